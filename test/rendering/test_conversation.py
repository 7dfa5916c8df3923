"""`Conversation`: what the engine saw, token by token, whatever the environment says next."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_families import END_OF_TURN, FAMILIES, TOOLS, family_renderer
from tensordict import NonTensorData, TensorDict

from llmrl.rendering import Conversation, reconcile

APPENDING = ["chatml", "gemma", "llama3", "qwen25"]


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def answer(conversation, text="yes<|im_end|>", version=0):
    ids = conversation.renderer.encode(text) if isinstance(text, str) else list(text)
    return conversation.with_completion(ids, log_probs=[-0.5] * len(ids), versions=[version] * len(ids))


def check(conversation, *seen):
    """The named invariants: held is prompt and completion, columns of one length, nothing trained twice or never."""
    prompt, completion = seen[-1]
    assert conversation.prompt_ids == [*prompt, *completion]
    assert conversation.node.token_ids() == conversation.prompt_ids
    for column in ("token_ids", "loss_mask", "log_probs", "versions"):
        assert conversation.tensor_view(column).shape == (conversation.num_tokens,)
    result = conversation.reconcile()
    num_sampled = sum(len(each) for _, each in seen)
    assert sum(sum(row.columns.loss_mask) for row in result.rows) + result.counts["num_realigned_tokens"] == num_sampled
    if result.rows and result.rows[-1].turn_span[1] == conversation.num_turns:
        last = result.rows[-1].columns
        assert last.token_ids == conversation.tensor_view("token_ids").tolist()
        assert last.loss_mask == conversation.tensor_view("loss_mask").tolist()
        assert last.versions == conversation.tensor_view("versions").tolist()
        torch.testing.assert_close(torch.tensor(last.log_probs), conversation.tensor_view("log_probs"))


@pytest.fixture
def chatml(model_path):
    return family_renderer(model_path, "chatml")


said = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=10)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("mode", ["token", "message"])
@settings(max_examples=15)
@given(data=st.data())
def test_after_every_append_held_is_prompt_and_completion(model_path, family, mode, data):
    renderer = family_renderer(model_path, family)
    conversation = Conversation.start(renderer, mode=mode, fork_threshold_tokens=data.draw(st.integers(0, 8)))
    messages, seen = [user(data.draw(said))], []
    for index in range(data.draw(st.integers(1, 4))):
        conversation = conversation.with_prompt(messages)
        prompt = conversation.prompt_ids
        ids = renderer.encode(data.draw(st.just("") | said))
        ids += data.draw(st.sampled_from([[], list(renderer.stop_token_ids[:1])]))
        conversation = conversation.with_completion(ids, log_probs=[-0.1] * len(ids), versions=[index] * len(ids))
        seen.append((prompt, ids))
        check(conversation, *seen)
        messages = [*conversation.messages, user(data.draw(said))]
        if family != "gemma" and data.draw(st.booleans()):
            messages[0] = user(data.draw(said))  # an environment that rewrites the beginning


@pytest.mark.parametrize("family", APPENDING)
def test_bridging_is_full_rendering_where_the_template_appends(model_path, family):
    renderer = family_renderer(model_path, family)
    conversation, messages = Conversation.start(renderer), [user("One?")]
    for number in range(4):
        conversation = conversation.with_prompt(messages)
        full = renderer.render(messages, add_generation_prompt=True)
        assert renderer.decode(conversation.prompt_ids) == renderer.decode(full)
        # This tokenizer joins the blank line that ends a Llama header differently when a word follows.
        assert conversation.prompt_ids == full or family == "llama3"
        conversation = answer(conversation, f"Number {number}." + END_OF_TURN[family])
        messages = [*conversation.messages, user(f"And {number}?")]
    assert conversation.reconcile().counts["num_clean_turns"] == 3 and len(conversation.reconcile().rows) == 1


def test_an_added_end_of_turn_is_not_trained_and_a_sampled_one_is(chatml):
    for text, loss_mask in (("yes", False), ("yes<|im_end|>", True)):
        first = answer(Conversation.start(chatml).with_prompt([user("a")]), text)
        assert first.last.is_complete is loss_mask
        conversation = answer(first.with_prompt([*first.messages, user("b")]))
        row = conversation.reconcile().rows[0].columns
        where = first.num_tokens - loss_mask
        assert row.token_ids[where] == chatml.stop_token_ids[0]
        assert row.loss_mask[where] is loss_mask
        assert chatml.decode(row.token_ids).count("yes<|im_end|>\n<|im_start|>user\nb<|im_end|>\n") == 1


def test_an_empty_completion_is_a_turn_that_trains_nothing(chatml):
    first = answer(Conversation.start(chatml).with_prompt([user("a")]), "")
    assert first.last.message == assistant("") and first.reconcile().rows == []
    assert first.reconcile().counts["num_dropped_rows"] == 1
    second = answer(first.with_prompt([*first.messages, user("b")]))
    assert "assistant\n<|im_end|>\n<|im_start|>user\nb" in chatml.decode(second.prompt_ids)
    assert len(second.reconcile().rows) == 1 and second.num_turns == 2


def test_a_stop_string_that_ends_inside_a_token_keeps_the_sampled_ids(chatml):
    ids = chatml.encode("The answer is thirty")  # stopped on "thir": the last token goes on
    first = answer(Conversation.start(chatml).with_prompt([user("a")]), ids)
    second = first.with_prompt([*first.messages, user("b")])
    assert second.prompt_ids[first.num_tokens - len(ids) : first.num_tokens] == ids
    assert second.prompt_ids[first.num_tokens] == chatml.stop_token_ids[0]


def test_ids_that_are_not_what_the_tokenizer_would_make_are_kept(chatml):
    canonical = chatml.encode("hello")
    spelled = [token for letter in "hello" for token in chatml.encode(letter)]
    assert spelled != canonical and chatml.decode(spelled) == "hello"
    first = answer(Conversation.start(chatml, mode="token").with_prompt([user("a")]), spelled)
    second = answer(first.with_prompt([*first.messages, user("b")]))
    assert second.prompt_ids[: first.num_tokens] == first.prompt_ids and len(second.reconcile().rows) == 1


def test_a_character_split_across_completions_keeps_its_tokens(chatml):
    ids = chatml.encode("🦜")
    assert len(ids) > 1
    first = answer(Conversation.start(chatml).with_prompt([user("a")]), ids[:1])
    second = answer(first.with_prompt([*first.messages, user("b")]), ids[1:])
    trained = [
        t
        for t, m in zip(
            second.reconcile().rows[0].columns.token_ids, second.reconcile().rows[0].columns.loss_mask, strict=True
        )
        if m
    ]
    assert trained == ids


def test_few_shot_answers_at_the_start_are_context(chatml):
    opening = [user("1?"), assistant("1!"), user("2?")]
    conversation = answer(Conversation.start(chatml).with_prompt(opening), "2!<|im_end|>")
    row = conversation.reconcile().rows[0].columns
    trained = [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m]
    assert chatml.decode(trained) == "2!<|im_end|>" and conversation.num_turns == 1


def test_several_messages_of_the_environment_in_a_turn_are_appended_together(model_path):
    renderer = family_renderer(model_path, "qwen25")
    first = answer(
        Conversation.start(renderer).with_prompt([user("a")], tools=TOOLS),
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
    )
    new = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    second = first.with_prompt([*first.messages, *new], tools=TOOLS)
    assert second.prompt_ids == renderer.render([*first.messages, *new], tools=TOOLS, add_generation_prompt=True)


def test_empty_tool_calls_do_not_count_as_rewriting(chatml):
    first = answer(Conversation.start(chatml).with_prompt([user("a")]))
    messages = [user("a"), {**first.messages[1], "tool_calls": []}, user("b")]
    second = answer(first.with_prompt(messages))
    assert second.reconcile().counts["num_clean_turns"] == 1 and len(second.reconcile().rows) == 1


@pytest.mark.parametrize("mode", ["token", "message"])
def test_lone_surrogates_are_replaced_in_each_turn_and_rewrite_nothing(chatml, mode):
    messages, plain = [user("a\ud800b")], [user("a?b")]
    bad, good = (Conversation.start(chatml, mode=mode) for _ in range(2))
    for _ in range(3):
        bad, good = answer(bad.with_prompt(messages)), answer(good.with_prompt(plain))
        assert (
            bad.prompt_ids == good.prompt_ids and bad.with_prompt([*messages, assistant("yes"), user("c")]).is_prompted
        )
        messages, plain = ([*said, assistant("yes"), user(text)] for said, text in ((messages, "\udfff"), (plain, "?")))
    assert bad.reconcile().counts == good.reconcile().counts and len(bad.reconcile().rows) == 1


@pytest.mark.parametrize("mode", ["token", "message"])
def test_a_changed_tool_set_forks(model_path, mode):
    renderer = family_renderer(model_path, "qwen25")
    first = answer(Conversation.start(renderer, mode=mode).with_prompt([user("a")]))
    messages = [*first.messages, user("b")]
    second = answer(first.with_prompt(messages, tools=TOOLS))
    assert second.reconcile().counts["num_forked_turns"] == 1 and len(second.reconcile().rows) == 2
    assert second.node.context_ids and second.prompt_ids[: -second.node.num_completion_tokens] == renderer.render(
        messages, tools=TOOLS, add_generation_prompt=True
    )


@pytest.mark.parametrize("mode", ["token", "message"])
@pytest.mark.parametrize(
    ("edited", "kind"), [("one two three four five", "realigned"), ("one or another thing", "forked")]
)
def test_an_edited_last_answer_realigns_where_its_end_was_edited_and_forks_otherwise(chatml, mode, edited, kind):
    sampled = "one two three four six<|im_end|>"
    first = answer(Conversation.start(chatml, mode=mode).with_prompt([user("a")]), sampled)
    messages = [user("a"), assistant(edited), user("b")]
    second = answer(first.with_prompt(messages))
    counts = second.reconcile().counts
    assert counts[f"num_{kind}_turns"] == 1
    assert counts["num_realigned_tokens"] == (2 if kind == "realigned" else 0)  # "six" and the end of the turn
    assert second.prompt_ids[: -second.node.num_completion_tokens] == chatml.render(
        messages, add_generation_prompt=True
    )


@pytest.mark.parametrize("threshold", [0, 64, 1 << 20])
def test_reasoning_that_the_template_drops_is_trained_whatever_the_threshold(model_path, threshold):
    renderer = family_renderer(model_path, "qwen3")
    conversation, messages, sampled = Conversation.start(renderer, fork_threshold_tokens=threshold), [user("a")], []
    for number in range(4):
        conversation = conversation.with_prompt(messages)
        assert conversation.prompt_ids == renderer.render(messages, add_generation_prompt=True)
        sampled.append(renderer.encode(f"<think>\nlong long long {number}\n</think>\n\nyes {number}<|im_end|>"))
        conversation = answer(conversation, sampled[-1])
        messages = [*conversation.messages, user("b")]
    result = conversation.reconcile()
    trained = [
        [t for t, loss_mask in zip(row.columns.token_ids, row.columns.loss_mask, strict=True) if loss_mask]
        for row in result.rows
    ]
    assert trained == sampled  # each answer in a row of its own, after the prompt that it was sampled from
    assert result.counts["num_forked_turns"] == 3 and result.counts["num_realigned_tokens"] == 0


CALLS = {
    "as the template writes it": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "compact": '<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>',
    "without line breaks": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "after a line break": '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "with a space": '<tool_call>\n{"name": "add",  "arguments": {"a": 1}}\n</tool_call> ',
    "with words around": 'I see. <tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>\n\nDone.\n',
}
AFTER_CALL = "\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("reasoning", ["", "<think>\nhm\n</think>\n\n", "<think>hm</think>", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("spelling", CALLS)
@pytest.mark.parametrize("ending", ["<|im_end|>", ""])
def test_a_call_stays_as_it_was_sampled(model_path, reasoning, spelling, ending):
    renderer = family_renderer(model_path, "qwen3")
    call = renderer.encode(reasoning + CALLS[spelling] + ending)
    last = renderer.encode("It is 1.<|im_end|>")
    conversation = Conversation.start(renderer).with_prompt([user("a")], tools=TOOLS)
    ids = renderer.render([user("a")], tools=TOOLS, add_generation_prompt=True)
    masks = [False] * len(ids)
    for _ in range(3):  # a model of what is held, in a plain loop: nothing that was sampled is tokenized again
        assert conversation.prompt_ids == ids
        conversation = answer(conversation, call)
        assert len(conversation.messages[-1]["tool_calls"]) == 1
        messages = [*conversation.messages, {"role": "tool", "content": "1"}]
        conversation = conversation.with_prompt(messages, tools=TOOLS)
        after = renderer.encode(AFTER_CALL if ending else "<|im_end|>" + AFTER_CALL)
        ids, masks = ids + call + after, masks + [True] * len(call) + [False] * len(after)
    conversation = answer(conversation, last)
    (row,) = conversation.reconcile().rows
    assert row.columns.token_ids == ids + last
    assert row.columns.loss_mask == masks + [True] * len(last)


def test_reasoning_survives_a_tool_cycle(model_path):
    renderer = family_renderer(model_path, "qwen3")
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    first = answer(Conversation.start(renderer).with_prompt([user("a")], tools=TOOLS), text)
    second = answer(first.with_prompt([*first.messages, {"role": "tool", "content": "1"}], tools=TOOLS))
    assert second.reconcile().counts["num_clean_turns"] == 1


def test_message_mode_renders_nothing_again_when_nothing_was_rewritten(chatml, monkeypatch):
    conversation = answer(Conversation.start(chatml, mode="message").with_prompt([user("a")]))
    monkeypatch.setattr(chatml, "render", lambda *args, **kwargs: pytest.fail("rendered afresh"))
    answer(conversation.with_prompt([*conversation.messages, user("b")]))


@pytest.mark.parametrize(("family", "tools"), [("qwen3", TOOLS), ("mistral", None)])
def test_message_mode_compares_only_conversations_that_the_template_rewrites(model_path, family, tools, monkeypatch):
    renderer = family_renderer(model_path, family)
    assert renderer.is_history_rewritten
    conversation = Conversation.start(renderer, mode="message").with_prompt([user("a")], tools=tools)
    conversation = answer(conversation, f"b{END_OF_TURN[family]}")
    with monkeypatch.context() as patched:
        patched.setattr(renderer, "render", lambda *args, **kwargs: pytest.fail("rendered afresh"))
        bridged = conversation.with_prompt([*conversation.messages, user("c")], tools=tools)
    expected = renderer.render(bridged.messages, tools=tools, add_generation_prompt=True)
    assert renderer.decode(bridged.prompt_ids) == renderer.decode(expected)


def test_continuing_a_value_twice_branches(chatml):
    root = answer(Conversation.start(chatml).with_prompt([user("a")]))
    before = root.prompt_ids
    prompt = root.with_prompt([*root.messages, user("b")])
    left, right = answer(prompt, "left<|im_end|>", 1), answer(prompt, "right<|im_end|>", 2)
    other = answer(root.with_prompt([*root.messages, user("c")]), "other<|im_end|>", 3)
    assert root.prompt_ids == before
    for leaf, text in ((left, "left"), (right, "right"), (other, "other")):
        assert chatml.decode(leaf.prompt_ids).endswith(f"{text}<|im_end|>")
        assert leaf.tensor_view("token_ids").tolist() == leaf.prompt_ids == leaf.node.token_ids()
        assert leaf.node.parent is root.node
    result = reconcile([left.node, right.node, other.node])
    trained = [t for row in result.rows for t, m in zip(row.columns.token_ids, row.columns.loss_mask, strict=True) if m]
    expected = [*root.node.completion_ids, *left.node.completion_ids, *right.node.completion_ids]
    assert trained == [*expected, *other.node.completion_ids]


def test_asking_again_before_a_completion(chatml):
    start = Conversation.start(chatml)
    prompt = start.with_prompt([user("a")])
    assert prompt.with_prompt([user("a")]) is prompt
    replaced = prompt.with_prompt([user("b")])
    assert replaced.prompt_ids == chatml.render([user("b")], add_generation_prompt=True)
    first = answer(replaced)
    waiting = first.with_prompt([*first.messages, user("c")])
    more = waiting.with_prompt([*first.messages, user("c"), user("d")])
    assert more.prompt_ids == chatml.render([*more.messages], add_generation_prompt=True)


def test_token_prompts_need_no_renderer():
    conversation = Conversation.start(None).with_prompt_ids([1, 2])
    assert conversation.with_prompt_ids([1, 2]) is conversation
    conversation = conversation.with_completion([3], log_probs=[-0.5], versions=[0])
    conversation = conversation.with_prompt_ids([1, 2, 3, 4]).with_completion([5], log_probs=[-0.5], versions=[1])
    assert conversation.reconcile().rows[0].columns.versions == [-1, -1, 0, -1, 1]
    assert conversation.last is None
    with pytest.raises(ValueError, match="renderer"):
        conversation.with_prompt([user("a")])
    with pytest.raises(ValueError, match="empty"):
        conversation.with_prompt_ids([])


def test_what_the_engine_left_out_is_refused(chatml):
    prompt = Conversation.start(chatml).with_prompt([user("a")])
    with pytest.raises(ValueError, match="log_probs"):
        prompt.with_completion([1, 2], log_probs=[-0.5], versions=[0, 0])
    with pytest.raises(ValueError, match="versions"):
        prompt.with_completion([1, 2], log_probs=[-0.5, -0.5], versions=None)
    assert answer(prompt).num_tokens == prompt.num_tokens + len(chatml.encode("yes<|im_end|>"))
    with pytest.raises(ValueError, match="no prompt"):
        Conversation.start(chatml).with_completion([1], log_probs=[-0.5], versions=[0])
    with pytest.raises(ValueError, match="mode"):
        Conversation.start(chatml, mode="tokens")


def long_conversation(renderer, num_turns, seconds=None):
    conversation, messages = Conversation.start(renderer), [user("Begin, please.")]
    for _ in range(num_turns):
        started = time.thread_time()
        conversation = conversation.with_prompt(messages)
        conversation = answer(conversation, "An answer of some length, all the same.<|im_end|>")
        for column in ("token_ids", "loss_mask", "log_probs", "versions"):
            conversation.tensor_view(column)
        if seconds is not None:
            seconds.append(time.thread_time() - started)
        messages = (*conversation.messages, user("Go on, then, what else is there?"))
    return conversation


def test_tensor_views_share_memory_and_keep_their_values(chatml):
    first = answer(Conversation.start(chatml).with_prompt([user("a")]))
    view = first.tensor_view("token_ids")
    second = answer(first.with_prompt([*first.messages, user("b")]))
    longer = second.tensor_view("token_ids")
    assert longer.data_ptr() == view.data_ptr() and longer[: len(view)].tolist() == view.tolist()
    assert [second.tensor_view(c).dtype for c in ("loss_mask", "log_probs", "versions")] == [
        torch.bool, torch.float32, torch.int64,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="column"):
        first.tensor_view("ids")


def test_a_long_conversation_stores_each_token_once(chatml):
    conversation = long_conversation(chatml, 64)
    stores = {id(node.stored_columns): node.stored_columns for node in conversation.node.ancestors()}
    stores[id(conversation.held.columns)] = conversation.held.columns
    assert sum(len(columns) for columns in stores.values()) <= 1.1 * conversation.num_tokens


def test_a_rewritten_conversation_does_not_keep_its_old_rows(model_path):
    renderer = family_renderer(model_path, "qwen3")
    conversation, messages, num_rendered = Conversation.start(renderer), [user("a")], 0
    for _ in range(16):
        conversation = answer(conversation.with_prompt(messages), "<think>\nhm\n</think>\n\nyes<|im_end|>")
        num_rendered += conversation.node.num_context_tokens + conversation.node.num_completion_tokens
        messages = [*conversation.messages, user("b")]
    stores = {id(node.stored_columns): node.stored_columns for node in conversation.node.ancestors()}
    assert sum(len(columns) for columns in stores.values()) <= num_rendered + conversation.num_tokens


def test_a_turn_costs_the_same_early_and_late(chatml):
    seconds: list[list[float]] = [[] for _ in range(7)]
    for each in seconds:
        long_conversation(chatml, 66, each)
    early = min(min(each[2:7]) for each in seconds)
    late = min(min(each[61:66]) for each in seconds)
    # It would be some ten times, were anything done again for earlier turns.
    assert late <= 2 * early, f"turn 64 costs {late / early:.2f} times turn 4"


@pytest.mark.slow
def test_pickling_keeps_the_value_and_drops_what_others_appended(model_path):
    for family in ("chatml", "qwen3"):
        renderer = family_renderer(model_path, family)
        first = answer(Conversation.start(renderer).with_prompt([user("a")]), "<think>\nx\n</think>\n\ny<|im_end|>")
        waiting = first.with_prompt([*first.messages, user("b")])
        second = answer(waiting)
        for value in (Conversation.start(renderer), first, waiting, second):
            loaded = pickle.loads(pickle.dumps(value))
            assert loaded.prompt_ids == value.prompt_ids and loaded.messages == value.messages
            assert loaded.reconcile().counts == value.reconcile().counts and loaded.last == value.last
            assert loaded.tensor_view("loss_mask").tolist() == value.tensor_view("loss_mask").tolist()
            assert len(loaded.held.columns) == loaded.num_tokens
            if value.node is not None and not value.is_prompted:
                more = [*value.messages, user("c")]
                assert loaded.with_prompt(more).prompt_ids == value.with_prompt(more).prompt_ids
        loaded = pickle.loads(pickle.dumps(waiting))
        assert answer(loaded).prompt_ids == second.prompt_ids
        assert loaded.with_prompt(waiting.messages) is loaded


def test_a_pickled_prompt_is_replaced_by_another(model_path):
    renderer = family_renderer(model_path, "qwen3")
    first = answer(Conversation.start(renderer).with_prompt([user("a")]), "<think>\nx\n</think>\n\ny<|im_end|>")
    waiting = pickle.loads(pickle.dumps(first.with_prompt([*first.messages, user("b")])))
    messages = [*first.messages, user("c")]
    assert waiting.with_prompt(messages).prompt_ids == renderer.render(messages, add_generation_prompt=True)


def test_a_very_long_conversation_pickles(chatml):
    conversation = Conversation.start(None)
    held: list[int] = []
    for turn in range(2000):
        held = [*held, 1, 2]
        conversation = conversation.with_prompt_ids(held).with_completion([turn], log_probs=[-0.5], versions=[0])
        held = conversation.prompt_ids
    assert pickle.loads(pickle.dumps(conversation)).prompt_ids == held
    assert pickle.loads(pickle.dumps(conversation.node)).token_ids() == held


def test_it_rides_in_a_tensordict(chatml):
    conversation = answer(Conversation.start(chatml).with_prompt([user("a")]))
    tensordict = TensorDict({"conversation": NonTensorData(conversation)})
    for other in (tensordict.clone(), copy.deepcopy(tensordict)):
        assert other["conversation"].prompt_ids == conversation.prompt_ids

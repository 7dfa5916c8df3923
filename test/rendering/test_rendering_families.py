"""Families of chat templates with peculiar turns, tools or calls: read and written as they do, or refused."""

from __future__ import annotations

import pickle

import pytest
from rendering_families import PECULIAR_FAMILIES, TOOLS, family_renderer, family_tokenizer, template_text
from sentencepiece_tokenizers import SENTENCEPIECE_TEMPLATES, sentencepiece_tokenizer

from llmrl import LLMCollector
from llmrl.envs import DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.rendering import Conversation, RenderingError, TemplateRenderer, backend, make_renderer
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward, ToolTransform

ZIP = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds a place.",
        "parameters": {
            "type": "object",
            "properties": {"zip": {"type": "string"}, "limit": {"type": "integer"}, "tags": {"type": "array"}},
        },
    },
}
ARGUMENTS = {"zip": "90210", "limit": 2, "tags": ["a b", 1]}


def user(content):
    return {"role": "user", "content": content}


def answered(renderer, held, sampled, mode="auto", **arguments):
    """A conversation that was prompted and answered with this text."""
    conversation = Conversation.start(renderer, mode=mode).with_prompt(held, **arguments)
    ids = renderer.encode(sampled)
    return conversation.with_completion(ids, log_probs=[0.0] * len(ids), versions=[0] * len(ids))


def text_after(conversation, messages, **arguments):
    """What the next prompt has after what was held."""
    following = conversation.with_prompt((*conversation.messages, *messages), **arguments)
    assert following.prompt_ids[: conversation.num_tokens] == conversation.prompt_ids
    return conversation.renderer.decode(following.prompt_ids[conversation.num_tokens :])


# Turns


def test_harmony_is_refused_since_its_turns_are_several_messages(model_path):
    with pytest.raises(RenderingError, match=r"'<\|end\|>'.*harmony.*backend='renderers'"):
        TemplateRenderer(family_tokenizer(model_path, "gpt_oss"))


def test_harmony_takes_the_package_renderers_and_says_so_where_it_cannot(model_path, monkeypatch):
    tokenizer = family_tokenizer(model_path, "gpt_oss")
    with pytest.raises(RenderingError, match=r"harmony.*does not know"):
        make_renderer(tokenizer)
    monkeypatch.setattr(backend, "PackageRenderer", lambda tokenizer: ("the package's", tokenizer))
    assert make_renderer(tokenizer) == ("the package's", tokenizer)


@pytest.mark.parametrize("end", ["<|user|>", "<|observation|>", "<|endoftext|>", ""])
@pytest.mark.parametrize(
    ("message", "written"),
    [
        (user("b"), "<|user|>\nb<|assistant|>"),
        ({"role": "tool", "content": "7", "name": "add"}, "<|observation|>\n7<|assistant|>"),
        ({"role": "system", "content": "s"}, "<|system|>\ns<|assistant|>"),
    ],
)
def test_a_turn_that_ends_with_the_opener_of_the_next_role_keeps_that_role(model_path, end, message, written):
    renderer = family_renderer(model_path, "glm4")
    assert {renderer.decode([token]) for token in renderer.stop_token_ids} == {"<|user|>", "<|observation|>"}
    conversation = answered(renderer, [user("a")], "yes" + end)
    is_opened = bool(end) and written.startswith(end)
    assert text_after(conversation, [message]) == (written.removeprefix(end) if is_opened else written)
    assert conversation.last.message["content"] == "yes"


def test_a_glm4_call_that_waits_for_a_result_is_a_call_also_of_a_tool_that_is_not_offered(model_path):
    renderer = family_renderer(model_path, "glm4")
    call = 'fnd\n{"zip": "90210"}'
    parsed = renderer.parse(renderer.encode(f"{call}<|observation|>"), tools=[ZIP])
    assert [one["function"] for one in parsed.message["tool_calls"]] == [{"name": "fnd", "arguments": {"zip": "90210"}}]
    assert renderer.parse(renderer.encode('find\n{"zip": }<|observation|>'), tools=[ZIP]).malformed_tool_calls
    for prose in (call, f"{call}<|user|>", "The answer is 7.<|observation|>"):
        message = renderer.parse(renderer.encode(prose), tools=[ZIP]).message
        assert message == {"role": "assistant", "content": prose.partition("<|")[0]}


def test_an_end_of_a_call_may_stand_for_that_of_an_answer_where_both_close(model_path):
    renderer = family_renderer(model_path, "llama3")
    conversation = answered(renderer, [user("a")], "yes<|eom_id|>")
    assert text_after(conversation, [user("b")]).startswith("<|start_header_id|>user")


def test_a_message_that_the_template_writes_elsewhere_is_not_lost(model_path):
    renderer = family_renderer(model_path, "deepseek")
    conversation = answered(renderer, [user("a")], "yes<｜end▁of▁sentence｜>")
    prompted = conversation.with_prompt((*conversation.messages, {"role": "system", "content": "Be brief."}, user("b")))
    assert "Be brief." in renderer.decode(prompted.prompt_ids)
    with pytest.raises(RenderingError, match="system"):
        renderer.bridge(conversation.prompt_ids, [user("b"), {"role": "system", "content": "Be brief."}])


def test_marks_around_an_answer_are_no_part_of_what_is_said(model_path):
    renderer = family_renderer(model_path, "command_r7b")
    sampled = "<|START_RESPONSE|>yes<|END_RESPONSE|>"
    for end in ("<|END_OF_TURN_TOKEN|>", ""):
        conversation = answered(renderer, [user("a")], sampled + end)
        assert conversation.last.message["content"] == "yes"
        prompted = conversation.with_prompt((*conversation.messages, user("b")))
        held = renderer.decode(prompted.prompt_ids)
        assert held.count("<|END_RESPONSE|>") == 1 and sampled + "<|END_OF_TURN_TOKEN|>" in held
    messages = (*answered(renderer, [user("a")], sampled + "<|END_OF_TURN_TOKEN|>").messages, user("b"))
    assert sampled + "<|END_OF_TURN_TOKEN|>" in renderer.render_text(messages)
    assert renderer.decode(renderer.stop_token_ids) == "<|END_OF_TURN_TOKEN|>"


# Tool results


def test_a_template_that_counts_calls_is_refused_with_tools(model_path):
    renderer = family_renderer(model_path, "command_r7b")
    with pytest.raises(RenderingError, match=r"differently than.*tool_results='user'"):
        renderer.check_tools()
    assert family_renderer(model_path, "command_r7b", tool_results="user").tool_parser == "cohere"


def test_what_answers_an_unreadable_call_beside_a_good_one_is_not_written_as_a_result(model_path):
    renderer = family_renderer(model_path, "gemma4")
    sampled = "<|tool_call>call:add{a:1}<tool_call|><|tool_call>call:add{a:<tool_call|><|tool_response>"
    conversation = answered(renderer, [user("q")], sampled, mode="token", tools=TOOLS)
    new = [{"role": "tool", "name": "add", "content": "1", "tool_call_id": "call00000"}]
    new.append({"role": "tool", "content": "Error: unreadable"})
    text = text_after(conversation, new, tools=TOOLS)
    result, told = text.split("<tool_response|>")
    assert result == 'response:add{value:<|"|>1<|"|>}' and "<|turn>user\n<tool_response>\nError: unreadable" in told


@pytest.mark.parametrize("family", ["gemma", "cohere"])
def test_a_template_without_a_role_for_results_says_so_before_anything_is_sampled(model_path, family):
    renderer = family_renderer(model_path, family)
    assert renderer.render([user("q")], add_generation_prompt=True)
    for refused in (renderer.check_tools, lambda: renderer.render([user("q")], tools=TOOLS)):
        with pytest.raises(RenderingError, match=r"no role for tool results.*tool_results='user'"):
            refused()
    env = DatasetChatEnv(["Go."]).append_transform(ToolTransform([add]))
    with pytest.raises(RenderingError, match="no role for tool results"):
        LLMCollector(env, policy=LLMWrapperBase(ScriptedEngine(["x"]), renderer=renderer), groups_per_batch=1)


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def always(completion):
    return 1.0


CALL = '<tool_call>{"name": "add", "arguments": {"a": 7, "b": 8}}</tool_call>'


@pytest.mark.parametrize(
    ("family", "between"),
    [
        ("gemma", "<end_of_turn>\n<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"),
        (
            "cohere",
            "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
    ],
)
def test_rollouts_that_call_a_tool_are_kept_where_results_are_carried_as_the_user_s(model_path, family, between):
    renderer = TemplateRenderer(family_tokenizer(model_path, family), tool_results="user")
    end = renderer.decode(renderer.stop_token_ids[:1])
    env = DatasetChatEnv(["What is 7 + 8?"], repeats=2)
    env = env.append_transform(ToolTransform([add])).append_transform(RubricReward(always))

    def answer(prompt_ids):
        return ("It is 15." if "<tool_response>" in renderer.decode(prompt_ids) else CALL + CALL) + end

    engine = ScriptedEngine(answer, encode=renderer.encode)
    collector = LLMCollector(env, policy=LLMWrapperBase(engine, renderer=renderer), groups_per_batch=1)
    batch = next(iter(collector))
    collector.shutdown()
    assert len(batch) == 2 and len(engine.requests) == 4  # no group was played again
    results = "<tool_response>\n15\n</tool_response>\n<tool_response>\n15\n</tool_response>"
    for row in batch.unbind(0):
        text = renderer.decode(row["tokens", "full"].tolist())
        assert text.endswith(CALL + CALL + between.format(results) + "It is 15." + end)


def test_results_and_the_user_s_next_message_are_one_turn_where_roles_alternate(model_path):
    renderer = family_renderer(model_path, "gemma", tool_results="user")
    conversation = answered(renderer, [user("q")], CALL + "<end_of_turn>", tools=TOOLS)
    new = [{"role": "tool", "name": "add", "content": "15"}, user("And?")]
    written = "<start_of_turn>user\n<tool_response>\n15\n</tool_response>\nAnd?<end_of_turn>\n<start_of_turn>model\n"
    assert text_after(conversation, new, tools=TOOLS) == "\n" + written
    full = renderer.render((*conversation.messages, *new), tools=TOOLS, add_generation_prompt=True)
    assert renderer.decode(full).endswith(written)


def test_a_result_without_a_name_is_written_with_its_call_s(model_path):
    renderer = family_renderer(model_path, "gemma4")
    sampled = '<|tool_call>call:find{zip:<|"|>1<|"|>}<tool_call|><|tool_call>call:add{a:1}<tool_call|><|tool_response>'
    conversation = answered(renderer, [user("q")], sampled, tools=TOOLS)
    ids = [call["id"] for call in conversation.last.message["tool_calls"]]
    new = [{"role": "tool", "tool_call_id": each, "content": f"r{each[-1]}"} for each in ids]
    form = 'response:{}{{value:<|"|>{}<|"|>}}<tool_response|>'
    first, second = form.format("find", "r0"), form.format("add", "r1")
    written = f"{first}<|tool_response>{second}"
    assert text_after(conversation, new, tools=TOOLS) == written
    full = renderer.decode(renderer.render((*conversation.messages, *new), tools=TOOLS, add_generation_prompt=True))
    assert full.endswith("<|tool_response>" + written)
    with pytest.raises(RenderingError, match="'name'"):
        renderer.bridge(conversation.prompt_ids, new, tools=TOOLS)


def test_what_answers_an_unreadable_call_reaches_a_template_that_writes_results_with_calls_alone(model_path):
    renderer = family_renderer(model_path, "gemma4")
    conversation = answered(renderer, [user("q")], "<|tool_call>call:add{a:<tool_call|><turn|>", tools=TOOLS)
    assert len(conversation.last.malformed_tool_calls) == 1
    new = [{"role": "tool", "content": "Error: unreadable"}]
    written = "\n<|turn>user\n<tool_response>\nError: unreadable\n</tool_response><turn|>\n<|turn>model\n"
    assert text_after(conversation, new, tools=TOOLS) == written


# Calls


SAMPLED_CALLS = {
    "qwen3_coder": "<tool_call>\n<function=find>\n<parameter=zip>\n90210\n</parameter>\n<parameter=limit>\n2\n"
    '</parameter>\n<parameter=tags>\n["a b", 1]\n</parameter>\n</function>\n</tool_call>',
    "glm45": "\n<tool_call>find\n<arg_key>zip</arg_key>\n<arg_value>90210</arg_value>\n<arg_key>limit</arg_key>\n"
    '<arg_value>2</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a b", 1]</arg_value>\n</tool_call>',
    "glm4": 'find\n{"zip": "90210", "limit": 2, "tags": ["a b", 1]}\n',
    "lfm2": "<|tool_call_start|>[find(zip='90210', limit=2, tags=['a b', 1])]<|tool_call_end|>",
    "gemma4": '<|tool_call>call:find{limit:2,tags:[<|"|>a b<|"|>,1],zip:<|"|>90210<|"|>}<tool_call|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>"
    '{"zip": "90210", "limit": 2, "tags": ["a b", 1]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}


@pytest.mark.parametrize("family", SAMPLED_CALLS)
def test_calls_in_the_template_s_own_format_are_read(model_path, family):
    renderer = family_renderer(model_path, family)
    end = renderer.decode(renderer.stop_token_ids[-1:])
    parsed = renderer.parse(renderer.encode(SAMPLED_CALLS[family] * 2 + end), tools=[ZIP])
    calls = [call["function"] for call in parsed.message["tool_calls"]]
    assert calls == [{"name": "find", "arguments": ARGUMENTS}] * 2
    assert parsed.message["content"] == "" and parsed.is_complete and not parsed.malformed_tool_calls


@pytest.mark.parametrize("family", SAMPLED_CALLS)
def test_a_turn_does_not_end_between_parallel_calls(model_path, family):
    renderer = family_renderer(model_path, family)
    assert not set(renderer.encode(SAMPLED_CALLS[family])) & set(renderer.stop_token_ids)


@pytest.mark.parametrize("family", SAMPLED_CALLS)
def test_a_tool_loop_is_bridged_as_the_template_writes_it(model_path, family):
    renderer = family_renderer(model_path, family)
    conversation = Conversation.start(renderer, mode="token").with_prompt([user("q")], tools=[ZIP])
    messages = [user("q")]
    for turn in range(3):
        # As the template writes it, so that what is held can be compared with a whole rendering.
        call = {"type": "function", "id": "call00000", "function": {"name": "find", "arguments": {"zip": f"9{turn}"}}}
        whole = renderer.render_text(
            [
                *messages,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call00000", "content": f"r{turn}"},
            ],
            tools=[ZIP],
            add_generation_prompt=True,
        )
        held = renderer.decode(conversation.prompt_ids)
        end = max(
            whole.rfind(renderer.decode([token]), 0, whole.rindex(f"r{turn}")) for token in renderer.stop_token_ids
        )
        ids = renderer.encode(whole[len(held) : end])
        conversation = conversation.with_completion(ids, log_probs=[0.0] * len(ids), versions=[0] * len(ids))
        result = {"role": "tool", "content": f"r{turn}"}
        messages = [*conversation.messages, result]
        assert conversation.last.message["tool_calls"][0]["function"]["arguments"] == {"zip": f"9{turn}"}
        conversation = conversation.with_prompt(messages, tools=[ZIP])
        assert renderer.decode(conversation.prompt_ids) == whole


def test_a_template_that_shows_tools_and_whose_calls_nothing_reads_is_refused_with_tools(model_path):
    template = template_text("qwen3_coder").replace("<function=", "<run what=").replace("<parameter=", "<with ")
    tokenizer = family_tokenizer(model_path, "qwen3_coder")
    renderer = TemplateRenderer(tokenizer, chat_template=template)
    assert renderer.render([user("q")], add_generation_prompt=True)
    for refused in (renderer.check_tools, lambda: renderer.render([user("q")], tools=TOOLS)):
        with pytest.raises(RenderingError, match=r"SmolLM2.*<run what=f>.*tool_parser"):
            refused()
    with pytest.raises(RenderingError, match=r"<run what=f>.*tool_parser='hermes'"):
        TemplateRenderer(tokenizer, chat_template=template, tool_parser="hermes")
    assert TemplateRenderer(tokenizer, chat_template=template, tool_parser="none").tool_parser == "none"


def test_a_template_that_shows_tools_and_writes_no_calls_is_refused_with_tools(model_path):
    template = template_text("lfm2").replace("<|tool_list_start|>", "").replace("<|tool_list_end|>", "")
    with pytest.raises(RenderingError, match="does not write calls"):
        TemplateRenderer(family_tokenizer(model_path, "lfm2"), chat_template=template).check_tools()


def test_tools_that_we_show_are_shown_with_the_template_s_own_calls(model_path):
    renderer = family_renderer(model_path, "deepseek")
    text = renderer.decode(renderer.render([user("q")], tools=[ZIP], add_generation_prompt=True))
    example = '<｜tool▁call▁begin｜>function_name<｜tool▁sep｜>{"argument": "value"}<｜tool▁call▁end｜>'
    assert "Finds a place." in text and example in text and "<tool_call>" not in text


@pytest.mark.parametrize("family", sorted(set(PECULIAR_FAMILIES) - {"gpt_oss", "command_r7b"}))
def test_nothing_of_the_probes_reaches_a_prompt(model_path, family):
    results = "user" if family == "cohere" else "tool"
    renderer = pickle.loads(pickle.dumps(family_renderer(model_path, family, tool_results=results)))
    call = {"type": "function", "id": "1", "function": {"name": "find", "arguments": {"zip": "1"}}}
    messages = [
        user("q"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    text = renderer.render_text(messages, tools=[ZIP], add_generation_prompt=True)
    held = answered(renderer, messages[:1], "x", tools=[ZIP])
    held = held._with(messages=tuple(messages[:2]))
    text += renderer.decode(held.with_prompt(messages, tools=[ZIP]).prompt_ids)
    assert "xq7" not in text.lower()


# Tokenizers


@pytest.mark.parametrize("family", SENTENCEPIECE_TEMPLATES)
@pytest.mark.parametrize("prepend_scheme", ["first", "always"])
def test_sentencepiece_is_bridged_to_the_very_tokens_of_the_whole(family, prepend_scheme):
    special = ["<s>", "</s>", *(["<|user|>", "<|assistant|>", "<|end|>", "<|system|>"] if family == "phi3" else [])]
    tokenizer = sentencepiece_tokenizer(special, prepend_scheme)
    renderer = TemplateRenderer(tokenizer, chat_template=SENTENCEPIECE_TEMPLATES[family])
    messages = [user("a"), {"role": "assistant", "content": "x y"}, user("b c"), {"role": "assistant", "content": "z"}]
    whole = renderer.render_text([*messages, user("d")], add_generation_prompt=True)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert renderer.render([*messages, user("d")], add_generation_prompt=True) == ids
    delta = renderer.bridge([], [user("d")])
    assert ids[-len(delta) :] == delta and delta[0] in renderer.stop_token_ids

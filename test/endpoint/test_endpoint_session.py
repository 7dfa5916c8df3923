"""Sessions: every token that was sampled is trained once, whatever an agent does with its history."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import types
from collections import Counter

import pytest
from endpoint_agents import LoggingEngine, RandomAgent, ask, make_session, read, trained_spans
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_families import TOOLS, family_renderer

from llmrl.data import StopReason
from llmrl.endpoint import RefusedRequest
from llmrl.endpoint.session import ASIDE
from llmrl.engines import SamplingConfig

FAMILIES = ("chatml", "qwen25", "qwen3", "llama3", "mistral", "glm45", "deepseek")
USER = {"role": "user", "content": "Begin."}


def call_text(renderer, *arguments):
    """How a family writes these calls as an answer, with its end."""
    calls = [
        {"type": "function", "id": f"call{number:05d}", "function": {"name": "add", "arguments": one}}
        for number, one in enumerate(arguments)
    ]
    asked = renderer.render_text([USER], tools=TOOLS, add_generation_prompt=True)
    whole = renderer.render_text(
        [USER, {"role": "assistant", "content": "", "tool_calls": calls}],
        tools=TOOLS,
    )
    assert whole.startswith(asked.rstrip())
    return whole[len(asked.rstrip()) :].lstrip("\n")


def scripted(renderer, family):
    """An engine with answers of many kinds: plain, thinking, calling, spelled as no template spells them."""
    texts = ["One two three.", " said with space \n", "<think>\nHm.\n</think>\n\nTwo two.", ""]
    if family not in ("chatml",):
        texts += [call_text(renderer, {"a": 1})]
        if family in ("qwen25", "qwen3"):
            texts += ['<tool_call>\n{"arguments":   {"a": 2},"name":"add"}\n</tool_call>']
            texts += [call_text(renderer, {"a": 3}).replace("<|im_end|>", "").strip() * 2]
    numbers = itertools.count()
    end = renderer.stop_token_ids[0]

    def answer(prompt_ids):
        number = next(numbers)
        ids = [*renderer.encode(f"{texts[number % len(texts)]}"), end]
        ids = ids[: ids.index(end) + 1]
        return ids[:-1] if number % 5 == 4 and len(ids) > 1 else ids  # cut, without its end

    return LoggingEngine(answer, decode=renderer.decode, max_model_len=100_000)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_log_is_what_is_trained(model_path, family):
    renderer = family_renderer(model_path, family)

    @settings(max_examples=10, derandomize=True)
    @given(st.lists(st.sampled_from(RandomAgent.OPERATIONS), min_size=1, max_size=12), st.integers(0, 99))
    def check(operations, seed):
        async def main():
            engine = scripted(renderer, family)
            session = make_session(renderer, engine)
            await RandomAgent(session, engine, random.Random(seed).choice).play(operations)
            lost = Counter()
            for exchange in itertools.chain.from_iterable(session.exchanges.values()):
                is_aside = exchange.request.model.endswith(ASIDE)
                if exchange.task.done() and (exchange.reply is None or is_aside):
                    sampled = exchange.task.result()
                    lost.update(
                        (tuple(sampled.prompted.prompt_ids), tuple(one.token_ids)) for one in sampled.completions
                    )
            session.end()
            await asyncio.sleep(0)
            logged = Counter(engine.log) - lost
            assert sum(logged.values()) == session.tree.num_turns
            reconciled = session.tree.reconcile()
            assert trained_spans(reconciled) == Counter({key: count for key, count in logged.items() if key[1]})
            check_records(session.tree, reconciled.rows)

        asyncio.run(main())

    check()


def check_records(tree, rows):
    """Check the record of each turn: the row that trains it, and the position of its answer in that row."""
    records = tree.to_records()
    assert len(records) == (0 if len(tree.leaves) < 2 else tree.num_turns)
    for turn, record in zip(tree.turns, records, strict=False):
        start = record["num_kept_tokens"] + record["num_context_tokens"]
        place = slice(start, start + record["num_completion_tokens"])
        trained = [
            number
            for number, row in enumerate(rows)
            if row.columns.token_ids[: place.stop] == turn.conversation.prompt_ids
            and turn.completion.token_ids
            and all(row.columns.loss_mask[place])
        ]
        # Answers that are equal, to one prompt, are each trained in a row.
        assert record["row"] in trained if trained else record["row"] is None
        assert record["messages"][-1] == turn.conversation.messages[-1]


def run_session(renderer, answers, act, **options):
    """What `act` returns of a session on an engine with these answers."""

    async def main():
        engine = LoggingEngine(answers, encode=renderer.encode, decode=renderer.decode)
        return await act(make_session(renderer, engine, **options), engine)

    return asyncio.run(main())


def body(*messages, **more):
    return {"model": "policy", "messages": list(messages), **more}


def test_an_answer_that_comes_back_spelled_otherwise_goes_on_as_it_was_sampled(model_path):
    renderer = family_renderer(model_path, "qwen25")
    calls = '<tool_call>\n{"arguments":   {"a": 2},"name":"add"}\n</tool_call>\n' * 2
    answers = [f" let me see \n{calls}<|im_end|>", " so \n", "done<|im_end|>"]

    async def act(session, engine):
        first = await ask(session, body(USER, tools=list(TOOLS)))
        message = first["choices"][0]["message"]
        one, two = (call["id"] for call in message["tool_calls"])
        assert first["choices"][0]["finish_reason"] == "tool_calls" and one != two
        # The content stripped, arguments written anew, and results in the other order.
        again = {**message, "content": message["content"].strip()}
        results = [{"role": "tool", "tool_call_id": call_id, "content": call_id[-1]} for call_id in (two, one)]
        second = await ask(session, body(USER, again, *results, tools=list(TOOLS)))
        said = {"role": "assistant", "content": second["choices"][0]["message"]["content"].strip()}
        await ask(session, body(USER, again, *results, said, {"role": "user", "content": "?"}, tools=list(TOOLS)))
        return session.tree, engine.log

    tree, log = run_session(renderer, answers, act)
    (row,) = tree.reconcile().rows
    assert tuple(row.columns.token_ids) == log[-1][0] + log[-1][1]
    assert [
        prompt[: len(before[0] + before[1])] == before[0] + before[1] for before, (prompt, _) in itertools.pairwise(log)
    ]
    assert renderer.decode(row.columns.token_ids).count('{"arguments":   {"a": 2},"name":"add"}') == 2


def test_requests_at_once_and_sub_agents_are_branches_and_roots(renderer):
    async def act(session, engine):
        first = await ask(session, body(USER))
        said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        others = [body(USER, said, {"role": "user", "content": str(number)}) for number in range(2)]
        await asyncio.gather(*(ask(session, one) for one in others))
        await ask(session, body({"role": "system", "content": "You are another."}, USER))
        return session.tree

    tree = run_session(renderer, ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>", "d<|im_end|>"], act)
    first, *others, last = (turn.node for turn in tree.turns)
    assert [other.parent for other in others] == [first, first] and first.parent is last.parent is None
    assert [sum(row.columns.loss_mask) for row in tree.reconcile().rows] == [4, 2, 2]
    records = tree.to_records()
    assert [(one["parent"], one["row"]) for one in records] == [(None, 0), (0, 0), (0, 1), (None, 2)]
    assert [[message["content"] for message in one["messages"]] for one in records] == [
        ["Begin.", "a"], ["0", "b"], ["1", "c"], ["You are another.", "Begin.", "d"]
    ]  # fmt: skip
    assert tree.count_turns() == {
        "num_clean_turns": 2, "num_realigned_turns": 0, "num_forked_turns": 0, "num_realigned_tokens": 0
    }  # fmt: skip


def test_an_edited_answer_branches_from_the_turn_before_it(renderer):
    async def act(session, engine):
        messages = [USER]
        for number in range(3):
            answer = await ask(session, body(*messages))
            messages += [
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                {"role": "user", "content": str(number)},
            ]
        messages[3] = {"role": "assistant", "content": "Edited."}
        await ask(session, body(*messages))
        return session.tree

    tree = run_session(renderer, [f"answer {n}<|im_end|>" for n in range(4)], act)
    assert tree.turns[3].node.parent is tree.turns[0].node and tree.turns[3].node.kind == "clean"


def test_limits_refuse_and_keep_what_was_there(renderer):
    async def act(session, engine):
        await ask(session, body(USER, n=2))
        with pytest.raises(RefusedRequest, match="its 3 answers") as refused:
            await ask(session, body(USER, n=2))
        assert (refused.value.status, refused.value.code) == (403, "insufficient_quota")
        assert session.reason == StopReason.MAX_TURNS
        await ask(session, body(USER, model=f"policy{ASIDE}"))
        return session.tree.num_turns, session.counts["num_aside"]

    assert run_session(renderer, ["a<|im_end|>"], act, max_turns=3) == (2, 1)


@pytest.mark.parametrize("outcome", ["failed", "aborted", "cancelled"])
def test_a_request_without_an_answer_leaves_its_turn_to_the_next_one(renderer, outcome):
    async def act(session, engine):
        if outcome == "failed":
            engine.fail_next()
        else:
            engine.hang_next()
        exchange = session.begin(*read(body(USER)))
        if outcome != "failed":
            while not engine.num_in_flight:
                await asyncio.sleep(0)
        if outcome == "aborted":
            engine.pause("abort")
            engine.resume()
        elif outcome == "cancelled":
            exchange.task.cancel()  # as when its client has disconnected
        await asyncio.wait({exchange.task})
        with pytest.raises(RefusedRequest) as refused:
            session.deliver(exchange)
        exchange.leave()
        await ask(session, body(USER))
        with pytest.raises(RefusedRequest, match="its 1 answers"):
            await ask(session, body(USER))
        return refused.value.status, session.tree.num_turns

    status = 499 if outcome == "cancelled" else 500
    assert run_session(renderer, ["a<|im_end|>"], act, max_turns=1) == (status, 1)


def test_tokens_are_a_budget_of_all_answers(renderer):
    async def act(session, engine):
        replies = [await ask(session, body(USER, max_tokens=4)) for _ in range(3)]
        with pytest.raises(RefusedRequest, match="the 10 tokens of its answers"):
            await ask(session, body(USER))
        assert session.reason == StopReason.LENGTH
        return [(reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) for reply in replies]

    used = run_session(renderer, ["one two three four five six<|im_end|>"], act, max_completion_tokens=10)
    assert used == [(4, "length"), (4, "length"), (2, "length")]


def test_a_prompt_that_is_too_long_is_refused_in_words_that_agents_search_for(renderer):
    async def act(session, engine):
        for content in ("word " * 200, "x" * 60_000):
            with pytest.raises(RefusedRequest, match=r"prompt is too long.*maximum context length") as refused:
                await ask(session, body({"role": "user", "content": content}))
            assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
            assert session.last_refusal == StopReason.PROMPT_TOO_LONG
        await ask(session, body(USER))  # a compacted one is answered, and makes up for it
        return session.reason, session.last_refusal, engine.log

    reason, refusal, log = run_session(renderer, ["a<|im_end|>"], act, max_prompt_tokens=100)
    assert (reason, refusal, len(log)) == (StopReason.NONE, StopReason.NONE, 1)


def test_a_history_that_is_sent_again_and_again_is_kept_once(renderer):
    messages = [{"role": "user", "content": "=" * 20_000}]

    def texts_of(root):
        """All long texts that are reachable, each object once."""
        seen, found, waiting = set(), {}, [root]
        while waiting:
            for value in gc.get_referents(waiting.pop()):
                if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType)):
                    continue
                seen.add(id(value))
                if isinstance(value, str) and len(value) >= 20_000:
                    found[id(value)] = value
                waiting.append(value)
        return found

    async def act(session, engine):
        for number in range(20):
            answer = await ask(session, body(*messages))
            said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
            messages.extend([said, {"role": "user", "content": str(number)}])
        # The renderer's cache has the first turn as it was rendered; the session itself has it once.
        return sum(text == messages[0]["content"] for text in texts_of([session.tree.turns, vars(session)]).values())

    assert run_session(renderer, ["yes<|im_end|>"], act, max_prompt_tokens=100_000) == 1


def test_what_the_run_decides_is_overridden_and_counted(renderer):
    async def act(session, engine):
        await ask(session, body(USER, temperature=0.0, top_p=0.5, stop="two", max_tokens=99))
        await ask(session, body(USER, temperature=0.0, tool_choice="required"))
        return session.record(), [sampling for _, sampling, _ in engine.requests]

    sampling = SamplingConfig(temperature=0.7, max_new_tokens=50)
    record, asked = run_session(renderer, ["one two<|im_end|>"], act, sampling=sampling)
    assert record == {"requests": {"num_answered": 2, "overridden": {"temperature": 2, "top_p": 1, "tool_choice": 1}}}
    assert asked == [sampling.with_changes(stop=("two",)), sampling]


def test_a_stop_string_is_sampled_and_trained_and_not_shown(renderer):
    async def act(session, engine):
        first = await ask(session, body(USER, stop=["two"]))
        message = first["choices"][0]["message"]
        await ask(session, body(USER, message, {"role": "user", "content": "?"}))
        return message["content"], session.tree

    content, tree = run_session(renderer, ["one two three<|im_end|>"], act)
    (row,) = tree.reconcile().rows
    assert content == "one " and tree.turns[1].node.parent is tree.turns[0].node
    assert renderer.decode(tree.turns[0].node.completion_ids).endswith("two") and sum(row.columns.loss_mask) > 4


def test_calls_are_text_where_none_may_be_made(model_path):
    renderer = family_renderer(model_path, "qwen25")
    text = call_text(renderer, {"a": 1})

    async def act(session, engine):
        return (await ask(session, body(USER, tools=list(TOOLS), tool_choice="none")))["choices"][0]

    text = text[: text.index("<|im_end|>")]
    choice = run_session(renderer, [text], act)
    assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_a_session_that_ended_answers_nothing_and_cancels_what_is_sampled(renderer):
    async def act(session, engine):
        engine.hang_next()
        exchange = session.begin(*read(body(USER)))
        await asyncio.sleep(0)
        session.end()
        await asyncio.wait({exchange.task})
        for call in (lambda: session.deliver(exchange), lambda: session.begin(*read(body(USER)))):
            with pytest.raises(RefusedRequest, match="session has ended"):
                call()
        return exchange.task.cancelled(), engine.num_in_flight, session.tree.num_turns

    assert run_session(renderer, ["a<|im_end|>"], act) == (True, 0, 0)


def test_log_probs_are_those_of_the_sampled_tokens(renderer):
    async def act(session, engine):
        reply = await ask(session, body(USER, logprobs=True))
        tokens = reply["choices"][0]["logprobs"]["content"]
        node = session.tree.turns[0].node
        assert [token["logprob"] for token in tokens] == node.log_probs
        return "".join(token["token"] for token in tokens)

    assert run_session(renderer, ["one two<|im_end|>"], act) == "one two<|im_end|>"

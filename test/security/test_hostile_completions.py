"""What an engine or a model may send: refused at the border, one rollout at a time, and nothing unreadable is kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
from dataclasses import replace

import killed_runs
import pytest
from tensordict import TensorDict

from llmrl.collectors import LLMCollector
from llmrl.data import ChatHistory, History, RolloutStatus, StopReason, check_messages
from llmrl.engines import Completion, EngineError
from llmrl.envs import MessageChatEnv, MessageEnv, MessageStep
from llmrl.policies import LLMWrapperBase
from llmrl.rendering.tool_calls import TOOL_CALL_PARSERS, find_tool_call_parser
from llmrl.testing import ScriptedEngine
from llmrl.transforms import ToolTransform

GOOD = Completion([5, 6], [-0.5, -0.25], [0, 0], "stop")
BAD_COMPLETIONS = {
    "nothing": (None, "NoneType"),
    "a dict": ({"token_ids": [5]}, "dict"),
    "a log-prob that is not a number": (replace(GOOD, log_probs=[-0.5, math.nan]), r"log_probs\[1\].*nan"),
    "an infinite log-prob": (replace(GOOD, log_probs=[-math.inf, -0.5]), r"log_probs\[0\].*-inf"),
    "a positively infinite log-prob": (replace(GOOD, log_probs=[math.inf, -0.5]), r"log_probs\[0\].*inf"),
    "a log-prob beyond float32": (replace(GOOD, log_probs=[-1e39, -0.5]), r"log_probs\[0\].*-1e\+39"),
    "a positive log-prob": (replace(GOOD, log_probs=[-0.5, 900.0]), r"log_probs\[1\].*900"),
    "log-probs that are booleans": (replace(GOOD, log_probs=[False, False]), r"log_probs\[0\].*bool"),
    "log-probs that are texts": (replace(GOOD, log_probs=["-0.5", "-0.5"]), r"log_probs\[0\].*str"),
    "too few log-probs": (replace(GOOD, log_probs=[-0.5]), "log_probs .*1.*2"),
    "no log-probs": (replace(GOOD, log_probs=None), "log_probs .*NoneType"),
    "a negative id": (replace(GOOD, token_ids=[5, -1]), r"token_ids\[1\].*-1"),
    "an id beyond the vocabulary": (replace(GOOD, token_ids=[10**6, 5]), r"token_ids\[0\].*1000000"),
    "an id beyond 64 bits": (replace(GOOD, token_ids=[5, 2**80]), r"token_ids\[1\]"),
    "ids that are booleans": (replace(GOOD, token_ids=[True, 5]), r"token_ids\[0\].*bool"),
    "ids that are floats": (replace(GOOD, token_ids=[5.0, 6.0]), r"token_ids\[0\].*float"),
    "ids as a text": (replace(GOOD, token_ids="56"), "token_ids .*str"),
    "too many tokens": (Completion([5] * 5000, [-0.5] * 5000, [0] * 5000, "length"), "5000.*8"),
    "a version that no engine has": (replace(GOOD, versions=[0, -1]), r"versions\[1\].*-1"),
    "versions that are texts": (replace(GOOD, versions=["0", "0"]), r"versions\[0\].*str"),
    "too few versions": (replace(GOOD, versions=[0]), "versions .*1.*2"),
    "an unknown end": (replace(GOOD, finish_reason="content_filter"), "content_filter"),
    "a stop string that is none": (replace(GOOD, stop_string=3), "stop_string"),
}
FAULTS = list(BAD_COMPLETIONS)
# What calls are made of in the formats that are read, with escapes of lone surrogates.
CALL_MARKS = [
    "<tool_call>", "</tool_call>", '{"name": ', '"f\\ud800"', ', "arguments": ', '{"a": "\\udfff"}', "}", "{", "[", "]",
    "[TOOL_CALLS]", "[ARGS]", "f", "(a='\\ud800')", "<|tool_call_start|>", "<|tool_call_end|>", "<function=f>",
    "<parameter=a>", '"\\ud800"', "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<|tool_call>call:f{a:", '<|"|>', "}<tool_call|>", "<TOOLCALL>", "</TOOLCALL>", "<|tool_call|>",
    "<|/tool_call|>", "\n", "```json\n", "```", "<|python_tag|>", "null", "é", ",",
]  # fmt: skip


class Bad(ScriptedEngine):
    """Answers with a given completion."""

    def __init__(self, completion):
        super().__init__([[5]])
        self.completion = completion

    async def generate(self, *arguments, **options):
        return self.completion


class TwoTurns(MessageEnv):
    """Asks twice; the second question names the fault."""

    def __init__(self, item):
        self.questions = iter(["Ready?", f"Now {item['fault']}!"])

    async def init(self):
        return [{"role": "user", "content": next(self.questions)}]

    async def step(self, message):
        question = next(self.questions, None)
        said = [] if question is None else [{"role": "user", "content": question}]
        return MessageStep(said, reward=1.0, is_done=question is None)


def test_a_bad_completion_is_refused_by_name(renderer):
    history = ChatHistory(prompt=History.from_chats([{"role": "user", "content": "a"}]))
    policy = LLMWrapperBase(Bad(GOOD), renderer=renderer, generate_kwargs={"max_new_tokens": 8})
    for bad, message in BAD_COMPLETIONS.values():
        policy.engine.completion = bad
        with pytest.raises(EngineError, match=message):
            policy(TensorDict({"history": history}))


def test_a_rollout_with_a_bad_completion_fails_with_what_it_had_and_the_others_live(renderer):
    class Hostile(ScriptedEngine):
        async def generate(self, prompt_ids, sampling, **arguments):
            completion = await super().generate(prompt_ids, sampling, **arguments)
            text = renderer.decode(prompt_ids)
            fault = next((name for name in FAULTS if f"Now {name}!" in text), None)
            return completion if fault is None else BAD_COMPLETIONS[fault][0]

    policy = LLMWrapperBase(
        Hostile(["yes<|im_end|>"], encode=renderer.encode), renderer=renderer, generate_kwargs={"max_new_tokens": 8}
    )
    prompts = [{"fault": name} for name in (*FAULTS, "nothing of the kind")]
    with LLMCollector(MessageChatEnv(TwoTurns, prompts), policy=policy, groups_per_batch=1) as collector:
        *failed, good = collector.play(len(prompts))
    assert (good.status, good.num_turns, good.reward) == (RolloutStatus.COMPLETED, 2, 2.0)
    for name, rollout in zip(FAULTS, failed, strict=True):
        assert (rollout.status, rollout.reason) == (RolloutStatus.ERROR, StopReason.ENGINE_ERROR)
        assert re.search(BAD_COMPLETIONS[name][1], rollout.error)
        assert rollout.num_turns == 1 and len(rollout.conversation.turns) == 1 and not rollout.is_scored


def test_a_run_survives_each_bad_completion_and_replays(renderer, tmp_path, monkeypatch):
    class Hostile(ScriptedEngine):
        """A bad completion after every second good one, each kind in turn, whatever is asked for again included."""

        requested, is_bad = itertools.count(), itertools.cycle(FAULTS)

        async def generate(self, prompt_ids, sampling, **arguments):
            completion = await super().generate(prompt_ids, sampling, **arguments)
            return BAD_COMPLETIONS[next(self.is_bad)][0] if next(self.requested) % 6 >= 3 else completion

    def stop(step, batch):
        if step == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(killed_runs, "ScriptedEngine", Hostile)
    with pytest.raises(KeyboardInterrupt):
        killed_runs.train(tmp_path, renderer, resume=False, on_step=stop)
    killed_runs.train(tmp_path, renderer, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    errors = [line["error"] for line in lines if line["status"] == "error"]
    # Three requests one after another are bad, and an error says what the last of them was.
    assert errors and all(any(re.search(said, error) for _, said in BAD_COMPLETIONS.values()) for error in errors)
    assert {line["step"] for line in lines if line["split"] == "train"} == set(range(1, killed_runs.NUM_STEPS + 1))
    weights = json.loads((tmp_path / "weights.json").read_text())["weights"]
    assert all(math.isfinite(value) for value in [*weights["weight"][0], *weights["bias"]])


def test_good_completions_pass_the_border_unchanged(renderer):
    rounding = Completion([0, 5, 6], [1e-6, 0.0, -103.5], [0, 1, 2**40], "length", metrics={"num_cached_tokens": 1.0})
    policy = LLMWrapperBase(Bad(GOOD), renderer=renderer)
    for completion in (GOOD, rounding, Completion([], [], [], "abort"), replace(GOOD, stop_string="END")):
        policy.engine.completion = completion
        assert asyncio.run(policy.complete([1, 2], policy.sampling)) is completion


def test_the_vocabulary_is_the_engine_s_where_it_knows_it_and_else_the_tokenizer_s(renderer):
    num_known = len(renderer.tokenizer)
    for vocab_size, last in ((None, num_known - 1), (num_known + 64, num_known + 63), (10, 9)):
        policy = LLMWrapperBase(Bad(replace(GOOD, token_ids=[5, last])), renderer=renderer)
        policy.engine.vocab_size = vocab_size
        assert asyncio.run(policy.complete([1], policy.sampling)).token_ids == [5, last]
        policy.engine.completion = replace(GOOD, token_ids=[5, last + 1])
        with pytest.raises(EngineError, match=rf"token_ids\[1\].*{last + 1}"):
            asyncio.run(policy.complete([1], policy.sampling))


# Texts


def surrogates_in(value):
    if isinstance(value, dict):
        return any(surrogates_in(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return any(map(surrogates_in, value))
    return isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value)


def test_a_lone_surrogate_in_a_call_is_replaced_where_the_call_is_read():
    arguments = r'{"a\udc00": ["\ud83d", {"b": "\ud800"}]}'
    texts = {
        "hermes": rf'<tool_call>{{"name": "f\ud800", "arguments": {arguments}}}</tool_call>',
        "llama3_json": rf'{{"name": "f\ud800", "parameters": {arguments}}}',
        "mistral": rf'[TOOL_CALLS][{{"name": "f\ud800", "arguments": {arguments}, "id": "\ud800"}}]',
    }
    for name, text in texts.items():
        [call] = find_tool_call_parser(name)(text, ()).tool_calls
        assert call["function"] == {"name": "f?", "arguments": {"a?": ["?", {"b": "?"}]}}, name
        assert not surrogates_in(call)


@pytest.mark.parametrize("seed", range(4))
def test_no_parser_gives_what_cannot_be_written_whatever_it_reads(seed):
    random_source = random.Random(seed)
    marks = [mark for mark in CALL_MARKS if random_source.random() < 0.9]
    for _ in range(400):
        text = "".join(random_source.choice(marks) for _ in range(random_source.randrange(1, 14)))
        for name, parse in TOOL_CALL_PARSERS.items():
            parsed = parse(text, ())
            for call in parsed.tool_calls:
                assert json.dumps(call, ensure_ascii=False).encode(), (name, text)
            for bad in parsed.malformed:
                assert f"{bad.raw}{bad.reason}".encode(), (name, text)


def test_messages_lose_lone_surrogates_where_they_enter():
    plain = ({"role": "user", "content": "é\U0001f600"}, {"role": "assistant", "content": "", "tool_calls": [{"a": 1}]})
    assert all(a is b for a, b in zip(check_messages(plain), plain, strict=True))
    bad = {"role": "user", "content": [{"type": "text", "text": "a\ud800"}], "name": "\udfffb"}
    expected = {"role": "user", "content": [{"type": "text", "text": "a?"}], "name": "?b"}
    assert check_messages([bad]) == (expected,) and bad["name"] == "\udfffb"
    assert History.from_chats([bad]).append(bad).chats == (expected, expected)


def test_a_lone_surrogate_anywhere_ends_no_rollout_and_its_record_can_be_written(renderer):
    call = '<tool_call>{"name": "echo", "arguments": {"text": "\\ud800"}}</tool_call><|im_end|>'

    def echo(text: str) -> str:
        """Echo."""
        return text + "\ud801"

    class Surrogates(TwoTurns):
        async def init(self):
            return [{"role": "user", "content": "a\ud800"}]

        async def step(self, message):
            if message.get("tool_calls"):
                return MessageStep([{"role": "user", "content": "b\ud800"}])
            return MessageStep(is_done=True)

    engine = ScriptedEngine([call, "yes<|im_end|>"], encode=renderer.encode)
    env = MessageChatEnv(Surrogates, [{"fault": ""}]).append_transform(ToolTransform([echo]))
    with LLMCollector(env, policy=LLMWrapperBase(engine, renderer=renderer), groups_per_batch=1) as collector:
        [rollout] = collector.play(1)
    assert (rollout.status, rollout.error, rollout.num_turns) == (RolloutStatus.COMPLETED, "", 2)
    assert json.dumps(rollout.to_record(), ensure_ascii=False).encode()
    contents = [message["content"] for message in rollout.messages]
    assert contents == ["a?", "", "??", "b?", "yes"]

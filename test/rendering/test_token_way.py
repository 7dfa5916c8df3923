"""A token's way from the engine to a row: what is made on it, where it is read, and over which loops a call goes."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest
import torch
from torchrl.envs import StepCounter, Transform

from llmrl.collectors import LLMCollector
from llmrl.data.tensordicts import batch_elements, plain
from llmrl.envs import DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep
from llmrl.policies import LLMWrapperBase
from llmrl.rendering.turn import TokenBuffer
from llmrl.testing import ScriptedEngine
from llmrl.transforms import KLComputation, RubricReward, ToolTransform, reads_turns


def given(completion):
    return 1.0


class Twice(MessageEnv):
    """Two turns, then the end."""

    def __init__(self, item):
        self.num_turns = 0

    async def init(self):
        return [{"role": "user", "content": "Count."}]

    async def step(self, message):
        self.num_turns += 1
        return MessageStep([{"role": "user", "content": "And?"}], reward=1.0, is_done=self.num_turns == 2)


def make_policy(renderer, *script):
    return LLMWrapperBase(ScriptedEngine(script, encode=renderer.encode, decode=renderer.decode), renderer=renderer)


def test_no_tensor_of_a_turn_is_made_for_rows(renderer, monkeypatch):
    monkeypatch.setattr(TokenBuffer, "tensor_view", lambda *_: pytest.fail("a turn's tensor was made"))
    answer = renderer.encode("1 2<|im_end|>")
    with LLMCollector(MessageChatEnv(Twice), policy=make_policy(renderer, "1 2<|im_end|>"), groups_per_batch=2) as made:
        for row in made.next().unbind(0):
            trained = row["tokens", "full"][row["masks", "all_assistant_mask"]]
            assert trained.tolist() == answer * 2


class Reading(Transform):
    """A user's transform, which looks at everything that the data contract has of a turn."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _step(self, tensordict, next_tensordict):
        for element in batch_elements(tensordict):
            turn = element["history"]
            self.seen.append(
                (
                    element["tokens", "prompt"].tolist() + element["tokens", "response"].tolist(),
                    element["tokens", "full"].tolist(),
                    element["masks", "all_assistant_mask"].tolist(),
                    len(element["log_probs", "full"]) - len(element["tokens", "prompt"]),
                    len(element["log_probs", "response"]),
                    element["policy_versions", "full"].tolist(),
                    bool(element["masks", "all_attention_mask"].all()),
                    turn.response.content,
                    plain(element.get("finish_reason")),
                )
            )
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset


def test_a_transform_of_a_users_reads_every_documented_entry_of_a_turn(renderer):
    reading = Reading()
    env = MessageChatEnv(Twice).append_transform(reading)
    answer = renderer.encode("1 2<|im_end|>")
    prompt = renderer.render([{"role": "user", "content": "Count."}], add_generation_prompt=True)
    with LLMCollector(env, policy=make_policy(renderer, "1 2<|im_end|>"), groups_per_batch=1) as collector:
        collector.next()
    first = reading.seen[0]
    mask = [False] * len(prompt) + [True] * len(answer)
    versions = [0 if sampled else -1 for sampled in mask]
    assert first[:6] == (prompt + answer, prompt + answer, mask, len(answer), len(answer), versions)
    assert first[6:] == (True, ["1 2"], "stop")
    assert len(reading.seen) == 2 and reading.seen[1][1][: len(prompt + answer)] == prompt + answer


def test_who_reads_turns():
    class Mine(ToolTransform):
        """A user's class may read what it likes."""

    env = DatasetChatEnv(["a"])
    assert not reads_turns(env.append_transform(RubricReward(given)))
    for part in (StepCounter(), KLComputation(), Mine()):
        assert reads_turns(DatasetChatEnv(["a"]).append_transform(part))


def test_a_tool_call_goes_from_the_collectors_loop_to_the_tools_and_over_no_other(renderer):
    loops = set()

    async def look(place: str) -> str:
        """Look somewhere."""
        loops.add(asyncio.get_running_loop())
        return f"nothing in {place}"

    call = '<tool_call>\n{"name": "look", "arguments": {"place": "there"}}\n</tool_call><|im_end|>'
    tools = ToolTransform([look])
    env = DatasetChatEnv(["Look."], repeats=2).append_transform(tools).append_transform(RubricReward(given))
    with LLMCollector(env, policy=make_policy(renderer, call, "Nothing.<|im_end|>"), groups_per_batch=1) as collector:
        collector.next()
        assert {message["content"] for one in collector.rollouts for message in one.messages[2:3]} == {
            "nothing in there"
        }
        assert loops == {tools.loop.loop} and collector._background.loop not in loops
        assert not collector._source.stepper.slow_loop._loops  # the loop for users' steps was never started
    tools.close()


class SlowSender:
    """A sender that copies at once, with engines that take their time."""

    def __init__(self):
        self.model, self.engine, self.is_loaded, self.is_shut = None, None, threading.Event(), False

    def register_model(self, model):
        self.model = model

    def init_all_workers_group(self, metadata, engine):
        self.engine = engine

    def update_weights(self):
        return 1

    def start_update(self):
        future: Future[int] = Future()

        def load():
            self.is_loaded.wait(60)
            future.set_result(2)

        threading.Thread(target=load, daemon=True).start()
        return future

    def shutdown(self):
        self.is_shut = True


def test_training_goes_on_while_engines_load(renderer):
    sender = SlowSender()

    class Scheme:
        def create_sender(self):
            return sender

    model, policy = torch.nn.Linear(1, 1), make_policy(renderer, "1<|im_end|>")
    with LLMCollector(
        DatasetChatEnv(["a"]), policy=policy, groups_per_batch=1, weight_sync_schemes={"policy": Scheme()}
    ) as collector:
        with pytest.raises(ValueError, match="the trainer's model"):
            collector.start_update()
        update = collector.start_update(model)
        assert not update.done() and sender.model is model and sender.engine is policy.engine
        sender.is_loaded.set()
        assert update.result(60) == 2
        assert collector.update_policy_weights_() == 1
    assert sender.is_shut
    with (
        LLMCollector(DatasetChatEnv(["a"]), policy=policy, groups_per_batch=1) as collector,
        pytest.raises(ValueError, match="one that takes weights"),
    ):
        collector.start_update(model)

"""Environments over loaders, and what a conversation's turns and episodes leave behind."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset
from torchrl.envs import StepCounter

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus
from llmrl.envs import ChatEnv, DataLoadingPrimer, DatasetChatEnv, EndOfData
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine


class Numbers(IterableDataset):
    def __init__(self, count=None):
        self.count = count

    def __iter__(self):
        return ({"query": f"{n}?"} for n in (itertools.count() if self.count is None else range(self.count)))


def make_policy(renderer, answer, **options):
    return LLMWrapperBase(ScriptedEngine([answer], encode=renderer.encode), renderer=renderer, **options)


def test_an_endless_loader_is_read_as_it_is_drawn():
    env = ChatEnv.from_dataloader(DataLoader(Numbers(), batch_size=3), repeats=2, batch_size=(2,))
    assert [list(env.reset()["query"]) for _ in range(5)] == [[f"{n}?"] * 2 for n in range(5)]
    again = ChatEnv.from_dataloader(DataLoader(Numbers(), batch_size=2), repeats=2, batch_size=(2,))
    again.load_state_dict(env.state_dict())
    assert list(again.reset()["query"]) == ["5?"] * 2
    primed = ChatEnv().append_transform(DataLoadingPrimer(DataLoader(Numbers(), batch_size=3)))
    assert [primed.reset()["query"] for _ in range(5)] == [f"{n}?" for n in range(5)]
    with pytest.raises(ValueError, match="so they cannot be restarted"):
        env.reset_dataloader()
    with pytest.raises(ValueError, match="let the loader shuffle"):
        ChatEnv.from_dataloader(DataLoader(Numbers()), shuffle=True)


@pytest.mark.parametrize("has_length", [False, True])
def test_a_loader_that_ends_wraps_or_ends_and_can_be_begun_anew(has_length):
    source = [{"query": f"{n}?"} for n in range(3)] if has_length else Numbers(3)
    env = DatasetChatEnv.from_dataloader(DataLoader(source, batch_size=2))
    expected = [f"train/{epoch}/{index}" for epoch in range(2) for index in range(3)]
    assert [env.reset()["rollout", "group_id"] for _ in range(6)] == expected
    env = DatasetChatEnv.from_dataloader(DataLoader(source, batch_size=2), num_epochs=1)
    assert [env.reset_dataloader().reset()["rollout", "group_id"], *(env.reset() for _ in range(2))][0] == "train/0/0"
    for passed in (1, 2):
        assert env.reset_dataloader() is env
        drawn = [env.reset()["rollout", "group_id"] for _ in range(3)]
        assert drawn == [f"train/{passed}/{index}" for index in range(3)]
        with pytest.raises(EndOfData):
            env.reset()


def test_prompts_are_maintained_as_tokens(tokenizer):
    env = ChatEnv.with_tokenizer(tokenizer, batch_size=(1,), system_prompt="Be kind.")
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert env.reset(TensorDict(query=["Hi"], batch_size=(1,)))["tokens", "prompt"][0].tolist() == expected


@pytest.mark.parametrize("input_mode", ["history", "text", "tokens"])
def test_what_an_environment_writes_is_on_its_device(tokenizer, input_mode):
    env = ChatEnv(input_mode=input_mode, device="meta", tokenizer=tokenizer)
    opened = env.reset(TensorDict(query="Hi"))
    full = {"history": lambda: opened["history"].prompt, "text": lambda: "Hi", "tokens": lambda: torch.ones(3)}
    opened[input_mode, "full"] = full[input_mode]()
    written = [opened, env.step(opened)["next"]]
    leaves = [leaf for one in written for leaf in one.values(True, True) if isinstance(leaf, torch.Tensor)]
    assert len(leaves) >= 7 and {leaf.device.type for leaf in leaves} == {"meta"}


def test_nothing_of_a_turn_or_an_episode_is_left_at_the_root(renderer):
    env = DatasetChatEnv(["a", "b"]).append_transform(StepCounter(max_steps=2))
    policy, data, has_ended = make_policy(renderer, "2<|im_end|>"), env.reset(), []
    opened = set(data.keys(True))
    for _ in range(4):
        stepped, data = env.step_and_maybe_reset(policy(data))
        has_ended.append(bool(stepped["next", "done"]))
        assert stepped["text"].response == "2<|im_end|>" and stepped["history"].response.content == ["2"]
        assert set(data.keys(True)) - opened <= {"_reset"}
        assert (data["conversation"] is None) == has_ended[-1]
    assert has_ended == [False, True] * 2


@pytest.mark.parametrize("end_at_length", [True, False])
def test_an_answer_that_was_cut_ends_its_rollout_or_is_played_on(renderer, end_at_length):
    env = DatasetChatEnv(["a"]).append_transform(StepCounter(max_steps=2))
    policy = make_policy(renderer, "one two three four five", generate_kwargs={"max_new_tokens": 3})
    limits = RolloutLimits(end_at_length=end_at_length)
    with LLMCollector(env, policy, groups_per_batch=1, limits=limits) as collector:
        [row] = collector.next()
        [rollout] = collector.rollouts
    assert (rollout.num_turns, rollout.status) == (1 if end_at_length else 2, RolloutStatus.TRUNCATED)
    assert int(row["masks", "all_assistant_mask"].sum()) == 3 * rollout.num_turns
    trained = renderer.decode(row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist())
    assert trained == "one two three" * rollout.num_turns

"""Primers open conversations with rows of a data set; those in Ray share one pass over it."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.envs import StepCounter, check_env_specs

from llmrl.collectors import LLMCollector
from llmrl.envs import ChatEnv, DataLoadingPrimer, DatasetChatEnv, EndOfData, RayDataLoadingPrimer
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward

ROWS = [{"query": "1 + 1 =", "answer": "2"}, {"query": "1 + 2 =", "answer": "3"}, {"query": "2 + 2 =", "answer": "4"}]


def exact(completion, answer):
    return float(completion == answer)


def drawn(env, count):
    data = env.reset(TensorDict(batch_size=[count]))
    return list(zip(data["query"], data["rollout", "group_id"], data["rollout", "sample_index"].tolist(), strict=True))


def collector_of(env, renderer, **shape):
    policy = LLMWrapperBase(ScriptedEngine(["2<|im_end|>"], encode=renderer.encode), renderer=renderer)
    return LLMCollector(env.append_transform(RubricReward(exact)), policy=policy, **shape)


@pytest.mark.parametrize("batch_size", [None, (2,)])
def test_specs_with_a_primer_and_other_transforms(batch_size):
    env = ChatEnv(batch_size=batch_size).append_transform(DataLoadingPrimer(ROWS, repeats=2))
    check_env_specs(env)
    check_env_specs(env.append_transform(StepCounter(max_steps=3)).append_transform(RubricReward(exact)))


def test_a_primed_env_draws_as_a_dataset_env_does():
    options = {"repeats": 2, "shuffle": True, "seed": 3, "num_epochs": 2}
    primed = ChatEnv().append_transform(DataLoadingPrimer(DataLoader(ROWS, batch_size=2), **options))
    assert drawn(primed, 9) == drawn(DatasetChatEnv(ROWS, **options), 9)
    with pytest.raises(EndOfData):
        drawn(primed, 4)


def test_columns_reach_rewards_and_a_given_query_is_kept():
    env = ChatEnv().append_transform(DataLoadingPrimer(dataloader_factory=lambda: ROWS))
    env = env.append_transform(RubricReward(exact))
    data = env.reset()
    data["history"].full = data["history"].prompt.append({"role": "assistant", "content": "2"})
    assert env.step(data)["next", "reward"].item() == 1.0
    assert env.reset(TensorDict({"query": "mine"}))["history"].prompt.content == ["mine"]


def test_a_partial_reset_draws_for_the_marked_conversations_only():
    env = ChatEnv(batch_size=(2,)).append_transform(DataLoadingPrimer(ROWS))
    data = env.reset()
    data["_reset"] = torch.tensor([[False], [True]])
    data = env.reset(data)
    assert data["history"].prompt.content == [["1 + 1 ="], ["2 + 2 ="]]


def test_what_cannot_be_drawn_whole_is_not_drawn_at_all():
    options = {"repeats": 2, "num_epochs": 1}
    for env in (DatasetChatEnv(ROWS, **options), ChatEnv().append_transform(DataLoadingPrimer(ROWS, **options))):
        assert len(drawn(env, 4)) == 4
        with pytest.raises(EndOfData, match="2 draws left, 3 were requested") as end:
            drawn(env, 3)
        assert end.value.num_left == 2 and len(drawn(env, 2)) == 2


@pytest.mark.parametrize("shape", [{"groups_per_batch": 2}, {"dialog_turns_per_batch": 4}])
def test_a_collection_ends_with_the_data_of_a_primer(renderer, shape):
    env = ChatEnv().append_transform(DataLoadingPrimer(ROWS, repeats=2, num_epochs=2))
    with collector_of(env, renderer, **shape) as collector:
        sizes = [len(batch) for batch in collector]
        assert sizes == [4, 4, 4] and next(iter(collector), None) is None
        with pytest.raises(EndOfData):
            collector.play(1)


def test_a_collector_knows_a_primers_groups_and_saves_its_position(renderer):
    def make():
        return ChatEnv().append_transform(DataLoadingPrimer(ROWS, repeats=2, shuffle=True, seed=1))

    with (
        collector_of(make(), renderer, groups_per_batch=1) as first,
        collector_of(make(), renderer, groups_per_batch=1) as second,
    ):
        groups = {rollout.group_id for rollout in (first.next(), first.rollouts)[1]}
        assert len(groups) == 1 and len(first.rollouts) == 2
        second.load_state_dict(first.state_dict())
        first.next(), second.next()
        assert [r.group_id for r in first.rollouts] == [r.group_id for r in second.rollouts] != [*groups] * 2


def test_a_saved_position_is_continued():
    first, second = (DataLoadingPrimer(ROWS, shuffle=True) for _ in range(2))
    first.draw(4)
    second.load_state_dict(first.state_dict())
    assert first.draw(5) == second.draw(5)


def test_exactly_one_source():
    with pytest.raises(ValueError, match="exactly one"):
        DataLoadingPrimer()
    with pytest.raises(ValueError, match="empty"):
        DataLoadingPrimer([])
    with pytest.raises(ValueError, match="the rows of the dataloader have no columns"):
        DataLoadingPrimer([{}])


def test_primers_in_ray_share_one_pass_and_a_collection_ends_with_it(ray_cluster, renderer):
    options = {"dataloader": ROWS, "repeats": 2, "num_epochs": 1, "actor_name": "primer-of-this-test"}
    first = RayDataLoadingPrimer(**options)
    env, other = ChatEnv().append_transform(first), ChatEnv().append_transform(RayDataLoadingPrimer(**options))
    state = first.state_dict()
    both = drawn(env, 2) + drawn(other, 3) + drawn(env, 1)
    assert both == drawn(DatasetChatEnv(ROWS, repeats=2), 6)
    with pytest.raises(EndOfData, match="0 draws left"):
        other.reset()
    first.load_state_dict(state)
    assert [one[2] for one in pickle.loads(pickle.dumps(first)).draw(2)] == [0, 1]
    with collector_of(env, renderer, dialog_turns_per_batch=3) as collector:
        assert [len(batch) for batch in collector] == [3, 1]

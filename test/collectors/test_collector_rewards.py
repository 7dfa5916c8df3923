"""What the collector makes of rewards: of those that are none, too."""

from __future__ import annotations

import asyncio
import gc
import itertools

import pytest
import torch
from tensordict import NonTensorData
from torchrl.data import LazyStackStorage, NonTensor, ReplayBuffer
from torchrl.envs import Compose, StepCounter, Transform, TransformedEnv

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import StopReason
from llmrl.envs import (
    AgentEnv,
    ChatEnv,
    DataLoadingPrimer,
    DatasetChatEnv,
    Game,
    GameEnv,
    GSM8KRewardParser,
    MessageChatEnv,
    MessageEnv,
    MessageStep,
    MixedEnv,
)
from llmrl.objectives import MCAdvantage
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn, Rubric, Score, UnknownRewardInput
from llmrl.testing import ScriptedEngine
from llmrl.tools import ToolTransform
from llmrl.transforms import KLComputation, PolicyVersion, RubricReward
from llmrl.transforms.parts import writes_reward

DATASET = [{"query": f"{n} + 1 =", "answer": str(n + 1)} for n in range(4)]


def exact(completion, answer):
    return float(completion == answer)


@pytest.fixture
def make_policy(renderer):
    def make(script=("1<|im_end|>",)):
        engine = ScriptedEngine(script, encode=renderer.encode, decode=renderer.decode)
        return LLMWrapperBase(engine, renderer=renderer)

    return make


def collect_groups(policy, env=None, **kwargs):
    env = env or DatasetChatEnv(DATASET, repeats=2).append_transform(RubricReward(exact))
    return LLMCollector(env, policy=policy, groups_per_batch=2, **kwargs)


def test_a_parameter_that_names_nothing_is_refused_when_the_reward_is_appended(make_policy):
    typo = Rubric(RewardFn(lambda anwser: 1, name="typo"))
    where = (
        r"'typo' \(.*test_collector_rewards.py:\d+\) reads \['anwser'\], which is not among \['answer', 'completion'"
    )
    for compose in (lambda reward: reward, lambda reward: Compose(StepCounter(), reward)):
        with pytest.raises(UnknownRewardInput, match=where):
            DatasetChatEnv(DATASET).append_transform(compose(RubricReward(typo)))
        with pytest.raises(UnknownRewardInput, match=where):
            TransformedEnv(DatasetChatEnv(DATASET), compose(RubricReward(typo)))
    # Where the columns come later, the collector refuses; where they come with the reset, the rollout's scoring does.
    late = ChatEnv().append_transform(RubricReward(typo)).append_transform(DataLoadingPrimer(DATASET))
    with pytest.raises(UnknownRewardInput, match=where):
        LLMCollector(late, policy=make_policy(), groups_per_batch=1)
    ChatEnv().append_transform(RubricReward(typo))


class Hinting(Transform):
    """Writes a column of its own."""

    def _reset(self, tensordict, tensordict_reset):
        for element in tensordict_reset.unbind(0) if tensordict_reset.batch_size else [tensordict_reset]:
            element.set("hint", NonTensorData("h"))
        return tensordict_reset

    def transform_observation_spec(self, observation_spec):
        observation_spec["hint"] = NonTensor(shape=observation_spec.shape, example_data="")
        return observation_spec


def test_what_an_earlier_transform_writes_may_be_read_by_a_reward(make_policy):
    def hinted(hint):
        return float(hint == "h")

    env = DatasetChatEnv(DATASET, repeats=2).append_transform(Hinting()).append_transform(RubricReward(hinted))
    with collect_groups(make_policy(), env) as collector:
        assert [rollout.reward for rollout in collector.play(2)] == [1.0, 1.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0]], ids=repr)
@pytest.mark.parametrize("is_async", [False, True])
def test_rollouts_whose_score_is_no_finite_number_leave_batch_and_baseline(make_policy, value, is_async):
    def score(completion, answer):
        return value if answer == "1" else float(completion == "2")

    async def judge(completion, answer):
        return score(completion, answer)

    policy = make_policy(["2<|im_end|>", "3<|im_end|>"])
    env = DatasetChatEnv(DATASET[:2], repeats=2).append_transform(RubricReward(judge if is_async else score))
    with collect_groups(policy, env, postproc=MCAdvantage(grpo_size=2)) as collector:
        batch = next(iter(collector))
        dropped = [rollout for rollout in collector.rollouts if not rollout.is_scored]
    name = f"reward function {'judge' if is_async else 'score'!r} ({__file__}:"
    assert batch["rollout", "group_id"] == ["train/0/1"] * 2 + ["train/1/1"] * 2
    assert batch["advantage"].isfinite().all() and batch["next", "reward"].isfinite().all()
    assert collector.report.num_dropped_by_reason == {"unscored": len(dropped)} and len(dropped) >= 2
    name = "judge" if is_async else "score"
    assert all(
        rollout.reward == 0.0 and f"reward function {name!r} ({__file__}:" in rollout.error for rollout in dropped
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0]], ids=repr)
def test_the_reward_of_a_message_step_is_a_finite_number_or_its_rollout_fails(make_policy, value):
    class Broken(MessageEnv):
        async def init(self):
            return [{"role": "user", "content": "go"}]

        async def step(self, message):
            return MessageStep(reward=value, is_done=True)

    with LLMCollector(MessageChatEnv(lambda item: Broken()), policy=make_policy(), groups_per_batch=1) as collector:
        [rollout] = collector.play(1)
    assert not rollout.is_scored and rollout.reason == StopReason.ENVIRONMENT_ERROR
    assert "MessageStep.reward must be" in rollout.error and f"Broken.step ({__file__}:" in rollout.error


class Poisoned(Transform):
    """Writes a reward that is none."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("reward", next_tensordict.get("reward") * float("nan"))


@pytest.mark.parametrize("is_rubric_there", [False, True])
def test_a_reward_that_a_transform_spoils_leaves_batch_and_baseline(make_policy, is_rubric_there):
    env = DatasetChatEnv(DATASET).append_transform(Poisoned())
    if is_rubric_there:
        env = env.append_transform(RubricReward(exact))
    limits = RolloutLimits(max_turns=1)
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1, limits=limits) as collector:
        [rollout] = collector.play(1)
    assert not rollout.is_scored and rollout.reward == 0.0 and "must be a finite number, got nan" in rollout.error


class OwnReward(ChatEnv):
    """A user's environment may reward in whatever way."""

    def _stepped(self, tensordict):
        return super()._stepped(tensordict).set("reward", torch.ones(1, 1))


class OwnRubricReward(RubricReward):
    """A user's."""


class NoReward(Transform):
    writes_reward = False


def test_parts_that_write_a_reward_say_so_and_those_of_others_count_as_rewarding_unless_they_say_otherwise():
    silent = DatasetChatEnv(DATASET).append_transform(ToolTransform([])).append_transform(PolicyVersion())
    assert not writes_reward(silent) and not writes_reward(silent.append_transform(NoReward()))
    rewarding = [MessageChatEnv(lambda row: None), AgentEnv(lambda row, model: 1.0, DATASET), OwnReward()]
    parts = [RubricReward(exact), OwnRubricReward(exact), GSM8KRewardParser(), KLComputation(), Poisoned()]
    rewarding += [DatasetChatEnv(DATASET).append_transform(part) for part in parts]
    rewarding.append(DatasetChatEnv(DATASET).append_transform(Compose(StepCounter(), Compose(RubricReward(exact)))))
    assert [writes_reward(env) for env in rewarding] == [True] * len(rewarding)


def test_a_group_size_that_contradicts_the_environments_is_refused(make_policy):
    buffer = ReplayBuffer(storage=LazyStackStorage(8)).append_transform(MCAdvantage(grpo_size=3))
    for kwargs in (
        {"postproc": MCAdvantage(grpo_size=3)},
        {"postproc": Compose(MCAdvantage(grpo_size=1, candidate_group_size=4))},
        {"replay_buffer": buffer},
    ):
        with pytest.raises(ValueError, match=r"groups of [34] .* each prompt 2 times \(repeats\)"):
            collect_groups(make_policy(), **kwargs)
    with collect_groups(make_policy()) as collector, pytest.raises(ValueError, match="groups of 4"):
        collector.set_postproc(MCAdvantage(grpo_size=4))
    collect_groups(make_policy(), postproc=MCAdvantage(grpo_size=1, candidate_group_size=2)).shutdown()


def test_a_rubric_within_nested_transforms_is_found(make_policy):
    class First(Rubric):
        async def score_group(self, rollouts):
            return [Score(float(place == 0)) for place in range(len(rollouts))]

    env = DatasetChatEnv(DATASET, repeats=2).append_transform(Compose(Compose(RubricReward(First(exact)))))
    with collect_groups(make_policy(), env) as collector:
        assert next(iter(collector))["next", "reward"].flatten().tolist() == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_scorer_that_fails_gives_the_error_reward_within_the_step_and_after_it(make_policy, is_async):
    def score():
        raise ValueError("no")

    async def judge():
        raise ValueError("no")

    rubric = Rubric(RewardFn(judge if is_async else score, name="broken"), error_reward=-1.0)
    env = DatasetChatEnv(DATASET).append_transform(RubricReward(rubric)).append_transform(RubricReward(exact))
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
        [rollout] = collector.play(1)
    assert rollout.is_scored and rollout.reward == 0.0 and rollout.breakdown == {"exact": 1.0}
    assert "broken" in rollout.error


async def late(completion):
    await asyncio.sleep(60)


async def late_and_stubborn(completion):
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("judge", [late, late_and_stubborn])
def test_a_late_judge_is_named_and_leaves_nothing_in_the_log(make_policy, judge, caplog):
    gc.collect()  # what earlier tests left may be logged as it is freed
    caplog.clear()
    env = DatasetChatEnv(DATASET * 8).append_transform(RubricReward(Rubric(judge, timeout_seconds=0.01)))
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
        rollouts = collector.play(32)
    gc.collect()  # what was never retrieved is logged when it is freed
    where = f"reward function {judge.__name__!r} ({__file__}:{judge.__code__.co_firstlineno})"
    assert all("TimeoutError" in one.error and where in one.error and not one.is_scored for one in rollouts)
    assert caplog.records == []


class PlaceInGroup(Rubric):
    async def score_group(self, rollouts):
        return [Score(float(place)) for place in range(len(rollouts))]


def test_survivors_stay_where_only_another_environment_scores_groups_together(make_policy):
    class EverySecondFails(MessageEnv):
        count = itertools.count()

        async def init(self):
            return [{"role": "user", "content": "go"}]

        async def step(self, message):
            if next(self.count) % 2:
                raise ValueError("no")
            return MessageStep(reward=1.0, is_done=True)

    compared = DatasetChatEnv(DATASET, repeats=2).append_transform(RubricReward(PlaceInGroup(exact)))
    mixed = MixedEnv({"compared": compared, "failing": MessageChatEnv(lambda row: EverySecondFails(), repeats=2)})
    with LLMCollector(mixed, policy=make_policy(), groups_per_batch=2) as collector:
        batch = collector.next()
        assert collector.report.num_dropped_by_reason == {StopReason.ENVIRONMENT_ERROR: 1}
    assert sorted(batch["next", "reward"].flatten().tolist()) == [0.0, 1.0, 1.0]


def asked(query):
    return float(query == "mine")


class Opened(MessageEnv):
    async def init(self):
        return [{"role": "user", "content": "go"}]

    async def step(self, message):
        return MessageStep(is_done=True)


class Said(Game):
    roles = ("one",)
    is_said = False

    def observe(self):
        return "one", "go"

    def act(self, text):
        self.is_said = True

    def rewards(self):
        return {"one": 0.0} if self.is_said else None


@pytest.mark.parametrize(
    "make_env",
    [
        lambda rows: MessageChatEnv(lambda row: Opened(), rows),
        lambda rows: GameEnv(lambda row: Said(), rows, roles=Said.roles),
        lambda rows: DatasetChatEnv(rows, prepare=lambda row: f"{row['query']}: go"),
    ],
    ids=["messages", "game", "prepare"],
)
def test_a_column_that_is_named_query_reaches_the_rewards_as_it_is(make_policy, make_env):
    env = make_env([{"query": "mine"}]).append_transform(RubricReward(asked))
    assert env.observation_spec is not None
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
        [rollout] = collector.play(1)
    assert rollout.columns == {"query": "mine"} and rollout.reward == 1.0
    assert "go" in rollout.messages[0]["content"]


class FailsForSome(Hinting):
    def _reset(self, tensordict, tensordict_reset):
        for element in tensordict_reset.unbind(0) if tensordict_reset.batch_size else [tensordict_reset]:
            if element["number"] % 2:
                raise ValueError("no")
        return super()._reset(tensordict, tensordict_reset)


class InitFailsForSome(Opened):
    def __init__(self, row):
        self.number = row["number"]

    async def init(self):
        if self.number % 2:
            raise ValueError("no")
        return await super().init()


@pytest.mark.parametrize("place", ["transform", "init"])
def test_a_rollout_that_could_not_be_opened_has_the_columns_of_its_row(make_policy, place):
    rows = [{"query": "a", "number": 0}, {"query": "b", "number": 1, "rare": 7}]
    if place == "init":
        env = MessageChatEnv(InitFailsForSome, rows)
    else:
        env = DatasetChatEnv(rows).append_transform(FailsForSome())
    env = env.append_transform(RubricReward(RewardFn(lambda number: 1.0, name="one")))
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
        good, failed = collector.play(2)
    assert good.status.name == "COMPLETED" and failed.status.name == "ERROR"
    assert good.columns.items() >= {"query": "a", "number": 0, "rare": None}.items()
    assert failed.columns == {"query": "b", "number": 1, "rare": 7}


class OverAtOnce(Game):
    roles = ("first", "second")
    is_over = False

    def observe(self):
        return "first", "go"

    def act(self, text):
        self.is_over = True

    def rewards(self):
        return {"first": 1.0, "second": -1.0} if self.is_over else None


@pytest.mark.parametrize("is_async", [False, True])
def test_a_rollout_whose_game_is_over_before_its_first_turn_is_scored_by_its_rubric(make_policy, is_async):
    def score(completion):
        return 10.0 if completion else 20.0

    async def judge(completion):
        return score(completion)

    env = GameEnv(lambda row: OverAtOnce(), roles=OverAtOnce.roles)
    env = env.append_transform(RubricReward(RewardFn(judge if is_async else score, name="said")))
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
        rollouts = collector.play(2)
    assert [(one.num_turns, one.reward, one.breakdown) for one in rollouts] == [
        (1, 11.0, {"said": 10.0}),
        (0, 19.0, {"said": 20.0}),
    ]

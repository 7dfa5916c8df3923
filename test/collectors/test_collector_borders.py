"""What the collector makes of several scorers, transforms, players and of rollouts that end before they begin."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from torchrl.envs import Transform

from llmrl.collectors import GroupRules, LLMCollector, RolloutLimits
from llmrl.data.tensordicts import batch_elements, plain
from llmrl.envs import (
    ChatEnv,
    DatasetChatEnv,
    Game,
    GameEnv,
    MessageChatEnv,
    MessageEnv,
    MessageStep,
    MixedEnv,
    ToolEnv,
)
from llmrl.objectives import MCAdvantage
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn, Rubric, Score
from llmrl.testing import ScriptedEngine
from llmrl.tools import ToolTransform
from llmrl.transforms import IncrementalTokenizer, RubricReward


def make_policy(renderer, script=("1<|im_end|>",), latency_s=0.0, **options):
    engine = ScriptedEngine(script, encode=renderer.encode, decode=renderer.decode, latency_s=latency_s)
    return LLMWrapperBase(engine, renderer=renderer, **options)


def play(renderer, env, num_rollouts=2, script=("1<|im_end|>",), **options):
    with LLMCollector(env, policy=make_policy(renderer, script), groups_per_batch=1, **options) as collector:
        return collector.play(num_rollouts)


@pytest.mark.parametrize(
    ("policy_mode", "env_mode"), list(itertools.permutations(("history", "text", "tokens"), 2)), ids="-".join
)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_policy_with_another_input_mode_than_its_environment_is_refused(renderer, policy_mode, env_mode, has_tokens):
    env = DatasetChatEnv(["a"], repeats=2, input_mode=env_mode, tokenizer=renderer.tokenizer)
    if has_tokens and env_mode == "history":
        env = env.append_transform(IncrementalTokenizer(renderer=renderer))
    policy = make_policy(renderer, input_mode=policy_mode)
    with pytest.raises(ValueError, match=f"policy has input_mode='{policy_mode}'.*has input_mode='{env_mode}'"):
        LLMCollector(env, policy=policy, dialog_turns_per_batch=2)


async def look():
    """Look."""


def late_tool(rows):
    return DatasetChatEnv(rows).append_transform(RubricReward(ten)).append_transform(ToolTransform([look]))


@pytest.mark.parametrize(
    ("env", "arguments", "message"),
    [
        (DatasetChatEnv, {"tokens_per_batch": 64, "max_staleness": 1}, "max_staleness needs batches"),
        (DatasetChatEnv, {"queue": []}, "queue"),
        (DatasetChatEnv, {"limits": {"a": RolloutLimits()}}, "limits by name"),
        (lambda rows: MixedEnv({"a": DatasetChatEnv(rows)}), {"track_policy_version": True}, "track_policy_version"),
        (lambda rows: ChatEnv(), {}, "groups need a DatasetChatEnv"),
        (DatasetChatEnv, {"limits": 5}, "limits must be"),
        (DatasetChatEnv, {"group_rules": len}, "group_rules must be"),
        (DatasetChatEnv, {"postproc": 5}, "postproc must be"),
        (DatasetChatEnv, {"postproc": MCAdvantage(grpo_size=2)}, "is made for groups of 2"),
        (DatasetChatEnv, {"group_rules": GroupRules(min_survivors=2)}, "min_survivors=2 drops every group"),
        (
            lambda rows: MixedEnv({"a": DatasetChatEnv(rows)}),
            {"limits": {"b": RolloutLimits()}},
            "unknown environments",
        ),
        (lambda rows: GameEnv(Pair, roles=Pair.roles), {"max_concurrent_rollouts": 1}, "the players of a game"),
        (late_tool, {}, "append them before it"),
    ],
)
def test_no_policy_is_made_for_arguments_that_are_refused(renderer, env, arguments, message):
    made = []

    def policy_factory():
        made.append(make_policy(renderer))
        return made[-1]

    if "tokens_per_batch" not in arguments:
        arguments = {"groups_per_batch": 1, **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        LLMCollector(env(["a"]), policy_factory=policy_factory, **arguments)
    assert not made
    with LLMCollector(DatasetChatEnv(["a"]), policy_factory=policy_factory, groups_per_batch=1) as collector:
        assert made == [collector.policy]


# Several scorers


def ten(completion):
    return 10.0


def half(completion):
    return 0.5


async def slow_quarter(completion):
    await asyncio.sleep(0)
    return 0.25


class Compared(Rubric):
    async def score_group(self, rollouts):
        return [Score(float(place), {"compared": float(place)}) for place, _ in enumerate(rollouts)]


SCORERS = {
    "ten": lambda: RubricReward(ten),
    "half": lambda: RubricReward(half, terminate_when_answered=False),
    "slow_quarter": lambda: RubricReward(slow_quarter),
    "compared": lambda: RubricReward(Compared(RewardFn(ten, name="compared"))),
}
VALUES = {"ten": 10.0, "half": 0.5, "slow_quarter": 0.25}


@pytest.mark.parametrize("shape", [{"groups_per_batch": 1}, {"dialog_turns_per_batch": 2}], ids=["groups", "turns"])
@pytest.mark.parametrize("names", [*itertools.permutations(VALUES), ("ten", "half"), ("half", "compared", "ten")])
def test_every_scorer_counts_once_in_any_order(renderer, names, shape):
    env = DatasetChatEnv(["a", "b"], repeats=2)
    for name in names:
        env = env.append_transform(SCORERS[name]())
    with LLMCollector(env, policy=make_policy(renderer), **shape) as collector:
        batch, rollouts = collector.next(), collector.rollouts
    assert len(rollouts) == 2
    for rollout in rollouts:
        expected = {name: VALUES.get(name, float(rollout.sample_index)) for name in names}
        assert rollout.breakdown == expected and rollout.reward == sum(expected.values())
        assert rollout.turn_rewards == [rollout.reward] and rollout.status.name == "COMPLETED"
    entries = batch if "groups_per_batch" in shape else batch["next"]
    assert sorted(batch["next", "reward"].flatten().tolist()) == sorted(rollout.reward for rollout in rollouts)
    assert {name: len(entries["reward_breakdown", name]) for name in names} == dict.fromkeys(names, 2)


def test_a_rollout_that_one_of_several_scorers_could_not_score_is_not_scored(renderer):
    def broken(completion):
        raise ValueError("no")

    for rewards in itertools.permutations([ten, half, broken]):
        env = DatasetChatEnv(["a"])
        for reward in rewards:
            env = env.append_transform(RubricReward(reward))
        [rollout] = play(renderer, env, 1)
        assert not rollout.is_scored and "broken" in rollout.error


def test_scorers_around_an_environment_that_has_one_count_too(renderer):
    class Counted:
        def count(self) -> str:
            """Count."""
            return "1"

        def get_reward(self):
            return 10.0

    for judge, value in ((half, 0.5), (slow_quarter, 0.25)):
        env = ToolEnv(Counted, [{"prompt": "Go."}]).append_transform(RubricReward(judge))
        [rollout] = play(renderer, env, 1)
        assert rollout.reward == 10.0 + value
        assert rollout.breakdown == {"get_reward": 10.0, judge.__name__: value}


def test_two_scorers_of_one_name_are_refused():
    env = DatasetChatEnv(["a"]).append_transform(RubricReward(ten))
    with pytest.raises(ValueError, match=r"several reward functions of the names \['ten'\]; give each its own"):
        env.append_transform(RubricReward(RewardFn(half, name="ten")))


# Tools


def make_call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answer_with(*calls):
    return "\n".join(calls) + "<|im_end|>"


def odd(number: int) -> str:
    """Answer."""
    return f"odd {number}"


def even(number: int) -> str:
    """Answer."""
    return f"even {number}"


def other(number: int) -> str:
    """Answer."""
    return f"other {number}"


def told(rollout):
    return [message["content"] for message in rollout.messages if message["role"] == "tool"]


def test_results_come_in_the_order_of_the_calls_whichever_transforms_answer(renderer):
    env = DatasetChatEnv(["a"])
    for tools in ([even], [odd], [other]):
        env = env.append_transform(ToolTransform(tools))
    env = env.append_transform(RubricReward(half))
    order = [odd, other, even, odd, even, even, other]
    calls = [make_call(tool.__name__, number=number) for number, tool in enumerate(order)]
    calls.insert(3, make_call("none"))
    [rollout] = play(renderer, env, 1, (answer_with(*calls), "1<|im_end|>"))
    expected = [f"{tool.__name__} {number}" for number, tool in enumerate(order)]
    expected.insert(3, "Error: there is no tool 'none'")
    assert [text[: len(start)] for text, start in zip(told(rollout), expected, strict=True)] == expected


class Sum:
    def __init__(self):
        self.total = 0

    async def inc(self, by: int) -> str:
        """Add."""
        before = self.total
        await asyncio.sleep(0)
        await asyncio.sleep(0.01 / by)
        self.total = before + by
        return str(self.total)

    def dec(self, by: int) -> str:
        """Subtract."""
        self.total -= by
        return str(self.total)

    def get_reward(self):
        return float(self.total)


@pytest.mark.parametrize("in_an_environment", [True, False])
def test_calls_of_one_instance_run_one_after_another(renderer, in_an_environment):
    if in_an_environment:
        env = ToolEnv(Sum, [{"prompt": "Go."}])
    else:
        env = DatasetChatEnv(["Go."]).append_transform(ToolTransform([Sum, odd])).append_transform(RubricReward(half))
    calls = [make_call("inc", by=1), make_call("inc", by=2), make_call("dec", by=1), make_call("inc", by=4)]
    [rollout] = play(renderer, env, 1, (answer_with(*calls), "1<|im_end|>"))
    assert told(rollout) == ["1", "3", "2", "6"]


class FailsFor(Transform):
    """A user's transform that raises for one conversation."""

    def _step(self, tensordict, next_tensordict):
        if any(
            "bad" in (plain(element.get("query")), plain(element.get("name", None)))
            for element in batch_elements(tensordict)
        ):
            raise ValueError("bad")
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset


def test_a_failing_step_of_one_conversation_repeats_no_tool_and_loses_no_result_of_another(renderer):
    called = []

    def note(text: str) -> str:
        """Note."""
        called.append(text)
        return f"noted {text}"

    env = DatasetChatEnv(["a", "bad", "b"]).append_transform(ToolTransform([note])).append_transform(FailsFor())
    script = [answer_with(make_call("note", text="x"))] * 3 + ["1<|im_end|>"] * 2
    rollouts = play(renderer, env.append_transform(RubricReward(half)), 3, script)
    assert [rollout.status.name for rollout in rollouts] == ["COMPLETED", "ERROR", "COMPLETED"]
    assert [told(rollout) for rollout in (rollouts[0], rollouts[2])] == [["noted x"]] * 2 and len(called) == 3


def test_a_failing_step_of_one_conversation_steps_no_other_environment_twice(renderer):
    stepped = []

    class Once(MessageEnv):
        def __init__(self, item):
            self.name = item["name"]

        async def init(self):
            return [{"role": "user", "content": self.name}]

        async def step(self, message):
            stepped.append(self.name)
            return MessageStep([], is_done=True, reward=1.0)

    env = MessageChatEnv(Once, [{"name": name} for name in ("a", "bad", "b")]).append_transform(FailsFor())
    rollouts = play(renderer, env, 3)
    assert sorted(stepped) == ["a", "b", "bad"] and [one.reward for one in rollouts] == [1.0, 0.0, 1.0]


# Rollouts that never answered


@pytest.mark.parametrize("judge", [True, False])
def test_an_example_of_the_opening_is_no_answer(renderer, judge):
    asked, answered = {"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}
    query = [asked, answered, asked]

    def right(completion):
        return float(completion == "2")

    async def right_later(completion):
        return right(completion)

    env = DatasetChatEnv([{"query": query}]).append_transform(RubricReward(right_later if judge else right))
    [rollout] = play(renderer, env, 1, limits=RolloutLimits(max_prompt_tokens=2))
    assert (rollout.status.name, rollout.num_turns, rollout.reward) == ("TRUNCATED", 0, 0.0)


class Forgetful(MessageEnv):
    def __init__(self, item):
        self.name = item["query"]

    async def init(self):
        return [{"role": "user", "content": self.name}]

    async def step(self, message):
        if self.name == "hangs":
            await asyncio.sleep(600)
        return MessageStep([], reward=1.0, is_done=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"dialog_turns_per_batch": 4},
        {"yield_completed_trajectories": True, "dialog_turns_per_batch": 4},
        {"yield_only_last_steps": True, "dialog_turns_per_batch": 4},
        {"groups_per_batch": 4},
    ],
    ids=lambda shape: "+".join(shape),
)
def test_a_rollout_that_ends_before_its_first_step_is_counted_once(renderer, shape):
    names = ["a", "hangs", "b", "hangs", "c", "d", "e", "hangs"]
    env = MessageChatEnv(Forgetful, [{"query": name} for name in names], num_epochs=1)
    limits = RolloutLimits(rollout_timeout_seconds=3.0)
    counted, sizes = [], []
    with LLMCollector(env, policy=make_policy(renderer), limits=limits, **shape) as collector:
        for batch in collector:
            sizes.append(batch.shape[0])
            counted += collector.rollouts
            num_dropped = collector.report.num_dropped_by_reason
            assert sum(num_dropped.values()) + batch.shape[0] == collector.report.num_rollouts or "groups" in str(shape)
        counted += [one for one in collector.rollouts if all(one is not other for other in counted)]
    assert sorted(rollout.rollout_id for rollout in counted) == [f"train/0/{index}/0" for index in range(8)]
    if "groups_per_batch" not in shape:
        assert sum(sizes) == 5


# Seeds


def test_requests_of_a_policy_with_a_seed_have_seeds_of_their_own_the_same_in_each_run(renderer):
    def seeds():
        env = MessageChatEnv(Twice, [{"query": "a"}, {"query": "b"}], repeats=2)
        policy = make_policy(renderer, generate_kwargs={"seed": 7})
        with LLMCollector(env, policy=policy, groups_per_batch=1) as collector:
            collector.play(4)
        return sorted(sampling.seed for _, sampling, _ in policy.engine.requests)

    first = seeds()
    assert len(set(first)) == 8 and first == seeds()


class Twice(Forgetful):
    num_turns = 0

    async def step(self, message):
        self.num_turns += 1
        return MessageStep([{"role": "user", "content": "again"}], is_done=self.num_turns == 2)


# Games


class Pair(Game):
    roles = ("first", "second")

    def __init__(self, row=None):
        self.said = []

    def observe(self):
        return self.roles[len(self.said) % 2], "Go on."

    def act(self, text):
        self.said.append(text)

    def rewards(self):
        return {"first": 1.0, "second": 2.0} if len(self.said) == 4 else None


@pytest.mark.slow
def test_the_limit_of_a_step_does_not_count_what_the_other_players_sample(renderer):
    env = GameEnv(Pair, roles=Pair.roles)
    seconds = iter([0.0, 2.5, 0.0, 0.0])
    policy = make_policy(renderer, latency_s=lambda prompt, answer: next(seconds))
    with LLMCollector(
        env, policy=policy, groups_per_batch=1, limits=RolloutLimits(step_timeout_seconds=2.0)
    ) as collector:
        rollouts = collector.play(2)
    assert [(one.status.name, one.reward, one.error) for one in rollouts] == [
        ("COMPLETED", 1.0, ""), ("COMPLETED", 2.0, "")
    ]  # fmt: skip


def test_the_limit_of_a_step_holds_for_a_move_and_ends_the_game_for_all(renderer, clock):
    async def opponent(messages):
        clock.pass_limit(600)
        await asyncio.Event().wait()

    env = GameEnv(Pair, roles=Pair.roles, opponents={"second": opponent})
    [rollout] = play(renderer, env, 1, limits=RolloutLimits(step_timeout_seconds=600))
    assert rollout.reason == "environment_error" and "it took more than 600 s" in rollout.error


@pytest.mark.parametrize(
    "shape", [{"dialog_turns_per_batch": 6}, {"yield_only_last_steps": True, "dialog_turns_per_batch": 4}], ids=str
)
def test_a_game_is_mixed_with_another_environment_in_batches_of_turns(renderer, shape):
    def make():
        plain_env = DatasetChatEnv(["a", "b", "c"], repeats=2).append_transform(RubricReward(half))
        return MixedEnv({"game": GameEnv(Pair, roles=Pair.roles, repeats=2), "plain": plain_env})

    seen, states = [], []
    for state in (None, states):
        with LLMCollector(make(), policy=make_policy(renderer), **shape) as collector:
            if state:
                collector.load_state_dict(state[0])
            for _ in range(3):
                assert collector.next().shape[0] >= 4
                seen += [rollout.rollout_id for rollout in collector.rollouts]
            states.append(collector.state_dict())
    assert len(set(seen)) == len(seen) and {one.partition("/")[0] for one in seen} == {"game", "plain"}

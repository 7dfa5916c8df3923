"""Several environments in one run: shares, ends, own weights, groups that are never mixed, and places that are kept."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.collectors.source import MixedSource
from llmrl.envs import DatasetChatEnv, Game, GameEnv, MixedEnv, PromptSampler
from llmrl.envs.mixed import MixedPrompts
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn, Rubric, Score
from llmrl.testing import ScriptedEngine
from llmrl.transforms import PolicyVersion, RubricReward


def env(name, *, num_rows=5, repeats=2, num_epochs=None):
    """Rows of tokens; the first token names the environment: 1 is a, 2 is b, …"""
    first = ord(name) - ord("a") + 1
    rows = [{"query": [first, index], "which": name} for index in range(num_rows)]
    return DatasetChatEnv(rows, input_mode="tokens", repeats=repeats, num_epochs=num_epochs)


def policy():
    return LLMWrapperBase(ScriptedEngine([[7, 8]]), input_mode="tokens", generate_kwargs={"max_new_tokens": 4})


def collector_of(mixed, **options):
    return LLMCollector(
        mixed, policy=policy(), **{"groups_per_batch": 4, "limits": RolloutLimits(max_turns=1)} | options
    )


def envs_of(batch):
    """The environment of each group in a batch, by its prompts' first token and by its id."""
    tokens = {row["rollout", "group_id"]: "?abc"[int(row["tokens", "full"][0])] for row in batch.unbind(0)}
    assert all(group_id.split("/")[0] == name for group_id, name in tokens.items())
    return Counter(tokens.values())


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), st.integers(1, 80))
def test_every_environment_has_its_share_of_any_number_of_draws(weights, num_draws):
    names = "abcd"[: len(weights)]
    prompts = MixedPrompts({name: PromptSampler([{}]) for name in names}, dict(zip(names, weights, strict=True)))
    drawn = Counter(prompts.choose(1)[0] for _ in range(num_draws))
    for name, weight in zip(names, weights, strict=True):
        assert abs(drawn[name] - num_draws * weight / sum(weights)) <= len(weights) - 1  # of one or two: below one
        assert weight or not drawn[name]


def plain_order(num_rows, weights, num_groups):
    """Ids of groups as one loop would draw them, group by group; of an environment with one epoch, it ends."""
    credits, num_drawn, ended, ids = dict.fromkeys(num_rows, 0.0), Counter(), set(), []
    while len(ids) < num_groups and len(ended) < len(num_rows):
        left = [name for name in num_rows if name not in ended]
        for name in left:
            credits[name] += weights[name] / sum(weights[one] for one in left)
        name = max(left, key=credits.get)
        credits[name] -= 1.0
        epoch, index = divmod(num_drawn[name], num_rows[name])
        if epoch and name in "ab":
            ended.add(name)
        else:
            num_drawn[name] += 1
            ids.append(f"{name}/{epoch}/{index}")
    return ids


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3)), min_size=1, max_size=5),
    st.booleans(),
)
def test_groups_drawn_at_once_have_the_order_of_a_plain_loop_through_any_number_of_kills(
    num_rows, shares, draws, are_single
):
    num_rows = dict(zip("abcd", num_rows, strict=False))
    weights = dict(zip(num_rows, shares, strict=False))
    expected = deque(plain_order(num_rows, weights, 100))

    def make(state=None):
        mixed = MixedEnv(
            {name: env(name, num_rows=num, num_epochs=1 if name in "ab" else None) for name, num in num_rows.items()},
            weights=weights,
        )
        if state is not None:
            mixed.prompts.load_state_dict(json.loads(json.dumps(state)))
        source = MixedSource(mixed, in_groups=not are_single, limits=RolloutLimits())
        source.use_policy(policy())
        return source

    async def drawn(source, num_groups):
        if are_single:
            jobs = await source.open_rollouts(2 * num_groups)
            return [jobs[start : start + 2] for start in range(0, len(jobs), 2)]
        return await source.open(num_groups)

    source = make()
    for num_groups, num_lost in draws:
        groups = asyncio.run(drawn(source, num_groups))
        ids = [group[0].records[0].group_id for group in groups]
        assert all([job.records[0].sample_index for job in group] == [0, 1] for group in groups)
        assert all(job.records[0].group_id == one for group, one in zip(groups, ids, strict=True) for job in group)
        assert ids == [expected.popleft() for _ in range(min(num_groups, len(expected)))]
        lost = groups[len(groups) - min(num_lost, len(groups)) :]  # killed before these were delivered
        state = source.dataset_env.prompts.state_dict(
            unfinished=[p for group in lost for job in group for p in job.positions]
        )
        expected.extendleft(reversed(ids[len(groups) - len(lost) :]))
        source.shutdown()
        source = make(state)
    source.shutdown()


def test_each_environment_has_its_own_reward_and_its_progress(renderer):
    def paying(reward, weight):
        rubric = Rubric(RewardFn(lambda completion: reward, name=f"pays_{reward}", weight=weight))
        rows = [{"query": f"{reward} {index}"} for index in range(5)]
        return DatasetChatEnv(rows, repeats=2).append_transform(RubricReward(rubric))

    mixed = MixedEnv({"a": paying(0.25, 1), "b": paying(0.5, 2)}, weights={"a": 3, "b": 1})
    talking = LLMWrapperBase(ScriptedEngine(["7<|im_end|>"], encode=renderer.encode), renderer=renderer)
    with LLMCollector(mixed, policy=talking, groups_per_batch=4) as collector:
        collector.next()
        rollouts = collector.rollouts
    assert Counter(one.env for one in rollouts) == {"a": 6, "b": 2}
    for one in rollouts:
        assert one.columns["query"].startswith(f"{one.reward} ") and one.breakdown == {f"pays_{one.reward}": one.reward}
        assert one.env == {0.25: "a", 0.5: "b"}[one.reward] == one.group_id[0]
    assert (mixed.prompts.progress["a"].reward, mixed.prompts.progress["b"].num_scored) == (0.25, 2)


def test_groups_are_of_one_environment_and_limits_are_its_own():
    mixed = MixedEnv({"a": env("a"), "b": env("b")}, weights={"a": 3, "b": 1})
    with collector_of(mixed) as collector:
        assert envs_of(collector.next()) == {"a": 3, "b": 1}
    limits = {"a": RolloutLimits(max_turns=1), "b": RolloutLimits(max_prompt_tokens=1)}
    with collector_of(MixedEnv({"a": env("a"), "b": env("b")}), limits=limits) as collector:
        reasons = {(one.env, one.reason) for one in collector.play(4)}
    assert reasons == {("a", "max_turns"), ("b", "prompt_too_long")}


def test_an_environment_that_ends_leaves_its_draws_to_the_others_until_all_have_ended():
    mixed = MixedEnv({"a": env("a", num_rows=2, num_epochs=1), "b": env("b", num_rows=5, num_epochs=1)})
    with collector_of(mixed, groups_per_batch=1) as collector:
        drawn = [next(iter(envs_of(batch))) for batch in collector]
    assert drawn == list("ababbbb"[:4] + "bbb") and Counter(drawn) == {"a": 2, "b": 5}


def test_own_weights_follow_what_was_scored():
    def weights(progress):
        seen.append({name: (one.num_groups, one.num_scored) for name, one in progress.items()})
        return {"a": float(progress["a"].num_groups < 3), "b": 1e-9}

    seen = []
    mixed = MixedEnv({"a": env("a"), "b": env("b")}, weights=weights)
    with collector_of(mixed, groups_per_batch=2) as collector:
        batches = [envs_of(collector.next()) for _ in range(3)]
    assert batches == [{"a": 2}, {"a": 1, "b": 1}, {"b": 2}]
    assert seen[0] == {"a": (0, 0), "b": (0, 0)} and seen[-1]["a"] == (3, 6)


@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_a_saved_state_goes_on_with_the_same_groups(num_before):
    def make():
        return MixedEnv({"a": env("a"), "b": env("b"), "c": env("c")}, weights={"a": 4, "b": 2, "c": 1})

    def ids(batch):
        return sorted(set(batch["rollout", "group_id"]))

    with collector_of(make()) as collector:
        expected = [ids(collector.next()) for _ in range(num_before + 3)]
    with collector_of(make()) as collector:
        for _ in range(num_before):
            collector.next()
        state = collector.state_dict()
    with collector_of(make()) as collector:
        collector.load_state_dict(state)
        assert [ids(collector.next()) for _ in range(3)] == expected[num_before:]


def test_groups_in_flight_when_the_state_was_saved_are_drawn_again():
    def make():
        return MixedEnv({"a": env("a"), "b": env("b")})

    with collector_of(make(), max_staleness=2, groups_per_batch=2) as collector:
        first = set(collector.next()["rollout", "group_id"])
        state = collector.state_dict()
    with collector_of(make(), groups_per_batch=2) as collector:
        collector.load_state_dict(state)
        later = [group_id for _ in range(4) for group_id in set(collector.next()["rollout", "group_id"])]
    every = {f"{name}/{epoch}/{index}" for name in "ab" for epoch in range(2) for index in range(5)}
    assert len(later) == len(set(later)) == 8 and not first & set(later)
    begun = sorted(first | set(later))
    # Nothing was left out: of each environment the first five rows of the order are there.
    assert set(begun) <= every and begun[:5] == [f"a/0/{index}" for index in range(5)]


def test_turns_and_single_rollouts_come_from_all_of_them():
    mixed = MixedEnv({"a": env("a", repeats=1), "b": env("b", repeats=1)})
    with collector_of(mixed, groups_per_batch=None, dialog_turns_per_batch=6) as collector:
        assert Counter(int(turn["tokens", "prompt"][0]) for turn in collector.next().unbind(0)) == {1: 3, 2: 3}


class Once(Game):
    """Two players say something, one after the other."""

    roles = ("x", "y")
    num_said = 0

    def observe(self):
        return self.roles[self.num_said], "Say."

    def act(self, text):
        self.num_said += 1

    def rewards(self):
        return {"x": 1.0, "y": 2.0} if self.num_said == 2 else None


class Compared(Rubric):
    async def score_group(self, rollouts):
        seen = [rollout.columns["query"] for rollout in rollouts]
        return [Score(float(len(seen)) if len(set(seen)) == 1 else -1.0, {})] * len(seen)


@pytest.mark.parametrize(("num_rollouts", "num_places"), [(8, None), (8, 2), (6, None)])
def test_rollouts_that_are_played_come_group_by_group(renderer, num_rollouts, num_places):
    judged = DatasetChatEnv([{"query": str(index)} for index in range(5)], repeats=2)
    rubric = Compared(RewardFn(lambda completion: 0.0, name="none"))
    mixed = MixedEnv(
        {
            "judged": judged.append_transform(RubricReward(rubric)),
            "game": GameEnv(lambda row: Once(), roles=Once.roles, repeats=2),
        }
    )
    talking = LLMWrapperBase(ScriptedEngine(["7<|im_end|>"], encode=renderer.encode), renderer=renderer)
    options = {} if num_places is None else {"max_concurrent_rollouts": num_places}
    with LLMCollector(mixed, policy=talking, groups_per_batch=1, **options) as collector:
        rewards = [(one.env, one.role, one.reward) for one in collector.play(num_rollouts)]
    pair = [("judged", "", 2.0)] * 2 + [("game", "x", 1.0), ("game", "y", 2.0)]
    assert rewards == (pair * 2)[:num_rollouts]


@pytest.mark.parametrize(
    ("envs", "weights", "message"),
    [
        (dict, None, "at least one"),
        (lambda: {"a/b": env("a")}, None, "or contain '/'"),
        (lambda: {"a": env("a"), "b": env("b", repeats=3)}, None, "the same repeats"),
        (lambda: {"a": env("a"), "b": env("b")}, {"a": 1}, "must name"),
        (lambda: {"a": env("a"), "b": env("b")}, {"a": 1, "b": -1}, "not be negative"),
        (lambda: {"a": env("a"), "b": env("b")}, {"a": 0, "b": 0}, "not all be 0"),
        (lambda: dict.fromkeys("ab", env("a")), None, "shares its prompts with another one"),
    ],
)
def test_what_makes_no_mixture_is_refused(envs, weights, message):
    with pytest.raises(ValueError, match=message):
        MixedEnv(envs(), weights=weights)


def test_what_a_collector_cannot_do_with_it_is_refused():
    with pytest.raises(ValueError, match="limits names"):
        collector_of(MixedEnv({"a": env("a")}), limits={"b": RolloutLimits()})
    with pytest.raises(ValueError, match="PolicyVersion to each"):
        collector_of(MixedEnv({"a": env("a")}), track_policy_version=PolicyVersion())
    with pytest.raises(ValueError, match="those of a MixedEnv"):
        collector_of(env("a"), limits={"a": RolloutLimits()})

"""Games of several players: who plays whom, what each sees, and what becomes of those who leave."""

from __future__ import annotations

import asyncio

import pytest

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.envs import Game, GameEnv
from llmrl.objectives import MCAdvantage
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine

ROLES = ("first", "second")


class Count(Game):
    """Players say numbers in turn until one says what is not above the last; that one loses 1 and the other wins it."""

    roles = ROLES

    def __init__(self, *, is_left_counted=True):
        self.said, self.loser, self.is_left_counted = [], None, is_left_counted

    def observe(self):
        return ROLES[len(self.said) % 2], f"above {self.said[-1] if self.said else 0}"

    def act(self, text):
        number = int(text) if text.isdigit() else 0
        if number <= (self.said[-1] if self.said else 0):
            self.loser = ROLES[len(self.said) % 2]
        self.said.append(number)

    def rewards(self):
        return None if self.loser is None else self.leave(self.loser)

    def leave(self, role):
        return {one: -1.0 if one == role else 1.0 for one in ROLES} if self.is_left_counted or self.loser else None


def collect(env, answers, renderer, *, num_groups=1, limits=None, **options):
    """Play a group with a policy that answers by the last number in its prompt."""

    def answer(prompt_ids):
        told = renderer.decode(prompt_ids).rsplit("above ", 1)[-1].split("<|im_end|>")[0]
        return renderer.encode(answers[told] + "<|im_end|>")

    policy = LLMWrapperBase(ScriptedEngine(answer), renderer=renderer, generate_kwargs={"max_new_tokens": 8})
    with LLMCollector(env, policy=policy, groups_per_batch=num_groups, limits=limits, **options) as collector:
        return collector.next(), sorted(collector.rollouts, key=lambda one: one.rollout_id)


def sides(rollouts):
    return [(one.rollout_id, one.role, one.reward, one.status.name, one.num_turns) for one in rollouts]


def test_one_policy_plays_both_sides_each_with_its_own_view_reward_and_rows(renderer):
    env = GameEnv(lambda row: Count(), roles=ROLES, system_prompt="Go up.", repeats=4)
    batch, rollouts = collect(env, {"0": "3", "3": "5", "5": "9", "9": "1"}, renderer)
    assert sides(rollouts) == [
        ("train/0/0/0", "first", 1.0, "COMPLETED", 2),
        ("train/0/0/1", "second", -1.0, "COMPLETED", 2),
        ("train/0/0/2", "first", 1.0, "COMPLETED", 2),
        ("train/0/0/3", "second", -1.0, "COMPLETED", 2),
    ]
    views = [[message["content"] for message in one.messages] for one in rollouts[:2]]
    assert views == [["Go up.", "above 0", "3", "above 5", "9"], ["Go up.", "above 3", "5", "above 9", "1"]]
    assert list(batch["rollout", "role"]) == ["first", "second"] * 2
    for row, said in zip(batch.unbind(0), ("39", "51", "39", "51"), strict=True):
        trained = row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist()
        assert renderer.decode(trained).replace("<|im_end|>", "") == said
        assert row["next", "reward"].item() == (1.0 if said == "39" else -1.0)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_opponent_is_in_no_rows(renderer, is_async):
    def say(messages):
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2) + ["user"]
        return str(int(messages[-1]["content"].split()[-1]) + 1)

    async def say_later(messages):
        await asyncio.sleep(0)
        return say(messages)

    opponents = {"first": say_later if is_async else say}
    env = GameEnv(lambda row: Count(), roles=ROLES, opponents=opponents, repeats=2)
    batch, rollouts = collect(env, {"1": "4", "5": "2"}, renderer)
    assert [one.role for one in rollouts] == ["second"] * 2
    assert sides(rollouts)[1] == ("train/0/0/1", "second", -1.0, "COMPLETED", 2)
    assert [message["content"] for message in rollouts[0].messages] == ["above 1", "4", "above 5", "2"]
    for row in batch.unbind(0):
        trained = row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist()
        assert renderer.decode(trained).replace("<|im_end|>", "") == "42"


def test_a_game_that_is_over_before_a_players_first_turn_is_completed_without_one(renderer):
    batch, rollouts = collect(GameEnv(lambda row: Count(), roles=ROLES, repeats=2), {"0": "no"}, renderer)
    assert sides(rollouts) == [
        ("train/0/0/0", "first", -1.0, "COMPLETED", 1),
        ("train/0/0/1", "second", 1.0, "COMPLETED", 0),
    ]
    assert list(batch["rollout", "role"]) == ["first"] and rollouts[1].is_scored


def test_rollouts_that_leave_a_game_without_a_player_are_refused(renderer):
    policy = LLMWrapperBase(ScriptedEngine(["1<|im_end|>"], encode=renderer.encode), renderer=renderer)
    env = GameEnv(lambda row: Count(), roles=ROLES, repeats=2)
    with (
        LLMCollector(env, policy=policy, groups_per_batch=1) as collector,
        pytest.raises(ValueError, match="multiple of a game's 2 players"),
    ):
        collector.play(3)


@pytest.mark.parametrize("place", [0, 1])
def test_players_do_not_wait_for_one_that_could_not_come(renderer, place):
    class Late(GameEnv):
        def _made(self, drawn):
            if drawn[2] == place:
                raise ConnectionError("lost on the way")
            return super()._made(drawn)

    _, rollouts = collect(Late(lambda row: Count(), roles=ROLES, repeats=4), {"0": "3", "3": "1"}, renderer)
    assert ["lost on the way" in one.error for one in rollouts] == [number == place for number in range(4)]
    assert [one.is_scored for one in rollouts] == [False, False, True, True]


@pytest.mark.parametrize("num_concurrent", [2, 3])
def test_few_places_are_enough_for_games_to_end(renderer, num_concurrent):
    env = GameEnv(lambda row: Count(), roles=ROLES, repeats=6)
    answers = {"0": "3", "3": "5", "5": "1"}
    _, rollouts = collect(env, answers, renderer, num_groups=2, max_concurrent_rollouts=num_concurrent)
    assert [one.reward for one in rollouts] == [-1.0, 1.0] * 6


def test_a_player_who_meets_a_limit_leaves_the_game(renderer):
    answers = {"0": "3", "3": "5", "5": "8", "8": "9", "9": "1"}
    env = GameEnv(lambda row: Count(), roles=ROLES, repeats=2)
    _, rollouts = collect(env, answers, renderer, limits=RolloutLimits(max_turns=1))
    assert sides(rollouts) == [
        ("train/0/0/0", "first", -1.0, "TRUNCATED", 1),
        ("train/0/0/1", "second", 1.0, "COMPLETED", 0),
    ]
    cut = {"0": "3", "3": "5 and then some more words than fit"}
    _, rollouts = collect(GameEnv(lambda row: Count(), roles=ROLES, repeats=2), cut, renderer)
    assert [(*side[2:4], side[4]) for side in sides(rollouts)] == [(1.0, "COMPLETED", 1), (-1.0, "TRUNCATED", 1)]


def test_a_game_that_no_player_finishes_counts_for_none(renderer):
    limits = RolloutLimits(max_turns=1)
    env = GameEnv(lambda row: Count(is_left_counted=bool(row["place"])), [{"place": 0}, {"place": 1}], roles=ROLES)
    batch, rollouts = collect(env, {"0": "3", "3": "5"}, renderer, limits=limits)
    lost = [one for one in rollouts if one.group_id == "train/0/0"]
    assert [one.status.name for one in lost] == ["ERROR", "ERROR"] and "'first' left" in lost[1].error
    assert set(batch["rollout", "group_id"]) == {"train/0/1"}


def failing(where):
    class Failing(Count):
        def __init__(self):
            super().__init__()
            if where == "init":
                raise OSError("no board")

        def observe(self):
            role, text = super().observe()
            return ("third" if where == "role" else role), text

        def act(self, text):
            if where == "act" and self.said:
                raise SystemExit("no rules")
            super().act(text)

        def leave(self, role):
            return {role: float("nan")} | ({} if where == "missing" else {one: float("nan") for one in ROLES})

    return Failing()


@pytest.mark.parametrize(
    ("where", "message"),
    [("init", "no board"), ("role", "'third'"), ("act", "no rules"), ("missing", "not of"), ("number", "nan")],
)
def test_a_game_that_fails_fails_both_sides_and_no_other_game(renderer, where, message):
    games = iter([lambda: failing(where), Count])
    env = GameEnv(lambda row: next(games)(), roles=ROLES, repeats=4)
    _, rollouts = collect(env, {"0": "3", "3": "5", "5": "1"}, renderer)
    for one in rollouts[:2]:
        assert one.status.name == "ERROR" and message in one.error
    assert [one.reward for one in rollouts[2:]] == [-1.0, 1.0]


def test_what_makes_no_sense_is_refused(renderer):
    with pytest.raises(ValueError, match=r"opponents has \['third'\]"):
        GameEnv(lambda row: Count(), roles=ROLES, opponents={"third": lambda messages: ""})
    with pytest.raises(ValueError, match="leave one to the policy"):
        GameEnv(lambda row: Count(), roles=ROLES, opponents=dict.fromkeys(ROLES, lambda messages: ""))
    with pytest.raises(TypeError, match=r"roles must be a list of names, got 'ab'; write roles=\['ab'\]"):
        GameEnv(lambda row: Count(), roles="ab")
    with pytest.raises(ValueError, match=r"roles must be distinct names, got \['first', 'first'\]"):
        GameEnv(lambda row: Count(), roles=["first", "first"])
    with pytest.raises(ValueError, match="multiple of the 2 roles"):
        GameEnv(lambda row: Count(), roles=ROLES, repeats=3)
    with pytest.raises(RuntimeError, match="played by a collector"):
        GameEnv(lambda row: Count(), roles=ROLES).reset()
    with pytest.raises(ValueError, match="max_concurrent_rollouts must be at least 2"):
        collect(GameEnv(lambda row: Count(), roles=ROLES), {}, renderer, max_concurrent_rollouts=1)
    opponents = {"first": lambda messages: 7}
    env = GameEnv(lambda row: Count(), roles=ROLES, opponents=opponents)
    with pytest.raises(TypeError, match="'first' must answer with a text, got int"):
        env.reset()


def test_roles_have_baselines_of_their_own(renderer):
    """The side that begins wins three of four games: within its role a win is worth little, and a loss costs much."""

    class Drawn(Count):
        def __init__(self, winner):
            super().__init__()
            self.winner = winner

        def rewards(self):
            return {role: float(role == self.winner) for role in ROLES} if len(self.said) == 2 else None

    winners = ["first", "first", "second", "first"]

    def batch():
        games = iter(winners)
        env = GameEnv(lambda row: Drawn(next(games)), roles=ROLES, repeats=8)
        return collect(env, {"0": "3", "3": "5"}, renderer)

    rows, rollouts = batch()
    rewards = {role: [float(role == winner) for winner in winners] for role in ROLES}
    for by in ("role", None):
        advantages = MCAdvantage(grpo_size=8, normalization="mean", by=by)
        written = advantages(rows.clone())
        for row in written.unbind(0):
            role, reward = row["rollout", "role"], row["next", "reward"].item()
            compared = rewards[role] if by else [one for of_role in rewards.values() for one in of_role]
            assert row["advantage"].item() == pytest.approx(reward - sum(compared) / len(compared))
        assert len(written) == 8 and advantages.has_signal(rollouts)
    firsts_alone = [one for one in rollouts if one.role == "first" and one.reward]
    lost = [one for one in rollouts if one.role == "second" and not one.reward]
    # Who begins won each time: that is no signal, where roles are compared with themselves.
    assert MCAdvantage().has_signal(firsts_alone + lost)
    assert not MCAdvantage(by="role").has_signal(firsts_alone + lost)


def test_a_buffer_waits_for_all_roles_of_a_group(renderer):
    env = GameEnv(lambda row: Count(), roles=ROLES, repeats=4)
    rows, _ = collect(env, {"0": "3", "3": "5", "5": "1"}, renderer)
    advantages = MCAdvantage(grpo_size=4, by="role", drop_constant_groups=False)
    assert advantages.inv(rows[:3]) is None
    assert len(advantages.inv(rows[3:])) == 4


def test_what_is_compared_by_is_a_role():
    with pytest.raises(ValueError, match="by must be 'role'"):
        MCAdvantage(by="env")
    with pytest.raises(ValueError, match="candidates"):
        MCAdvantage(grpo_size=2, candidate_group_size=4, by="role")

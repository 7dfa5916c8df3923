"""TextArena's games, spoken by a stand-in with its interface, and those of it and GEM where they are installed."""

from __future__ import annotations

import random

import pytest
import textarena_stand_in
from own_packages import with_packages_of_its_own

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus
from llmrl.envs import GymnasiumTextEnv, MessageChatEnv
from llmrl.envs.hubs.textarena import TextArenaGame, make_textarena_env
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine

stand_in = textarena_stand_in.stand_in


def play(renderer, env, num_rollouts, choose, *, max_turns=12):
    def answer(prompt_ids):
        return f"{choose(renderer.decode(prompt_ids))}<|im_end|>"

    policy = LLMWrapperBase(ScriptedEngine(answer, encode=renderer.encode), renderer=renderer)
    limits = RolloutLimits(max_turns=max_turns)
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=limits) as collector:
        rollouts = collector.play(num_rollouts)
    env.close()
    return rollouts


def said_to(rollout):
    return [message["content"] for message in rollout.messages if message["role"] == "user"]


def test_one_player_gets_what_is_new(stand_in, renderer):
    rollouts = play(renderer, make_textarena_env("Heap-v0", num_players=1, seeds=[3], repeats=2), 2, lambda text: "2")
    for rollout in rollouts:
        assert rollout.status is RolloutStatus.COMPLETED and rollout.reward == 1.0
        first, *others = said_to(rollout)
        assert first == f"You are Player 0. {random.Random(3).randint(3, 9)} stones."
        assert all(text.startswith(tuple("123456789")) and "Player" not in text for text in others)
    assert said_to(rollouts[0]) == said_to(rollouts[1])  # games of a seed are alike, side by side or not


def test_the_policy_plays_both_sides_and_one_side_wins(stand_in, renderer):
    rollouts = play(renderer, make_textarena_env("Heap-v0", seeds=[3], repeats=4), 4, lambda text: "[1]")
    assert [rollout.role for rollout in rollouts] == ["player_0", "player_1"] * 2
    assert rollouts[0].reward + rollouts[1].reward == 0 and {abs(one.reward) for one in rollouts} == {1.0}
    assert "[Player 0] [1]" in said_to(rollouts[1])[0] and "[Player 1]" not in said_to(rollouts[1])[0]


def test_an_opponent_answers_and_wrong_moves_lose(stand_in, renderer):
    seen = []

    async def opponent(messages):
        seen.append(messages)
        return "[1]"

    env = make_textarena_env("Heap-v0", opponents={"player_1": opponent}, seeds=[3], repeats=1)
    [rollout] = play(renderer, env, 1, lambda text: "[9]" if "[Player 1]" in text else "[1]")
    assert rollout.reward == -1.0 and rollout.status is RolloutStatus.COMPLETED
    assert said_to(rollout)[-1] == "Take [1] or [2]." and len(seen) == 1
    assert seen[0][0]["content"].startswith("You are Player 1.")


def test_who_meets_a_limit_leaves_the_game(stand_in, renderer):
    env = make_textarena_env("Heap-v0", opponents={"player_1": lambda messages: "[1]"}, seeds=[3], repeats=1)
    [rollout] = play(renderer, env, 1, lambda text: "[1]", max_turns=1)
    assert rollout.status is RolloutStatus.TRUNCATED and rollout.reward == -1.0
    [alone] = play(renderer, make_textarena_env("Heap-v0", num_players=1), 1, lambda text: "[1]", max_turns=1)
    assert alone.reward == 0.0


def test_an_opponent_that_fails_ends_its_game_with_the_reason(stand_in, renderer):
    def opponent(messages):
        raise ConnectionError("the frozen engine is gone")

    env = make_textarena_env("Heap-v0", opponents={"player_1": opponent}, repeats=1)
    [rollout] = play(renderer, env, 1, lambda text: "[1]")
    assert rollout.status is RolloutStatus.ERROR and "the frozen engine is gone" in rollout.error


def test_the_programs_random_numbers_are_left_alone(stand_in):
    random.seed(5)
    expected = [random.random() for _ in range(2)]
    random.seed(5)
    numbers = [random.random()]
    games = [TextArenaGame("Heap-v0", num_players=1, seed=3) for _ in range(2)]
    for _ in range(2):  # in turn, and still each is what it is alone
        told = {game.observe() for game in games}
        assert len(told) == 1
        for game in games:
            game.act("[1]")
    assert [*numbers, random.random()] == expected


def test_what_is_no_game_is_refused_before_anything_is_played(stand_in):
    with pytest.raises(ValueError, match="Heep-v0-raw not found"):
        make_textarena_env("Heep-v0")
    with pytest.raises(ValueError, match="Heap-v0 is not a game for num_players=3: a heap is for one or two"):
        make_textarena_env("Heap-v0", num_players=3)
    with pytest.raises(ValueError, match="num_players must be at least 1"):
        make_textarena_env("Heap-v0", num_players=0)


def test_tic_tac_toe_and_guess_the_number_of_textarena(renderer):
    pytest.importorskip("textarena")

    def halve(text):
        low, high, guess = 1, 20, 10
        for part in text.split("<|im_start|>user")[2:]:
            low, high = (guess + 1, high) if "higher" in part else (low, guess - 1)
            guess = (low + high) // 2
        return f"[{guess}]"

    [guessed] = play(renderer, make_textarena_env("GuessTheNumber-v0", num_players=1, repeats=1), 1, halve)
    assert guessed.reward == 1.0 and guessed.status is RolloutStatus.COMPLETED
    assert all("You have to guess" not in text for text in said_to(guessed)[1:])
    [wrong] = play(renderer, make_textarena_env("GuessTheNumber-v0", num_players=1, repeats=1), 1, lambda text: "none")
    assert wrong.reward < 1 and wrong.status is RolloutStatus.COMPLETED and wrong.num_turns <= 2

    def first_free(text):
        return text.rpartition("Available Moves: '")[2].partition("'")[0]

    x, o = play(renderer, make_textarena_env("TicTacToe-v0", repeats=2), 2, first_free)
    assert (x.reward, o.reward) == (1.0, -1.0) and x.num_turns == 4  # 0 2 4 6 is a diagonal of three
    env = make_textarena_env(
        "TicTacToe-v0", opponents={"player_0": lambda messages: first_free(messages[-1]["content"])}, repeats=1
    )
    [cheat] = play(renderer, env, 1, lambda text: "[0]")
    assert cheat.reward == -1.0 and cheat.role == "player_1"


class WithoutClose:
    """As GEM's environments are."""

    def reset(self, seed=None):
        return f"seed {seed}", {}

    def step(self, action):
        return "over", float(action == "hi"), True, False, {}


def test_a_text_environment_without_close_is_played(renderer):
    env = MessageChatEnv(lambda row: GymnasiumTextEnv(WithoutClose(), seed=7))
    [rollout] = play(renderer, env, 1, lambda text: "hi")
    assert rollout.reward == 1.0 and said_to(rollout) == ["seed 7"]


@with_packages_of_its_own("gem", "gem-llm==0.1.*")
def test_guess_the_number_of_gem(renderer):
    import gem

    env = MessageChatEnv(lambda row: GymnasiumTextEnv(gem.make("game:GuessTheNumber-v0-easy"), seed=1), repeats=2)

    def choose(text):
        return "no number" if "lower than 5" in text else "\\boxed{5}"

    rollouts = play(renderer, env, 2, choose)
    assert all(one.status is RolloutStatus.COMPLETED for one in rollouts)
    assert [one.reward for one in rollouts] == pytest.approx([-0.1, -0.1])  # a wrong move ends it
    assert "lower than 5" in said_to(rollouts[0])[1] and said_to(rollouts[0]) == said_to(rollouts[1])

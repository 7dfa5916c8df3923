"""Registered environments of gymnasium by name: the rewards of a plain loop, whatever the policy writes."""

from __future__ import annotations

import gymnasium
import pytest
from gymnasium_registry import drawn_actions, is_same, played
from hub_rows import play

from llmrl.data import RolloutStatus
from llmrl.envs import GymnasiumEnv, make_task_env


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1", "CartPole-v1"])
def test_a_rollout_earns_what_a_plain_loop_earns(env_id):
    actions = drawn_actions(env_id)
    rollouts, inexact = played(env_id, actions)
    assert is_same(env_id, rollouts, actions) and inexact == 0
    assert all(one.is_scored for one in rollouts)


def test_the_lake_is_crossed_by_who_can_walk():
    env = make_task_env("gymnasium:FrozenLake-v1", options={"is_slippery": False}, num_problems=1)
    way = iter(["down", "down", "right", "right", "down", "right"])
    numbers = {"left": 0, "down": 1, "right": 2, "up": 3}
    [rollout], _ = play(env, lambda prompt: f"I go {(word := next(way))}: {numbers[word]}", 1, at_once=1)
    env.close()
    assert (rollout.status, rollout.reward, rollout.num_turns) == (RolloutStatus.COMPLETED, 1.0, 6)
    shown = [message["content"] for message in rollout.messages if message["role"] != "assistant"]
    assert "- 2: Move right" in shown[0] and shown[0].endswith("Your answer is your action: a number from 0 to 3.")
    assert shown[1] == "[S]FFF\nFHFH\nFFFH\nHFFG\n\n0"
    assert shown[2].endswith("SFFF\n[F]HFH\nFFFH\nHFFG\n\n4")


def test_an_answer_that_is_no_action_costs_a_turn_and_the_time_limit_truncates():
    env = GymnasiumEnv("FrozenLake-v1", options={"max_episode_steps": 2}, num_problems=1)
    said = iter(["north", "4", "-1", "nan", "0", "0"])
    [rollout], _ = play(env, lambda prompt: next(said), 1, at_once=1)
    env.close()
    assert [one["content"] for one in rollout.messages].count("An action is a number from 0 to 3.") == 4
    assert (rollout.status, rollout.num_turns, rollout.is_scored) == (RolloutStatus.TRUNCATED, 6, True)


def test_what_cannot_be_played_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match="gymnasium cannot make 'FrozenLake-v9'"):
        GymnasiumEnv("FrozenLake-v9")
    with pytest.raises(ValueError, match="unexpected keyword argument 'is_slippy'"):
        GymnasiumEnv("FrozenLake-v1", options={"is_slippy": False})

    class Pictures(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), dtype="uint8")
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

    gymnasium.register("Pictures-v0", entry_point=Pictures)
    with pytest.raises(TypeError, match="observations have 12288 numbers"):
        GymnasiumEnv("Pictures-v0")

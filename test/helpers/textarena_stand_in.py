"""A stand-in for the package TextArena with one small game."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace

import pytest


class Heap:
    """Who takes the last stone wins; alone, it only has to be taken. A second wrong move in a row loses."""

    def reset(self, num_players, seed=None):
        assert num_players <= 2, "a heap is for one or two"
        random.seed(seed)
        self.num_stones, self.num_players, self.num_wrong, self.result = random.randint(3, 9), num_players, 0, None
        names = {player: f"Player {player}" for player in range(num_players)}
        self.state = SimpleNamespace(current_player_id=0, role_mapping=names)
        self.told = {player: [(-1, f"You are Player {player}. {self.num_stones} stones.", None)] for player in names}

    def get_observation(self):
        player = self.state.current_player_id
        told, self.told[player] = self.told[player], []
        return player, told

    def step(self, action):
        player = self.state.current_player_id
        for listener in self.told.values():
            listener.append((player, action, None))
        if action not in ("[1]", "[2]"):
            self.num_wrong += 1
            self.told[player].append((-1, "Take [1] or [2].", None))
            if self.num_wrong == 2:
                self.result = {other: -1 if other == player else 1 for other in self.told}
            return self.result is not None, {}
        self.num_stones, self.num_wrong = max(self.num_stones - int(action[1]), 0), 0
        for listener in self.told.values():
            listener.append((-1, f"{self.num_stones} left, a coin shows {random.choice('ht')}.", None))
        if not self.num_stones:
            self.result = {other: 1 if other == player else -1 for other in self.told}
        self.state.current_player_id = (player + 1) % self.num_players
        return self.result is not None, {}

    def close(self):
        return self.result, {}


class ActionFormattingWrapper:
    """As TextArena's: brackets around a move that has none."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def step(self, action):
        return self.env.step(action=action if "[" in action and "]" in action else f"[{action}]")


@pytest.fixture
def stand_in(monkeypatch):
    def make(env_id):
        if env_id != "Heap-v0-raw":
            raise ValueError(f"Environment {env_id} not found in registry.")
        return Heap()

    module = ModuleType("textarena")
    module.make, module.wrappers = make, SimpleNamespace(ActionFormattingWrapper=ActionFormattingWrapper)
    monkeypatch.setitem(sys.modules, "textarena", module)

"""A guessing game on the server of the package openenv; it prints its address.

PYTHON openenv_real_server.py       # one that has openenv
"""

from __future__ import annotations

import socket

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.secret, self.turns = 3 + (seed or 0) % 3, 0
        return Hint(hint=f"Guess my number (seed {seed}).")

    def step(self, action, timeout_s=None, **options):
        self.turns += 1
        guess = int(action.message)
        if guess == self.secret:
            return Hint(hint="right", reward=1.0, done=True)
        return Hint(hint="higher" if guess < self.secret else "lower", reward=-0.25)

    @property
    def state(self):
        return State(step_count=self.turns)


if __name__ == "__main__":
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])

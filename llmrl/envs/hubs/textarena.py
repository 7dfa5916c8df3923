"""TextArena games (Guertler et al. 2025, arXiv 2504.11442) for one or several players."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, Unpack

from llmrl._utils.arguments import check_least
from llmrl._utils.imports import require
from llmrl.envs.game import Game, GameEnv, Opponent
from llmrl.envs.sampler import OrderOptions

Result = TypeVar("Result")

_HOLD_SECONDS = 10.0
"""Time after which a game that holds the random state is considered hung, and others no longer wait for it."""


class _RandomNumbers:
    """Lock of Python's global random state, which one game uses at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self) -> threading.Lock:
        """Acquire the lock and return it; a lock that a hung game does not release is replaced."""
        while not (lock := self._lock).acquire(timeout=_HOLD_SECONDS):
            if self._lock is lock:
                self._lock = threading.Lock()
        return lock

    def is_held(self, lock: threading.Lock) -> bool:
        """Return whether a lock is still the current one."""
        return self._lock is lock


_random_numbers = _RandomNumbers()


class TextArenaGame(Game):
    """A TextArena game, in which each player sees the messages since its own last move.

    TextArena handles illegal moves. A player that leaves a game with others gets -1 and the others
    get 0; a single player that leaves gets 0. Python's global random state is not changed.
    """

    def __init__(self, env_id: str, *, num_players: int, seed: int = 0) -> None:
        textarena = require("textarena", extra="textarena")
        self._roles = role_names(num_players)
        self._random_state = random.Random(seed).getstate()
        env = self._seeded(lambda: textarena.make(env_id=f"{env_id}-raw"))
        self._env = textarena.wrappers.ActionFormattingWrapper(env)
        try:
            self._seeded(lambda: self._env.reset(num_players=num_players, seed=seed))
        except AssertionError as error:
            raise ValueError(f"{env_id} is not a game for num_players={num_players}: {error}") from error
        self._results: dict[str, float] | None = None

    def _seeded(self, function: Callable[[], Result]) -> Result:
        lock = _random_numbers.acquire()
        before = random.getstate()
        random.setstate(self._random_state)
        try:
            return function()
        finally:
            if _random_numbers.is_held(lock):
                self._random_state = random.getstate()
                random.setstate(before)
            lock.release()

    def observe(self) -> tuple[str, str]:
        """Return the player to move, and the messages of the game and other players since its last move."""
        player, messages = self._seeded(self._env.get_observation)
        names = self._env.state.role_mapping
        said = (
            text if speaker < 0 else f"[{names.get(speaker, f'Player {speaker}')}] {text}"
            for speaker, text, _ in messages
            if speaker != player
        )
        return self._roles[player], "\n".join(said).strip()

    def act(self, text: str) -> None:
        """Make a move."""
        is_done, _ = self._seeded(lambda: self._env.step(action=text))
        if is_done:
            rewards, _ = self._seeded(self._env.close)
            self._results = {role: float((rewards or {}).get(player, 0.0)) for player, role in enumerate(self._roles)}

    def rewards(self) -> Mapping[str, float] | None:
        """Return TextArena's rewards, or None while the game is running."""
        return self._results

    def leave(self, role: str) -> Mapping[str, float]:
        """Return -1 for a player that leaves other players, and 0 otherwise."""
        return {name: -1.0 if name == role and len(self._roles) > 1 else 0.0 for name in self._roles}


def role_names(num_players: int) -> tuple[str, ...]:
    """Return the names of the players in TextArena's order."""
    check_least(1, num_players=num_players)
    return tuple(f"player_{number}" for number in range(num_players))


def make_textarena_env(
    env_id: str,
    *,
    num_players: int = 2,
    opponents: Mapping[str, Opponent] | None = None,
    seeds: Iterable[int] = range(1000),
    system_prompt: str | None = None,
    repeats: int | None = None,
    **order: Unpack[OrderOptions],
) -> GameEnv:
    """Return an environment of a TextArena game with the players `player_0`, `player_1`, ….

    Args:
        env_id: id of the game, such as `TicTacToe-v0`.
        seeds: seeds of the games, one per group.
        opponents, system_prompt, repeats, **order: see `GameEnv`.

    Raises:
        MissingExtraError: if TextArena is not installed.
        ValueError: if the game does not exist for this number of players; see also `GameEnv`.

    Example:
        >>> make_textarena_env("TicTacToe-v0", opponents={"black": max})
        Traceback (most recent call last):
        ValueError: opponents has ['black'], and the roles are ['player_0', 'player_1'].
    """
    roles = role_names(num_players)
    rows = [{"seed": number} for number in seeds]
    env = GameEnv(
        lambda row: TextArenaGame(env_id, num_players=num_players, seed=row["seed"]),
        rows,
        roles=roles,
        opponents=opponents,
        system_prompt=system_prompt,
        repeats=repeats,
        **order,
    )
    TextArenaGame(env_id, num_players=num_players, seed=rows[0]["seed"])  # raises errors of the game early
    return env

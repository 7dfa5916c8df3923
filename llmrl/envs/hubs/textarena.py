"""TextArena's games (Guertler et al. 2025, arXiv 2504.11442), for one player or several."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from llmrl._utils.imports import require
from llmrl.envs.game import Game, GameEnv, Opponent

Result = TypeVar("Result")

_random_lock = threading.Lock()


class TextArenaGame(Game):
    """Plays a game of TextArena: each player is told what is new since its own last move.

    A move against the rules is answered, or ends the game, as TextArena has it. Who leaves others gets -1, and these 0;
    who leaves alone gets 0. Games draw from Python's own random numbers, each from a state of its own; the program's
    stays.

    Args:
        env_id: of the game, as `TicTacToe-v0`.
        num_players: who play it.
        seed: of its reset.

    Raises:
        MissingExtraError: without TextArena.
        ValueError: for a game that there is not, or not for so many.
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
            raise ValueError(f"{env_id} is no game for num_players={num_players}: {error}") from error
        self._results: dict[str, float] | None = None

    def _seeded(self, function: Callable[[], Result]) -> Result:
        with _random_lock:
            before = random.getstate()
            random.setstate(self._random_state)
            try:
                return function()
            finally:
                self._random_state = random.getstate()
                random.setstate(before)

    def observe(self) -> tuple[str, str]:
        """Return whose turn it is, and what was said since: by the game, and by others."""
        player, told = self._seeded(self._env.get_observation)
        names = self._env.state.role_mapping
        said = (
            text if speaker < 0 else f"[{names.get(speaker, f'Player {speaker}')}] {text}"
            for speaker, text, _ in told
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
        """Return TextArena's rewards; None while the game goes on."""
        return self._results

    def leave(self, role: str) -> Mapping[str, float]:
        """Return -1 for who leaves others, and 0 for these."""
        return {name: -1.0 if name == role and len(self._roles) > 1 else 0.0 for name in self._roles}


def role_names(num_players: int) -> tuple[str, ...]:
    """Return what the players are called, in the order in which TextArena counts them.

    Example:
        >>> role_names(2)
        ('player_0', 'player_1')
    """
    if num_players < 1:
        raise ValueError(f"num_players must be at least 1, got {num_players}.")
    return tuple(f"player_{number}" for number in range(num_players))


def make_textarena_env(
    env_id: str,
    *,
    num_players: int = 2,
    opponents: Mapping[str, Opponent] | None = None,
    seeds: Iterable[int] = range(1000),
    system_prompt: str | None = None,
    repeats: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    num_epochs: int | None = None,
    name: str = "train",
) -> GameEnv:
    """Return an environment of a game of TextArena, whose players are `player_0`, `player_1`, ….

    Args:
        env_id: of the game, as `TicTacToe-v0`.
        num_players: who play it.
        opponents: who plays a role in place of the policy: a function of the messages that it has seen, which may ask
            a model. Roles that are not there are the policy's own.
        seeds: of the games, one a group.
        system_prompt, repeats, shuffle, seed, num_epochs, name: see `GameEnv`.

    Raises:
        MissingExtraError: without TextArena.
        ValueError: for a game that there is not, or not for so many, and see `GameEnv`.

    Example:
        >>> make_textarena_env("TicTacToe-v0", opponents={"black": max})
        Traceback (most recent call last):
        ValueError: opponents has ['black'], and the roles are ['player_0', 'player_1'].
    """
    roles, rows = role_names(num_players), [{"seed": number} for number in seeds]
    env = GameEnv(
        lambda row: TextArenaGame(env_id, num_players=num_players, seed=row["seed"]),
        rows,
        roles=roles,
        opponents=opponents,
        system_prompt=system_prompt,
        repeats=repeats,
        shuffle=shuffle,
        seed=seed,
        num_epochs=num_epochs,
        name=name,
    )
    TextArenaGame(env_id, num_players=num_players, seed=rows[0]["seed"])  # what is wrong with it is told here
    return env

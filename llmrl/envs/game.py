"""`GameEnv`: games of several players, some or all of which the policy plays."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeAlias, Unpack, cast

import torch
from tensordict import TensorDictBase

from llmrl._utils.asynchronous import awaited
from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.failure import describe
from llmrl._utils.numbers import finite_number
from llmrl._utils.types import Row
from llmrl.data import Message, StopReason, text_of
from llmrl.data.message import copied, system_messages
from llmrl.data.tensordicts import plain
from llmrl.envs.message_env import MessageChatEnv, MessageEnv, MessageStep, Opened
from llmrl.envs.sampler import Drawn, OrderOptions

Opponent: TypeAlias = Callable[[Sequence[Message]], str | Awaitable[str]]
"""Function that returns the answer of a role that is not trained, given the messages that this role has seen."""


class Game(ABC):
    """The rules of a turn-based game; one instance plays one game. Its methods are never called concurrently.

    For simultaneous moves, ask the players one after another and do not show their moves to each other.

    Example:
        >>> class Pennies(Game):
        ...     roles = ("even", "odd")
        ...     def __init__(self):
        ...         self.shown = []
        ...     def observe(self):
        ...         return self.roles[len(self.shown)], "Heads or tails?"
        ...     def act(self, text):
        ...         self.shown.append(text)
        ...     def rewards(self):
        ...         if len(self.shown) == 2:
        ...             is_even = self.shown[0] == self.shown[1]
        ...             return {"even": float(is_even), "odd": float(not is_even)}
        >>> env = GameEnv(lambda row: Pennies(), roles=Pennies.roles, opponents={"odd": lambda messages: "heads"})
        >>> env.reset()["history"].prompt.content
        ['Heads or tails?']
    """

    roles: ClassVar[Sequence[str]]
    """Names of the players."""

    @abstractmethod
    def observe(self) -> tuple[str, str]:
        """Return the player to move and its observation since its last turn; called once per turn."""

    @abstractmethod
    def act(self, text: str) -> None:
        """Apply the answer of the player to move; the text may be an illegal move."""

    @abstractmethod
    def rewards(self) -> Mapping[str, float] | None:
        """Return the reward of each role, or None while the game is running."""

    def leave(self, role: str) -> Mapping[str, float] | None:
        """Return each role's reward when a player's answer is cut or its turns are used up; None fails the game."""
        return None


class GameEnv(MessageChatEnv):
    """Games of several players. Each role of the policy is a separate rollout, which sees only that player's view.

    The rollouts of a group are the roles of its games in order: for a game of two roles,
    `repeats=8` is four games of self-play, or eight games against an opponent. Each rollout has its
    own reward and stores its role under `("rollout", "role")`, so `MCAdvantage(by="role")` compares
    it only with rollouts of the same role. Opponents' messages are excluded from the loss.

    A player leaves the game (`Game.leave`) if its answer was cut or its turns are used up. If a conversation fails,
    no role of its game is scored. If a game ends before a rollout's first turn, the rollout is
    completed without turns. Games in which the policy plays several roles need a collector.

    Args:
        make_game: function that creates the game of a row.
        dataset: rows, or a file of them, see `load_rows`; by default one empty row, which is repeated.
        roles: names of the players, as in `Game.roles`.
        opponents: players in place of the policy, by role.
        repeats: rollouts per row; by default one per role that the policy plays.
        **order: `shuffle`, `seed`, `num_epochs` and `name`, see `DatasetChatEnv`.

    Raises TypeError if `roles` is a string, and ValueError if roles are equal, if opponents play unknown roles or all
    roles, or if `repeats` is not a multiple of the number of the policy's roles.

    Example:
        >>> from llmrl.envs import Game
        >>> class Dictator(Game):
        ...     roles = ("giver", "taker")
        ...     given = None
        ...     def observe(self):
        ...         return "giver", "Ten coins are yours. How many do you give away?"
        ...     def act(self, text):
        ...         self.given = int(text) if text.isdecimal() else 10
        ...     def rewards(self):
        ...         return None if self.given is None else {"giver": 10.0 - self.given, "taker": float(self.given)}
        >>> env = GameEnv(lambda row: Dictator(), roles=Dictator.roles, repeats=4)
        >>> env.roles, env.prompts.num_samples
        (('giver', 'taker'), 4)
    """

    def __init__(
        self,
        make_game: Callable[[Row], Game],
        dataset: str | Path | Iterable[Row] | None = None,
        *,
        roles: Sequence[str],
        opponents: Mapping[str, Opponent] | None = None,
        system_prompt: str | None = None,
        repeats: int | None = None,
        **order: Unpack[OrderOptions],
    ) -> None:
        if isinstance(roles, str):
            raise TypeError(f"roles must be a list of names, got {roles!r}; write roles=[{roles!r}] for one role.")
        if len(set(roles)) < len(roles):
            raise ValueError(f"roles must be distinct names, got {list(roles)}.")
        self._opponents = dict(opponents or {})
        if unknown := sorted(set(self._opponents) - set(roles)):
            raise ValueError(f"opponents has {unknown}, and the roles are {list(roles)}.")
        self.roles = tuple(role for role in roles if role not in self._opponents)
        if not self.roles:
            raise ValueError(f"opponents play all roles, {list(roles)}: leave one to the policy.")
        self._tables: dict[tuple[str, int], _Table] = {}  # games that wait for players
        self._coming: dict[tuple[str, int], _Player] = {}
        self._first_messages = system_messages(system_prompt)
        self._make_game = make_game
        super().__init__(
            cast("Callable[[Row], MessageEnv]", make_game),  # `_made` returns the player
            dataset,
            repeats=len(self.roles) if repeats is None else repeats,
            **order,
        )

    step_timeout_seconds: float | None = None
    """Time limit of one move, including opponents' moves, or of creating the game; set by a collector. Time spent
    waiting for other players of the policy does not count."""

    async def before_reset(self, drawn: Drawn) -> TensorDictBase:
        """Add a player to its game; a player that fails to join leaves it, so that the others do not wait."""
        row, group_id, sample_index = drawn
        game, place = divmod(sample_index, len(self.roles))
        table = self._tables.pop((group_id, game), None)
        if table is None:
            table = _Table(self.roles, self._opponents, self._first_messages, self._loops.current)
        table.num_missing -= 1
        if table.num_missing:
            self._tables[group_id, game] = table
        player = _Player(table, self.roles[place], lambda: self._make_game(copied(row)))
        self._coming[group_id, sample_index] = player
        try:
            await self._loops.wait(player.sit_down(), self.step_timeout_seconds, on=table.loop)
            return await super().before_reset(drawn)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # raised if the loop is closed; then no task waits
                table.loop.post(functools.partial(table.leave, self.roles[place], is_counted=False))
            raise
        finally:
            del self._coming[group_id, sample_index]

    def _home(self, drawn: Drawn) -> BackgroundLoop:
        return self._coming[drawn[1:]].table.loop  # players of a game share one loop

    def _made(self, drawn: Drawn) -> MessageEnv:
        return self._coming[drawn[1:]]

    def _open_all(self, drawn: Sequence[Drawn | None]) -> list[TensorDictBase]:
        if len(self.roles) > 1:
            raise RuntimeError(f"the roles {self.roles} wait for each other: the game must be played by a collector.")
        return super()._open_all(drawn)

    def _opened_step(self, opened: Opened) -> TensorDictBase:
        step = super()._opened_step(opened)
        if isinstance(opened.env, _Player) and opened.env.reward is not None:
            step.set("reward", torch.full((1, 1), opened.env.reward))
            for key in ("terminated", "done"):
                step.set(key, torch.ones(1, dtype=torch.bool))
        return step

    async def before_step(self, element: TensorDictBase) -> None:
        """Play until this player's next turn; a player that reached a limit leaves the game."""
        player = plain(element.get("message_env"))
        if isinstance(player, _Player):
            player.reason = plain(element.get(("rollout", "reason"), "")) or StopReason.NONE
        await super().before_step(element)

    async def _asked(self, message_env: MessageEnv, message: Message) -> MessageStep:
        if isinstance(message_env, _Player):
            move = message_env.move(text_of(message.get("content")))
            await self._loops.wait(move, self.step_timeout_seconds, on=message_env._loop)
        return await super()._asked(message_env, message)


class _Table:
    """A running game, and the players that wait for their turns on its event loop."""

    def __init__(
        self,
        roles: Sequence[str],
        opponents: Mapping[str, Opponent],
        opening: Sequence[Message],
        loop: BackgroundLoop,
    ) -> None:
        self.opening = opening
        self.loop = loop
        self.num_missing = len(roles)
        """Number of players that have not joined yet."""
        self.results: Mapping[str, float] = {}
        """Reward of each role; empty while the game is running."""
        self._opponents = opponents
        self._views: dict[str, list[Message]] = {role: [*opening] for role in opponents}
        self._woken = {role: asyncio.Event() for role in roles}
        self._observation = ""
        self._failure: BaseException | None = None
        self._game: Game | None = None

    async def begin(self, make_game: Callable[[], Game]) -> None:
        if self._game is None and self._failure is None:
            with self._failing_all():
                self._game = make_game()
            await self._go_on(self._game)

    async def turn_of(self, role: str) -> str | None:
        """Return a player's observation at its next turn; None if the game is over, RuntimeError if it failed."""
        await self._woken[role].wait()
        if self._failure is not None:
            raise RuntimeError(f"the game has ended: {describe(self._failure)}") from self._failure
        if self.results:
            return None
        self._woken[role].clear()
        return self._observation

    async def act(self, text: str) -> None:
        assert self._game is not None
        if not self.results and self._failure is None:  # otherwise a player has left
            with self._failing_all():
                self._game.act(text)
            await self._go_on(self._game)

    def leave(self, role: str, *, is_counted: bool) -> None:
        """End the game for a player that cannot continue; a finished game is unchanged."""
        if self.results or self._failure is not None:
            return
        with self._failing_all():
            left = self._game.leave(role) if is_counted and self._game is not None else None
            if left is None:
                self._failure = RuntimeError(f"the player {role!r} left the game before its end.")
            else:
                self.results = self._checked(left)
        self._wake_all()

    async def _go_on(self, game: Game) -> None:
        """Let opponents move until the policy has a turn or the game is over."""
        with self._failing_all():
            while not self.results and self._failure is None:
                if (results := game.rewards()) is not None:
                    self.results = self._checked(results)
                    return self._wake_all()
                role, text = game.observe()
                if role in self._woken:
                    self._observation = text
                    return self._woken[role].set()
                if role not in self._opponents:
                    raise ValueError(f"observe gave the turn to {role!r}, which is not a role of the game.")
                view = self._views[role]
                view.append({"role": "user", "content": text})
                answer = await awaited(self._opponents[role](copied(tuple(view))))
                if not isinstance(answer, str):
                    raise TypeError(f"the opponent {role!r} must answer with a text, got {type(answer).__name__}.")
                view.append({"role": "assistant", "content": answer})
                game.act(answer)

    def _checked(self, results: Mapping[str, float]) -> Mapping[str, float]:
        if missing := [role for role in self._woken if role not in results]:
            raise ValueError(f"the game returned rewards of {sorted(results)}, but not of {missing}.")
        return {role: finite_number(results[role], f"the reward of {role!r}") for role in self._woken}

    def _wake_all(self) -> None:
        for woken in self._woken.values():
            woken.set()

    @contextlib.contextmanager
    def _failing_all(self) -> Iterator[None]:
        """Pass an error on to the other players, so that none of them waits forever."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._wake_all()
            raise


class _Player(MessageEnv):
    """A player of the policy: its view of the game as a conversation."""

    def __init__(self, table: _Table, role: str, make_game: Callable[[], Game]) -> None:
        self.table = table
        self._role = role
        self._make_game = make_game
        self.reason: str = StopReason.NONE
        """Reason why the current turn ends this player's conversation; empty if it does not."""
        self.reward: float | None = None
        """Reward of the player if the game was over before its first turn; otherwise None."""
        self._is_over = False  # whether its last move, not its leaving, ended the game

    async def sit_down(self) -> None:
        await self.table.begin(self._make_game)

    async def init(self) -> Sequence[Message]:
        observation = await self.table.turn_of(self._role)
        if observation is None:
            self.reward = self.table.results[self._role]
        return [*self.table.opening, {"role": "user", "content": observation or ""}]

    async def move(self, text: str) -> None:
        """Apply this player's answer, and leave the game if it reached a limit."""
        if self.reason in (StopReason.NONE, StopReason.MAX_TURNS):  # otherwise the answer was cut
            await self.table.act(text)
        self._is_over = bool(self.table.results)
        if self.reason:
            self.table.leave(self._role, is_counted=self.reason != StopReason.ABORTED)

    async def step(self, message: Message) -> MessageStep:
        observation = await self.table.turn_of(self._role)
        if observation is not None:
            return MessageStep([{"role": "user", "content": observation}])
        return MessageStep(reward=self.table.results[self._role], is_done=self._is_over or not self.reason)

    async def close(self) -> None:
        self.table.leave(self._role, is_counted=False)

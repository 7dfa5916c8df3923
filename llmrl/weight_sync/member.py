"""One engine of an update, and all of them as one client of a transfer."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llmrl.engines.base import EngineError, TransferInfo, UpdatableEngine
from llmrl.weight_sync.deadline import TRANSFER_SECONDS

if TYPE_CHECKING:
    from llmrl.weight_sync.channels import Connection

_PROGRESS_SECONDS = 5.0
"""For an engine to say how far it is."""


_MIXED: weakref.WeakKeyDictionary[UpdatableEngine, int] = weakref.WeakKeyDictionary()
"""Engines with weights that may be neither those of before an update nor its own, and the version of that update."""


def last_version_of(engine: UpdatableEngine) -> int:
    """Return the highest version that the engine, or one that loaded the same update, may have put to use."""
    return max(engine.policy_version, _MIXED.get(engine, 0))


class Member:
    """One engine of a group, and how far it is with an update."""

    def __init__(self, engine: UpdatableEngine) -> None:
        self.engine = engine
        self.connection: Connection | None = None
        self.is_left_out = False
        """Whether it could not be reached in an update: a server that is back takes part in the next one anew."""
        self._is_updating = False
        self.num_restarts: int = getattr(engine, "num_restarts", 0)
        """Of a server: one that was started again knows nothing of what was opened and begun before."""

    @property
    def is_mixed(self) -> bool:
        """Whether its weights may be neither the old nor the new ones, whichever sender left them so."""
        return self.engine in _MIXED

    def mark_mixed(self, version: int) -> None:
        """Note that the engine may hold parts of the weights of `version`."""
        _MIXED[self.engine] = max(version, _MIXED.get(self.engine, 0))

    def mark_whole(self) -> None:
        """Note that the engine holds the weights of its version."""
        _MIXED.pop(self.engine, None)

    @property
    def is_whole(self) -> bool:
        """Whether it has weights to serve with: a mixture are none, and one that sleeps gave its own back."""
        return not self.is_mixed and not getattr(self.engine, "lacks_weights", False)

    @property
    def is_alive(self) -> bool:
        """Whether the engine serves; one that just failed is given a moment to notice its death."""
        for _ in range(20):
            if not self.engine.is_alive:
                return False
            time.sleep(0.01)
        return True

    timeout_seconds = TRANSFER_SECONDS
    """See `Client.timeout_seconds`."""

    @property
    def num_workers(self) -> int:
        """Worker processes that take weights."""
        return self.engine.num_workers

    def progress(self) -> int | None:
        """Return a number that changes with every token that comes; None where none is due."""
        try:
            return asyncio.run(asyncio.wait_for(self.engine.progress(), _PROGRESS_SECONDS))
        except (EngineError, TimeoutError):
            return None

    def disconnect(self) -> None:
        """Give up the way that weights take to the engine."""
        if self.connection is not None:
            self.connection.shutdown()
        self.connection = None

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Open the engine's end."""
        self.engine.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        """Begin; what an update before left open is ended first."""
        self.abandon(can_discard=False)
        self.engine.start_weight_update()
        self._is_updating = True

    def update_weights(self, update_info: TransferInfo | list[TransferInfo]) -> None:
        """Let the engine take weights."""
        try:
            self.engine.update_weights(update_info)
        except BaseException:
            self._is_updating = False  # vLLM ends the update itself
            raise

    def commit(self, version: int) -> None:
        """Put the taken weights to use.

        Raises EngineError if it took none, which would give its old weights the new version.
        """
        if not self._is_updating:
            raise EngineError("the engine took no weights in this update.")
        self.engine.finish_weight_update(version)
        self._is_updating = False  # vLLM goes on with an update if ending it failed: the next one ends it

    def abandon(self, *, can_discard: bool) -> None:
        """End an update that was begun, with the version of before; with `can_discard` what was taken is forgotten."""
        if not self._is_updating:
            return
        if can_discard:
            self.engine.update_weights({"is_discarded": True})
        self._is_updating = False
        self.engine.finish_weight_update(self.engine.policy_version)


class AllWorkers:
    """The client of a channel that has one group of all workers; the end of an update is put off until `commit`."""

    def __init__(
        self,
        members: list[Member],
        each: Callable[[Sequence[Member], Callable[[Member], object]], None],
        timeout_seconds: float,
    ) -> None:
        self._members = members
        self._each = each
        self.timeout_seconds = timeout_seconds
        """Sooner than an engine is taken to hang, so that those which wait for a dead one are not ended with it."""

    @property
    def num_workers(self) -> int:
        """Worker processes that take weights, all engines together."""
        return sum(member.num_workers for member in self._members)

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Open every engine's end; each engine's workers follow those of the one before."""
        infos = {}
        offset = init_info.get("rank_offset")
        for member in self._members:
            infos[member] = init_info
            if isinstance(offset, int):
                infos[member] = {**init_info, "rank_offset": offset}
                offset += member.num_workers
        self._each(self._members, lambda member: member.init_weight_transfer_engine(infos[member]))

    def start_weight_update(self) -> None:
        """Make every engine ready."""
        self._each(self._members, lambda member: member.start_weight_update())

    def update_weights(self, update_info: TransferInfo | list[TransferInfo]) -> None:
        """Let every engine take the weights."""
        self._each(self._members, lambda member: member.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | int | None = None) -> None:
        """Every engine has taken everything; the group commits them one by one."""

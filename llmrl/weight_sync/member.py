"""The state of one engine in an update, and a client of all engines' workers."""

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
"""Timeout of a request for an engine's progress."""


_MIXED: weakref.WeakKeyDictionary[UpdatableEngine, int] = weakref.WeakKeyDictionary()
"""Engines that may hold a mixture of weights, and the version of the update that left it."""


def last_version_of(engine: UpdatableEngine) -> int:
    """Return the highest version that the engine, or another engine in the same update, may have loaded."""
    return max(engine.policy_version, _MIXED.get(engine, 0))


class Member:
    """One engine of a group, and its state in an update."""

    def __init__(self, engine: UpdatableEngine) -> None:
        self.engine = engine
        self.connection: Connection | None = None
        self.is_left_out = False
        """Whether the engine became unreachable in an update; a server that answers again joins the next."""
        self._is_updating = False
        self.num_restarts: int = getattr(engine, "num_restarts", 0)
        """Number of restarts of a server; a restarted one has lost its connections and updates."""

    @property
    def is_mixed(self) -> bool:
        """Whether the engine may hold a mixture of weights, left by any sender."""
        return self.engine in _MIXED

    def mark_mixed(self, version: int) -> None:
        """Record that the engine may hold parts of the weights of `version`."""
        _MIXED[self.engine] = max(version, _MIXED.get(self.engine, 0))

    def mark_whole(self) -> None:
        """Record that the engine holds the whole weights of its version."""
        _MIXED.pop(self.engine, None)

    @property
    def is_whole(self) -> bool:
        """Whether the engine has whole weights: neither a mixture nor released while it sleeps."""
        return not self.is_mixed and not getattr(self.engine, "lacks_weights", False)

    @property
    def is_alive(self) -> bool:
        """Whether the engine serves; waits up to 0.2 s for a failed one to notice its death."""
        for _ in range(20):
            if not self.engine.is_alive:
                return False
            time.sleep(0.01)
        return True

    timeout_seconds = TRANSFER_SECONDS
    """See `Client.timeout_seconds`."""

    @property
    def num_workers(self) -> int:
        """Number of workers that take weights."""
        return self.engine.num_workers

    def progress(self) -> int | None:
        """Return a number that changes with every token; None if the engine has no requests or does not answer."""
        try:
            return asyncio.run(asyncio.wait_for(self.engine.progress(), _PROGRESS_SECONDS))
        except (EngineError, TimeoutError):
            return None

    def disconnect(self) -> None:
        """Close the connection to the engine."""
        if self.connection is not None:
            self.connection.shutdown()
        self.connection = None

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Open the engine's end."""
        self.engine.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        """Start an update, after ending any unfinished one."""
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
        """Load the received weights. Raises EngineError without any: old weights would get the new version."""
        if not self._is_updating:
            raise EngineError("the engine received no weights in this update.")
        self.engine.finish_weight_update(version)
        self._is_updating = False  # if ending an update fails, vLLM continues it and the next update ends it

    def abandon(self, *, can_discard: bool) -> None:
        """End an unfinished update and keep the old version; with `can_discard`, discard the received weights."""
        if not self._is_updating:
            return
        if can_discard:
            self.engine.update_weights({"is_discarded": True})
        self._is_updating = False
        self.engine.finish_weight_update(self.engine.policy_version)


class AllWorkers:
    """Client of all engines, with their workers in one group; `EngineGroup` commits the update later."""

    def __init__(
        self,
        members: list[Member],
        each: Callable[[Sequence[Member], Callable[[Member], object]], None],
        timeout_seconds: float,
    ) -> None:
        self._members = members
        self._each = each
        self.timeout_seconds = timeout_seconds
        """Shorter than the engines' hang timeout, so that engines that wait for a dead engine are not killed."""

    @property
    def num_workers(self) -> int:
        """Number of workers of all engines."""
        return sum(member.num_workers for member in self._members)

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Open every engine's end, with consecutive worker ranks."""
        infos = {}
        offset = init_info.get("rank_offset")
        for member in self._members:
            infos[member] = init_info
            if isinstance(offset, int):
                infos[member] = {**init_info, "rank_offset": offset}
                offset += member.num_workers
        self._each(self._members, lambda member: member.init_weight_transfer_engine(infos[member]))

    def start_weight_update(self) -> None:
        """Start an update in every engine."""
        self._each(self._members, lambda member: member.start_weight_update())

    def update_weights(self, update_info: TransferInfo | list[TransferInfo]) -> None:
        """Let every engine take the weights."""
        self._each(self._members, lambda member: member.update_weights(update_info))

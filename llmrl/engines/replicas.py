"""`EngineReplicas`: several engines with the same weights, as one."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from llmrl.engines.base import Completion, Engine, EngineError, SamplingConfig

MAX_REMEMBERED_KEYS = 65536
"""Routing keys whose replica is remembered; the oldest are forgotten first."""


class EngineReplicas(Sequence[Any]):
    """Sends requests to one of several engines: a routing key to where it went before, others to the least loaded.

    A replica that dies costs its requests an `EngineError` each; later ones go to those that live. As a sequence of
    engines it can be handed to `sender.init_all_workers_group`.

    Args:
        engines: with the same model; their smallest `max_model_len` holds for all.
        max_imbalance: a key leaves its replica when that has so many requests more than the least loaded.

    Raises:
        ValueError: when there are no engines.

    Example:
        >>> import asyncio
        >>> from llmrl.engines import ScriptedEngine
        >>> engines = EngineReplicas([ScriptedEngine([[1]]), ScriptedEngine([[2]])])
        >>> asyncio.run(engines.generate([5], SamplingConfig(), routing_key="group")).token_ids
        [1]
    """

    def __init__(self, engines: Sequence[Engine], *, max_imbalance: int = 32) -> None:
        if not engines:
            raise ValueError("engines must not be empty.")
        self._engines = list(engines)
        self._max_imbalance = max_imbalance
        self._loads = [0] * len(self._engines)
        self._home: OrderedDict[str, int] = OrderedDict()
        self._where: dict[str, int] = {}
        self._ids = itertools.count()
        self.max_model_len: int = min(engine.max_model_len for engine in self._engines)
        """Prompt and completion together, in tokens."""

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, index: Any) -> Any:
        return self._engines[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._engines)

    @property
    def policy_version(self) -> int:
        """Version that all living replicas have reached."""
        living = self._living()
        return min(self._engines[index].policy_version for index in living or range(len(self._engines)))

    @property
    def is_alive(self) -> bool:
        """Whether any replica serves requests."""
        return bool(self._living())

    @property
    def num_in_flight(self) -> int:
        """Requests that have not returned yet."""
        return sum(self._loads)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """Sample one completion on one of the replicas.

        Raises:
            ValueError: as the replica's own `generate`.
            EngineError: when the replica died, or none lives; a second try goes elsewhere.
        """
        if request_id is None:
            request_id = f"replicas-{id(self):x}-{next(self._ids)}"
        elif request_id in self._where:
            raise ValueError(f"request_id {request_id!r} is in flight already; ids must be unique.")
        index = self._choose(routing_key)
        self._where[request_id] = index
        self._loads[index] += 1
        try:
            return await self._engines[index].generate(
                prompt_ids, sampling, request_id=request_id, routing_key=routing_key
            )
        finally:
            self._loads[index] -= 1
            del self._where[request_id]

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what it has."""
        index = self._where.get(request_id)
        if index is not None:
            await self._engines[index].abort(request_id)

    def shutdown(self) -> None:
        """Shut every replica down. May be called twice."""
        for engine in self._engines:
            engine.shutdown()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        first: Any = self._engines[0]
        return first.get_tokenizer()

    def _living(self) -> list[int]:
        return [index for index, engine in enumerate(self._engines) if getattr(engine, "is_alive", True)]

    def _choose(self, routing_key: str | None) -> int:
        living = self._living()
        if not living:
            raise EngineError(f"None of the {len(self._engines)} engines is running; start new ones.")
        least = min(living, key=lambda index: (self._loads[index], index))
        if routing_key is None:
            return least
        home = self._home.get(routing_key)
        if home not in living or self._loads[home] - self._loads[least] > self._max_imbalance:
            home = least
        self._home[routing_key] = home
        self._home.move_to_end(routing_key)
        if len(self._home) > MAX_REMEMBERED_KEYS:
            self._home.popitem(last=False)
        return home

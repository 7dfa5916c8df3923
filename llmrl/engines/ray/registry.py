"""`EngineRegistry`: lets collector actors find the trainer's engine actors."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrl._utils.imports import require
from llmrl.engines.base import Engine, EngineError
from llmrl.engines.ray.engine import EngineNotice, RayEngine
from llmrl.engines.replicas import EngineReplicas

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_LOOK_AGAIN_S = 1.0
_SUCCESSOR_SECONDS = 600.0
logger = logging.getLogger(__name__)


class RegistryActor:
    """Ray actor that stores the serving engine of each replica, or None."""

    def __init__(self) -> None:
        self._notices: list[EngineNotice | None] = []

    def publish(self, notices: list[EngineNotice | None]) -> None:
        """Replace the registered engines."""
        self._notices = notices

    def read(self) -> list[EngineNotice | None]:
        """Return the registered engines."""
        return self._notices


@dataclass(frozen=True, slots=True)
class EngineRegistry:
    """Registry of the engines with the current weights; can be sent to other processes of the cluster.

    The trainer starts, updates and replaces engines (`EngineReplicas`) and registers the serving ones. Collector
    actors send requests to them directly, and find the replacement of a dead engine in the registry.

    Example:
        >>> registry = EngineRegistry.start()                                     # doctest: +SKIP
        >>> registry.publish(engines)                                             # doctest: +SKIP
        >>> policy_factory = lambda: vLLMWrapper(registry.connect())             # doctest: +SKIP
    """

    actor: ActorHandle

    @classmethod
    def start(cls) -> EngineRegistry:
        """Start an empty registry. Raises ImportError if Ray is not installed."""
        return cls(require("ray", extra="ray").remote(RegistryActor).options(num_cpus=0).remote())

    def publish_once(self, replicas: EngineReplicas) -> None:
        """Register the engines that serve now. Raises TypeError if the replicas are not Ray actors."""
        serving = replicas.serving
        notices = []
        for index, engine in enumerate(replicas):
            if not isinstance(engine, RayEngine):
                raise TypeError(
                    f"replicas must be Ray actors, got {type(engine).__name__}: start them with use_ray=True."
                )
            notices.append(engine.notice() if index in serving else None)
        require("ray", extra="ray").get(self.actor.publish.remote(notices))

    def publish(self, replicas: EngineReplicas) -> None:
        """Register the serving engines now and at each change, until the replicas are shut down.

        Hanging engines are replaced meanwhile, even if the trainer makes no requests. Raises as `publish_once` does.
        """
        self.publish_once(replicas)
        threading.Thread(
            target=lambda: asyncio.run(self._publish_changes(replicas)), name="llmrl-registry", daemon=True
        ).start()

    async def _publish_changes(self, replicas: EngineReplicas) -> None:
        watching = asyncio.create_task(replicas.watch_for_hangs())
        published = _serving(replicas)
        while not replicas.is_shut_down:
            await asyncio.sleep(_LOOK_AGAIN_S)
            if (serving := _serving(replicas)) != published:
                try:
                    self.publish_once(replicas)
                except Exception as error:  # the cluster or the registry is gone, which collectors detect
                    logger.warning("the registry of engines could not be written: %s", error)
                    return
                published = serving
        watching.cancel()

    def connect(self) -> EngineReplicas:
        """Return the engines that serve now, which wait up to ten minutes for the replacement of a dead one.

        Raises EngineError if no engine serves.
        """
        notices = self._read()
        if not notices:
            raise EngineError("the registry has no engine that serves.")
        held = dict(enumerate(notices))
        claiming = threading.Lock()  # replicas that die together look for their successors in several threads

        def successor(index: int) -> RayEngine:
            deadline = time.monotonic() + _SUCCESSOR_SECONDS
            while time.monotonic() < deadline:
                with claiming:
                    known = [notice.actor for notice in held.values()]
                    fresh = [notice for notice in self._read() if notice.actor not in known]
                    if fresh:
                        held[index] = fresh[0]
                        return RayEngine.reach(fresh[0])
                time.sleep(_LOOK_AGAIN_S)
            raise EngineError(f"no engine replaced replica {index} within {_SUCCESSOR_SECONDS:.0f} s.")

        return EngineReplicas([RayEngine.reach(notice) for notice in notices], restart=successor)

    def _read(self) -> list[EngineNotice]:
        notices = require("ray", extra="ray").get(self.actor.read.remote())
        return [notice for notice in notices if notice is not None]


def _serving(replicas: EngineReplicas[Engine]) -> list[Engine]:
    serving = replicas.serving
    return [engine for index, engine in enumerate(replicas) if index in serving]

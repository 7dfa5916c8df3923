"""`VLLMWeightReceiver`: the engines' end of a weight update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmrl.engines.base import EngineError

if TYPE_CHECKING:
    import torch

    from llmrl.weight_sync.scheme import VLLMWeightSyncScheme


class VLLMWeightReceiver:
    """Drives the control plane of one engine, or of several as one.

    It has the methods of vLLM's `VLLMWeightSyncClient`, so vLLM's trainer-side engines drive it too. An engine is an
    `AsyncVLLM` or anything with its methods (a Ray actor's handle wrapped in blocking calls).
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, engine: Any | Sequence[Any]) -> None:
        self._scheme = scheme
        self.engines: list[Any] = list(engine) if isinstance(engine, Sequence) else [engine]
        if not self.engines:
            raise ValueError("engine must be an engine or a non-empty sequence of engines, got an empty sequence.")
        backends = {one.weight_transfer_backend for one in self.engines}
        if len(backends) != 1 or None in backends:
            raise ValueError(
                f"engines must share one weight-transfer backend, got {sorted(map(str, backends))}; start them with "
                "weight_transfer=True."
            )
        self.backend: str = backends.pop()
        self._pool = ThreadPoolExecutor(len(self.engines), thread_name_prefix="llmrl-weight-sync")

    @property
    def policy_version(self) -> int:
        """Version that all engines have reached."""
        return min(engine.policy_version for engine in self.engines)

    @property
    def num_workers(self) -> int:
        """Worker processes that take weights, all engines together."""
        return sum(engine.num_workers for engine in self.engines)

    @property
    def model_dtype(self) -> torch.dtype:
        """dtype that weights are sent in."""
        return self.engines[0].model_dtype

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop stepping and go on afterwards, but not with weights that are neither old nor new (`stay_paused`)."""
        self._stay_paused = False
        self._each(lambda engine: engine.pause(self._scheme.pause_mode, clear_cache=False))
        try:
            yield
        finally:
            if not self._stay_paused:
                self._each(lambda engine: engine.resume())

    def stay_paused(self) -> None:
        """Leave the engines paused: they must not generate before a further update."""
        self._stay_paused = True

    def reset_prefix_cache(self) -> None:
        """Drop key-value blocks of the old weights.

        Raises:
            EngineError: when blocks of old weights would stay in the cache for later requests.
        """
        reset = self._scheme.reset_running_requests
        results = self._each(lambda engine: engine.reset_prefix_cache(reset_running_requests=reset))
        if reset and not all(results):
            raise EngineError("vLLM did not reset its prefix cache; key-value blocks of old weights may be used.")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open every engine's end; in a collective group each engine's workers follow those of the one before."""
        offset = init_info.get("rank_offset", 0)
        infos = []
        for engine in self.engines:
            infos.append(init_info if "rank_offset" not in init_info else {**init_info, "rank_offset": offset})
            offset += engine.num_workers
        futures = [
            self._pool.submit(engine.init_weight_transfer_engine, info)
            for engine, info in zip(self.engines, infos, strict=True)
        ]
        for future in futures:
            future.result()

    def start_weight_update(self) -> None:
        """Make every engine ready."""
        self._each(lambda engine: engine.start_weight_update())

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let every engine take the weights."""
        self._each(lambda engine: engine.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | int | None = None) -> int:
        """Put the weights to use; the version is the next one after the engines' highest, unless given."""
        if weight_version is None:
            weight_version = max(engine.policy_version for engine in self.engines) + 1
        self._each(lambda engine: engine.finish_weight_update(weight_version))
        return int(weight_version)

    def shutdown(self) -> None:
        """Release threads; the engines stay."""
        self._pool.shutdown(wait=False)

    def _each(self, action: Callable[[Any], Any]) -> list[Any]:
        """Run `action` for all engines at once; all have ended before the first error is raised."""
        if len(self.engines) == 1:
            return [action(self.engines[0])]
        futures = [self._pool.submit(action, engine) for engine in self.engines]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

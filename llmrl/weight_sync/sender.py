"""`VLLMWeightSender`: the trainer's end of a weight update."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from llmrl.weight_sync.scheme import WeightSyncError
from llmrl.weight_sync.source import ModelMetadata, make_weight_source

if TYPE_CHECKING:
    from llmrl.weight_sync.receiver import VLLMWeightReceiver
    from llmrl.weight_sync.scheme import VLLMWeightSyncScheme
    from llmrl.weight_sync.transport import VLLMCollectiveTransport


class VLLMWeightSender:
    """Sends a model's weights to engines: register the model, open the group once, then update at will."""

    def __init__(self, scheme: VLLMWeightSyncScheme) -> None:
        self._scheme = scheme
        self._model: torch.nn.Module | Mapping[str, torch.Tensor] | None = None
        self._receiver: VLLMWeightReceiver | None = None
        self._transport: VLLMCollectiveTransport | None = None
        self.last_timings: dict[str, float] = {}
        """Seconds of the parts of the last update: `stage_s` (the engines generate), `pause_s`, `send_s`,
        `reset_cache_s`, `resume_s`."""

    def register_model(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Say whose weights to send: a module, or a mapping of checkpoint names to tensors, read at each update."""
        self._model = model
        if self._transport is not None:
            self._open()

    def init_all_workers_group(
        self, model_metadata: ModelMetadata | None = None, engine: Any | Sequence[Any] = None
    ) -> None:
        """Open the way to the workers of an engine, or of several that are to hold the same weights.

        Args:
            model_metadata: from `get_model_metadata`; checked against the registered model.
            engine: an `AsyncVLLM` or a sequence of them.

        Raises:
            RuntimeError: without a registered model.
            ValueError: when the metadata is of another model, or the engine takes no weights.
            EngineError: when a worker cannot be reached.
        """
        if self._model is None:
            raise RuntimeError("no model is registered; call sender.register_model(model) first.")
        if engine is None:
            raise ValueError("engine must be an AsyncVLLM or a sequence of them, got None.")
        self._receiver = self._scheme.create_receiver(engine)
        self._open()
        if model_metadata is not None:
            self._check(model_metadata)

    def update_weights(self, weights: Mapping[str, torch.Tensor] | None = None) -> int:
        """Put the model's weights (or `weights`, by checkpoint name) into the engines; return their version.

        Requests in flight are treated as the scheme says, none is lost. The engines count the version.

        Raises:
            WeightSyncError: when an engine refuses; the message says which weights it holds now.
        """
        if self._transport is None or self._receiver is None:
            raise RuntimeError("the workers are not reached yet; call sender.init_all_workers_group(...) first.")
        self._override.clear()
        self._override.update(weights or {})
        clock = _Clock()
        self._transport.stage()
        clock.lap("stage_s")
        before = self._receiver.policy_version
        with self._receiver.paused():
            clock.lap("pause_s")
            try:
                self._transport.send()
            except Exception as error:
                raise WeightSyncError(f"The weight update failed: {_brief(error)} {self._restore(before)}") from error
            clock.lap("send_s")
            self._receiver.reset_prefix_cache()
            clock.lap("reset_cache_s")
        clock.lap("resume_s")
        self.last_timings = clock.laps
        return self._receiver.policy_version

    def shutdown(self) -> None:
        """Release memory, communicators and threads; the engines stay. May be called twice."""
        if self._transport is not None:
            self._transport.shutdown()
        if self._receiver is not None:
            self._receiver.shutdown()
        self._transport = self._receiver = None

    def _open(self) -> None:
        assert self._receiver is not None and self._model is not None
        if self._transport is not None:
            self._transport.shutdown()
        self._override: dict[str, torch.Tensor] = {}
        self._source = make_weight_source(self._model, self._receiver.model_dtype, override=self._override)
        self._transport = self._scheme.create_transport(self._receiver, self._source)

    def _check(self, model_metadata: ModelMetadata) -> None:
        own = {meta.name: tuple(meta.shape) for meta in self._source.metadata()}
        given = {name: tuple(shape) for name, (_, shape) in model_metadata.items()}
        if own != given:
            differing = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
            raise ValueError(
                f"model_metadata is not that of the registered model: {len(differing)} weights differ, "
                f"among them {differing[:3]}."
            )

    def _restore(self, version: int) -> str:
        assert self._receiver is not None and self._transport is not None
        cause = "the weights of before are not held any more"
        try:
            if self._transport.restore(version):
                self._receiver.reset_prefix_cache()
                return f"The engine holds the weights of version {version} as before; mend the cause and try again."
        except Exception as error:
            cause = f"restoring failed too: {error}"
        self._receiver.stay_paused()
        return f"The engine holds a mixture of weights and stays paused until an update succeeds ({cause})."


def _brief(error: Exception, limit: int = 400) -> str:
    text = str(error)  # vLLM lists every parameter it knows
    return text if len(text) <= limit else f"{text[:limit]} […]"


class _Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

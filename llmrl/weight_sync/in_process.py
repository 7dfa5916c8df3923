"""Weight sync for an engine in the trainer's process, and the default scheme of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

import torch

from llmrl.trainer.trained_model import trained_model
from llmrl.weight_sync.scheme import VLLMWeightSyncScheme
from llmrl.weight_sync.source import Weights, model_of, named_weights


@runtime_checkable
class LoadsWeights(Protocol):
    """Protocol of an engine that copies weights within the process, such as `TransformersEngine`."""

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, version: int | None = None) -> int:
        """Copy weights, by checkpoint name, between two tokens; return their version."""


def default_scheme(engine: object) -> InProcessSyncScheme | VLLMWeightSyncScheme:
    """Return the default weight-sync scheme of an engine."""
    return InProcessSyncScheme() if isinstance(engine, LoadsWeights) else VLLMWeightSyncScheme()


class InProcessSyncScheme:
    """Scheme that copies weights into an engine of this process, such as `TransformersEngine`."""

    def create_sender(self) -> InProcessSender:
        """Create a sender; it is used like that of `VLLMWeightSyncScheme`."""
        return InProcessSender()


class InProcessSender:
    """Sender that copies a model's weights, with adapters merged, into an engine of this process."""

    def __init__(self) -> None:
        self._model: Weights | None = None
        self._engine: LoadsWeights | None = None

    def register_model(self, model: Weights) -> None:
        """Set the source of weights."""
        self._model = model_of(model)

    def init_all_workers_group(self, model_metadata: object = None, engine: LoadsWeights | None = None) -> None:
        """Set the engine; `model_metadata` has no effect."""
        self._engine = engine

    def update_weights(self) -> int:
        """Copy the weights; return their version."""
        assert self._model is not None and self._engine is not None
        version = self._engine.load_weights(dict(named_weights(self._model)))
        if isinstance(self._model, torch.nn.Module):
            record = trained_model(self._model)
            record.engine_version = version
            record.num_updates = 0
        return version

    def start_update(self) -> Future[int]:
        """Copy the weights before returning, and return a finished future."""
        done: Future[int] = Future()
        done.set_result(self.update_weights())
        return done

    def shutdown(self) -> None:
        """Do nothing; the engine belongs to the caller."""

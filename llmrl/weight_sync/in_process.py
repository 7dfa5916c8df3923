"""Weights for an engine in the trainer's own process, and the scheme that an engine wants."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

import torch

from llmrl.trainer.trained_model import trained_model
from llmrl.weight_sync.scheme import VLLMWeightSyncScheme
from llmrl.weight_sync.source import model_of, named_weights


@runtime_checkable
class LoadsWeights(Protocol):
    """An engine of this process that copies weights: `TransformersEngine`."""

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, version: int | None = None) -> int:
        """Copy weights, by their names in a checkpoint, between two tokens; their version."""
        ...


def default_scheme(engine: object) -> InProcessSyncScheme | VLLMWeightSyncScheme:
    """Return the default way for new weights to reach an engine.

    Example:
        >>> type(default_scheme(object())).__name__
        'VLLMWeightSyncScheme'
    """
    return InProcessSyncScheme() if isinstance(engine, LoadsWeights) else VLLMWeightSyncScheme()


class InProcessSyncScheme:
    """Copies weights into an engine of this process, such as `TransformersEngine`."""

    def create_sender(self) -> InProcessSender:
        """Make what copies; used as that of `VLLMWeightSyncScheme`."""
        return InProcessSender()


class InProcessSender:
    """Copies a model's weights, adapters merged, into an engine of this process."""

    def __init__(self) -> None:
        self._model: torch.nn.Module | Mapping[str, torch.Tensor] | None = None
        self._engine: LoadsWeights | None = None

    def register_model(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Set the model to copy weights from."""
        self._model = model_of(model)

    def init_all_workers_group(self, model_metadata: object = None, engine: LoadsWeights | None = None) -> None:
        """Say which engine they are copied into."""
        self._engine = engine

    def update_weights(self) -> int:
        """Copy the weights; their version."""
        assert self._model is not None and self._engine is not None
        version = self._engine.load_weights(dict(named_weights(self._model)))
        if isinstance(self._model, torch.nn.Module):
            record = trained_model(self._model)
            record.engine_version = version
            record.num_updates = 0
        return version

    def start_update(self) -> Future[int]:
        """Do the same: a copy within a process is done before training could go on."""
        done: Future[int] = Future()
        done.set_result(self.update_weights())
        return done

    def shutdown(self) -> None:
        """Do nothing: the engine is its owner's."""

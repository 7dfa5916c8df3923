"""Senders of a collector's weight-sync schemes, connected at the first update."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from tensordict.nn import TensorDictModuleBase

from llmrl.weight_sync.source import Weights


class WeightSender(Protocol):
    """Trainer's end of a weight-sync scheme."""

    def register_model(self, model: Weights) -> None:
        """Set the model as the source of the weights."""

    def init_all_workers_group(self, model_metadata: Any, engine: Any) -> None:
        """Connect to an engine."""

    def update_weights(self) -> int:
        """Send the weights, wait until the engine has them, and return their version."""

    def start_update(self) -> Future[int]:
        """Start to send the weights, and return as soon as the model may change."""

    def shutdown(self) -> None:
        """Release resources; the engine keeps running."""


class WeightScheme(Protocol):
    """Method of sending weights to engines, such as `VLLMWeightSyncScheme`."""

    def create_sender(self) -> WeightSender:
        """Return the trainer's end."""


class HasEngine(Protocol):
    """Object that holds the engine."""

    @property
    def engine(self) -> object:
        """Engine that receives the weights; None if this process cannot reach it."""


class WeightSenders:
    """Senders of schemes by policy name; without schemes, one of the engine's default scheme."""

    def __init__(self, schemes: Mapping[str, WeightScheme], source: HasEngine) -> None:
        self._schemes = dict(schemes)
        self._source = source
        self._senders: dict[str, WeightSender] = {}
        self._model: Weights | None = None

    def connected(self, model: Weights | TensorDictModuleBase | None) -> list[WeightSender]:
        """Return the senders, connected to the engines.

        `model`: the trainer's model, a policy that scores with it, or a mapping of its weights;
        None keeps the last model.

        Raises ValueError if there is no model at the first call, or if this process can reach no engine.
        """
        from llmrl.weight_sync import default_scheme, get_model_metadata

        engine = self._source.engine
        if engine is None:
            raise ValueError("an update of the weights needs an engine that this process can reach: pass engine=.")
        if isinstance(model, TensorDictModuleBase):
            model = model.model
        model = self._model if model is None else model
        is_another = model is not self._model
        for name, scheme in (self._schemes or {"policy": default_scheme(engine)}).items():
            if name not in self._senders:
                if model is None:
                    raise ValueError("the first update of the weights needs the trainer's model.")
                sender = scheme.create_sender()
                # On ranks above 0 of a sharded trainer, a sender only helps to gather the weights.
                sends = getattr(scheme, "rank", 0) == 0
                try:
                    sender.register_model(model)
                    sender.init_all_workers_group(get_model_metadata(model), engine if sends else None)
                except BaseException:
                    sender.shutdown()
                    raise
                self._senders[name] = sender
            elif is_another and model is not None:
                self._senders[name].register_model(model)
        self._model = model
        return list(self._senders.values())

    def __getitem__(self, name: str) -> WeightSender:
        """Return the sender of a scheme (KeyError if unknown), which may not be connected yet."""
        if name not in self._senders:
            self._senders[name] = self._schemes[name].create_sender()
        return self._senders[name]

    def shutdown(self) -> None:
        """Close the senders; the engines keep running. May be called twice."""
        senders = self._senders
        self._senders = {}
        for sender in senders.values():
            sender.shutdown()

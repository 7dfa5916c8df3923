"""The senders of a collector's weight-sync schemes, connected when the first update is made."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

import torch
from tensordict.nn import TensorDictModuleBase

Weights: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]
"""The trainer's model, or its weights by their names in a checkpoint."""


class WeightSender(Protocol):
    """The trainer's end of a scheme."""

    def register_model(self, model: Weights) -> None:
        """Say whose weights to send."""
        ...

    def init_all_workers_group(self, model_metadata: Any, engine: Any) -> None:
        """Open the way to an engine."""
        ...

    def update_weights(self) -> int:
        """Send the weights, and return their version when the engine has them."""
        ...

    def start_update(self) -> Future[int]:
        """Begin to send the weights, and return as soon as the model may change."""
        ...

    def shutdown(self) -> None:
        """Release what it holds; the engine stays."""
        ...


class WeightScheme(Protocol):
    """How weights reach engines, such as `VLLMWeightSyncScheme`."""

    def create_sender(self) -> WeightSender:
        """Return the trainer's end."""
        ...


class HasEngine(Protocol):
    """What reaches the engines."""

    @property
    def engine(self) -> object:
        """What weights are sent to; None where it is not reached from here."""
        ...


class WeightSenders:
    """One sender for each scheme, or one of the scheme that the engine wants.

    Args:
        schemes: by policy name; may be empty.
        source: whose engine weights are sent to.
    """

    def __init__(self, schemes: Mapping[str, WeightScheme], source: HasEngine) -> None:
        self._schemes, self._source = dict(schemes), source
        self._senders: dict[str, WeightSender] = {}
        self._model: Weights | None = None

    def connected(self, model: Weights | TensorDictModuleBase | None) -> list[WeightSender]:
        """Return the senders, connected to the engines.

        Args:
            model: the trainer's, or a policy that scores with it, or a mapping of its weights; None is the one before.

        Raises:
            ValueError: without a model the first time, or where no engine is reached from here.
        """
        from llmrl.weight_sync import default_scheme, get_model_metadata

        engine = self._source.engine
        if engine is None:
            raise ValueError("an update of the weights needs an engine that is reached from here: pass engine=.")
        if isinstance(model, TensorDictModuleBase):
            model = model.model
        is_another = model is not None and model is not self._model
        model = self._model = model if is_another else self._model
        for name, scheme in (self._schemes or {"policy": default_scheme(engine)}).items():
            if name not in self._senders:
                if model is None:
                    raise ValueError("the first update of the weights needs the trainer's model.")
                sender = scheme.create_sender()
                sender.register_model(model)
                # On the ranks above 0 of a sharded trainer a sender only helps to gather.
                sends = getattr(scheme, "rank", 0) == 0
                sender.init_all_workers_group(get_model_metadata(model), engine if sends else None)
                self._senders[name] = sender
            elif is_another and model is not None:
                self._senders[name].register_model(model)
        return list(self._senders.values())

    def __getitem__(self, name: str) -> WeightSender:
        """Return the sender of a scheme, which is the caller's to connect where no update was made before.

        Raises:
            KeyError: when no scheme has this name.
        """
        if name not in self._senders:
            self._senders[name] = self._schemes[name].create_sender()
        return self._senders[name]

    def shutdown(self) -> None:
        """End the senders; the engines stay. May be called twice."""
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            sender.shutdown()

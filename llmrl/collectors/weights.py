"""The senders of a collector's weight-sync schemes, connected when the first update is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tensordict.nn import TensorDictModuleBase


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

    def __init__(self, schemes: Mapping[str, Any], source: HasEngine) -> None:
        self._schemes, self._source = dict(schemes), source
        self._senders: dict[str, Any] = {}
        self._model: object = None

    def connected(self, model: Any) -> list[Any]:
        """The senders, connected to the engines.

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
        if model is None and self._model is None:
            raise ValueError("the first update of the weights needs the trainer's model.")
        is_another = model is not None and model is not self._model
        model = self._model = model if is_another else self._model
        for name, scheme in (self._schemes or {"policy": default_scheme(engine)}).items():
            if name not in self._senders:
                sender = scheme.create_sender()
                sender.register_model(model)
                sender.init_all_workers_group(get_model_metadata(model), engine)
                self._senders[name] = sender
            elif is_another:
                self._senders[name].register_model(model)
        return list(self._senders.values())

    def shutdown(self) -> None:
        """End the senders; the engines stay. May be called twice."""
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            sender.shutdown()

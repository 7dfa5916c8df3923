"""Who sends a collector's engine the trainer's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict.nn import TensorDictModuleBase

from llmrl.weight_sync import default_scheme, get_model_metadata


class WeightSenders:
    """The senders of the given schemes, or of the one that the engine wants, opened when a model is first named."""

    def __init__(self, schemes: Mapping[str, Any] | None) -> None:
        self._schemes = dict(schemes or {})
        self._senders: dict[str, Any] = {}
        self._model: Any = None

    def of(self, model: Any, engine: Any) -> list[Any]:
        """The senders of a model's weights to an engine.

        Args:
            model: the trainer's, or a policy that scores with it, or a mapping of its weights; None is the one before.
            engine: that generates.

        Raises:
            ValueError: without a model at the first call, or without an engine.
        """
        if engine is None:
            raise ValueError("sending weights needs an engine that is reached from here: pass engine=.")
        if isinstance(model, TensorDictModuleBase):
            model = model.model
        if model is None and self._model is None:
            raise ValueError("the first update_policy_weights_ needs the trainer's model.")
        is_another = model is not None and model is not self._model
        self._model = model if is_another else self._model
        for name, scheme in (self._schemes or {"policy": default_scheme(engine)}).items():
            if name not in self._senders:
                sender = scheme.create_sender()
                sender.register_model(self._model)
                sender.init_all_workers_group(get_model_metadata(self._model), engine)
                self._senders[name] = sender
            elif is_another:
                self._senders[name].register_model(model)
        return list(self._senders.values())

    def shutdown(self) -> None:
        """End them; the engine stays."""
        for sender in self._senders.values():
            sender.shutdown()
        self._senders = {}

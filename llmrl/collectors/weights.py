"""The senders of a collector's weight-sync schemes, connected when the first update is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class HasEngine(Protocol):
    """What reaches the engines."""

    @property
    def engine(self) -> object:
        """What weights are sent to; None where it is not reached from here."""
        ...


class WeightSenders:
    """One sender for each scheme.

    Args:
        schemes: by policy name.
        source: whose engine weights are sent to.
    """

    def __init__(self, schemes: Mapping[str, Any], source: HasEngine) -> None:
        self._schemes, self._source = dict(schemes), source
        self._senders: dict[str, Any] = {}

    def connected(self, model: Any) -> list[Any]:
        """The senders, connected to the engines; `model`, the trainer's, is needed the first time alone.

        Raises:
            ValueError: without a scheme, without a model the first time, or where no engine is reached from here.
        """
        if not self._schemes:
            raise ValueError("an update of the weights needs weight_sync_schemes={'policy': scheme}.")
        for name, scheme in self._schemes.items():
            if name not in self._senders:
                self._senders[name] = self._connect(scheme, model)
        return list(self._senders.values())

    def _connect(self, scheme: Any, model: Any) -> Any:
        from llmrl.weight_sync import get_model_metadata

        if model is None:
            raise ValueError("the first update of the weights needs the trainer's model.")
        if self._source.engine is None:
            raise ValueError("weight_sync_schemes need an engine that is reached from here: pass engine=.")
        sender = scheme.create_sender()
        sender.register_model(model)
        sender.init_all_workers_group(get_model_metadata(model), self._source.engine)
        return sender

    def shutdown(self) -> None:
        """End the senders; the engines stay. May be called twice."""
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            sender.shutdown()

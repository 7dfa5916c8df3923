"""Small helpers over TensorDicts that hold ragged, partly non-tensor conversations."""

from __future__ import annotations

from typing import Any

from tensordict import NonTensorData, TensorDictBase


def plain(value: Any) -> Any:
    """The Python object behind a non-tensor leaf; anything else as it is."""
    return value.data if isinstance(value, NonTensorData) else value


def batch_elements(tensordict: TensorDictBase) -> list[TensorDictBase]:
    """The single conversations of a batch of any shape, without copying; a single conversation gives itself."""
    if not tensordict.batch_size:
        return [tensordict]
    return [leaf for element in tensordict.unbind(0) for leaf in batch_elements(element)]

"""Helpers for TensorDicts with ragged, partly non-tensor conversations."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor, lazy_stack

from llmrl._utils.arguments import refuse_unknown
from llmrl._utils.other_libraries import instead_of

Container = TypeVar("Container")
_NO_BATCH = torch.Size(())
RESERVED_ENTRIES = frozenset((
    "_reset", "action", "columns", "conversation", "done", "env_answer", "env_error", "env_info", "env_traceback",
    "finish_reason", "history", "log_probs", "masks", "message_env", "next", "policy_versions", "reward", "rollout",
    "routed_experts", "sampling_mask", "terminated", "text", "tokens", "tools", "truncated",
))  # fmt: skip
"""Names of entries with a reserved meaning; dataset columns with these names are stored in `"columns"`."""


def plain(value: object) -> Any:
    """Return the Python object of a non-tensor leaf, or any other value unchanged."""
    if not isinstance(value, NonTensorData):
        return value
    is_own = not (value._tensordict._is_shared or value._tensordict._is_memmap)
    return value._non_tensordict["data"] if is_own else value.data  # ten times faster than the attribute


def documented(cls: type[Container]) -> type[Container]:
    """Restore a class's docstring, which tensordict replaces, and refuse arguments that only TorchRL's class has.

    Example:
        >>> from tensordict import TensorClass
        >>> @documented
        ... class Note(TensorClass["nocast"]):
        ...     "A note."
        ...     _documentation = __doc__
        ...     text: str
        >>> Note.__doc__
        'A note.'
    """
    cls.__doc__ = cls._documentation  # type: ignore[attr-defined]
    refused = instead_of(cls.__name__)
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: Container, *args: object, **kwargs: object) -> None:
        refuse_unknown(cls.__name__, refused.keys() & kwargs, ())
        init(self, *args, **kwargs)

    if refused:
        type.__setattr__(cls, "__init__", checked)
    return cls


def batch_elements(tensordict: TensorDictBase) -> list[TensorDictBase]:
    """Return the single conversations of a batch of any shape, without copying."""
    if not tensordict.batch_size:
        return [tensordict]
    return [leaf for element in tensordict.unbind(0) for leaf in batch_elements(element)]


def restacked(elements: Sequence[TensorDictBase], shape: torch.Size) -> TensorDictBase:
    """Return the batch of shape `shape` from its `batch_elements`; entries stay ragged.

    Raises ValueError if there are no elements.

    Example:
        >>> restacked([TensorDict(a=torch.ones(n)) for n in (1, 2, 3, 4)], torch.Size([2, 2]))[1, 0]["a"].shape
        torch.Size([3])
    """
    if not shape:
        return elements[0]
    if not elements:
        raise ValueError(f"a batch of shape {list(shape)} has no conversation; give at least one.")
    stacked = lazy_stack(list(elements), 0)
    if len(shape) == 1:
        return stacked
    return stacked.reshape(shape)


# A turn creates a dozen small containers. The public constructors validate them, which costs four
# times as much as the rest of a turn, so these functions use tensordict's unchecked constructors.


def tensordict_of(entries: Mapping[str, object]) -> TensorDict:
    """Return a TensorDict of batch shape `[]` from tensors, containers and `non_tensor` leaves, without checks."""
    return TensorDict._new_unsafe(entries, batch_size=_NO_BATCH)


def container_of(cls: type[Container], entries: Mapping[str, object]) -> Container:
    """Return a tensorclass of batch shape `[]` from tensors, containers and leaves, without checks."""
    return _unchecked(cls, entries, dict.fromkeys(cls.__expected_keys__ - entries.keys()))  # type: ignore[attr-defined]


def non_tensor(value: object) -> NonTensorData:
    """Return a non-tensor leaf of batch shape `[]`."""
    return _unchecked(NonTensorData, {}, {**_NON_TENSOR_FIELDS, "data": value})


def _unchecked(cls: type[Container], entries: Mapping[str, object], others: dict[str, object]) -> Container:
    container = cls.__new__(cls)
    container.__dict__.update(_tensordict=tensordict_of(entries), _non_tensordict=others)
    return container


_NON_TENSOR_FIELDS = NonTensorData(data=None)._non_tensordict  # the first instance makes tensordict complete the class


def dataset_columns(element: TensorDictBase) -> dict[str, object]:
    """Return the dataset's columns of a conversation by name: non-tensor entries at its root and in `"columns"`."""
    columns = {
        key: plain(value) for key, value in element.items() if key not in RESERVED_ENTRIES and is_non_tensor(value)
    }
    apart = element.get("columns", None)
    if apart is None:
        return columns
    return {**columns, **{key: plain(value) for key, value in apart.items()}}

"""Saved states as safetensors files: loading one executes no code, and corruption is detected.

A state consists of nested containers with tensors. The file has the tensors by number, then `structure`, the JSON that
describes the containers, then `checksum`, the CRC-32 of everything before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, NonTensorData, NonTensorStack, TensorDict

from llmrl._utils.files import open_file
from llmrl._utils.json_values import as_json
from llmrl._utils.safetensors_file import DTYPES, is_sealed, places_of, write_safetensors
from llmrl._utils.types import JSON, StateDict
from llmrl.data import ChatHistory, History, LogProbs, Masks, Text, Tokens
from llmrl.data.history import Chat

_CONTAINERS = (ChatHistory, History, LogProbs, Masks, Text, Tokens)
_CONTAINERS_BY_NAME = {cls.__name__: cls for cls in _CONTAINERS}
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, MemoryMappedTensor)
_STRUCTURE = "structure"
_CHECKSUM = "checksum"
_MAX_DEPTH = 100


class DamagedFileError(ValueError):
    """Raised if a file of a run differs from what llmrl wrote."""


def save_state(path: Path, state: StateDict) -> None:
    """Write a state to a file.

    It may contain None, numbers, text, bytes, tensors, numpy arrays, lists, tuples, mappings, TensorDicts and llmrl's
    containers, nested in any way. Tensors are loaded on the CPU; a tensor that occurs twice is saved once.

    Raises TypeError if the state contains anything else; the message names the place.
    """
    encoder = _Encoder()
    structure = json.dumps(encoder.encode(state, "")).encode()
    tensors = {str(number): tensor for number, tensor in enumerate(encoder.tensors)}
    tensors[_STRUCTURE] = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
    entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_safetensors(path, entries, tensors.items(), checksum_name=_CHECKSUM)


def load_state(path: Path, *, advice: str, is_checked: bool = True) -> StateDict:
    """Read a file that `save_state` wrote. Tensors are memory-mapped from the file; writes to them stay private.

    Args:
        advice: instruction for the user if the file is damaged.
        is_checked: whether to verify the checksum, which reads the whole file; otherwise use only numbers and text.

    Raises:
        FileNotFoundError: if there is no file.
        DamagedFileError: if the file is damaged or of another format; the message ends with `advice`.
    """
    with open_file(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(9)
    try:
        buffer = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        if is_checked and not is_sealed(buffer):
            raise ValueError("its checksum does not match its content")
        places = {place.name: place for place in places_of(buffer)}
        structure = json.loads(bytes(places.pop(_STRUCTURE).view(buffer).numpy()))
        del places[_CHECKSUM]
        return cast(StateDict, _decode(structure, {name: place.view(buffer) for name, place in places.items()}))
    except Exception as error:  # a file of unknown origin may raise any error
        is_safetensors = start[8:9] == b"{"  # the header's size may look like a pickle's start
        is_pickle = start.startswith((b"PK", b"\x80")) and not is_safetensors
        found = "found a pickle, which is never read" if is_pickle else error
        raise DamagedFileError(f"{path} is damaged, or not from llmrl: {found} ({size} bytes). {advice}") from error


class _Encoder:
    """Converts a state to JSON, and collects its tensors."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[object, str] = {}

    def encode(self, value: object, where: str) -> JSON:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, list):
            return [self.encode(item, f"{where}[{place}]") for place, item in enumerate(value)]
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        kind, encoded = self._tagged(value, where)
        return {f"${kind}": encoded}

    def _tagged(self, value: object, where: str) -> tuple[str, JSON]:
        if isinstance(value, torch.Tensor):
            return "tensor", self._number(value, where)
        if isinstance(value, tuple):
            return "tuple", self.encode(list(value), where)
        if isinstance(value, bytes):
            return "bytes", list(value)
        if isinstance(value, np.ndarray | np.generic):
            return "array", self._number(torch.from_numpy(np.array(value)), where)
        if isinstance(value, Chat):
            # A policy may sample arguments of calls that are nested more deeply than Python can write and read.
            is_deep = _is_deeper(value.messages, _MAX_DEPTH)
            messages = tuple(map(as_json, value.messages)) if is_deep else value.messages
            return "chat", [self.encode(messages, where), value.is_message]
        if isinstance(value, NonTensorData):
            return "leaf", [self.encode(value.data, where), list(value.batch_size)]
        if isinstance(value, LazyStackedTensorDict):
            kind = "leaves" if isinstance(value, NonTensorStack) else "stack"
            return kind, [self.encode(value.tensordicts, where), value.stack_dim]
        if isinstance(value, TensorDict):
            return "tensordict", [self.encode(dict(value.items()), where), list(value.batch_size)]
        if isinstance(value, _CONTAINERS):
            return "container", [type(value).__name__, self.encode(value._tensordict, where)]
        if isinstance(value, Mapping):
            return "mapping", [
                [self.encode(key, where), self.encode(item, f"{where}[{key!r}]")] for key, item in value.items()
            ]
        raise TypeError(
            f"a run's files cannot hold the {type(value).__name__} at {where or 'the top'}: give numbers, text, "
            "tensors, lists, tuples, dicts or TensorDicts, so that reading them executes nothing."
        )

    def _number(self, tensor: torch.Tensor, where: str) -> str:
        if type(tensor) not in _TENSORS or tensor.layout != torch.strided or tensor.dtype not in DTYPES.values():
            raise TypeError(
                f"a run's files cannot hold the tensor at {where}: it is a {type(tensor).__name__} of {tensor.layout} "
                f"and {tensor.dtype}; give dense tensors of {', '.join(DTYPES)}."
            )
        # Tied weights are saved as one tensor.
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if not tensor.numel() or key not in self._numbers:
            self.tensors.append(tensor)
            self._numbers[key] = str(len(self.tensors) - 1)
        return self._numbers[key]


def _is_deeper(value: object, depth: int) -> bool:
    """Return whether a value is nested more than `depth` deep."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if not isinstance(value, list | tuple):
        return False
    return not depth or any(_is_deeper(entry, depth - 1) for entry in value)


def _decode(value: object, tensors: Mapping[str, torch.Tensor]) -> Any:
    def decoded(item: object) -> Any:
        return _decode(item, tensors)

    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": number}:
            tensor = tensors[number]
            # torch reads a generator's state from the start of the storage, so it must not be a view.
            return tensor.clone() if tensor.dtype == torch.uint8 else tensor
        case {"$tuple": items}:
            return tuple(decoded(items))
        case {"$bytes": numbers}:
            return bytes(numbers)
        case {"$array": number}:
            array = tensors[number].numpy()
            return array if array.ndim else array[()]
        case {"$chat": [dict() as messages, bool() as is_message]}:
            return Chat(decoded(messages), is_message=is_message)
        case {"$chat": [list() as messages, bool() as is_message]}:  # of older files, whose messages are plain JSON
            return Chat(messages, is_message=is_message)
        case {"$chat": messages}:  # of files that were written without the form
            return Chat(messages)
        case {"$leaf": [data, batch_size]}:
            return NonTensorData(decoded(data), batch_size=batch_size)
        case {"$leaves": [leaves, dim]}:
            return NonTensorStack(*decoded(leaves), stack_dim=dim)
        case {"$stack": [elements, dim]}:
            return LazyStackedTensorDict(*decoded(elements), stack_dim=dim)
        case {"$tensordict": [entries, batch_size]}:
            return TensorDict(decoded(entries), batch_size=batch_size)
        case {"$container": [name, entries]}:
            return _CONTAINERS_BY_NAME[name]._from_tensordict(decoded(entries))
        case {"$mapping": pairs}:
            return {decoded(key): decoded(item) for key, item in pairs}
    return {key: decoded(item) for key, item in value.items()}

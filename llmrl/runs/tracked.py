"""The states of a training loop's objects in a checkpoint, whole or sharded.

Each rank writes its shards in the background to a safetensors file, which `torch.distributed.checkpoint` reads on any
number of ranks. The checksums of these files and the states that are not sharded are in the checkpoint's own file.
"""

from __future__ import annotations

import json
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmrl._utils.files import open_file
from llmrl._utils.model_parts import has_quantized_base
from llmrl._utils.ranks import gathered, rank_and_size
from llmrl._utils.safetensors_file import write_safetensors
from llmrl._utils.types import StateDict
from llmrl.data.state_file import DamagedFileError
from llmrl.trainer.optimizer import MOMENT_BYTES
from llmrl.trainer.trained_model import trained_model

Place = tuple[str | int, ...]
"""Keys from the outermost dictionary to a tensor."""

_CHUNK = 1 << 24


class Stateful(Protocol):
    """An object that a checkpoint can contain."""

    def state_dict(self) -> StateDict:
        """Return the state: values that `llmrl.data.state_file` supports, and sharded tensors."""

    def load_state_dict(self, state_dict: StateDict) -> object:
        """Restore a state."""


def with_scaler(tracked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of a loop, with the loss scaler added if the model computes in float16."""
    model = tracked.get("model")
    if isinstance(model, torch.nn.Module) and (scaler := trained_model(model).scaler) is not None:
        return {**tracked, "scaler": scaler}
    return dict(tracked)


@dataclass(frozen=True, slots=True)
class Shards:
    """This rank's parts of the sharded tensors of a checkpoint; each rank writes a file of its own.

    Nothing is copied: the tensors must not change until they are written.
    """

    folder: Path
    names: list[tuple[Place, str]]
    """Where each sharded tensor is in the states, and its name in the files."""
    tensors: Mapping[Place, DTensor]

    def write(self) -> None:
        """Write this rank's file, one tensor at a time; the file's name contains its CRC-32."""
        own: dict[str, torch.Tensor] = {}
        offsets: dict[str, object] = {}
        for place, name in reversed(self.names):
            tensor = self.tensors[place]
            if tensor.to_local().numel() and _is_first_replica(tensor):
                _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
                own[name] = tensor.to_local()
                offsets[name] = {"saved_offsets": list(start)}
        rank = dist.get_rank()
        partial = self.folder / f"{rank:05d}.partial"
        entries = [(name, tensor.dtype, tensor.shape) for name, tensor in own.items()]
        _, crc = write_safetensors(partial, entries, own.items(), metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
        partial.replace(self.folder / f"{rank:05d}-{crc:08x}.safetensors")

    def record(self) -> StateDict:
        """Wait until all ranks have written their shards, and return the entry `shards` of the checkpoint's file."""
        while len(files := sorted(path.name for path in self.folder.glob("*.safetensors"))) < dist.get_world_size():
            time.sleep(0.01)
        return {"folder": self.folder.name, "names": self.names, "checksums": {name: _crc_in(name) for name in files}}


def _state_of(one: Stateful) -> StateDict:
    """Return the state of an object; for a model with a quantized base, only the state of its adapters.

    The base is loaded from the model's files again, because bitsandbytes does not load the state that it saves.
    """
    state = one.state_dict()
    if not isinstance(one, torch.nn.Module) or not has_quantized_base(one):
        return state
    return {name: state[name] for name, parameter in one.named_parameters() if parameter.requires_grad}


def save_split(state: StateDict, shards: Shards | None, save: Callable[[StateDict], object] | None) -> None:
    """Write this rank's shards; rank 0, which has `save`, then saves the state with their record."""
    if shards is not None:
        shards.write()
    if save is not None:
        save(state if shards is None else {**state, "shards": shards.record()})


def split_tracked(tracked: Mapping[str, Stateful], path: Path, step: int) -> tuple[StateDict, Shards | None]:
    """Return the states of a loop's objects for the checkpoint's file, and the shards for files of their own.

    Args:
        tracked: objects by name. All ranks call this function if an object has sharded tensors.
        path: folder of the run, which all ranks can access.
    """
    states: StateDict = {name: _state_of(one) for name, one in tracked.items()}
    tensors = {place: tensor for place, tensor in _tensors(states) if isinstance(tensor, DTensor)}
    if not tensors:
        return {"tracked": states}, None
    folder = path / f"shards-{step:06d}"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # from a run that was killed
        folder.mkdir(parents=True)
    return {"tracked": _without(states, tensors)}, Shards(folder, _names(tensors), tensors)


def check_free_space(tracked: Mapping[str, Stateful], checkpoint: Path, *, num_checkpoints: int) -> None:
    """Raise OSError if the disk has no room for the coming checkpoints; each is written beside the previous one.

    Args:
        tracked: objects by name. Only weights and the moments of optimizers are counted.
        checkpoint: file of the checkpoint, which may not exist yet.
        num_checkpoints: number of checkpoints that the run will write.
    """
    num_bytes = sum(map(_least_bytes, tracked.values()))
    num_kept = int(checkpoint.exists())
    needed = num_bytes * (min(2, num_kept + num_checkpoints) - num_kept)
    free = shutil.disk_usage(checkpoint.parent).free
    if needed > free:
        raise OSError(
            f"The run's checkpoints need {needed / 2**30:.1f} GiB more in {checkpoint.parent}, but its disk has only "
            f"{free / 2**30:.1f} GiB free. Free some space, or put the run on another disk with run.path."
        )


def _least_bytes(one: Stateful) -> int:
    """Return the least number of bytes of an object's state, after a step if it is an optimizer."""
    if isinstance(one, torch.nn.Module):
        is_whole = not has_quantized_base(one)
        parameters = [parameter for parameter in one.parameters() if is_whole or parameter.requires_grad]
        return sum(parameter.nbytes for parameter in parameters)
    if not isinstance(one, torch.optim.Optimizer):
        return 0
    # Only optimizers from `make_optimizer` say which moments they keep; other optimizers count as 0.
    return sum(
        MOMENT_BYTES[group["moments"]] * parameter.numel()
        for group in one.param_groups
        if "moments" in group
        for parameter in group["params"]
    )


def restore_tracked(tracked: Mapping[str, Stateful], checkpoint: StateDict, path: Path) -> None:
    """Restore the states of a loop's objects from the checkpoint at `path`, on any number of ranks.

    Raises ValueError if the checkpoint lacks an object, and DamagedFileError if the shards are damaged.
    """
    for name, state in states_of(checkpoint, path, tracked).items():
        one = tracked[name]
        if isinstance(one, torch.nn.Module) and has_quantized_base(one):
            one.load_state_dict(state, strict=False)
        else:
            one.load_state_dict(state)


def states_of(checkpoint: StateDict, path: Path, tracked: Mapping[str, Stateful]) -> dict[str, StateDict]:
    """Return the states of these objects in the checkpoint at `path`, sharded like the objects.

    Raises the errors of `restore_tracked`. All ranks call this function if a state or an object is sharded.
    """
    missing = [name for name in tracked if name not in checkpoint["tracked"]]
    if missing:
        raise ValueError(
            f"{path} has no state for {', '.join(missing)}, only for {', '.join(checkpoint['tracked'])}: another "
            "loop wrote it. Track the same objects, or name another folder with run.path."
        )
    states: dict[str, StateDict] = {name: checkpoint["tracked"][name] for name in tracked}
    layouts = dict(_layouts(tracked))
    if "shards" in checkpoint:
        _read_shards(states, checkpoint["shards"], path, layouts)
    elif layouts:
        for place, tensor in list(_tensors(states)):
            like = layouts.get(place, layouts.get(place[:-1]))
            if like is not None and like.shape == tensor.shape:
                part = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
                _put(states, place, part)
    return states


def _read_shards(states: StateDict, shards: StateDict, path: Path, layouts: Mapping[Place, DTensor]) -> None:
    """Read the shards into `states`: sharded like the objects of this loop, or whole if these are not sharded."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    folder = path.parent / shards["folder"]
    found, recorded = _checksums(folder), shards["checksums"]
    if found != recorded:
        names = sorted(name for name in found | recorded if found.get(name) != recorded.get(name))
        raise DamagedFileError(
            f"{folder} is damaged: {', '.join(names)} changed or missing. Restore it from a "
            "copy, or begin another run from an exported model in another folder."
        )
    reader = HuggingFaceStorageReader(str(folder))
    known: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    targets: dict[str, torch.Tensor] = {}
    for place, name in shards["names"]:
        if place[0] not in states:
            continue
        entry = known[name]
        like = layouts.get(place, layouts.get(place[:-1]))
        target = torch.empty(entry.size, dtype=entry.properties.dtype) if like is None else torch.empty_like(like)
        _put(states, place, targets.setdefault(name, target))
    load(targets, storage_reader=reader, no_dist=not dist.is_initialized())


def _layouts(tracked: Mapping[str, Stateful]) -> Iterator[tuple[Place, DTensor]]:
    """Yield the place of each sharded state with a tensor of the same layout; for an optimizer, the parameter."""
    for name, one in tracked.items():
        if isinstance(one, torch.optim.Optimizer):
            parameters = [parameter for group in one.param_groups for parameter in group["params"]]
            places: Any = (((name, "state", number), parameter) for number, parameter in enumerate(parameters))
        else:
            places = _tensors({name: one.state_dict()})
        yield from ((place, tensor) for place, tensor in places if isinstance(tensor, DTensor))


def _names(shards: Mapping[Place, DTensor]) -> list[tuple[Place, str]]:
    """Return the name of each tensor in the files; tied weights have one name."""
    first: dict[int, str] = {}
    names = [
        (place, first.setdefault(tensor.to_local().data_ptr(), "/".join(map(str, place))))
        for place, tensor in shards.items()
    ]
    # Only the names of rank 0 are reliable: other ranks may have an empty part of a small tensor, without an address.
    dist.broadcast_object_list(names, src=0)
    return names


def _checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each safetensors file in a folder; the ranks share the work."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, num_ranks = rank_and_size(group)
    own = {path.name: _crc(path) for path in sorted(folder.glob("*.safetensors"))[rank::num_ranks]}
    return {name: crc for part in gathered(own, group) for name, crc in part.items()}


def _is_first_replica(tensor: DTensor) -> bool:
    """Return whether no lower rank has the same part of a tensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "the mesh contains all ranks"
    return all(not at or placement.is_shard() for at, placement in zip(coordinate, tensor.placements, strict=True))


def _crc_in(name: str) -> int:
    return int(name.removesuffix(".safetensors").rpartition("-")[2], 16)


def _crc(path: Path) -> int:
    crc = 0
    with open_file(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _tensors(states: Mapping[Any, Any], place: Place = ()) -> Iterator[tuple[Place, torch.Tensor]]:
    for key, value in states.items():
        if isinstance(value, torch.Tensor):
            yield (*place, key), value
        elif isinstance(value, Mapping):
            yield from _tensors(value, (*place, key))


def _without(states: StateDict, places: Mapping[Place, object], place: Place = ()) -> StateDict:
    return {
        key: _without(value, places, (*place, key)) if isinstance(value, dict) else value
        for key, value in states.items()
        if (*place, key) not in places
    }


def _put(states: dict[Any, Any], place: Place, tensor: torch.Tensor) -> None:
    for key in place[:-1]:
        states = states[key]
    states[place[-1]] = tensor

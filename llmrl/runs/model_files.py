"""A trained model's files in the format of its checkpoint, written one parameter at a time."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from llmrl.trainer.trained_model import trained_model
from llmrl.weight_sync.source import ModelWeights, WeightMeta, base_of, checkpoint_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ExportedModel:
    """The weights of a model as files of its checkpoint have them, in the dtype of serving and with adapters merged.

    They are read when they are written, unless they were copied before. A sharded model's parameters are gathered one
    after the other (collective: rank 0 writes while every other rank calls `gather`).

    Args:
        model: a model of transformers, or of peft over one; what encodes images is left out.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.base: PreTrainedModel = cast("PreTrainedModel", base_of(model))
        self._dtype = trained_model(model).compute_dtype or torch.float32
        self._parts = [ModelWeights(model, self._dtype)]
        parameters = dict(self.base.named_parameters(remove_duplicate=False))
        saved = self.base.state_dict().keys() - parameters.keys()
        buffers = {checkpoint_name(name): one for name, one in self.base.named_buffers() if name in saved}
        if buffers:  # in their own dtype
            self._parts.append(ModelWeights(model))
            self._parts[-1].override = buffers
        self._copied: list[tuple[str, torch.Tensor]] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are sharded over processes."""
        return self._parts[0].is_sharded

    def copy_to_host(self) -> None:
        """Copy the weights to host memory, so that training may change them before they are written."""
        self._copied = list(self._on_host())

    def gather(self) -> None:
        """Take part in the gathering of the weights that another rank writes."""
        for part in self._parts:
            part.gather_the_rest()

    def write(self, folder: Path, max_shard_size: str) -> None:
        """Write the weights and the configuration, as `save_pretrained` of transformers does.

        Args:
            folder: an existing folder.
            max_shard_size: the most of a file, such as "5GB"; larger models are written to several. The weights of a
                file are held in host memory.
        """
        from huggingface_hub import split_state_dict_into_shards_factory
        from safetensors.torch import save_file

        metadata = {one.name: one for part in self._parts for one in part.metadata()}
        split = split_state_dict_into_shards_factory(
            metadata,
            get_storage_size=_num_bytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        held: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in self._copied or self._on_host():
            file = split.tensor_to_filename[name]
            held.setdefault(file, {})[name] = tensor
            if len(held[file]) == len(split.filename_to_tensors[file]):
                save_file(held.pop(file), folder / file, metadata={"format": "pt"})
        if split.is_sharded:
            num_parameters = sum(math.prod(one.shape) for one in self._parts[0].metadata())  # buffers are none
            sizes = {"total_parameters": num_parameters, **split.metadata}
            index = {"metadata": sizes, "weight_map": split.tensor_to_filename}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        self._write_configuration(folder)

    def _write_configuration(self, folder: Path) -> None:
        config = copy.deepcopy(self.base.config)
        config.dtype = self._dtype
        config.architectures = [type(self.base).__name__]
        config.save_pretrained(folder)
        if self.base.can_generate():
            self.base.generation_config.save_pretrained(folder)

    def _on_host(self) -> Iterator[tuple[str, torch.Tensor]]:
        kinds = chain.from_iterable(part.metadata() for part in self._parts)
        tensors = chain.from_iterable(part.uncast() for part in self._parts)
        for meta, (name, tensor) in zip(kinds, tensors, strict=True):
            yield name, torch.empty(meta.shape, dtype=meta.dtype).copy_(tensor)


def _num_bytes(weight: WeightMeta) -> int:
    return math.prod(weight.shape) * weight.dtype.itemsize

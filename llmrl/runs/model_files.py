"""A trained model's files in the format of its checkpoint, written one parameter at a time."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from llmrl._utils.safetensors_file import write_safetensors
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
        self._parameters = ModelWeights(model, self._dtype)
        self._buffers = ModelWeights(model)  # in their own dtype
        parameters = dict(self.base.named_parameters(remove_duplicate=False))
        saved = self.base.state_dict().keys() - parameters.keys()
        self._buffers.override = {
            checkpoint_name(name): one for name, one in self.base.named_buffers() if name in saved
        }
        self._copied: list[tuple[str, torch.Tensor]] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are sharded over processes."""
        return self._parameters.is_sharded

    def copy_to_host(self) -> None:
        """Copy the weights to host memory, so that training may change them before they are written."""
        self._copied = list(self._read())

    def gather(self) -> None:
        """Take part in the gathering of the weights that another rank writes."""
        self._parameters.gather_the_rest()

    def write(self, folder: Path, max_shard_size: str) -> None:
        """Write the weights and the configuration, as `save_pretrained` of transformers does.

        Args:
            folder: an existing folder.
            max_shard_size: the most that a file has, such as "5GB"; larger models are written to several. A larger
                parameter has a file of its own.
        """
        limit = int(max_shard_size[:-2]) * 1000 ** (1 + "KMGT".index(max_shard_size[-2]))
        files: list[list[WeightMeta]] = [[]]
        sizes: list[int] = [0]
        for weight in self._metadata():
            size = _num_bytes(weight)
            if files[-1] and sizes[-1] + size > limit:
                files.append([])
                sizes.append(0)
            files[-1].append(weight)
            sizes[-1] += size
        weights = iter(self._copied or self._read())
        index: dict[str, str] = {}
        for number, entries in enumerate(files, start=1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            write_safetensors(folder / name, entries, islice(weights, len(entries)), metadata={"format": "pt"})
            index |= {entry.name: name for entry in entries}
        if len(files) > 1:
            num_parameters = sum(math.prod(weight.shape) for weight in self._parameters.metadata())
            totals = {"total_parameters": num_parameters, "total_size": sum(sizes)}
            text = json.dumps({"metadata": totals, "weight_map": index}, indent=2)
            (folder / "model.safetensors.index.json").write_text(text)
        self._write_configuration(folder)

    def _write_configuration(self, folder: Path) -> None:
        config = copy.deepcopy(self.base.config)
        config.dtype = self._dtype
        config.architectures = [type(self.base).__name__]
        config.save_pretrained(folder)
        if self.base.can_generate():
            self.base.generation_config.save_pretrained(folder)

    def _parts(self) -> list[ModelWeights]:
        # Buffers first: they may have wider dtypes, which a file begins with.
        return [self._buffers, self._parameters] if self._buffers.override else [self._parameters]

    def _metadata(self) -> list[WeightMeta]:
        return [weight for part in self._parts() for weight in part.metadata()]

    def _read(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = chain.from_iterable(part.uncast() for part in self._parts())
        for weight, (name, tensor) in zip(self._metadata(), tensors, strict=True):
            yield name, torch.empty(weight.shape, dtype=weight.dtype).copy_(tensor)


def _num_bytes(weight: WeightMeta) -> int:
    return math.prod(weight.shape) * weight.dtype.itemsize

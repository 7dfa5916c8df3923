"""Writes a trained model in the format of its checkpoint: weights one at a time, and encoders unchanged."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from llmrl._utils.model_parts import has_encoders, leave_out_encoders
from llmrl._utils.safetensors_file import write_safetensors
from llmrl.trainer.trained_model import trained_model
from llmrl.weight_sync.source import ModelWeights, WeightMeta, base_of, checkpoint_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ENCODERS = "model-encoders.safetensors"
_SINGLE = "model.safetensors"
_LANGUAGE = "model-language.safetensors"
_INDEX = "model.safetensors.index.json"
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


class ExportedModel:
    """The weights of a model under the names of its checkpoint, in the compute dtype and with adapters merged.

    `write` reads the weights from the model, unless `copy_to_host` was called before. The parameters of a sharded model
    are gathered one at a time (collective: rank 0 calls `write` while every other rank calls `gather`).

    Args:
        model: a transformers model, or a peft model around one; its image encoders are left out.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.base: PreTrainedModel = cast("PreTrainedModel", base_of(model))
        self._dtype = trained_model(model).compute_dtype or torch.float32
        self._parameters = ModelWeights(model, self._dtype)
        parameters = dict(self.base.named_parameters(remove_duplicate=False))
        saved = self.base.state_dict().keys() - parameters.keys()
        self._buffers = {checkpoint_name(name): one for name, one in self.base.named_buffers() if name in saved}
        self._parts = [self._parameters]
        if self._buffers:  # in their own dtype; first, because a file begins with its widest dtype
            self._parts.insert(0, ModelWeights(model))
            self._parts[0].override = self._buffers
        self._copied: list[tuple[str, torch.Tensor]] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are sharded over processes."""
        return self._parameters.is_sharded

    def copy_to_host(self) -> None:
        """Copy the weights to host memory, so that training may change them before they are written."""
        self._copied = [(name, tensor.to("cpu", copy=True)) for name, tensor in chain.from_iterable(self._parts)]

    def gather(self) -> None:
        """Take part in gathering the weights that rank 0 writes."""
        self._parameters.gather_the_rest()

    def write(self, folder: Path, max_shard_size: str) -> None:
        """Write the weights and the configuration in the layout of transformers' `save_pretrained`.

        Args:
            folder: an existing folder.
            max_shard_size: maximum size of a file, such as "5GB"; larger models are split into
                several files. A larger parameter gets a file of its own.
        """
        limit = int(max_shard_size[:-2]) * 1000 ** (1 + "KMGT".index(max_shard_size[-2]))
        files: list[list[WeightMeta]] = [[]]
        sizes: list[int] = [0]
        for weight in (one for part in self._parts for one in part.metadata()):
            size = math.prod(weight.shape) * weight.dtype.itemsize
            if files[-1] and sizes[-1] + size > limit:
                files.append([])
                sizes.append(0)
            files[-1].append(weight)
            sizes[-1] += size
        weights = iter(self._copied or chain.from_iterable(self._parts))
        index: dict[str, str] = {}
        for number, entries in enumerate(files, start=1):
            name = _SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            write_safetensors(folder / name, entries, islice(weights, len(entries)), metadata={"format": "pt"})
            index |= {entry.name: name for entry in entries}
        if len(files) > 1:
            num_values = sum(math.prod(weight.shape) for entries in files for weight in entries)
            num_parameters = num_values - sum(buffer.numel() for buffer in self._buffers.values())
            totals = {"total_parameters": num_parameters, "total_size": sum(sizes)}
            text = json.dumps({"metadata": totals, "weight_map": index}, indent=2)
            (folder / _INDEX).write_text(text)
        self._write_configuration(folder)

    def _write_configuration(self, folder: Path) -> None:
        config = copy.deepcopy(self.base.config)
        if hasattr(config, "quantization_config"):  # the written weights are not quantized
            del config.quantization_config
        config.dtype = self._dtype
        config.architectures = [type(self.base).__name__]
        config.save_pretrained(folder)
        if self.base.can_generate():
            self.base.generation_config.save_pretrained(folder)


def copy_encoders(source: str, folder: Path, model: PreTrainedModel) -> None:
    """Copy the encoders of the checkpoint `source`, unchanged, to `folder`, which holds the language model.

    Does nothing for a model without encoders. Raises OSError if the checkpoint is no longer on this machine.
    """
    if not has_encoders(model):
        return
    from safetensors.torch import save_file

    checkpoint = _folder_of(source)
    weights = _encoders_of(checkpoint, model)
    if weights:
        save_file(weights, folder / _ENCODERS, metadata={"format": "pt"})
        _add_to_index(folder, weights)
    for name in _PROCESSORS:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)


def _folder_of(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, local_files_only=True))


def _encoders_of(checkpoint: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint that belong to the full model class but not to its language model."""
    from safetensors import safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    with torch.device("meta"):
        whole = type(model)(model.config)
    conversions = get_model_conversion_mapping(whole)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    known = whole.state_dict()
    leave_out_encoders(whole)
    left_out = known.keys() - whole.state_dict().keys()
    weights = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # the file is not a mapping
                own, _ = rename_source_key(name, renamings, converters, whole.base_model_prefix, known)
                if own in left_out:
                    weights[name] = file.get_tensor(name)
    return weights


def _add_to_index(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text())
    else:  # transformers would read only a file with the usual name, so rename it
        (folder / _SINGLE).rename(folder / _LANGUAGE)
        with safe_open(folder / _LANGUAGE, "pt") as file:
            index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), _LANGUAGE)}
    index["weight_map"] |= dict.fromkeys(weights, _ENCODERS)
    (folder / _INDEX).write_text(json.dumps(index, indent=2))

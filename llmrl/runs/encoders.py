"""Copy of the encoders of a checkpoint with images, which training leaves as they are, into a saved model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llmrl._utils.model_parts import has_encoders, leave_out_encoders

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILE = "model-encoders.safetensors"
_SINGLE = "model.safetensors"
_LANGUAGE = "model-language.safetensors"
_INDEX = "model.safetensors.index.json"
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def copy_encoders(source: str, folder: Path, model: PreTrainedModel) -> None:
    """Add the encoders of the checkpoint `source` to `folder`, which holds its language model, bit by bit.

    Does nothing for a model without encoders. Raises OSError if the checkpoint is not on this machine any more.
    """
    if not has_encoders(model):
        return
    from safetensors.torch import save_file

    checkpoint = _folder_of(source)
    weights = _encoders_of(checkpoint, model)
    if weights:
        save_file(weights, folder / _FILE, metadata={"format": "pt"})
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
    """Return the weights of a checkpoint that its whole class has and the language model does not."""
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
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                own, _ = rename_source_key(name, renamings, converters, whole.base_model_prefix, known)
                if own in left_out:
                    weights[name] = file.get_tensor(name)
    return weights


def _add_to_index(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text())
    else:  # transformers would read a file of the usual name alone
        (folder / _SINGLE).rename(folder / _LANGUAGE)
        with safe_open(folder / _LANGUAGE, "pt") as file:
            index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), _LANGUAGE)}
    index["weight_map"] |= dict.fromkeys(weights, _FILE)
    (folder / _INDEX).write_text(json.dumps(index, indent=2))

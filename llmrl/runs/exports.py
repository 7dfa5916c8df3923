"""Export of the model in Hugging Face format during training: writes and pushes happen in the background."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llmrl._utils.files import check_entries, write_folder_atomically
from llmrl._utils.model_parts import has_encoders, leave_out_encoders
from llmrl.config.ranks import broadcast_from_rank0, this_rank
from llmrl.config.sections import ScriptConfig
from llmrl.runs.encoders import copy_encoders
from llmrl.runs.report import RunResults
from llmrl.runs.run_card import run_card
from llmrl.runs.run_folder import BackgroundWrites
from llmrl.trainer.model.checkpoint_format import conversions_of
from llmrl.trainer.trained_model import trained_model
from llmrl.weight_sync.source import named_weights

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from transformers import PreTrainedModel


class Exports:
    """Exports of a run's model: `exports/step-000050`, `model-best`, `model`, and a repository on the hub.

    An export contains the weights of one step, in the dtype of serving and with adapters merged, the tokenizer and a
    model card. The weights are copied to host memory, and a thread writes them while training continues; the next
    export waits for the thread, so there is at most one copy. A push is skipped while another one is running. A failed
    push is reported and does not end the run.

    If the model is sharded, all ranks call the same methods, and rank 0 writes.
    """

    def __init__(self, cfg: ScriptConfig, say: Callable[[str], object]) -> None:
        self._cfg = cfg
        self._path = Path(cfg.run.path)
        self._say = say
        self._writes = BackgroundWrites()
        self._pushed: Future[CommitInfo] | None = None
        self._being_pushed: Path | None = None

    def start(self, step: int, model: PreTrainedModel, metrics: Mapping[str, float], summary: RunResults) -> None:
        """Begin the export of a step's weights. Raises any exception of the previous export."""
        self._writes.wait()
        copied = copy_to_host(model)
        if copied is not None:
            path = self._path / "exports" / f"step-{step:06d}"
            self._writes.start(self._export, copied, path, run_card(self._cfg, step, metrics, summary), step)

    def save(
        self, path: Path, step: int, model: PreTrainedModel, metrics: Mapping[str, float], summary: RunResults
    ) -> None:
        """Write a step's weights to a folder, and wait until they are written."""
        self._writes.wait()
        copied = copy_to_host(model)
        if copied is not None:
            self._write(copied, path, run_card(self._cfg, step, metrics, summary))

    def finish(self, step: int, model: PreTrainedModel, metrics: Mapping[str, float], summary: RunResults) -> None:
        """Write the last weights to `model`, push them, and wait for the push."""
        path = self._path / "model"
        self.save(path, step, model, metrics, summary)
        if self._cfg.export.push_to_hub is not None and this_rank() == 0:
            self._await_push()
            self._push(path, step)
            self._await_push()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self._writes.wait()

    def _write(self, model: PreTrainedModel, path: Path, card: str) -> None:
        limit = self._cfg.export.max_shard_size
        write_model(model, path, self._path / "tokenizer", card, limit, self._cfg.model.folder)

    def _export(self, model: PreTrainedModel, path: Path, card: str, step: int) -> None:
        self._write(model, path, card)
        if self._cfg.export.push_to_hub is not None and (self._pushed is None or self._pushed.done()):
            self._await_push()
            self._push(path, step)
        if (num_kept := self._cfg.export.save_total_limit) is not None:
            for old in exports_of(self._path)[:-num_kept]:
                if old != self._being_pushed:
                    shutil.rmtree(old)

    def _push(self, path: Path, step: int) -> None:
        from huggingface_hub import HfApi

        assert self._cfg.export.push_to_hub is not None
        self._being_pushed = path
        self._pushed = HfApi().upload_folder(
            repo_id=self._cfg.export.push_to_hub,
            folder_path=path,
            commit_message=f"Weights after step {step}",
            run_as_future=True,
        )

    def _await_push(self) -> None:
        """Wait for the push and report its failure."""
        pushed = self._pushed
        path = self._being_pushed
        self._pushed = self._being_pushed = None
        if pushed is not None and (error := pushed.exception()) is not None:
            self._say(
                f"{path} was not pushed to {self._cfg.export.push_to_hub} ({type(error).__name__}: {error}). By hand: "
                f"llmrl push {self._path} {self._cfg.export.push_to_hub}"
            )


def open_repository(name: str, *, is_public: bool = False) -> None:
    """Create a repository for a model on the hub, if it does not exist.

    Args:
        name: such as `me/my-model`.
        is_public: whether a new repository is public; an existing one is not changed.

    Raises ValueError if the name is invalid, and OSError if the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(name, private=not is_public, exist_ok=True)
    except ValueError:
        raise
    except Exception as error:  # the class depends on the hub's HTTP library
        raise OSError(
            f"the hub does not let you push to the repository {name!r} ({type(error).__name__}: {error}). Log in "
            "with `hf auth login`, or name a repository that you may write to."
        ) from error


def push_folder(folder: Path, repository: str, *, is_public: bool = False) -> str:
    """Push a model's folder to a repository on the hub (`open_repository`), and return its URL.

    Raises FileNotFoundError if the folder has no model, UnsafeFileError if it has a link, and OSError if the hub cannot
    be reached or refuses.
    """
    from huggingface_hub import HfApi

    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} holds no model to push: there is no config.json in it.")
    check_entries(folder, ["*"])  # the target of a link would be pushed
    open_repository(repository, is_public=is_public)
    try:
        HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Push {folder.name}")
    except Exception as error:
        raise OSError(f"{folder} was not pushed to {repository!r} ({type(error).__name__}: {error}).") from error
    return f"{HfApi().endpoint}/{repository}"


def exports_of(run: Path) -> list[Path]:
    """Return the folders of a run's exports, sorted by step."""
    return sorted((run / "exports").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def copy_to_host(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a copy of a model on the host, in the dtype of serving and with adapters merged.

    All ranks call this if the model is sharded; only rank 0 gets the copy, the others get None.
    """
    broadcast_from_rank0(None)  # the other ranks wait here while rank 0 writes
    dtype = trained_model(model).compute_dtype or torch.float32
    base: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    weights = {}
    for name, tensor in named_weights(model):
        if this_rank() == 0:
            weights[name] = tensor.to("cpu", dtype, copy=True)
    if this_rank() > 0:
        return None
    kept = base.state_dict().keys() - dict(base.named_parameters(remove_duplicate=False)).keys()
    buffers = {name: tensor.to("cpu", copy=True) for name, tensor in base.named_buffers() if name in kept}
    config = copy.deepcopy(base.config)
    config.dtype = dtype
    with torch.device("meta"):
        served = type(base)(config).to(dtype)
    if has_encoders(served):
        leave_out_encoders(served)
    # The names and the layout of the checkpoint that was loaded.
    served._weight_conversions = conversions_of(base) or None
    served.load_state_dict(weights | buffers, strict=False, assign=True)
    served.tie_weights()
    served.generation_config = copy.deepcopy(base.generation_config)
    return served


def write_model(
    model: PreTrainedModel, path: Path, tokenizer: Path, card: str, max_shard_size: str, source: str
) -> None:
    """Write a model, a tokenizer's files and a card to a folder, atomically.

    What the model has no part of, the encoders of images, is copied from the checkpoint `source` as it is.
    """

    def write(folder: Path) -> None:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        copy_encoders(source, folder, model)
        shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
        (folder / "README.md").write_text(card, encoding="utf-8")

    path.parent.mkdir(exist_ok=True)
    write_folder_atomically(path, write)

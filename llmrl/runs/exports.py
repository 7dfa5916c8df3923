"""Export of the model in Hugging Face format during training: writes and pushes happen in the background."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from llmrl._utils.files import check_entries, write_folder_atomically
from llmrl.config.ranks import broadcast_from_rank0, this_rank
from llmrl.config.sections import ScriptConfig
from llmrl.runs.model_files import ExportedModel, copy_encoders
from llmrl.runs.report import RunResults
from llmrl.runs.run_card import run_card
from llmrl.runs.run_folder import BackgroundWrites

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from transformers import PreTrainedModel


class Exports:
    """Exports of a run's model: `exports/step-000050`, `model-best`, `model`, and a repository on the hub.

    An export contains the weights of one step (in the compute dtype, with adapters merged), the tokenizer and a model
    card. The weights are copied to host memory, and a thread writes them while training continues.
    The next export waits for the thread, so there is at most one copy. A push is skipped while
    another push is running. A failed push is reported and does not end the run.

    If the model is sharded, all ranks call the same methods, and training waits: the ranks gather
    the parameters one at a time, and rank 0 writes them.
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
        exported = self._read(model)
        if exported is None:
            return
        path = self._path / "exports" / f"step-{step:06d}"
        card = run_card(self._cfg, step, metrics, summary)
        if exported.is_sharded:
            self._export(exported, path, card, step)
        else:
            exported.copy_to_host()
            self._writes.start(self._export, exported, path, card, step)

    def save(
        self, path: Path, step: int, model: PreTrainedModel, metrics: Mapping[str, float], summary: RunResults
    ) -> None:
        """Write a step's weights to a folder, and wait until they are written."""
        exported = self._read(model)
        if exported is not None:
            self._write(exported, path, run_card(self._cfg, step, metrics, summary))

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

    def _read(self, model: PreTrainedModel) -> ExportedModel | None:
        """Return the model for rank 0 to write; the other ranks take part in gathering it, and get None."""
        self._writes.wait()
        broadcast_from_rank0(None)  # the other ranks wait here while rank 0 writes something else
        exported = ExportedModel(model)
        if this_rank() == 0:
            return exported
        exported.gather()
        return None

    def _write(self, model: ExportedModel, path: Path, card: str) -> None:
        limit = self._cfg.export.max_shard_size
        write_model(model, path, self._path / "tokenizer", card, limit, self._cfg.model.folder)

    def _export(self, model: ExportedModel, path: Path, card: str, step: int) -> None:
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
        pushed = self._pushed
        path = self._being_pushed
        self._pushed = self._being_pushed = None
        if pushed is not None and (error := pushed.exception()) is not None:
            self._say(
                f"{path} was not pushed to {self._cfg.export.push_to_hub} ({type(error).__name__}: {error}). To "
                f"push it by hand: llmrl push {self._path} {self._cfg.export.push_to_hub}"
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
    except Exception as error:  # its class depends on the HTTP library of huggingface_hub
        raise OSError(
            f"the hub does not let you push to the repository {name!r} ({type(error).__name__}: {error}). Log in "
            "with `hf auth login`, or name a repository that you may write to."
        ) from error


def push_folder(folder: Path, repository: str, *, is_public: bool = False) -> str:
    """Push a model's folder to a repository on the hub (`open_repository`), and return its URL.

    Raises FileNotFoundError if the folder has no model, UnsafeFileError if it contains a link, ValueError if the name
    of the repository is invalid, and OSError if the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi

    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} holds no model to push: config.json is missing.")
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


def write_model(model: ExportedModel, path: Path, tokenizer: Path, card: str, max_shard_size: str, source: str) -> None:
    """Write a model, a tokenizer's files and a card to a folder, atomically.

    Image encoders, which the trained model does not contain, are copied unchanged from the checkpoint `source`.
    """

    def write(folder: Path) -> None:
        model.write(folder, max_shard_size)
        copy_encoders(source, folder, model.base)
        shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
        (folder / "README.md").write_text(card, encoding="utf-8")

    path.parent.mkdir(exist_ok=True)
    write_folder_atomically(path, write)

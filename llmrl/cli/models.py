"""Lookup of the model that a command names, and its renderer."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from rich.console import Console

from llmrl.rendering import Renderer, make_renderer
from llmrl.runs.exports import exports_of
from llmrl.runs.run_folder import holds_run
from llmrl.testing.embedded_model import ensure_embedded_model

if TYPE_CHECKING:
    from llmrl.engines import AsyncVLLM


def model_path(name: str) -> str:
    """Return the path or name that vLLM loads for a command's `--model`.

    For `embedded` this is the embedded model; for a run its trained model, or its last export if the run has not ended.

    Raises:
        FileNotFoundError: if the path does not exist, if the folder has no model, or if a name on
            the hub cannot be downloaded.

    Example:
        >>> model_path("./no-such-folder")
        Traceback (most recent call last):
        ...
        FileNotFoundError: --model is './no-such-folder', which is no folder here and no name on the hub.
    """
    if name == "embedded":
        return str(ensure_embedded_model())
    path = Path(name)
    if (path / "model").exists():
        return str(path / "model")
    if exports := exports_of(path):
        return str(exports[-1])
    if holds_run(path):
        raise FileNotFoundError(
            f"--model is {name!r}, a run that has not written its model; training writes it at the end."
        )
    if path.is_dir() and not (path / "config.json").exists():
        raise FileNotFoundError(f"--model is {name!r}, a folder without a model: there is no config.json in it.")
    # organisation/model is a name on the hub, unless there is a local folder `organisation`.
    is_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if not path.exists() and (is_path or ("/" in name and path.parent.is_dir())):
        raise FileNotFoundError(f"--model is {name!r}, which is no folder here and no name on the hub.")
    if not path.exists():
        _check_hub(name)
    return name


def _check_hub(name: str) -> None:
    """Raise FileNotFoundError at once if a name is not in the cache and cannot be downloaded."""
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    host = urlsplit(constants.ENDPOINT)
    why = ""
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    elif not getproxies():
        try:
            port = host.port or {"http": 80}.get(host.scheme, 443)
            socket.create_connection((host.hostname or "", port), timeout=3).close()
        except OSError as error:
            why = f"{host.hostname} cannot be reached ({error})"
    if why:
        raise FileNotFoundError(
            f"--model is {name!r}, a name on the hub: it is not in {constants.HF_HUB_CACHE}, and {why}. Give the "
            "folder of a model, or embedded."
        )


@dataclass(frozen=True, slots=True)
class ChatModel:
    """Model of a command, resolved before an engine is started."""

    path: str
    """Path or name that vLLM loads."""
    max_model_len: int
    """Maximum number of tokens of prompt and answer together, within the model's context."""
    renderer: Renderer

    @classmethod
    def find(cls, name: str, max_model_len: int, chat_template: Path | None, console: Console) -> ChatModel:
        """Resolve a model by its name; print a note if its context is shorter than `max_model_len`."""
        from transformers import AutoConfig

        path = model_path(name)
        config = AutoConfig.from_pretrained(path).get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or max_model_len
        if max_model_len > longest:
            console.print(
                f"--max-model-len is {longest}, the length of the model's context, in place of {max_model_len}"
            )
        return cls(path, min(max_model_len, longest), make_chat_renderer(path, chat_template))

    def start_engine(self, console: Console, *, seed: int = 0, num_replicas: int | None = None) -> AsyncVLLM:
        """Start vLLM with this model, several times with `num_replicas`."""
        from llmrl.engines import AsyncVLLM

        console.print(f"vLLM starts with {self.path}", soft_wrap=True)
        return AsyncVLLM.from_pretrained(
            self.path, num_replicas=num_replicas, max_model_len=self.max_model_len, seed=seed
        )


def make_chat_renderer(path: str, chat_template: Path | None) -> Renderer:
    """Return the renderer of a model's conversations, with its own template or that of a file.

    Raises:
        ValueError: if the model has no template, or if its template cannot be rendered exactly.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text()
    elif not tokenizer.chat_template:
        raise ValueError(
            f"{path} has no chat template: it is a base model, or its template is lost. Give the template that it was "
            "trained with by --chat-template FILE, or use a model that was trained to converse."
        )
    return make_renderer(tokenizer)

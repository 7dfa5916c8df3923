"""Which model a command means."""

from __future__ import annotations

from pathlib import Path

from llmrl.runs.run_folder import holds_run
from llmrl.testing.embedded_model import ensure_embedded_model


def model_path(name: str) -> str:
    """Return what vLLM loads: the embedded model, of a training run its trained model, else the name itself.

    Raises:
        FileNotFoundError: for a path where nothing is, or a folder without a model, such as that of a run that has
            not ended yet.

    Example:
        >>> model_path("organisation/model")
        'organisation/model'
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
    if holds_run(path):
        raise FileNotFoundError(f"--model is {name!r}, a run that has not written its model: it does when it ends.")
    if path.is_dir() and not (path / "config.json").exists():
        raise FileNotFoundError(f"--model is {name!r}, a folder without a model: there is no config.json in it.")
    # organisation/model is a name on the hub, unless the first is a folder here.
    is_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if not path.exists() and (is_path or ("/" in name and path.parent.is_dir())):
        raise FileNotFoundError(f"--model is {name!r}, which is no folder here and no name on the hub.")
    return name

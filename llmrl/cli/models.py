"""Which model a command means."""

from __future__ import annotations

from pathlib import Path

from llmrl.embedded_model import ensure_embedded_model


def model_path(name: str) -> str:
    """What vLLM loads: the embedded model, of a training run its trained model, else the name itself.

    Example:
        >>> model_path("organisation/model")
        'organisation/model'
    """
    if name == "embedded":
        return str(ensure_embedded_model())
    of_run = Path(name) / "model"
    return str(of_run) if of_run.exists() else name

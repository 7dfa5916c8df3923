"""What a training loop has that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from llmrl._utils.types import StateDict


class Stateful(Protocol):
    """What a checkpoint can hold."""

    def state_dict(self) -> StateDict:
        """Everything needed to go on, as `llmrl.runs.state_file` can write it."""
        ...

    def load_state_dict(self, state_dict: StateDict) -> object:
        """The reverse of `state_dict`."""
        ...


def restore_tracked(tracked: Mapping[str, Stateful], checkpoint: StateDict, path: Path) -> None:
    """Put a loop's objects into the states that the checkpoint at `path` has of them.

    Raises:
        ValueError: when it has none of one of them.
    """
    missing = [name for name in tracked if name not in checkpoint["tracked"]]
    if missing:
        raise ValueError(
            f"{path} has no state of {', '.join(missing)}, but of {', '.join(checkpoint['tracked'])}: the run was "
            "begun by another loop."
        )
    for name, one in tracked.items():
        one.load_state_dict(checkpoint["tracked"][name])

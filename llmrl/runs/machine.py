"""The facts that determine how a trainer's numbers are rounded: processor, number of threads, library versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from llmrl._utils.files import open_file
from llmrl._utils.types import JSON
from llmrl.watch.findings import read_by_step


def machine_of(device: str) -> dict[str, JSON]:
    """Return the processor, number of threads and library versions that compute on a device, such as `cuda:0`.

    Two machines with equal facts compute bitwise the same numbers.
    """
    facts: dict[str, JSON] = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    if device.startswith("cuda"):
        return {"processor": torch.cuda.get_device_name(device), **facts}
    name = platform.machine()
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            name = found[1]
    processor = f"{name} with {torch.backends.cpu.get_cpu_capability()}"
    return {"processor": processor, "threads": torch.get_num_threads(), **facts}


def other_facts(first: Mapping[str, JSON], second: Mapping[str, JSON]) -> dict[str, tuple[object, object]]:
    """Return the facts that two machines both report and that differ, with both values.

    Example:
        >>> other_facts({"threads": 1, "torch": "2.13.0"}, {"threads": 2, "torch": "2.13.0"})
        {'threads': (1, 2)}
    """
    shared = [name for name in first if name in second]
    return {name: (first[name], second[name]) for name in shared if first[name] != second[name]}


class MachineLog:
    """The file `machines.jsonl` of a run. A line names the machine of a step and of all steps until the next line.

    A line also has the length of the engine, on which the trainer's rotary frequencies depend.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, machine: Mapping[str, JSON]) -> None:
        """Append the machine that computes a step, unless it equals the machine on record for that step."""
        if self.at(step) != machine:
            with open_file(self.path, "a") as file:
                file.write(json.dumps({"step": step, **machine}) + "\n")

    def at(self, step: int) -> dict[str, JSON]:
        """Return the machine of a step; empty if the machine is unknown."""
        steps = read_by_step(self.path)
        last = max((one for one in steps if one <= step), default=0)
        return {name: value for name, value in steps.get(last, {}).items() if name != "step"}

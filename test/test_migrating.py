"""Every public name of TorchRL's LLM layer is in the page on moving from it, and what it says is ours is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/migrating-from-torchrl.md"
ROW = re.compile(r"^\| `(\w+)` \| (?:`([\w.]+)`|—) \|", re.MULTILINE)
NAMESPACES = [
    "torchrl.data.llm",
    "torchrl.envs.llm",
    "torchrl.envs.llm.transforms",
    "torchrl.modules.llm",
    "torchrl.objectives.llm",
    "torchrl.collectors.llm",
    "torchrl.weight_update.llm",
]


def rows():
    found = ROW.findall(PAGE.read_text())
    assert len(found) > 100
    return dict(found)


def test_every_name_of_torchrl_is_listed_and_no_other():
    names = {name for namespace in NAMESPACES for name in importlib.import_module(namespace).__all__}
    assert set(rows()) == names


def test_what_is_said_to_be_ours_is_there():
    missing = []
    for theirs, ours in rows().items():
        if ours:
            module, _, name = ours.rpartition(".")
            if not hasattr(importlib.import_module(module), name):
                missing.append(f"{theirs}: {ours}")
    assert not missing, missing

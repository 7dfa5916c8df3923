"""Every public name of TorchRL's LLM layer is in the page on moving from it, and what it says is ours is there."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

from llmrl._utils.arguments import KnownArguments, keywords_of

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


def parameters(function):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds and p.name != "self"]


def counterparts():
    """Classes of ours that refuse arguments, and TorchRL's of the same name."""
    for namespace in ("torchrl.envs.llm", "torchrl.envs.llm.transforms"):
        for name in importlib.import_module(namespace).__all__:
            for ours in ("llmrl.envs", "llmrl.transforms"):
                found = getattr(importlib.import_module(ours), name, None)
                if isinstance(found, type) and issubclass(found, KnownArguments):
                    yield name, getattr(importlib.import_module(namespace), name), found


def test_every_argument_of_torchrls_environments_and_transforms_is_taken_or_answered():
    unanswered, num_found = [], 0
    for name, theirs, ours in counterparts():
        known = keywords_of(ours.__init__)
        num_found += 1
        for parameter in parameters(theirs.__init__):
            if known is None or (parameter not in known and parameter not in ours.explained_arguments):
                unanswered.append(f"{name}({parameter}=)")
    assert num_found > 18 and not unanswered, unanswered

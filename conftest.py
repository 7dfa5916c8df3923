"""Which files are searched for examples: to search one is to import it, and some import what is slow or not there."""

from __future__ import annotations

import atexit
import gc
import importlib.util
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

# What is imported is no garbage: Python would look for some in it again and again.
gc.disable()

PACKAGE = Path(__file__).parent / "llmrl"
# The set-up leaves reasoning-gym out where nothing can compile what it requires.
NEEDS = {"reasoning_gym": ["llmrl/envs/tasks/reasoning_gym.py", "llmrl/rewards/adapters.py"]}
collect_ignore = [path for package, paths in NEEDS.items() if not importlib.util.find_spec(package) for path in paths]


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Search the package's files that have an example, and no others."""
    collectors = yield
    if PACKAGE in file_path.parents and ">>>" in file_path.read_text():
        return collectors
    return [collector for collector in collectors if not isinstance(collector, DoctestModule)]


def pytest_collection_finish():
    """Look for garbage again, and only in what the tests make."""
    gc.freeze()
    gc.enable()


@atexit.register
def let_the_interpreter_end_as_it_does():
    """Libraries report what is left then as leaks. Before that pytest looks for garbage, five times."""
    gc.unfreeze()

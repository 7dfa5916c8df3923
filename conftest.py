"""Which files are searched for examples: to search one is to import it, and some import vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

PACKAGE = Path(__file__).parent / "llmrl"


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Search the package's files that have an example, and no others."""
    collectors = yield
    if PACKAGE in file_path.parents and ">>>" in file_path.read_text():
        return collectors
    return [collector for collector in collectors if not isinstance(collector, DoctestModule)]

"""Each place where a test may be skipped is in the list of CONTRIBUTING.md, with its reason."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.search(r"^## Skipped tests\n(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)[
    1
]
# Modules that a test looks for to compare with, and that come with others.
PARTS = {"aiohttp.web": "aiohttp", "playwright.sync_api": "playwright", "reasoning_gym.factory": "reasoning_gym"}


@functools.cache
def places():
    """Modules without which tests are skipped, and files that skip for another reason."""
    modules, files = set(), set()
    for path in sorted((ROOT / "test").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "importorskip":
                modules.add(node.args[0].value)
            elif node.func.attr in ("skip", "skipif"):
                files.add(str(path.relative_to(ROOT)))
    return modules, files


@pytest.mark.slow
def test_every_skip_is_listed_and_every_listed_one_is_there():
    modules, files = places()
    listed = set(re.findall(r"`(test/[\w/]+\.py)`", SECTION))
    assert listed - files == set(), "listed, and skip nothing"
    assert files - listed == set(), "skip, and are not listed"
    named = re.search(r"^Packages: (.*?)\.$", SECTION, re.DOTALL | re.MULTILINE)[1]
    assert set(re.findall(r"`([\w.]+)`", named)) == {PARTS.get(module, module.partition(".")[0]) for module in modules}


def test_what_the_set_up_installs_skips_nothing():
    if not (Path(sys.prefix) / "llmrl-setup.stamp").exists():
        pytest.skip("this environment was not made by `make setup`")
    missing = sorted(module for module in places()[0] if importlib.util.find_spec(module.partition(".")[0]) is None)
    assert missing in ([], ["reasoning_gym.factory"]), missing  # the latter where there is no C compiler

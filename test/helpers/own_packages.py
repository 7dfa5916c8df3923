"""Tests with packages that do not go with those of the suite: in a program that finds them before its own."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmrl.envs.hubs.virtual_env import InstallError, python_with

_INSIDE = "LLMRL_OWN_PACKAGES"
# Plugins import packages of the suite; the options in `pyproject.toml` need these two.
_OPTIONS = ("-q", "-p", "pytest_timeout", "-p", "xdist.plugin", "-p", "no:cacheprovider", "-n", "0")
_RUN = "import sys; sys.path.insert(0, sys.argv[1]); import pytest; sys.exit(pytest.main(sys.argv[2:]))"


def with_packages_of_its_own(module, *requirements):
    """Run a test in a program that has these packages in front of the suite's, unless the suite has the module."""

    def decorate(test):
        @pytest.mark.usefixtures("own_programs")
        @functools.wraps(test)
        def run(request, **fixtures):
            if importlib.util.find_spec(module) is not None:
                return test(**fixtures)
            assert _INSIDE not in os.environ, f"{requirements} have no module {module!r}"
            try:
                python = python_with(requirements)
            except InstallError as error:
                pytest.skip(f"{requirements[0]} cannot be installed here: {error}")
            (site,) = python.parent.parent.glob("lib/python*/site-packages")
            words = [sys.executable, "-c", _RUN, str(site), *_OPTIONS, request.node.nodeid]
            environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
            environ |= {_INSIDE: "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            root = Path(__file__).parents[2]
            done = subprocess.run(words, cwd=root, env=environ, capture_output=True, text=True)
            assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr

        names = ["request", *inspect.signature(test).parameters]
        kind = inspect.Parameter.KEYWORD_ONLY
        run.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        return run

    return decorate

"""A recorded run that the tests of this folder share."""

from __future__ import annotations

import shutil

import pytest
from recorded_runs import REWARDS, train_run


@pytest.fixture(scope="package")
def recorded(tiny_model_path, tmp_path_factory, takes_long):
    return train_run(tiny_model_path, tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def run_path(recorded, tmp_path):
    """A copy of the recorded run, which a test may damage."""
    return shutil.copytree(recorded, tmp_path / "run")


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path

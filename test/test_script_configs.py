"""Every configuration of the scripts composes, and names what `TrainingRun` reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "sota-implementations").glob("*/config/*.yaml"))
READ = set(re.findall(r"\bcfg\.(\w+)\.(\w+)", (ROOT / "llmrl/training_run.py").read_text()))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_composes_with_all_that_is_read(path):
    with initialize_config_dir(str(path.parent), version_base=None):
        cfg = OmegaConf.to_container(compose(path.stem), resolve=False)
    missing = [f"{group}.{name}" for group, name in READ if name not in cfg[group]]
    assert len(READ) > 10 and not missing


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_number_has_a_reason(path):
    bare = [line for line in path.read_text().splitlines() if re.match(r"  \w+: -?[\d.]", line) and "#" not in line]
    assert not bare


@pytest.mark.parametrize("path", sorted((ROOT / "sota-implementations").glob("*/*.py")), ids=lambda path: path.name)
def test_scripts_are_short_and_use_the_public_library(path):
    text = path.read_text()
    assert len(text.splitlines()) < 200
    assert not re.search(r"from llmrl[\w.]* import .*\b_\w", text)

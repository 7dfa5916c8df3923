"""The configurations of the training scripts, composed as the scripts compose them."""

from __future__ import annotations

import importlib
from pathlib import Path

from hydra import compose, initialize_config_dir

from llmrl.config.launch import CONFIGS, hidden_groups, prepared, register_schemas

SCRIPTS = Path(__file__).resolve().parents[2] / "sota-implementations"
FOLDER = SCRIPTS / "config"


def composed(algorithm, *overrides):
    register_schemas()
    with hidden_groups(), initialize_config_dir(str(FOLDER), version_base=None):
        return compose(algorithm, list(overrides))


def config(algorithm, *overrides):
    """As a script gets it."""
    return prepared(composed(algorithm, *overrides), CONFIGS[algorithm.removesuffix("-async")])


def script_of(algorithm):
    """The module of an algorithm's loop."""
    return importlib.import_module(f"llmrl.scripts.{algorithm.replace('-', '_')}")

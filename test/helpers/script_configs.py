"""The configurations of the training scripts, composed as the scripts compose them."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir

from llmrl.config.imitation import DistillationConfig, ExpertIterationConfig, SFTConfig
from llmrl.config.launch import prepared, register_schemas
from llmrl.config.sections import GRPOConfig

ROOT = Path(__file__).resolve().parents[2]


SCRIPTS = ROOT / "sota-implementations"


FOLDER = SCRIPTS / "config"


CONFIGS = {
    "grpo": GRPOConfig,
    "expert-iteration": ExpertIterationConfig,
    "sft": SFTConfig,
    "distillation": DistillationConfig,
}


def composed(algorithm, *overrides):
    register_schemas()
    with initialize_config_dir(str(FOLDER), version_base=None):
        return compose(algorithm, list(overrides))


def config(algorithm, *overrides):
    """As a script gets it."""
    return prepared(composed(algorithm, *overrides), CONFIGS[algorithm.removesuffix("-async")])


def script_of(algorithm, monkeypatch):
    """The module of an algorithm's loop."""
    name = algorithm.removesuffix("-async")
    monkeypatch.syspath_prepend(str(SCRIPTS / name))
    return __import__(name.replace("-", "_"))

"""Settings of the trainer of each GPU recipe. `pack.py` writes them into the kit, because composing needs hydra."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("recipes.json")


def settings() -> dict[str, dict[str, Any]]:
    """Return the size of each recipe's model, such as 1.5B, and the settings of its trainer (`TrainingShape`)."""
    return json.loads(FILE.read_text()) if FILE.exists() else composed()


def composed() -> dict[str, dict[str, Any]]:
    from llmrl.config.fit import training_shape
    from llmrl.recipes import known_recipes

    found = {}
    for name, recipe in known_recipes().items():
        cfg = recipe.config()
        if cfg.train.device == "cuda":
            size = re.search(r"[\d.]+B", cfg.model.path)
            assert size is not None, cfg.model.path
            training = training_shape(cfg.model, cfg.train, budget=cfg.collect.budget)
            found[name] = {"model": size[0], "training": asdict(training)}
    return found

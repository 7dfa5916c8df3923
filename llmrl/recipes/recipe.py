"""`Recipe`: a folder with a configuration and the recorded results of its runs."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llmrl._utils.files import open_file, read_text, write_atomically
from llmrl._utils.json_values import as_entry_value
from llmrl._utils.types import JSON
from llmrl.config.launch import CONFIGS, hidden_groups, register_schemas, typed
from llmrl.config.sections import ScriptConfig
from llmrl.recipes.band import Band

KNOWN = Path(__file__).parent / "known"
_CONFIG = Path(__file__).parents[1] / "config"


@dataclass(frozen=True, slots=True)
class Record:
    """Results of the seeds of a recipe, stored in `recorded.json`."""

    data: str
    """SHA-256 of the problems."""
    machine: dict[str, JSON]
    """Machine of the first seed (`llmrl.runs.machine.machine_of`)."""
    minutes: dict[str, float]
    """Minutes of training and evaluation, by seed."""
    before: dict[str, dict[str, float]]
    """First value of each measure, by seed."""
    after: dict[str, dict[str, float]]
    """Last value of each measure, by seed."""

    def write(self, folder: Path) -> None:
        """Write `recorded.json`."""
        text = json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"
        write_atomically(folder / "recorded.json", lambda path: path.write_text(text, encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A configuration with a known learning result, positive or negative.

    The folder contains `recipe.yaml` (the fields below), a README, and files that the entries name as `{recipe}/FILE`.
    After recording, the folder also contains `band.csv`, `recorded.json` and `curve.png`.
    """

    name: str
    folder: Path
    about: str
    """Task and model of the recipe."""
    stages: tuple[tuple[str, tuple[str, ...]], ...]
    """Scripts (`grpo`, `sft`, `expert-iteration`, `distillation`) with their entries. A stage begins with the model of
    the previous stage, unless its entries use that model as `{model}` for another purpose."""
    measures: tuple[str, ...]
    """Compared metrics of the last stage, from 0 to 1; `eval/NAME` is a metric of the task's held-out problems."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the band."""
    baselines: dict[str, float] = field(default_factory=dict)
    """Values of the last measure for policies without training, by description of the policy."""
    target: str = ""
    """Published results of others for comparison."""

    @classmethod
    def read(cls, folder: Path) -> Recipe:
        """Read a recipe's folder. Raises ValueError if `recipe.yaml` is not a valid recipe."""
        import yaml

        path = folder / "recipe.yaml"
        try:
            found = yaml.safe_load(read_text(path)) or {}
            found["stages"] = [
                (script, tuple(map(str, entries))) for stage in found["stages"] for script, entries in stage.items()
            ]
            given = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
            recipe = cls(name=folder.name, folder=folder, **given)  # type: ignore[arg-type]
        except (TypeError, KeyError, AttributeError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{path} is no recipe: {error}. It needs about, stages and measures.") from error
        if not recipe.measures or isinstance(recipe.measures, str):
            raise ValueError(
                f"{path}: measures must be a list of metrics, such as [reward_mean], got {recipe.measures!r}."
            )
        unknown = [script for script, _ in recipe.stages if script not in CONFIGS]
        if not recipe.stages or unknown:
            raise ValueError(f"{path}: stages must name scripts ({', '.join(CONFIGS)}), got {unknown}.")
        return recipe

    def entries(self, stage: int, model: str | None = None) -> list[str]:
        """Return the entries of a stage, with the recipe's folder in place of `{recipe}`.

        `model` is the previous stage's model, for `{model}` or else `model.path`; None is `embedded` for `{model}`.
        """
        entries = self.stages[stage][1]
        if model is not None and not any("{model}" in entry for entry in entries):
            entries = (*entries, "model.path={model}")
        return [_filled(entry, {"{recipe}": str(self.folder), "{model}": model or "embedded"}) for entry in entries]

    def config(self, entries: Sequence[str] = ()) -> ScriptConfig:
        """Return the configuration that the script of the last stage composes, changed by further entries.

        Raises ValueError if an entry does not exist or has an invalid value.
        """
        from hydra import compose, initialize_config_dir
        from hydra.errors import HydraException

        script, _ = self.stages[-1]
        register_schemas()
        try:
            with hidden_groups(), initialize_config_dir(str(_CONFIG.resolve()), version_base=None):
                composed = compose(script, [*self.entries(-1), *entries])
        except HydraException as error:
            raise ValueError(f"the recipe {self.name} with {' '.join(entries)}: {error}") from error
        return typed(composed, CONFIGS[script])

    def data_hash(self, entries: Sequence[str] = ()) -> str:
        """Return the SHA-256 of the training and held-out problems, and of the recipe's JSONL files."""
        from llmrl.envs.primer import dataset_env_of
        from llmrl.runs.setup import make_env, make_eval_envs

        cfg = self.config(entries)
        digest = hashlib.sha256()
        for env in (make_env(cfg), *make_eval_envs(cfg).values()):
            problems = dataset_env_of(env)
            rows = [] if problems is None else list(problems.prompts.items)
            digest.update("\n".join(sorted(json.dumps(row, sort_keys=True, default=str) for row in rows)).encode())
        for path in sorted(self.folder.glob("*.jsonl")):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def bands(self) -> dict[str, Band]:
        """Return the band of each measure. Raises FileNotFoundError if the recipe was not recorded."""
        path = self.folder / "band.csv"
        if not path.exists():
            raise FileNotFoundError(
                f"the recipe {self.name} has no band: it was not run yet. `llmrl recipe record` records a band."
            )
        bands: dict[str, dict[int, tuple[float, float]]] = {}
        with open_file(path, newline="") as file:
            for row in csv.DictReader(file):
                bands.setdefault(row["measure"], {})[int(row["step"])] = float(row["low"]), float(row["high"])
        return dict(bands)

    def record(self) -> Record | None:
        """Return the recorded results, or None."""
        path = self.folder / "recorded.json"
        return Record(**json.loads(read_text(path))) if path.exists() else None


def known_recipes() -> dict[str, Recipe]:
    """Return the recipes of the package by name."""
    return {path.parent.name: Recipe.read(path.parent) for path in sorted(KNOWN.resolve().glob("*/recipe.yaml"))}


def find_recipe(name: str) -> Recipe:
    """Return a recipe of the package by name, or the recipe in a folder.

    Raises:
        FileNotFoundError: if there is no such recipe.
        ValueError: if the folder's `recipe.yaml` is invalid.

    Example:
        >>> find_recipe("one-digit-sums").measures
        ('reward_mean', 'eval/pass@1')
    """
    if (Path(name) / "recipe.yaml").is_file():
        return Recipe.read(Path(name).resolve())
    recipes = known_recipes()
    if name not in recipes:
        raise FileNotFoundError(
            f"there is no recipe {name!r}, only {', '.join(recipes)}; name one of these, or a folder with recipe.yaml."
        )
    return recipes[name]


def _filled(entry: str, folders: Mapping[str, str]) -> str:
    """Return an entry with folders in their places; the names of folders can contain what hydra reads as syntax."""
    name, _, value = entry.partition("=")
    filled = re.sub("|".join(map(re.escape, folders)), lambda found: folders[found[0]], value)
    return entry if filled == value else f"{name}={as_entry_value(filled)}"

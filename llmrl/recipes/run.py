"""`train_seed`: a recipe's scripts, one after the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmrl._utils.json_values import as_entry_value
from llmrl.recipes.recipe import Recipe
from llmrl.runs.run_folder import RunFolder, holds_run


class RecipeRunError(RuntimeError):
    """A script of a recipe ended with an error."""


def train_seed(
    recipe: Recipe, seed: int, folder: Path, *, entries: Sequence[str] = (), script: Path | None = None
) -> Path:
    """Run a recipe with a seed; return the folder of the last stage's run.

    Stages that have ended are not run again, and one that was interrupted is resumed. Output goes to standard error.

    Args:
        folder: folder of the run; those of earlier stages are beside it.
        entries: further entries of the last stage.
        script: training script to run as the last stage instead, such as a changed copy of it.

    Raises RecipeRunError if a script fails.
    """
    model = None
    for number, (name, _) in enumerate(recipe.stages):
        is_last = number == len(recipe.stages) - 1
        path = folder if is_last else folder.with_name(f"{folder.name}-stage-{number}")
        if not (is_finished(path) and (is_last or (path / "model").is_dir())):
            module = f"llmrl.scripts.{name.replace('-', '_')}"
            program = [str(script)] if script is not None and is_last else ["-m", module]
            words = [*recipe.entries(number, model), *(entries if is_last else ())]
            own = [
                f"run.path={as_entry_value(str(path))}",
                f"seed={seed}",
                *(["resume=true"] if holds_run(path) else []),
            ]
            status = subprocess.run([sys.executable, *program, *words, *own], stdout=sys.stderr.fileno()).returncode
            if status or not is_finished(path):
                raise RecipeRunError(
                    f"{recipe.name}, seed {seed}: the script {name} ended with {status} before the end of its run in "
                    f"{path}; the same command resumes it."
                )
        model = str(path / "model")
    return folder


def is_finished(path: Path) -> bool:
    """Return whether a folder has a run that has ended and was evaluated."""
    return holds_run(path) and "after" in RunFolder(path, read_only=True).read_summary()

"""`train_seed`: runs the scripts of a recipe one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmrl._utils.json_values import as_entry_value
from llmrl.config.launch import run_script
from llmrl.recipes.recipe import Recipe
from llmrl.runs.run_folder import RunFolder, holds_run


class RecipeRunError(RuntimeError):
    """A script of a recipe ended with an error."""


def train_seed(
    recipe: Recipe, seed: int, folder: Path, *, entries: Sequence[str] = (), script: Path | None = None
) -> Path:
    """Run a recipe with a seed, and return the folder of the last stage's run.

    Finished stages are not run again, and an interrupted stage is resumed. Output goes to standard error.

    Args:
        folder: folder of the last stage's run; the folders of earlier stages are beside it.
        entries: further entries of the last stage.
        script: training script that replaces the script of the last stage, such as a changed copy.

    Raises RecipeRunError if a script fails.
    """
    model = None
    for number, (name, _) in enumerate(recipe.stages):
        is_last = number == len(recipe.stages) - 1
        path = folder.with_name(f"{folder.name}-stage-{number}")
        program = ["-m", f"llmrl.scripts.{name.replace('-', '_')}"]
        words = recipe.entries(number, model)
        if is_last:
            path = folder
            words += entries
            if script is not None:
                program = [str(script)]
        if not (is_finished(path) and (is_last or (path / "model").is_dir())):
            words += [f"run.path={as_entry_value(str(path))}", f"seed={seed}"]
            if holds_run(path):
                words.append("resume=true")
            status = run_script([*program, *words])
            if status or not is_finished(path):
                raise RecipeRunError(
                    f"{recipe.name}, seed {seed}: the script {name} exited with {status} before its run in {path} was "
                    "finished; the same command resumes the run."
                )
        model = str(path / "model")
    return folder


def is_finished(path: Path) -> bool:
    """Return whether a folder has a run that has ended; an interrupted run has not."""
    return holds_run(path) and "ended" in RunFolder(path, read_only=True).read_summary()

"""Reads the curves of runs, and writes their band to the files of a recipe."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmrl._utils.files import write_atomically
from llmrl.recipes.band import Band, Curve, band_of
from llmrl.recipes.recipe import Recipe, Record
from llmrl.recipes.run import is_finished
from llmrl.runs.report import drawn_png
from llmrl.runs.run_folder import RunFolder

DIFFERENCE = "log_prob_difference_mean"
_BOUND = "on_policy_difference_bound"
_HELD_OUT = "eval/"


def curves_of(recipe: Recipe, run: Path, entries: Sequence[str] = ()) -> dict[str, Curve]:
    """Return a run's measures by step. A run that ended early, because the task was learned, keeps its last value.

    A step before the last value has no value if the run has measured none.

    Args:
        entries: further entries of the run, such as a smaller number of steps.

    Raises:
        FileNotFoundError: if the folder holds no run.
        ValueError: if the run has not ended, or has no value of a measure.
    """
    folder = RunFolder(run, read_only=True)
    metrics = folder.read_metrics()
    if not is_finished(run):
        raise ValueError(f"{run} has not ended; resume it, or wait for its end.")
    cfg = recipe.config(entries)
    num_steps = cfg.train.num_steps
    curves: dict[str, Curve] = {}
    for measure in recipe.measures:
        name, every = measure, 1
        if measure.startswith(_HELD_OUT):
            name = f"eval/{cfg.env.label}/{measure.removeprefix(_HELD_OUT)}"
            every = cfg.eval.every or num_steps
        values = {int(row["step"]): row[name] for row in metrics if math.isfinite(row.get(name, math.nan))}
        if not values:
            raise ValueError(f"{run} has no metric {name!r}, which the recipe {recipe.name} compares.")
        steps = [step for step in range(min(values), num_steps + 1) if step % every == 0 or step == num_steps]
        last = max(values)
        curves[measure] = {step: values[min(step, last)] for step in steps if step in values or step > last}
    return curves


def log_prob_difference(run: Path) -> tuple[Curve, Band]:
    """Return the difference between trainer and engine at each on-policy step, and the band that rounding explains.

    The band ends at the run's own `on_policy_difference_bound`. Both are empty for algorithms that
    do not measure the difference. A loss over other tokens than the sampled ones, or an engine with
    other weights, shows here even if the rewards are as expected.
    """
    rows = [
        row
        for row in RunFolder(run, read_only=True).read_metrics()
        if math.isfinite(row.get(_BOUND, math.nan)) and row.get("staleness_max") == 0
    ]
    curve = {int(row["step"]): row[DIFFERENCE] for row in rows}
    return curve, {int(row["step"]): (0.0, row[_BOUND]) for row in rows}


def record(recipe: Recipe, runs: Mapping[int, Path]) -> Record:
    """Write the band, the results and the plot of the runs to the recipe's folder; `runs` maps seeds to folders.

    Raises ValueError if runs of the recipe's seeds are missing, or if a score is not from 0 to 1.
    """
    missing = [seed for seed in recipe.seeds if seed not in runs]
    if missing:
        raise ValueError(f"the band of {recipe.name} needs the seeds {recipe.seeds}; {missing} were not run.")
    by_seed = {seed: curves_of(recipe, runs[seed]) for seed in recipe.seeds}
    bands = {
        measure: band_of([curves[measure] for curves in by_seed.values()], num_prompts=num_prompts_of(recipe, measure))
        for measure in recipe.measures
    }
    write_atomically(recipe.folder / "band.csv", lambda path: _write_band(path, bands, by_seed))
    draw(recipe, bands, by_seed, recipe.folder / "curve.png")
    made = Record(
        data=recipe.data_hash(),
        machine=RunFolder(runs[recipe.seeds[0]], read_only=True).machines.at(1),
        minutes={str(seed): round(_minutes(runs[seed]), 1) for seed in recipe.seeds},
        before={measure: _ends(by_seed, measure, 0) for measure in recipe.measures},
        after={measure: _ends(by_seed, measure, -1) for measure in recipe.measures},
    )
    made.write(recipe.folder)
    return made


def num_prompts_of(recipe: Recipe, measure: str) -> int:
    """Return the number of different prompts in one measurement."""
    from llmrl.envs.primer import dataset_env_of
    from llmrl.runs.setup import make_eval_envs

    cfg = recipe.config()
    if not measure.startswith(_HELD_OUT):
        return cfg.collect.groups_per_batch
    problems = dataset_env_of(make_eval_envs(cfg)[cfg.env.label])
    assert problems is not None, "evaluation environments have a dataset"
    num_problems = len(problems.prompts.items)
    return min(num_problems, cfg.eval.num_problems or num_problems)


def _ends(by_seed: Mapping[int, Mapping[str, Curve]], measure: str, place: int) -> dict[str, float]:
    return {str(seed): round(list(curves[measure].values())[place], 4) for seed, curves in by_seed.items()}


def _write_band(path: Path, bands: Mapping[str, Band], by_seed: Mapping[int, Mapping[str, Curve]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["measure", "step", "low", "high", *(f"seed {seed}" for seed in by_seed)])
        for measure, band in bands.items():
            for step, ends in band.items():
                values = [curves[measure].get(step, math.nan) for curves in by_seed.values()]
                writer.writerow([measure, step, *(f"{value:.4f}" for value in (*ends, *values))])


def _minutes(run: Path) -> float:
    metrics = RunFolder(run, read_only=True).read_metrics()
    names = {name for row in metrics for name in row if name.endswith("/seconds") and name.startswith("eval/")}
    return sum(row.get(name, 0.0) for row in metrics for name in ("seconds", *names)) / 60


def draw(
    recipe: Recipe,
    bands: Mapping[str, Band],
    by_seed: Mapping[int, Mapping[str, Curve]],
    path: Path,
) -> None:
    """Draw bands and curves as a PNG. Raises ImportError if matplotlib is missing."""
    with drawn_png(path, len(bands), width=5 * len(bands), dpi=90) as axes:
        for axis, (measure, band) in zip(axes, bands.items(), strict=True):
            lows, highs = zip(*band.values(), strict=True)
            axis.fill_between(list(band), lows, highs, color="#1f6f8b", alpha=0.15, label="band")
            for seed, curves in by_seed.items():
                axis.plot(list(curves[measure]), list(curves[measure].values()), marker=".", label=f"seed {seed}")
            if measure == recipe.measures[-1]:
                for what, value in recipe.baselines.items():
                    axis.axhline(value, color="grey", linestyle=":", label=what)
            axis.set(title=measure.replace(_HELD_OUT, "held-out ").replace("_", " "), xlabel="step", ylim=(0, 1.02))
            axis.legend(frameon=False, fontsize=8)

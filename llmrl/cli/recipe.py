"""`llmrl recipe`: configurations with recorded learning curves; new runs are compared with their bands."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrl.cli.options import AsJSON, console, print_json, refusals

if TYPE_CHECKING:
    from llmrl.recipes import Recipe

app = typer.Typer(help="Recipes: configurations with their recorded learning curves.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a recipe, or a folder with a recipe.yaml.")]
Entries = Annotated[
    list[str] | None, typer.Argument(metavar="ENTRY", help="Entries to change, such as train.learning_rate=2e-4.")
]
Seeds = Annotated[
    list[int] | None, typer.Option("--seed", help="Seed to train with; may be repeated. By default the band's seeds.")
]
RUNS = Path("runs/recipes")


@app.command("list")
def list_recipes(as_json: AsJSON = False) -> None:
    """Print the recipes, with the last measure before and after training, as the mean over the seeds."""
    from rich.table import Column, Table

    from llmrl.recipes import known_recipes

    recipes = known_recipes().values()
    if as_json:
        return print_json({"recipes": [_facts(recipe) for recipe in recipes]})
    shown = ("measure", "before", "after", "seeds", "minutes")
    table = Table(Column("recipe", no_wrap=True), *shown)
    for recipe in recipes:
        facts = _facts(recipe)
        table.add_row(*(str(facts[name]) for name in ("name", *shown)))
    console.print(table)


def _facts(recipe: Recipe) -> dict[str, object]:
    recorded = recipe.record()
    measure = recipe.measures[-1]
    facts: dict[str, object] = {"name": recipe.name, "about": recipe.about, "measure": measure, "target": recipe.target}
    if recorded is None:
        return facts | dict.fromkeys(("before", "after", "minutes"), "–") | {"seeds": "not run yet"}
    return facts | {
        "before": _mean(recorded.before[measure]),
        "after": _mean(recorded.after[measure]),
        "seeds": ", ".join(map(str, recipe.seeds)),
        "minutes": _mean(recorded.minutes, digits=1),
        "machine": recorded.machine,
        "baselines": recipe.baselines,
    }


def _mean(by_seed: dict[str, float], digits: int = 2) -> float:
    return round(sum(by_seed.values()) / len(by_seed), digits)


@app.command()
def run(name: Name, entries: Entries = None, seed: Seeds = None, as_json: AsJSON = False) -> None:
    """Train a recipe with each of its seeds in runs/recipes/NAME; finished runs are not repeated."""
    from llmrl.recipes import find_recipe

    entries = entries or []
    with _refusals():
        _check_entries(entries)
        recipe = find_recipe(name)
        recipe.config(entries)
        runs = _train(recipe, seed or list(recipe.seeds), entries)
    _print_runs(recipe, runs, as_json, entries)


@app.command()
def record(name: Name, as_json: AsJSON = False) -> None:
    """Train the seeds of a recipe that have no finished run, and write band, figures and picture to its folder."""
    from llmrl.recipes import find_recipe
    from llmrl.recipes import record as record_runs

    with _refusals():
        recipe = find_recipe(name)
        runs = _train(recipe, list(recipe.seeds), [])
        record_runs(recipe, runs)
    _print_runs(recipe, runs, as_json)


@app.command()
def verify(
    name: Name,
    entries: Entries = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed; by default one that is not in the band.", show_default=False)
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(help="Training script to test in place of the recipe's, such as a changed copy.", exists=True),
    ] = None,
    finished: Annotated[
        Path | None, typer.Option("--run", metavar="RUN", help="Judge this run and train none.", exists=True)
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Train a recipe once more, and print whether the run is inside the band, or at which step it left the band.

    Exits with 1 if it is outside, and with 2 if it cannot be judged.
    """
    from llmrl.recipes import DIFFERENCE, curves_of, find_recipe, judge, log_prob_difference, train_seed

    entries = entries or []
    with _refusals():
        _check_entries(entries)
        if finished is not None and (seed is not None or script is not None):
            raise ValueError("--run judges a run and trains none: leave out --seed and --script, or --run.")
        recipe = find_recipe(name)
        bands = recipe.bands()
        _check_data(recipe, entries)
        if finished is None:
            if seed is None:
                seed = max(recipe.seeds) + 1
            folder = RUNS / recipe.name / time.strftime(f"verify-%Y%m%d-%H%M%S-{os.getpid()}")
            finished = train_seed(recipe, seed, folder, entries=entries, script=script)
        curves = curves_of(recipe, finished, entries)
        num_steps = recipe.config(entries).train.num_steps  # a shorter run is judged up to its last step
        bands = {name: {step: ends for step, ends in band.items() if step <= num_steps} for name, band in bands.items()}
        curves[DIFFERENCE], bands[DIFFERENCE] = log_prob_difference(finished)
    verdict = judge(curves, bands)
    if as_json:
        print_json({"recipe": recipe.name, "run": str(finished), **asdict(verdict), "curves": curves, "bands": bands})
    elif verdict.is_inside:
        console.print(f"{finished} is [bold]inside[/bold] the band of {recipe.name}", soft_wrap=True)
    else:
        value = "has no value" if verdict.value is None else f"is {verdict.value:.3f}"
        console.print(
            f"{finished} is [bold]outside[/bold] the band of {recipe.name}: it left at step {verdict.step}, where "
            f"{verdict.measure} {value} and the band {verdict.low:.3f} to {verdict.high:.3f}",
            soft_wrap=True,
        )
    raise typer.Exit(not verdict.is_inside)


def _refusals() -> contextlib.AbstractContextManager[None]:
    """Refuse what is wrong with a recipe or its entries, or a script that failed."""
    from llmrl.recipes.run import RecipeRunError

    return refusals(ValueError, OSError, ImportError, RecipeRunError)


def _check_entries(entries: list[str]) -> None:
    refused = {
        "dry_run": "a dry run leaves no curves: give the entries of the recipe's last stage to its script, with "
        "dry_run=true.",
        "seed": "the entry seed has no effect here: give the seed as --seed.",
        "run.path": f"the runs of a recipe are in {RUNS}: leave out run.path.",
    }
    for entry in entries:
        if (why := refused.get(entry.lstrip("+").partition("=")[0])) is not None:
            raise ValueError(why)


def _check_data(recipe: Recipe, entries: list[str]) -> None:
    recorded = recipe.record()
    if recorded is not None and recorded.data != (found := recipe.data_hash(entries)):
        raise ValueError(
            f"the problems differ from those of the band of {recipe.name}: their SHA-256 is {found[:12]}…, in the "
            f"record {recorded.data[:12]}…. Leave out entries that change the problems, or record the recipe again."
        )


def _train(recipe: Recipe, seeds: list[int], entries: list[str]) -> dict[int, Path]:
    from llmrl.recipes import train_seed

    name = "-".join([recipe.name, *(re.sub(r"[^\w.+-]", "_", entry) for entry in entries)])
    return {seed: train_seed(recipe, seed, RUNS / name / f"seed-{seed}", entries=entries) for seed in seeds}


def _print_runs(recipe: Recipe, runs: dict[int, Path], as_json: bool, entries: Sequence[str] = ()) -> None:
    from rich.table import Table

    from llmrl.recipes import curves_of

    curves = {seed: curves_of(recipe, path, entries) for seed, path in runs.items()}
    if as_json:
        rows = [{"seed": seed, "run": str(path), "curves": curves[seed]} for seed, path in runs.items()]
        return print_json({"recipe": recipe.name, "runs": rows})
    table = Table("seed", *(f"{measure} {when}" for measure in recipe.measures for when in ("before", "after")), "run")
    for seed, path in runs.items():
        values = [list(curves[seed][measure].values())[place] for measure in recipe.measures for place in (0, -1)]
        table.add_row(str(seed), *(f"{value:.3f}" for value in values), str(path))
    console.print(table)

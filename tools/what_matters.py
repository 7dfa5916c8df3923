"""Vary one setting of the one-digit-sums recipe at a time, with three seeds each, and draw the learning curves.

python tools/what_matters.py list
python tools/what_matters.py run [--only group-size] [--seeds 0 1 2]   # 2 to 3 minutes per run on two idle cores
python tools/what_matters.py draw                                      # pictures in docs/what-matters, and tables

Runs are in runs/what-matters; a finished run is not repeated.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmrl.recipes import Curve, Recipe, curves_of, find_recipe, train_seed
from llmrl.recipes.run import is_finished
from llmrl.runs.run_folder import RunFolder

RUNS = Path("runs/what-matters")
PICTURES = Path("docs/what-matters")
TARGET = 0.9
_SAME_ANSWERS = "collect.groups_per_batch={} collect.group_size={}"
_LORA = "model.lora.rank={} train.learning_rate=2e-4"
_TWO_EPOCHS = "train.num_epochs=2 train.num_minibatches=2"  # with one update per batch, no ratio is clipped

VARIED: Mapping[str, Mapping[str, str]] = {
    "group-size": {
        "32 prompts x 4 answers": _SAME_ANSWERS.format(32, 4),
        "16 x 8": "",
        "8 x 16": _SAME_ANSWERS.format(8, 16),
    },
    "learning-rate": {
        "5e-6": "train.learning_rate=5e-6",
        "1e-5": "train.learning_rate=1e-5",
        "2e-5": "",
        "4e-5": "train.learning_rate=4e-5",
    },
    "staleness": {
        "in turn": "",
        "at most 1": "collect.max_staleness=1",
        "at most 4": "collect.max_staleness=4",
        "at most 8": "collect.max_staleness=8",
    },
    "dynamic-sampling": {
        "smaller batches": "",
        "other prompts": "collect.replace_constant_groups=true train.num_steps=7",  # later steps may take any time
    },
    "kl": {"none": "", "0.01": "train.kl_to_ref_coeff=0.01", "0.1": "train.kl_to_ref_coeff=0.1"},
    "clip-higher": {
        "0.2 and 0.2": f"{_TWO_EPOCHS} train.clip_epsilon=0.2",
        "0.2 and 0.28": f"{_TWO_EPOCHS} train.clip_epsilon=0.2 train.clip_epsilon_high=0.28",
    },
    "adapters": {"all weights": "", "rank 8": _LORA.format(8), "rank 32": _LORA.format(32)},
    "dtype": {"float32": "", "bfloat16": "model.dtype=bfloat16"},
    "engine": {
        "float32": "",
        "int8": "engine.quantization=int8",
        "int8, ratio to the engine": "engine.quantization=int8 train.importance_cap=null",
    },
}
"""Entries of the configuration for each value, by varied setting."""


def all_entries(entries: str) -> list[str]:
    """Return the entries of a run. Evaluating only before and after training saves a sixth of the time."""
    return [*entries.split(), "eval.every=null"]


def folder_of(entries: str, seed: int) -> Path:
    """Return the folder of a run; all comparisons share the run of the unchanged recipe."""
    return RUNS / (re.sub(r"[^\w.]+", "-", entries) or "as-it-is") / f"seed-{seed}"


def train(recipe: Recipe, names: Sequence[str], seeds: Sequence[int]) -> None:
    """Train the missing runs, and keep only their metrics."""
    for entries in dict.fromkeys(entries for name in names for entries in VARIED[name].values()):
        for seed in seeds:
            print(f"{entries or 'the unchanged recipe'}, seed {seed}", flush=True)
            folder = train_seed(recipe, seed, folder_of(entries, seed), entries=all_entries(entries))
            RunFolder(folder, read_only=True).checkpoint_path.unlink(missing_ok=True)  # 45 checkpoints would be 95 GB
            shutil.rmtree(folder / "model", ignore_errors=True)


def curves(recipe: Recipe, entries: str, seeds: Sequence[int]) -> list[dict[str, Curve]]:
    """Return the curves of the finished runs, one for each seed."""
    folders = [folder for seed in seeds if is_finished(folder := folder_of(entries, seed))]
    return [curves_of(recipe, folder, all_entries(entries)) for folder in folders]


def steps_to_target(curve: Curve) -> int | None:
    """Return the first step with a mean reward of at least the target, or None.

    Example:
        >>> steps_to_target({1: 0.5, 2: 0.92, 3: 0.8}), steps_to_target({1: 0.5})
        (2, None)
    """
    return next((step for step, value in curve.items() if value >= TARGET), None)


def draw(recipe: Recipe, names: Sequence[str], seeds: Sequence[int]) -> None:
    """Draw the mean and the range over seeds, and print a table for each setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in names:
        figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        print(f"\n| {name} | steps to {TARGET}, by seed | held-out pass@1 after, by seed |\n|---|---|---|")
        for label, entries in VARIED[name].items():
            of_seeds = curves(recipe, entries, seeds)
            if not of_seeds:
                continue
            rewards = [found["reward_mean"] for found in of_seeds]
            steps = sorted(set.intersection(*map(set, rewards)))
            columns = [[curve[step] for curve in rewards] for step in steps]
            [line] = axis.plot(steps, list(map(statistics.mean, columns)), marker=".", label=label)
            axis.fill_between(
                steps, list(map(min, columns)), list(map(max, columns)), color=line.get_color(), alpha=0.15
            )
            reached = [str(steps_to_target(curve) or "not") for curve in rewards]
            after = [f"{list(found['eval/pass@1'].values())[-1]:.2f}" for found in of_seeds]
            print(f"| {label} | {', '.join(reached)} | {', '.join(after)} |")
        axis.set(title=name.replace("-", " "), xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
        figure.savefig(PICTURES / f"{name}.png", dpi=90)
        pyplot.close(figure)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["list", "run", "draw"])
    parser.add_argument("--only", nargs="*", choices=list(VARIED), default=list(VARIED))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    recipe = find_recipe("one-digit-sums")
    if options.what == "list":
        for name in options.only:
            for label, entries in VARIED[name].items():
                recipe.config(all_entries(entries))  # raises for an entry that does not exist
                print(f"{name:14}{label:24}{entries}")
    elif options.what == "run":
        train(recipe, options.only, options.seeds)
    else:
        draw(recipe, options.only, options.seeds)


if __name__ == "__main__":
    sys.exit(main())

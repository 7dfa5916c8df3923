"""The report of a finished run: a table of results, a curve, and the commands to continue."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from llmrl._utils.files import write_atomically
from llmrl._utils.imports import require
from llmrl._utils.json_values import as_entry_value, as_json
from llmrl._utils.types import JSON
from llmrl.config.sections import EnvConfig
from llmrl.envs.tasks.registry import is_env_name
from llmrl.runs.run_folder import RunFolder


@contextmanager
def drawn_png(path: Path, num_axes: int, *, width: float, dpi: int) -> Iterator[Sequence[Any]]:
    """Yield matplotlib's axes side by side, over `width` inches, and write what was drawn into them as a PNG.

    Raises ImportError if matplotlib is missing.
    """
    require("matplotlib", extra="scripts")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, num_axes, figsize=(width, 3.6), layout="constrained", squeeze=False)
    yield axes[0]
    for axis in axes[0]:
        axis.grid(alpha=0.25)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=dpi, format="png"))
    pyplot.close(figure)


def plot_curve(metrics: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw reward, evaluations, log-prob difference and times as a PNG. Raises ImportError if matplotlib is missing."""

    def values(name: str) -> list[float]:
        return [row.get(name, math.nan) for row in metrics]

    steps = values("step")
    names = {name for row in metrics for name in row if name.startswith("eval/") and name.endswith("/pass@1")}
    parts = {name: values(f"{name}_seconds") for name in ("generate", "train", "sync")}
    with drawn_png(path, 3, width=13, dpi=110) as (reward, difference, seconds):
        reward.plot(steps, values("reward_mean"), marker=".", color="#1f6f8b", label="mean reward")
        for place, name in enumerate(sorted(names), start=1):
            keys = ("step", name, f"{name}_low", f"{name}_high")
            evaluated, means, lows, highs = ([row[key] for row in metrics if name in row] for key in keys)
            label = f"held out: {name.split('/')[1]} pass@1"
            reward.plot(evaluated, means, marker="o", color=f"C{place}", label=label)
            reward.fill_between(evaluated, lows, highs, color=f"C{place}", alpha=0.2)
        reward.set(title="mean reward, held-out pass@1" if names else "mean reward", xlabel="step", ylim=(0, 1.02))
        if names:
            reward.legend(loc="lower right", frameon=False)
        difference.plot(steps, values("log_prob_difference_mean"), marker=".", color="#b3541e")
        difference.set(title="engine-to-trainer log-prob difference", xlabel="step", ylim=(0, None))
        seconds.stackplot(steps, list(parts.values()), labels=list(parts), alpha=0.8)
        seconds.set(title="seconds per step", xlabel="step")
        seconds.legend(loc="upper right", frameon=False)


Results: TypeAlias = Mapping[str, Mapping[str, JSON]]
"""Results of an evaluation by environment (`EvaluationReport.to_summary`)."""

RunResults: TypeAlias = Mapping[str, Results]
"""Evaluations `before` and `after` training, as in `summary.json`."""


def before_after_table(before: Results, after: Results) -> Table:
    """Return a table of evaluation results before and after training."""
    numbers = (Column(title, justify="right") for title in ("before", "after"))
    table = Table("", *numbers, title="on problems that training does not use")
    for row in shown_results(before, after):
        table.add_row(*row)
    return table


def shown_results(before: Results, after: Results) -> list[tuple[str, str, str]]:
    """Return rows for the table of evaluations: name, value before training, and value after.

    Example:
        >>> shown_results({"sums": {"reward": 0.25}}, {"sums": {"reward": 0.5, "num_rollouts": 8}})
        [('sums reward', '0.250', '0.500')]
    """
    return [
        (f"{name} {measure.replace('_', ' ')}", _number(before.get(name, {}).get(measure)), _number(result))
        for name, results in after.items()
        for measure, result in results.items()
        if measure.startswith("pass@") or measure in ("reward", "completion_tokens")
    ]


def _number(result: Any) -> str:
    if isinstance(result, Mapping):
        low, high = result["interval"]
        return f"{result['mean']:.3f} ({low:.2f} … {high:.2f})"
    return "–" if result is None else f"{result:.3f}"


ContinuedBy: TypeAlias = Callable[[str, Mapping[str, object]], str]
"""Returns the command or code that continues a run, from its path and the entries to change."""


def resume_command(run_path: str, changes: Mapping[str, object]) -> str:
    """Return the command that continues a run.

    Example:
        >>> resume_command("runs/mine", {"train.num_steps": 40}).split()[-3:]
        ['run.path=runs/mine', 'resume=true', 'train.num_steps=40']
    """
    changed = [f"{name}={as_entry_value(value)}" for name, value in changes.items()]
    script = Path(sys.argv[0])
    program = ["python", sys.argv[0]]
    if script.parent == Path(__file__).parents[1] / "scripts":
        program = ["llmrl", "train"] if script.stem == "grpo" else ["python", "-m", f"llmrl.scripts.{script.stem}"]
    return shlex.join([*program, f"run.path={run_path}", "resume=true", *changed])


def print_next_steps(console: Console, folder: RunFolder, resume_command: str, env: EnvConfig) -> None:
    """Print where the run is, and the commands to view it, evaluate its model, chat with the model, and continue.

    The command to evaluate is printed only if `llmrl eval` can build `env` from names.
    """
    path = shlex.quote(str(folder.path))
    measure = ""
    if is_env_name(env.name) and isinstance(env.data, str | None):
        problems = []
        if env.data is not None:
            problems += ["--data", env.data]
        if env.eval_split != "test":  # the default of the command
            problems += ["--split", env.eval_split]
        options = [f"{name}={json.dumps(as_json(value), ensure_ascii=False)}" for name, value in env.options.items()]
        measure = shlex.join(["llmrl", "eval", "--model", str(folder.path), *problems, "--env", env.name, *options])
    lines = (
        ("the run", f"{folder.path}: model/, curve.png, metrics.csv, rollouts.jsonl"),
        ("look at it", f"llmrl view {path}"),
        ("measure it", measure),
        ("talk to it", f"llmrl chat --model {path}"),
        ("continue", resume_command),
    )
    for name, text in lines:
        if text:
            console.print(f"[bold]{name:12}[/bold]", escape(text), sep="", highlight=False, soft_wrap=True)
    if (activate := _activation_command()) is not None:
        console.print(f"Activate the environment before these commands: {activate}", highlight=False, soft_wrap=True)


def _activation_command() -> str | None:
    """Return the command that activates this environment, or None if it is active."""
    folder = Path(sys.prefix)
    if sys.prefix == sys.base_prefix or str(folder / "bin") in os.environ.get("PATH", "").split(os.pathsep):
        return None
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    return f". {folder / 'bin' / 'activate'}"

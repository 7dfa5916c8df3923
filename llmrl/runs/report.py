"""The report of a finished run: a table of results, a curve, and the commands to continue."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llmrl._utils.files import write_atomically
from llmrl._utils.json_values import as_json
from llmrl._utils.types import JSON
from llmrl.config.sections import EnvConfig
from llmrl.envs.tasks.registry import is_env_name
from llmrl.runs.run_folder import RunFolder


def plot_curve(metrics: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw reward, evaluations, log-prob difference and times as a PNG. Raises ImportError if matplotlib is missing."""
    from llmrl._utils.imports import require

    require("matplotlib", extra="scripts")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def values(name: str) -> list[float]:
        return [row.get(name, math.nan) for row in metrics]

    steps = values("step")
    figure, (reward, difference, seconds) = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    reward.plot(steps, values("reward_mean"), marker=".", color="#1f6f8b", label="mean reward")
    names = {name for row in metrics for name in row if name.startswith("eval/") and name.endswith("/pass@1")}
    for place, name in enumerate(sorted(names)):
        points = [(row["step"], row[name], row[f"{name}_low"], row[f"{name}_high"]) for row in metrics if name in row]
        evaluated, means, lows, highs = zip(*points, strict=True)
        reward.plot(evaluated, means, marker="o", color=f"C{place + 1}", label=f"held out: {name.split('/')[1]} pass@1")
        reward.fill_between(evaluated, lows, highs, color=f"C{place + 1}", alpha=0.2)
    reward.set(title="mean reward, held-out pass@1" if names else "mean reward", xlabel="step", ylim=(0, 1.02))
    if names:
        reward.legend(loc="lower right", frameon=False)
    difference.plot(steps, values("log_prob_difference_mean"), marker=".", color="#b3541e")
    difference.set(title="engine-to-trainer log-prob difference", xlabel="step", ylim=(0, None))
    parts = {name: values(f"{name}_seconds") for name in ("generate", "train", "sync")}
    seconds.stackplot(steps, list(parts.values()), labels=list(parts), alpha=0.8)
    seconds.set(title="seconds per step", xlabel="step")
    seconds.legend(loc="upper right", frameon=False)
    for axis in (reward, difference, seconds):
        axis.grid(alpha=0.25)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=110, format="png"))
    pyplot.close(figure)


Results: TypeAlias = Mapping[str, Mapping[str, JSON]]
"""Results of an evaluation by environment (`EvaluationReport.to_summary`)."""

RunResults: TypeAlias = Mapping[str, Results]
"""Evaluations `before` and `after` training, as in `summary.json`."""


def before_after_table(before: Results, after: Results) -> Table:
    """Return a table of evaluation results before and after training."""
    table = Table(title="on problems that training does not use")
    for title in ("", "before", "after"):
        table.add_column(title, justify="left" if not title else "right")
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
    changed = [f"{name}={'null' if value is None else value}" for name, value in changes.items()]
    script = Path(sys.argv[0])
    program = ["python", sys.argv[0]]
    if script.parent == Path(__file__).parents[1] / "scripts":
        program = ["llmrl", "train"] if script.stem == "grpo" else ["python", "-m", f"llmrl.scripts.{script.stem}"]
    return shlex.join([*program, f"run.path={run_path}", "resume=true", *changed])


def print_next_steps(console: Console, folder: RunFolder, resume_command: str, env: EnvConfig | None = None) -> None:
    """Print where the run is, and the commands to view it, evaluate its model, chat with the model, and continue.

    The command to evaluate is printed only if `llmrl eval` can build `env` from names.
    """
    path = shlex.quote(str(folder.path))
    measure = ""
    if env is not None and is_env_name(env.name) and isinstance(env.data, str | None):
        problems = [] if env.data is None else ["--data", env.data]
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
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return f". {folder / 'bin' / 'activate'}"

"""`llmrl view`: runs as a page, on the terminal, as pictures, or as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmrl.cli.options import console, print_json
from llmrl.runs.report import plot_curve
from llmrl.viewer import RunData, follow, print_run, read_run


def write_pages(paths: Sequence[Path], page: Path, max_rollouts: int | None) -> None:
    """Write the page, and keep it up to date while a run is in progress."""
    is_first = True
    for written, is_live in follow(paths, page, max_rollouts=max_rollouts):
        if is_first:
            hint = "open it in a browser; it needs no network"
            console.print(f"{written}  [dim]{hint}[/dim]", soft_wrap=True)
        if is_first and is_live:
            console.print("[dim]the run is in progress: the page follows it until Ctrl-C[/dim]")
        is_first = False


def print_runs(paths: Sequence[Path], max_rollouts: int | None) -> None:
    """Print each run."""
    for path in paths:
        print_run(read_run(path, max_rollouts=max_rollouts), console=console)


def draw_curves(paths: Sequence[Path]) -> None:
    """Draw each run's curves to its `curve.png`."""
    for path in paths:
        plot_curve(read_run(path, max_rollouts=1).metrics, path / "curve.png")
        console.print(path / "curve.png", soft_wrap=True)


def print_reports(paths: Sequence[Path]) -> None:
    """Print the result of `report_of` for each run."""
    print_json({"runs": [report_of(read_run(path, max_rollouts=1), path) for path in paths]})


def report_of(run: RunData, path: Path) -> dict[str, object]:
    """Return the JSON report of a run: its folder, its metrics step by step, its evaluations and its health."""
    model = path / "model"
    return {
        "run": str(path),
        "model": str(model) if model.is_dir() else None,
        "is_running": run.is_running,
        "metrics": run.metrics,
        "health": list(run.health.values())[-1:],
        **run.summary,
    }

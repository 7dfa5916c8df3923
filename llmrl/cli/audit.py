"""`llmrl audit`: find errors of an environment before a run."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torchrl.envs import EnvBase

from llmrl._utils.types import JSON
from llmrl.audit import Audit, audit
from llmrl.cli.models import make_chat_renderer, model_path
from llmrl.cli.options import shown_number
from llmrl.envs import make_task_env
from llmrl.envs.tasks.registry import find_env


def run_audit(
    env: str,
    *,
    model: str,
    data: str | None,
    chat_template: Path | None,
    num_problems: int,
    options: Mapping[str, JSON],
    console: Console,
) -> Audit:
    """Play the prepared answers; return the result."""
    renderer = make_chat_renderer(model_path(model), chat_template)

    def make(split: str) -> EnvBase:
        return make_task_env(env, split, repeats=2, data=data, **options)

    # With `data`, both splits would have the same rows.
    splits = (find_env(env).splits if data is None else ()) or ("train",)
    with console.status("") as status:
        return audit(
            make,
            renderer,
            num_problems=num_problems,
            splits=splits,
            on_answer=lambda answer: status.update(f"playing {answer.name}"),
        )


def print_audit(result: Audit, console: Console) -> None:
    """Print the rewards of all answers, the findings and the verdict."""
    table = Table("answer", "deserves", "mean reward", title=f"{result.num_problems} problems")
    deserved = {"reference": "all" if result.reference else "all, if right"}
    for one in result.played:
        table.add_row(one.name, deserved.get(one.kind, "nothing"), shown_number(one.mean, ".2f"))
    console.print(table)
    for finding in result.findings:
        console.print(f"[bold]{finding.verdict}[/bold] {finding.name}: {finding.says}")
        for cause in finding.causes:
            console.print(f"    {cause}", markup=False)
    for reason in result.not_examined:
        console.print(f"[dim]not examined: {reason}[/dim]")
    console.print(f"verdict: [bold]{result.verdict}[/bold]")


def write_page(result: Audit, path: Path) -> None:
    """Write what `print_audit` prints as an HTML page."""
    recorder = Console(record=True, width=110, file=io.StringIO(), highlight=False)
    print_audit(result, recorder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(recorder.export_html(), encoding="utf-8")

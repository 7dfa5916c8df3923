"""`print_run`: shows a run on the terminal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmrl._utils.terminal import printable
from llmrl.viewer.run_data import Record, RunData, facts_of
from llmrl.watch.live_view import conversation_panel, sparkline


def print_run(run: RunData, *, console: Console | None = None) -> None:
    """Print the curves, the number of rollouts by status, and the best and worst conversations of the last step."""
    console = console or Console()
    head = Text(printable(run.name), style="bold")
    console.print(head.append(f": {len(run.metrics)} steps, {len(run.rollouts)} rollouts", style="not bold"))
    facts = [
        Text(printable(name), style="dim").append(f" {value}", style="not dim") for name, value in facts_of(run.summary)
    ]
    if facts:
        console.print(Columns(facts, padding=(0, 3)))
    # Names from all steps, because a step without training lacks some metrics.
    names = [name for name in dict.fromkeys(name for row in run.metrics for name in row) if name != "step"]
    table = Table("metric", "first", "last", "from the first step to the last")
    for name in names:
        values = [row[name] for row in run.metrics if math.isfinite(row.get(name, math.nan))]
        if not values:
            continue
        line = sparkline(_thinned(values), low=min(values), high=max(values))
        table.add_row(Text(printable(name)), f"{values[0]:.4g}", f"{values[-1]:.4g}", line)
    if names:
        console.print(table)
    statuses = Table("rollouts", "status", "reason", "mean reward")
    ends: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in run.rollouts:
        ends[record["split"], record["status"], record["reason"]].append(record)
    for (split, status, reason), ended in sorted(ends.items(), key=lambda end: end[0]):
        rewards = [record["reward"] for record in ended if record.get("is_scored", True)]
        mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "–"
        cells = (f"{split}: {len(ended)}", status, reason, mean)
        statuses.add_row(*(Text(printable(cell)) for cell in cells))
    if ends:
        console.print(statuses)
    last = [record for record in run.rollouts if record["step"] == run.rollouts[-1]["step"]]
    scored = [record for record in last if record.get("is_scored", True)]
    for word, record in zip(("best", "worst"), _extremes(scored), strict=False):
        title = f"{word} of step {record['step']}: {record['rollout_id']}  reward {record['reward']:.2f}"
        console.print(conversation_panel(record["messages"], title))
    if last and not scored:
        title = f"step {last[0]['step']}: {last[0]['rollout_id']}  without a score"
        console.print(conversation_panel(last[0]["messages"], title))


def _thinned(values: Sequence[float], width: int = 60) -> list[float]:
    """Return at most `width` values, evenly spaced, including the last."""
    if len(values) <= width:
        return list(values)
    return [values[round(place * (len(values) - 1) / (width - 1))] for place in range(width)]


def _extremes(records: Sequence[Record]) -> list[Record]:
    """Return the records with the highest and the lowest reward, without duplicates."""
    ranked = sorted(records, key=lambda record: -record["reward"])
    return ranked[:1] + ranked[1:][-1:]

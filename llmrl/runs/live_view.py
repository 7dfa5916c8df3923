"""`LiveView`: a training run on the terminal while it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from llmrl._utils.terminal import printable
from llmrl._utils.types import Row
from llmrl.data import Message, text_of

_COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward_mean", "{:.3f}"),
    ("length", "completion_tokens_mean", "{:.1f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("log-prob diff", "log_prob_difference_mean", "{:.4f}"),
    ("ESS", "ESS", "{:.3f}"),
    ("generate s", "generate_seconds", "{:.2f}"),
    ("train s", "train_seconds", "{:.2f}"),
    ("sync s", "sync_seconds", "{:.2f}"),
    ("forks", "num_forks", "{:.0f}"),
    ("realigned tokens", "num_realigned_tokens", "{:.0f}"),
)
# Shown from the first step on in which they are not zero.
_RARE = frozenset(("num_forks", "num_realigned_tokens"))
_SPARKS = "▁▂▃▄▅▆▇█"
_NUM_ROWS = 12


def sparkline(values: list[float], *, low: float = 0.0, high: float = 1.0) -> str:
    """Values as a line of block characters, `low` and `high` being the lowest and highest block, gaps where none is.

    Example:
        >>> sparkline([0.0, 0.5, float("nan"), 1.0])
        '▁▅ █'
    """
    span = (high - low) or 1.0
    shares = ((value - low) / span for value in values)
    return "".join(
        " " if math.isnan(share) else _SPARKS[round(min(max(share, 0.0), 1.0) * (len(_SPARKS) - 1))] for share in shares
    )


def conversation_panel(messages: Iterable[Message], title: str) -> Panel:
    """A conversation in a frame."""
    text = Text()
    for message in messages:
        text.append(f"{printable(message['role'])}: ", style="bold")
        text.append(printable(text_of(message.get("content")).strip()) + "\n")
    return Panel(text, title=Text(printable(title)), title_align="left")


class LiveView:
    """Step, reward, length, tokens a second, log-prob difference, effective sample size and where the time went.

    Forks and realigned tokens are shown once there are any.

    On a terminal it redraws in place; elsewhere it prints one line a step. Use as a context manager.

    Args:
        num_steps: steps of the whole run.
        first_step: steps done before, when resumed.
    """

    def __init__(self, num_steps: int, *, first_step: int = 0, console: Console | None = None) -> None:
        self.console = console or Console()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._progress.add_task("training", total=num_steps, completed=first_step)
        self._rows: list[Mapping[str, float]] = []
        self._sample: Panel | None = None
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if self.console.is_terminal:
            self._live = Live(self._render(), console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.update(self._render())
            self._live.stop()

    def doing(self, what: str) -> None:
        """Say what is being done now."""
        self._progress.update(self._task, description=what)
        if self._live is not None:
            self._live.update(self._render())

    def show_step(self, step: int, metrics: Mapping[str, float], records: Sequence[Row] = ()) -> None:
        """Show one step's metrics, and the best of some rollouts' records."""
        row = {"step": step, **metrics}
        self._rows.append(row)
        self._progress.update(self._task, completed=step)
        if self._live is not None:
            self._live.update(self._render())
        else:
            parts = (f"{title} {form.format(row[key])}" for title, key, form in self._columns() if key in row)
            self.console.print("  ".join(parts), highlight=False)
        if metrics.get("is_skipped"):
            text = f"step {step} changed nothing: no row, or a loss that is not finite"
            self.console.print(text, style="bold red")
        if records:
            self.show_sample(max(records, key=lambda record: record["reward"]))

    def show_sample(self, record: Row) -> None:
        """Show one conversation with its reward, from a rollout's record."""
        title = f"{record['rollout_id']}  reward {record['reward']:.2f}"
        self._sample = conversation_panel(record["messages"], title)
        if self._live is None:
            self.console.print(self._sample)

    def _columns(self) -> list[tuple[str, str, str]]:
        return [
            column for column in _COLUMNS if column[1] not in _RARE or any(row.get(column[1]) for row in self._rows)
        ]

    def _render(self) -> Group:
        table, columns = Table(), self._columns()
        for title, _, _ in columns:
            table.add_column(title, justify="right")
        for row in self._rows[-_NUM_ROWS:]:
            table.add_row(*(form.format(row[key]) if key in row else "" for _, key, form in columns))
        rewards = [row["reward_mean"] for row in self._rows if "reward_mean" in row]
        parts: list[RenderableType] = [table, Text(f"reward {sparkline(rewards[-60:])}"), self._progress]
        return Group(*parts, self._sample) if self._sample is not None else Group(*parts)

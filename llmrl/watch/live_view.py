"""`LiveView`: shows the progress of a training run on the terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from llmrl._utils.failure import without_packages
from llmrl._utils.terminal import printable
from llmrl._utils.types import Row
from llmrl.data import Message, text_of
from llmrl.watch.findings import Finding, Verdict
from llmrl.watch.notebook import NotebookOutput, curve_svg, paragraph_html, table_html

_COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward_mean", "{:.3f}"),
    ("length", "completion_tokens_mean", "{:.1f}"),
    ("seconds", "seconds", "{:.1f}"),
    ("errors", "num_error", "{:.0f}"),
    ("cut", "cut_share", "{:.0%}"),
    ("failed calls", "tool_failure_share", "{:.0%}"),
    ("trained", "trained_share", "{:.0%}"),
    ("entropy", "entropy", "{:.2f}"),
    ("log-prob diff", "log_prob_difference_mean", "{:.4f}"),
    ("ESS", "ESS", "{:.3f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("generate s", "generate_seconds", "{:.2f}"),
    ("train s", "train_seconds", "{:.2f}"),
    ("sync s", "sync_seconds", "{:.2f}"),
    ("forks", "num_forks", "{:.0f}"),
    ("realigned tokens", "num_realigned_tokens", "{:.0f}"),
)
"""Title, metric and format, the most important first: a narrow terminal shows only the first columns."""
# Columns that are shown once a step has a different value.
_RARE = {
    "trained_share": 1.0,
    "cut_share": 0.0,
    "num_error": 0.0,
    "tool_failure_share": 0.0,
    "num_forks": 0.0,
    "num_realigned_tokens": 0.0,
}
_STYLES = {Verdict.FINE: "green", Verdict.LOOK: "yellow", Verdict.BROKEN: "bold red"}
_SPARKS = "▁▂▃▄▅▆▇█"
_NUM_ROWS = 12
_NOTEBOOK_WIDTH = 140


def sparkline(values: list[float], *, low: float = 0.0, high: float = 1.0) -> str:
    """Return values as a line of block characters, with a space for NaN.

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
    """Return a conversation in a frame."""
    text = Text()
    for message in messages:
        text.append(f"{printable(message['role'])}: ", style="bold")
        text.append(printable(text_of(message.get("content")).strip()) + "\n")
    return Panel(text, title=Text(printable(title)), title_align="left")


class LiveView:
    """Shows each step in one line: reward, length, time, and as many other metrics as fit. A context manager.

    Rare values (cut answers, errors, forks) are shown once they occur. The view is redrawn in place on a terminal and
    in a notebook; elsewhere, a line per step is printed. `metrics.csv` has all metrics.
    """

    def __init__(self, num_steps: int, *, first_step: int = 0, console: Console | None = None) -> None:
        self.console = console or Console()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._progress.add_task("training", total=num_steps, completed=first_step)
        self._rows: list[Mapping[str, float]] = []
        self._sample: Panel | None = None
        self._findings: Sequence[Finding] = ()
        self._has_shown_error = False
        self._live: Live | None = None
        self._output: NotebookOutput | None = None

    def __enter__(self) -> LiveView:
        if self.console.is_jupyter:
            self._output = NotebookOutput()
        elif self.console.is_terminal:
            self._live = Live(self._render(), console=self.console, refresh_per_second=4)
            self._live.start()
        else:
            (task,) = self._progress.tasks
            self.console.print(f"step {task.completed + 1:g} of {task.total:g} begins", highlight=False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.update(self._render())
            self._live.stop()

    @property
    def _is_in_place(self) -> bool:
        return self._output is not None or self._live is not None

    def _redraw(self) -> bool:
        """Redraw in place, and return whether that is possible; otherwise the caller prints lines."""
        if self._output is not None:
            self._output.show(self._html())
        elif self._live is not None:
            self._live.update(self._render())
        return self._is_in_place

    def doing(self, what: str) -> None:
        """Show the current activity."""
        self._progress.update(self._task, description=what)
        self._redraw()

    def show_step(self, step: int, metrics: Mapping[str, float], records: Sequence[Row] = ()) -> None:
        """Show one step's metrics, and the best of `records`."""
        row = {"step": step, **metrics}
        self._rows.append(row)
        self._progress.update(self._task, completed=step)
        if not self._redraw():
            self.console.print(self._line(row), highlight=False)
        if num_overflows := metrics.get("num_overflows"):
            self.console.print(f"step {step}: {num_overflows:g} of its updates overflowed in float16", style="yellow")
        elif metrics.get("is_skipped"):
            why = "no row to train on, or a loss that is not finite"
            self.console.print(f"step {step} changed nothing: {why}", style="bold red")
        elif num_skipped := metrics.get("num_skipped"):
            self.console.print(f"step {step} skipped {num_skipped:g} of its updates", style="bold red")
        if records:
            self.show_sample(max(records, key=lambda record: record["reward"]))

    def show_health(self, step: int, findings: Sequence[Finding], records: Sequence[Row] = ()) -> None:
        """Show a step's findings, and the first error of the run with its traceback."""
        known = {(finding.name, finding.verdict) for finding in self._findings}
        self._findings = findings
        if not self._redraw():
            for finding in findings:
                if (finding.name, finding.verdict) not in known:
                    self.console.print(f"step {step}:", _sentence(finding), soft_wrap=True)
        failed = next((record for record in records if record["error"]), None)
        if failed is not None and not self._has_shown_error:
            self._has_shown_error = True
            said = printable(without_packages(str(failed["traceback"] or failed["error"])).rstrip())
            title = f"the first error: {failed['rollout_id']} at step {step}"
            self.console.print(Panel(Text(said), title=Text(printable(title)), title_align="left"))

    def show_dropped(self, step: int, findings: Sequence[Finding], records: Sequence[Row]) -> None:
        """Show that no rollout of a step can be trained on so far, with the findings and some of the rollouts."""
        lines = [_sentence(finding) for finding in findings]
        lines += [Text(f"  or: {cause}") for finding in findings[:1] for cause in finding.causes[1:]]
        panels = [conversation_panel(record["messages"], _title(record)) for record in records]
        self.console.print(
            f"step {step}: so far, all answers to each prompt had the same reward; other prompts are drawn.",
            *lines,
            sep="\n",
            highlight=False,
            soft_wrap=True,
        )
        self.console.print(*panels, sep="\n")  # soft_wrap would cut their lines

    def show_sample(self, record: Row) -> None:
        """Show the conversation and the reward of a rollout record."""
        self._sample = conversation_panel(record["messages"], _title(record))
        if not self._is_in_place:
            self.console.print(self._sample)

    def _columns(self) -> list[tuple[str, str, str]]:
        def is_shown(name: str) -> bool:
            return name not in _RARE or any(row.get(name, _RARE[name]) != _RARE[name] for row in self._rows)

        return [column for column in _COLUMNS if is_shown(column[1])]

    def _line(self, row: Mapping[str, float]) -> str:
        parts = [f"{title} {form.format(row[key])}" for title, key, form in self._columns() if key in row]
        ends = itertools.accumulate(len(part) + 2 for part in parts)
        return "  ".join(part for part, end in zip(parts, ends, strict=True) if end <= self.console.width + 2)

    def _fitting(self, width: int) -> list[tuple[str, list[str]]]:
        """Return titles and cells of the columns that fit into `width`, for the last steps."""
        rows = self._rows[-_NUM_ROWS:]
        columns = []
        for title, key, form in self._columns():
            cells = [form.format(row[key]) if key in row else "" for row in rows]
            width -= max(map(len, [title, *cells])) + 2
            if width < -2:
                break
            columns.append((title, cells))
        return columns

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        columns = self._fitting(self.console.width)
        for title, _ in columns:
            table.add_column(title, justify="right", no_wrap=True)
        for cells in zip(*(cells for _, cells in columns), strict=True):
            table.add_row(*cells)
        return table

    def _parts_of_reward(self) -> list[str]:
        """Return a line with mean and spread of each reward function at the last step, if there are several."""
        row = self._rows[-1] if self._rows else {}
        names = [name.removesuffix("_mean") for name in row if name.startswith("reward/") and name.endswith("_mean")]
        if len(names) < 2:
            return []
        parts = (
            f"{name.removeprefix('reward/')} {row[f'{name}_mean']:.3f} ± {row[f'{name}_std']:.3f}" for name in names
        )
        return [printable("  ".join(parts))]

    def _rewards(self) -> list[float]:
        return [row["reward_mean"] for row in self._rows if "reward_mean" in row]

    def _health(self) -> list[Text]:
        return [_sentence(finding) for finding in self._findings] or [Text(Verdict.FINE, style=_STYLES[Verdict.FINE])]

    def _html(self) -> str:
        (task,) = self._progress.tasks
        lines = [f"{task.description}: {task.completed:g} of {task.total or 0:g} steps", *self._parts_of_reward()]
        lines += [f"health {line.plain}" for line in self._health()]
        if self._sample is not None:
            lines += [f"{self._sample.title}: {self._sample.renderable}"]
        plot = curve_svg(self._rewards())
        return "".join([plot, table_html(self._fitting(_NOTEBOOK_WIDTH)), *map(paragraph_html, lines)])

    def _render(self) -> Group:
        parts: list[RenderableType] = [
            self._table(),
            Text(f"reward {sparkline(self._rewards()[-60:])}"),
            *map(Text, self._parts_of_reward()),
            *(Text.assemble("health ", line) for line in self._health()),
            self._progress,
        ]
        if self._sample is not None:
            parts.append(self._sample)
        return Group(*parts)


def _title(record: Row) -> str:
    if record["is_scored"]:
        return f"{record['rollout_id']}  reward {record['reward']:.2f}"
    return f"{record['rollout_id']}  not scored: {record['error'] or record['reason'] or 'it has no reward'}"


def _sentence(finding: Finding) -> Text:
    likely = f" Likely: {finding.causes[0]}." if finding.causes else ""
    over = f" ({finding.over})" if finding.over else ""
    said = f"{finding.name}: {finding.says}{likely}{over}"
    if finding.verdict == Verdict.FINE:
        return Text(said, style=_STYLES[finding.verdict])
    return Text.assemble((finding.verdict, _STYLES[finding.verdict]), " ", said)

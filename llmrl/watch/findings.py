"""Findings about a run's health, their verdicts and example rollouts, as stored in `health.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from llmrl._utils.files import open_file
from llmrl._utils.types import JSON, Row

_NUM_SHOWN = 8


class Verdict(StrEnum):
    """Health of a run, from best to worst."""

    FINE = "fine"
    LOOK = "look"
    BROKEN = "broken"


class Selection(StrEnum):
    """Kind of rollouts that illustrate a finding (`failing_rollouts`)."""

    NONE = ""
    ERROR = "error"
    UNSCORED = "unscored"
    CUT = "cut"
    TOOLS = "tools"
    LONGEST = "longest"
    BEST = "best"
    WORST = "worst"


@dataclass(frozen=True, slots=True)
class Finding:
    """A statement about a run, derived from its metrics."""

    name: str
    verdict: Verdict
    says: str
    """The measurement, as a sentence."""
    causes: tuple[str, ...]
    """Possible causes, the most likely first."""
    selection: Selection = Selection.NONE
    steps: tuple[int, int] | None = None
    """First and last step examined; None if the finding is not about a run."""

    @property
    def over(self) -> str:
        """The examined steps in words; empty without steps.

        Example:
            >>> Finding("answers_cut", Verdict.LOOK, "25 % of the answers were cut.", (), steps=(3, 5)).over
            'steps 3 to 5'
        """
        if self.steps is None:
            return ""
        first, last = self.steps
        return f"step {last}" if first == last else f"steps {first} to {last}"

    def to_record(self, records: Sequence[Row] = ()) -> dict[str, JSON]:
        """Return the finding as JSON, with the ids of at most eight of `records` that illustrate it."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "says": self.says,
            "steps": list(self.steps or ()),
            "causes": list(self.causes),
            "selection": self.selection,
            "rollouts": [record["rollout_id"] for record in failing_rollouts(self.selection, records)],
        }


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Return the worst verdict; `FINE` without findings."""
    return max((finding.verdict for finding in findings), key=list(Verdict).index, default=Verdict.FINE)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, the worst verdict first; findings with the same verdict keep their order."""
    return sorted(findings, key=lambda finding: list(Verdict).index(finding.verdict), reverse=True)


def percent(share: float) -> str:
    """Return a share in percent, as a sentence states it."""
    return f"{100 * share:.0f} %"


def severity(is_broken: bool) -> Verdict:
    """Return the verdict on what is not fine."""
    return Verdict.BROKEN if is_broken else Verdict.LOOK


def graded(share: tuple[float, float] | None, *, look: float, broken: float) -> Verdict:
    """Return the verdict on a share, given as (value, lower confidence bound)."""
    if share is None or share[1] <= look:
        return Verdict.FINE
    return severity(share[0] > broken)


def failing_rollouts(selection: Selection, records: Sequence[Row]) -> list[Row]:
    """Return at most eight rollout records (`Rollout.to_record`) that illustrate a finding.

    Example:
        >>> records = [{"rollout_id": "a", "reason": ""}, {"rollout_id": "b", "reason": "length"}]
        >>> [record["rollout_id"] for record in failing_rollouts(Selection.CUT, records)]
        ['b']
    """
    keep: dict[Selection, Callable[[Row], bool]] = {
        Selection.NONE: lambda record: False,
        Selection.ERROR: lambda record: record["status"] == "error",
        Selection.UNSCORED: lambda record: not record["is_scored"],
        Selection.CUT: lambda record: record["reason"] == "length",
        Selection.TOOLS: lambda record: any(outcome != "answered" for outcome in record.get("tool_calls", ())),
    }
    order: dict[Selection, Callable[[Row], float]] = {
        Selection.LONGEST: lambda record: -record["num_completion_tokens"],
        Selection.BEST: lambda record: -record["reward"],
        Selection.WORST: lambda record: record["reward"],
    }
    kept = [record for record in records if keep.get(selection, bool)(record)]
    return sorted(kept, key=order.get(selection, lambda record: 0.0))[:_NUM_SHOWN]


class HealthLog:
    """The file `health.jsonl` of a run: verdict and findings by step. The last line of a step counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, findings: Sequence[Finding], records: Sequence[Row] = ()) -> None:
        """Append a step's findings, with the ids of rollouts that illustrate them."""
        found = [finding.to_record(records) for finding in findings]
        line = {"step": step, "verdict": verdict_of(findings), "findings": found}
        with open_file(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> dict[int, dict[str, JSON]]:
        """Return the records by step, without damaged lines."""
        return read_by_step(self.path)


def read_by_step(path: Path) -> dict[int, dict[str, JSON]]:
    """Return the JSON lines of a file by their `step`: the last line of each step, without damaged lines."""
    steps: dict[int, dict[str, JSON]] = {}
    if not path.exists():
        return steps
    with open_file(path, "rb") as file:
        lines = file.read().splitlines()
    for line in lines:
        try:
            record = json.loads(line)
            steps[int(record["step"])] = record
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return steps

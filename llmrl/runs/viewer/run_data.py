"""`read_run`: a run folder as one value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, cast

from llmrl._utils.types import JSON, Tokenizer
from llmrl.data import Message
from llmrl.runs.run_folder import RunFolder, holds_run
from llmrl.runs.state_file import DamagedFileError
from llmrl.runs.token_log import TokenRow


class Record(TypedDict):
    """One rollout as a run's folder keeps it: `Rollout.to_record`, and where it belongs."""

    step: int
    split: str
    group_id: str
    rollout_id: str
    status: str
    reason: str
    reward: float
    messages: list[Message]


@dataclass(slots=True)
class RunData:
    """What a run left behind, for reading."""

    name: str
    metrics: list[dict[str, float]] = field(default_factory=list)
    """One entry a step."""
    rollouts: list[Record] = field(default_factory=list)
    """Records (`Rollout.to_record`) with `step` and `split`, in the order they were played."""
    rows: dict[tuple[int, str], list[TokenRow]] = field(default_factory=dict)
    """Training rows by step and rollout id, where their tokens were kept."""
    summary: dict[str, JSON] = field(default_factory=dict)
    config: str = ""
    """The run's configuration, as text."""
    token_texts: dict[int, str] = field(default_factory=dict)
    """What each token id that occurs stands for; empty when no tokenizer was found."""


def facts_of(summary: Mapping[str, JSON]) -> list[tuple[str, str]]:
    """Return what `summary.json` says, as people read it: names and values.

    Example:
        >>> facts_of({"before": {"accuracy": 0.5}, "evaluation": {"pass@1": {"mean": 0.9, "interval": [0.8, 0.95]}}})
        [('accuracy before', '0.5'), ('pass@1', '0.9 (0.8 … 0.95)')]
    """
    facts: list[tuple[str, str]] = []

    def add(name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            facts.append((name, _number(value)))
        elif "interval" in value:
            low, high = value["interval"]
            facts.append((name, f"{_number(value['mean'])} ({low:.3g} … {high:.3g})"))
        else:  # rewards by name, rollouts by status
            for part, number in value.items():
                add(part, number)

    for when, results in summary.items():
        for name, value in results.items() if isinstance(results, Mapping) else [("", results)]:
            add(name if when == "evaluation" else f"{name} {when}".strip(), value)
    return facts


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


def read_run(path: str | Path, *, max_rollouts: int | None = None) -> RunData:
    """Read a run folder; a line that a kill cut short is left out.

    Args:
        path: the folder.
        max_rollouts: keep only the last so many.

    Raises:
        FileNotFoundError: when the folder holds neither metrics nor rollouts.
        DamagedFileError: when a file of it is not what was written, naming it.
        ValueError: when `max_rollouts` is not positive.
    """
    if max_rollouts is not None and max_rollouts < 1:
        raise ValueError(f"max_rollouts must be at least 1, got {max_rollouts}.")
    path = Path(path)
    try:
        folder = RunFolder(path, read_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} holds no run; {_where_runs_are(path)}") from None
    config = path / "config.yaml"
    rollouts = list(_records(folder.rollouts_path))
    if max_rollouts is not None:
        rollouts = rollouts[-max_rollouts:]
    wanted = {(record["step"], record["rollout_id"]) for record in rollouts}
    rows: dict[tuple[int, str], list[TokenRow]] = {}
    for step in folder.tokens.steps():
        for row in folder.tokens.read(step):
            if (step, row.rollout_id) in wanted:
                rows.setdefault((step, row.rollout_id), []).append(row)
    used = {token_id for of_rollout in rows.values() for row in of_rollout for token_id in row.token_ids}
    return RunData(
        name=path.resolve().name,
        metrics=folder.read_metrics(),
        rollouts=rollouts,
        rows=rows,
        summary=folder.read_summary(),
        config=config.read_text(encoding="utf-8", errors="replace") if config.exists() else "",
        token_texts=_texts(used, _tokenizer(folder)),
    )


def _where_runs_are(path: Path) -> str:
    """Return the last run inside, where a folder of runs was given."""
    runs = [entry for entry in path.iterdir() if holds_run(entry)] if path.is_dir() else []
    if runs:
        return f"the last one in it is {max(runs, key=lambda run: run.stat().st_mtime)}."
    return "give the folder that the training script named (run.path in its configuration)."


def _records(path: Path) -> Iterator[Record]:
    """Yield the records; a step that was logged twice (before and after a kill) counts once."""
    if not path.exists():
        return
    seen = set()
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut short by a kill
            if not isinstance(record, dict) or Record.__required_keys__ - record.keys():
                continue  # damaged
            key = record["step"], record["split"], record["rollout_id"]
            if key not in seen:
                seen.add(key)
                yield cast(Record, record)


def _tokenizer(folder: RunFolder) -> Tokenizer | None:
    path = folder.tokenizer_path if folder.tokenizer_path.exists() else folder.model_path
    if not path.exists():
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise DamagedFileError(
            f"{path} is no tokenizer that can be read: {error}. Remove it, and view again."
        ) from error


def _texts(token_ids: set[int], tokenizer: Tokenizer | None) -> dict[int, str]:
    if tokenizer is None:
        return {}
    return {token_id: tokenizer.decode([token_id], skip_special_tokens=False) for token_id in sorted(token_ids)}

"""`read_run`: reads a run folder into one object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, cast, get_origin, get_type_hints

from llmrl._utils.arguments import check_least
from llmrl._utils.files import open_file, read_text
from llmrl._utils.types import JSON, Tokenizer
from llmrl.data import Message
from llmrl.data.state_file import DamagedFileError
from llmrl.runs.folder_lock import is_in_use
from llmrl.runs.run_folder import RunFolder, holds_run
from llmrl.watch.token_log import TokenRow


class Turn(TypedDict):
    """A request of an agent (`TurnTree.to_records`)."""

    messages: list[Message]


class _Required(TypedDict):
    step: int
    split: str
    group_id: str
    rollout_id: str
    status: str
    reason: str
    reward: float
    messages: list[Message]


class Record(_Required, total=False):
    """A rollout as stored in a run's folder: the result of `Rollout.to_record` with step and split.

    Records of earlier versions lack some of the entries below.
    """

    role: str
    turns: list[Turn]
    is_scored: bool
    error: str
    reward_breakdown: dict[str, float]
    columns: dict[str, JSON]
    num_turns: int


@dataclass(slots=True)
class RunData:
    """The content of a run folder."""

    name: str
    metrics: list[dict[str, float]] = field(default_factory=list)
    """One entry per step."""
    rollouts: list[Record] = field(default_factory=list)
    """Records (`Rollout.to_record`) with `step` and `split`, in the order of the rollouts."""
    rows: dict[tuple[int, str, str], list[TokenRow]] = field(default_factory=dict)
    """Rows with stored tokens, by step, split and rollout id."""
    health: dict[int, dict[str, JSON]] = field(default_factory=dict)
    """Lines of `health.jsonl`, by step."""
    summary: dict[str, JSON] = field(default_factory=dict)
    config: str = ""
    """The run's configuration, as text."""
    token_texts: dict[int, str] = field(default_factory=dict)
    """Text of each token id in the rows; empty if there is no tokenizer."""
    path: str = ""
    """Path of the folder as it was given; empty if the data is not from a folder."""
    is_running: bool = False
    """Whether a process is writing into the folder."""


def facts_of(summary: Mapping[str, JSON]) -> list[tuple[str, str]]:
    """Return the content of `summary.json` as names and values for display.

    Example:
        >>> facts_of({"before": {"sums": {"reward": 0.5}}, "after": {"sums": {"reward": 0.8}}})
        [('sums reward', '0.5 → 0.8')]
        >>> facts_of({"evaluation": {"pass@1": {"mean": 0.9, "interval": [0.8, 0.95]}}})
        [('pass@1', '0.9 (0.8 … 0.95)')]
    """
    by_name: dict[str, dict[str, str]] = {}

    def add(when: str, names: tuple[str, ...], value: JSON) -> None:
        if not isinstance(value, Mapping) or "interval" in value:
            by_name.setdefault(" ".join(names), {})[when] = _number(value)
            return
        for name, part in value.items():  # by environment, metric or reward
            if not name.startswith("num_"):
                add(when, names if name == "reward_breakdown" else (*names, name), part)

    for when, results in summary.items():
        add(when, (), results)
    facts = []
    for name, values in by_name.items():
        if values.keys() >= {"before", "after"}:
            facts.append((name, f"{values.pop('before')} → {values.pop('after')}"))
        facts += [(name if when == "evaluation" else f"{name} {when}".strip(), value) for when, value in values.items()]
    return facts


def _number(value: JSON) -> str:
    if isinstance(value, Mapping):
        low, high = cast("list[float]", value["interval"])
        return f"{_number(value['mean'])} ({low:.3g} … {high:.3g})"
    if isinstance(value, (int, float)):
        return f"{value:.4g}"
    return "–" if value is None else str(value)


def read_run(path: str | Path, *, max_rollouts: int | None = None) -> RunData:
    """Read a run folder, omitting incomplete lines.

    Args:
        max_rollouts: number of the last rollouts to keep; None keeps all.

    Raises:
        FileNotFoundError: if the folder holds no run.
        DamagedFileError: if a file is damaged.
        ValueError: if `max_rollouts` is not positive.
    """
    check_least(1, max_rollouts=max_rollouts)
    path = Path(path)
    try:
        folder = RunFolder(path, read_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} holds no run; {_where_runs_are(path)}") from None
    # Before the files: of a run that ends meanwhile, they may lack the end, and are read again.
    is_running = is_in_use(path)
    config = path / "config.yaml"
    rollouts = list(read_records(folder.rollouts_path))
    if max_rollouts is not None:
        rollouts = rollouts[-max_rollouts:]
    wanted = {key_of(record) for record in rollouts}
    rows: dict[tuple[int, str, str], list[TokenRow]] = {}
    wanted_steps = {key[:2] for key in wanted}
    for step, split in filter(wanted_steps.__contains__, folder.tokens.steps()):
        for row in folder.tokens.read(step, split):
            if (key := (step, split, row.rollout_id)) in wanted:
                rows.setdefault(key, []).append(row)
    used = {token_id for of_rollout in rows.values() for row in of_rollout for token_id in row.token_ids}
    return RunData(
        name=path.resolve().name,
        metrics=folder.read_metrics(),
        rollouts=rollouts,
        rows=rows,
        health=folder.health.read(),
        summary=folder.read_summary(),
        config=read_text(config, errors="replace") if config.exists() else "",
        token_texts=_texts(used, recorded_tokenizer(folder)),
        path=str(path),
        is_running=is_running,
    )


def key_of(record: Record) -> tuple[int, str, str]:
    """Return the key of a rollout: step, split, rollout id."""
    return record["step"], record["split"], record["rollout_id"]


def last_run(folder: str | Path = "runs") -> Path:
    """Return the run that logged last in a folder of runs. Raises FileNotFoundError if the folder holds no run."""
    runs = _runs_in(Path(folder))
    if not runs:
        raise FileNotFoundError(f"there is no run in {Path(folder).resolve()}; pass the folder of a run.")
    return runs[-1]


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder, sorted by the time of their last log entry."""
    runs = [entry for entry in folder.iterdir() if entry.is_dir() and holds_run(entry)] if folder.is_dir() else []
    names = ("metrics.csv", "rollouts.jsonl", "batches")
    return sorted(runs, key=lambda run: max((run / name).stat().st_mtime for name in names if (run / name).exists()))


def _where_runs_are(path: Path) -> str:
    runs = _runs_in(path)
    if runs:
        return f"the last run in this folder is {runs[-1]}."
    return "pass the folder that the training script printed (run.path in its configuration)."


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a `rollouts.jsonl`; a rollout that was logged twice is yielded once."""
    if not path.exists():
        return
    seen = set()
    with open_file(path, errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # truncated by a kill, or nested too deeply
            if not _is_record(record):
                continue  # damaged
            if (key := key_of(cast(Record, record))) not in seen:
                seen.add(key)
                yield cast(Record, record)


_MAX_BITS = 1000
"""Maximum size of an integer; larger ones may not fit into a float."""
_TYPES = {name: get_origin(hint) or hint for name, hint in get_type_hints(Record).items() if name != "reward"}


def _is_record(value: object) -> bool:
    """Return whether a line has the entries and types of a record; a folder may come from an untrusted source."""
    if not isinstance(value, dict) or Record.__required_keys__ - value.keys():
        return False
    return (
        all(isinstance(value[name], kind) for name, kind in _TYPES.items() if name in value)
        and _are_messages(value["messages"])
        and all(map(_is_number, (value["reward"], *value.get("reward_breakdown", {}).values())))
        and all(_is_turn(turn, place) for place, turn in enumerate(value.get("turns", ())))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() < _MAX_BITS)


def _is_turn(value: object, place: int) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        return False
    parent = value.get("parent")
    return _are_messages(value["messages"]) and (parent is None or parent in range(place))


def _are_messages(values: list[object]) -> bool:
    return all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and _are_calls(one.get("tool_calls") or [])
        for one in values
    )


def _are_calls(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in values
    )


def recorded_tokenizer(folder: RunFolder) -> Tokenizer | None:
    """Return the tokenizer that a run saved, or None. Raises DamagedFileError if it cannot be read."""
    path = folder.tokenizer_path if folder.tokenizer_path.exists() else folder.model_path
    if not path.exists():
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise DamagedFileError(
            f"{path} does not contain a readable tokenizer: {error}. Remove it, and open the run again."
        ) from error


def _texts(token_ids: set[int], tokenizer: Tokenizer | None) -> dict[int, str]:
    if tokenizer is None:
        return {}
    return {token_id: tokenizer.decode([token_id], skip_special_tokens=False) for token_id in sorted(token_ids)}

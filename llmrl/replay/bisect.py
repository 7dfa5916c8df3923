"""`first_difference`: finds where two runs that should be equal begin to differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from llmrl._utils.numbers import is_same
from llmrl.config.resumed import changes_of
from llmrl.data.message import prompt_of
from llmrl.replay.recorded import RecordedRun
from llmrl.watch.token_log import TokenRow
from llmrl.watch.tracking import is_performance

# In the order in which a step computes them.
_COLUMNS = ("token_ids", "loss_mask", "versions", "log_probs", "trainer_log_probs")


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two runs."""

    step: int
    quantity: str
    """Quantity that differs: `rollouts`, `rows`, a column of the tokens, `messages`, `reward`, `advantage`, or the name
    of a metric."""
    where: str
    first: object
    """Value in the first run."""
    second: object
    """Value in the second run."""
    meaning: str
    """Usual cause of the difference."""
    rollout_id: str = ""
    """Rollout with the difference; empty for a metric."""


def config_changes(first: RecordedRun, second: RecordedRun) -> dict[str, tuple[object, object]]:
    """Return the differing entries of two configurations, without `run.path` and `resume`."""
    changes = changes_of(first.entries, second.entries)
    return {name: pair for name, pair in changes.items() if name not in ("run.path", "resume")}


def first_difference(first: RecordedRun, second: RecordedRun) -> Parting | None:
    """Return the first difference of two runs, in the order of steps and of the computations in a step.

    Steps that only one run has logged are not compared. Returns None if all common steps are equal.

    Raises:
        ValueError: if the runs have no step in common.
        FileNotFoundError, DamagedFileError: if a file is missing, cut or damaged.
    """
    shared = sorted(set(first.steps) & set(second.steps))
    if not shared:
        known = (f"{run.folder.metrics_path} has {run.steps or 'none'}" for run in (first, second))
        raise ValueError(f"the runs must have a step in common: {'; '.join(known)}.")
    for step in shared:
        for run in (first, second):
            run.check_step(step)
        if (parting := next(_differences(first, second, step), None)) is not None:
            return parting
    return None


def _differences(first: RecordedRun, second: RecordedRun, step: int) -> Iterator[Parting]:
    ours, theirs = ({one["rollout_id"]: one for one in run.records(step)} for run in (first, second))
    if ours.keys() != theirs.keys():
        only = sorted(ours.keys() ^ theirs.keys())
        meaning = "different prompts: another data set, order or seed, or other rollouts were dropped"
        yield Parting(step, "rollouts", f"rollout {only[0]}", only[0] in ours, only[0] in theirs, meaning, only[0])
        return
    rows = [{(row.rollout_id, row.row_index): row for row in run.rows(step)} for run in (first, second)]
    if rows[0].keys() != rows[1].keys():
        key = min(rows[0].keys() ^ rows[1].keys())
        meaning = "different rows were dropped, or conversations were forked differently"
        where = f"row {key[1]} of rollout {key[0]}"
        yield Parting(step, "rows", where, key in rows[0], key in rows[1], meaning, key[0])
        return
    for column in _COLUMNS:
        for key in rows[0]:
            is_same_prompt = prompt_of(ours[key[0]]["messages"]) == prompt_of(theirs[key[0]]["messages"])
            yield from _in_column(step, column, rows[0][key], rows[1][key], is_same_prompt=is_same_prompt)
    for name in ours:
        for entry, meaning in (
            ("messages", "equal tokens were parsed differently, or the environment gave another answer"),
            ("reward", "another reward function, or other data or libraries that it uses"),
        ):
            pair = (ours[name].get(entry), theirs[name].get(entry))
            if pair[0] != pair[1]:
                yield Parting(step, entry, f"rollout {name}", *pair, meaning, name)
    for key in rows[0]:
        advantages = (rows[0][key].advantage, rows[1][key].advantage)
        if not is_same(*advantages):
            meaning = "another normalization or sign, or rollouts left out of the baseline"
            yield Parting(step, "advantage", f"rollout {key[0]}", *advantages, meaning, key[0])
    measured = (first.metrics(step), second.metrics(step))  # numbers that are not finite are left out of the file
    for name in {**measured[0], **measured[1]}:
        values = (measured[0].get(name, math.nan), measured[1].get(name, math.nan))
        if not is_performance(name) and not is_same(*values):
            meaning = "another loss, other options of the loss, or another optimizer"
            if name.startswith("eval/"):
                meaning = "the engine sampled other answers, or one of the runs did not evaluate"
            yield Parting(step, name, "metrics.csv", *values, meaning)


def _in_column(step: int, column: str, ours: TokenRow, theirs: TokenRow, *, is_same_prompt: bool) -> Iterator[Parting]:
    values = (getattr(ours, column), getattr(theirs, column))
    meanings = {
        "token_ids": "different prompts (the template), or different samples (the engine, its weights or its seed)",
        "loss_mask": "different tokens count as sampled",
        "versions": "the weights were updated at another time",
        "log_probs": "a difference of the engine: weights, dtype, kernel or batching",
        "trainer_log_probs": "a difference of the trainer: weights after an earlier update, dtype or kernel",
    }
    for place, pair in enumerate(zip(*values, strict=False)):
        if not is_same(*pair):
            where = f"row {ours.row_index} of rollout {ours.rollout_id}, token {place}"
            meaning = meanings[column]
            if column == "token_ids" and not any((*ours.loss_mask[: place + 1], *theirs.loss_mask[: place + 1])):
                meaning = "different prompts: another data set or order"
                if is_same_prompt:
                    meaning = (
                        "another version of the chat template or the tokenizer: the messages of the prompts are equal"
                    )
            yield Parting(step, column, where, *pair, meaning, ours.rollout_id)
            return
    if len(values[0]) != len(values[1]):
        where = f"row {ours.row_index} of rollout {ours.rollout_id}, its number of tokens"
        yield Parting(step, column, where, len(values[0]), len(values[1]), meanings[column], ours.rollout_id)

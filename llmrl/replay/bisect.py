"""`first_difference`: where two runs that should be equal begin to differ."""

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

# In the order in which a step makes them.
_COLUMNS = ("token_ids", "loss_mask", "versions", "log_probs", "trainer_log_probs")


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two runs."""

    step: int
    quantity: str
    """What differs: `rollouts`, `messages`, `reward`, a column of the tokens, `advantage`, or a metric's name."""
    where: str
    first: object
    """Its value in the first run."""
    second: object
    """Its value in the second run."""
    meaning: str
    """What usually causes it."""
    rollout_id: str = ""
    """The rollout in which it is; empty for a metric."""


def config_changes(first: RecordedRun, second: RecordedRun) -> dict[str, tuple[object, object]]:
    """Return the entries that differ between two configurations, without the folder of the run."""
    changes = changes_of(first.entries, second.entries)
    return {name: pair for name, pair in changes.items() if name not in ("run.path", "resume")}


def first_difference(first: RecordedRun, second: RecordedRun) -> Parting | None:
    """Return the first difference of two runs, in the order of steps and of the computations in a step.

    Steps that only one of them has made are not compared. Returns None if all others are equal.

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
        meaning = "other prompts: the data, its order, the seed, or which rollouts were dropped"
        yield Parting(step, "rollouts", f"rollout {only[0]}", only[0] in ours, only[0] in theirs, meaning, only[0])
        return
    rows = [{(row.rollout_id, row.row_index): row for row in run.rows(step)} for run in (first, second)]
    if rows[0].keys() != rows[1].keys():
        key = min(rows[0].keys() ^ rows[1].keys())
        meaning = "rows were dropped or forked otherwise"
        where = f"row {key[1]} of rollout {key[0]}"
        yield Parting(step, "rows", where, key in rows[0], key in rows[1], meaning, key[0])
        return
    for column in _COLUMNS:
        for key in rows[0]:
            is_same_prompt = prompt_of(ours[key[0]]["messages"]) == prompt_of(theirs[key[0]]["messages"])
            yield from _in_column(step, column, rows[0][key], rows[1][key], is_same_prompt=is_same_prompt)
    for name in ours:
        for entry, meaning in (
            ("messages", "equal tokens read otherwise: the template or a parser; or the environment's answers"),
            ("reward", "the reward function, or what it uses"),
        ):
            pair = (ours[name].get(entry), theirs[name].get(entry))
            if pair[0] != pair[1]:
                yield Parting(step, entry, f"rollout {name}", *pair, meaning, name)
    for key in rows[0]:
        advantages = (rows[0][key].advantage, rows[1][key].advantage)
        if not is_same(*advantages):
            meaning = "another normalization, a sign, or rollouts left out of the baseline"
            yield Parting(step, "advantage", f"rollout {key[0]}", *advantages, meaning, key[0])
    for name in first.metrics(step):
        values = (first.metrics(step)[name], second.metrics(step).get(name, math.nan))
        if not is_performance(name) and not is_same(*values):
            meaning = "the loss, its options, or the optimizer"
            if name.startswith("eval/"):
                meaning = "other samples of the engine, or an evaluation that one of the runs has not made"
            yield Parting(step, name, "metrics.csv", *values, meaning)


def _in_column(step: int, column: str, ours: TokenRow, theirs: TokenRow, *, is_same_prompt: bool) -> Iterator[Parting]:
    values = (getattr(ours, column), getattr(theirs, column))
    meanings = {
        "token_ids": "other prompts (the template), or other samples (the engine, its weights or its seed)",
        "loss_mask": "other tokens count as sampled",
        "versions": "the weights were updated at another moment",
        "log_probs": "the engine: its weights, dtype, kernel or batching",
        "trainer_log_probs": "the trainer's weights, which an earlier update left, its dtype or kernel",
    }
    for place, pair in enumerate(zip(*values, strict=False)):
        if not is_same(*pair):
            where = f"row {ours.row_index} of rollout {ours.rollout_id}, token {place}"
            meaning = meanings[column]
            if column == "token_ids" and not any((*ours.loss_mask[: place + 1], *theirs.loss_mask[: place + 1])):
                meaning = "the prompts are other ones: the data, or its order"
                if is_same_prompt:
                    meaning = (
                        "the chat template or the tokenizer is of another version: the prompts' messages are equal"
                    )
            yield Parting(step, column, where, *pair, meaning, ours.rollout_id)
            return
    if len(values[0]) != len(values[1]):
        where = f"row {ours.row_index} of rollout {ours.rollout_id}, its number of tokens"
        yield Parting(step, column, where, len(values[0]), len(values[1]), meanings[column], ours.rollout_id)

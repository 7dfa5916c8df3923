"""Output of the commands `replay`, `rescore`, `conversations`, `bisect` and `fork`."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import cast, get_args

from rich.table import Table

from llmrl._utils.spans import trace_spans
from llmrl._utils.terminal import printable
from llmrl.cli.options import as_shown, console, print_json, shown_number
from llmrl.replay.bisect import config_changes, first_difference
from llmrl.replay.conversations import Form, send_conversations, write_conversations
from llmrl.replay.fork import fork
from llmrl.replay.loop import OnStep, pass_over
from llmrl.replay.page import write_rescored, write_step, write_what_if
from llmrl.replay.recorded import RecordedRun
from llmrl.replay.rescore import rescore
from llmrl.replay.step import Compared, Quantity, ReplayedStep, as_json, replay_steps
from llmrl.replay.what_if import WhatIf, what_if
from llmrl.runs.machine import other_facts


def run_replay(
    path: Path,
    step: int,
    quantities: Sequence[str],
    reward: str | None,
    changes: Sequence[str],
    drop_rollouts: Sequence[str],
    *,
    last_step: int | None = None,
    page: Path | None = None,
    is_what_if: bool,
    is_json: bool,
) -> bool:
    """Replay steps, or compute them with changes; return whether they are as recorded, up to rounding."""
    run = RecordedRun(path)
    on_step = _announcing(is_json)
    if is_what_if or changes or drop_rollouts:
        changed = what_if(
            run,
            step,
            last_step=last_step,
            changes=changes,
            reward=reward,
            drop_rollouts=drop_rollouts,
            on_step=on_step,
        )
        print_json(changed.as_json()) if is_json else _print_what_if(changed)
        if page is not None:
            write_what_if(run, changed, page)
        return True
    if page is not None:
        raise ValueError("--page requires a what-if: change an entry, or give --reward with --what-if.")
    steps = range(step, (step if last_step is None else last_step) + 1)
    replayed = replay_steps(run, steps, quantities=cast("list[Quantity]", quantities), reward=reward, on_step=on_step)
    if is_json:
        print_json(as_json(replayed[0]) if last_step is None else {"steps": [as_json(one) for one in replayed]})
    else:
        for one in replayed:
            _print_replayed(one)
    differences = [one.first_difference for one in replayed]
    return not any(first is not None and first.is_beyond_rounding for first in differences)


def _announcing(is_json: bool) -> OnStep:
    """Return a function that names each step before it is computed; with JSON output it prints nothing."""
    if is_json:
        return pass_over
    return lambda number: console.print(f"[dim]computing step {number}[/dim]")


def _print_replayed(replayed: ReplayedStep) -> None:
    table = Table("quantity", "numbers", "result", title=f"step {replayed.step}", title_justify="left")
    for compared in replayed.compared:
        table.add_row(compared.quantity, str(compared.num_values), as_shown(_result(compared)))
    console.print(table)
    _print_changes_here(replayed.changed_here)
    first = replayed.first_difference
    if first is None:
        console.print("Everything that was compared is equal to the record, bit by bit.")
        return
    size = "differs" if first.is_beyond_rounding else "differs by rounding"
    console.print(
        f"[bold]{first.quantity} {size}[/bold], first at {as_shown(first.where)}: recorded {first.recorded:.9g}, "
        f"computed {first.computed:.9g}."
    )
    if first.is_beyond_rounding:
        console.print(f"This usually means: {first.meaning}.")


def _print_changes_here(changes: Mapping[str, tuple[object, object]]) -> None:
    for name, (recorded, here) in changes.items():
        text = f"On this machine {name} is {here} in place of {recorded!s:.200}: numbers may differ by rounding."
        console.print(printable(text), markup=False)


def _result(compared: Compared) -> str:
    if not compared.num_values:
        return f"not compared: {compared.note or 'nothing was recorded'}"
    if compared.is_equal:
        return "equal"
    return f"{'' if compared.is_beyond_rounding else 'rounding: '}off by up to {compared.max_difference:.3g}"


def _print_what_if(changed: WhatIf) -> None:
    for step in changed.steps:
        table = Table("metric", "as it was", "changed", title=f"step {step.step}", title_justify="left")
        for name, (before, after) in step.metrics.items():
            if before != after:
                table.add_row(name, *(shown_number(value, ".6g", missing="") for value in (before, after)))
        console.print(table)
        console.print(f"{len(step.turned)} of {len(step.advantages)} rollouts have an advantage of another sign.")
        if step.left_out:
            console.print(
                f"{len(step.left_out)} more have an advantage now. Their group had no signal, so their rows were not "
                "kept, and the changed step lacks them."
            )
    if changed.gradient_cosine is not None:
        console.print(f"The cosine between the gradients is {changed.gradient_cosine:.4f}.")
    if changed.update_cosine is not None and changed.update_ratio is not None:
        console.print(
            f"The cosine between the changes of the weights is {changed.update_cosine:.4f}; that of the changed "
            f"steps is {changed.update_ratio:.3g} times as long."
        )


def run_rescore(path: Path, reward: str, *, page: Path | None, is_json: bool) -> None:
    """Score the rollouts of a run, or the conversations of a file, by another function."""
    if path.is_file() and page is not None:
        raise ValueError("--page requires a run, but a file of conversations was given.")
    source = path if path.is_file() else RecordedRun(path)
    result = rescore(source, reward)
    if isinstance(source, RecordedRun) and page is not None:
        write_rescored(source, result, page)
    if is_json:
        return print_json(dataclasses.asdict(result))
    if result.rewards:
        mean = fmean(result.rewards.values())
        console.print(f"The mean of the {len(result.rewards)} new rewards is {mean:.4g}.")
    correlation = shown_number(result.correlation, ".3f", missing="undefined")
    before, after = result.signal_share
    for line in (
        f"{result.num_rollouts} rollouts have both rewards; {result.num_unscored} do not.",
        f"Rank correlation of the rewards: {correlation}.",
        f"Pairs in a group that change their order: {result.swapped_share:.1%}.",
        f"Groups with a signal: {before:.1%} before, {after:.1%} after.",
    ):
        console.print(line)
    if result.first_error:
        console.print(f"The first error: {as_shown(result.first_error)}")
    if result.most_changed:
        table = Table("step", "rollout", "before", "after", "answer", title="largest changes", title_justify="left")
        for one in result.most_changed:
            answer = " ".join(one.answer.split())
            table.add_row(
                str(one.step),
                as_shown(one.rollout_id),
                f"{one.before:.3g}",
                f"{one.after:.3g}",
                as_shown(f"{answer:.60}"),
            )
        console.print(table)


def run_bisect(first: Path, second: Path, *, page: Path | None, is_json: bool) -> bool:
    """Print where two runs begin to differ, and write a page of that step; return whether they are equal."""
    runs = RecordedRun(first), RecordedRun(second)
    changes = config_changes(*runs)
    parting = first_difference(*runs)
    number, found = 1, None
    if parting is not None:
        number, found = parting.step, dataclasses.asdict(parting)
    machines = other_facts(*(run.folder.machines.at(number) for run in runs))
    steps = [step for step in runs[0].steps if step in runs[1].steps]
    if page is not None and parting is not None:
        write_step(runs, parting, page)
    if is_json:
        print_json({"config": changes, "machine": machines, "num_steps": len(steps), "first_difference": found})
        return parting is None
    for name, (old, new) in changes.items():
        console.print(as_shown(f"configuration: {name} is {old} and {new}"))
    for name, (old, new) in machines.items():
        console.print(as_shown(f"machine: {name} is {old!s:.200} and {new!s:.200}"))
    if parting is None:
        console.print(f"The {len(steps)} steps that both runs have made are equal.")
        return True
    console.print(
        f"[bold]Step {parting.step}: {as_shown(parting.quantity)} differs[/bold], {as_shown(parting.where)}: "
        f"{as_shown(f'{parting.first!s:.200}')} and {as_shown(f'{parting.second!s:.200}')}."
    )
    console.print(f"This usually means: {parting.meaning}.")
    return False


def run_fork(path: Path, step: int, entries: Sequence[str], *, is_json: bool) -> None:
    """Make a new run from the middle of an old one, and print how their configurations differ."""
    folders = [entry.removeprefix("run.path=") for entry in entries if entry.startswith("run.path=")]
    if len(folders) != 1:
        raise ValueError(f"run.path=FOLDER must be given once, the folder of the new run; got {len(folders)} of them.")
    changes = [entry for entry in entries if not entry.startswith("run.path=")]
    run = RecordedRun(path)
    changed = fork(run, step, folders[0], changes, on_step=_announcing(is_json))
    view = shlex.join(["llmrl", "view", str(path), folders[0]])
    if is_json:
        return print_json({"path": folders[0], "step": step, "changes": changed, "view": view})
    for name, (old, new) in changed.items():
        console.print(as_shown(f"{name}: {new} in place of {old}"))
    _print_changes_here(run.changes_here())
    for line in (
        f"{folders[0]} has the first {step} steps; continue with run.path={folders[0]} resume=true",
        f"both in one picture: {view}",
    ):
        console.print(line, markup=False, soft_wrap=True)


def run_conversations(path: Path, file: Path | None, form: str, split: str, *, is_json: bool) -> None:
    """Write the conversations of a run to a file, or send them as spans."""
    run = RecordedRun(path)
    if form == "spans":
        if file is not None:
            raise ValueError(f"FILE must be left out with --as spans, which writes no file, got {str(file)!r}.")
        trace_spans()
        number = send_conversations(run, split=split)
    elif form not in get_args(Form) or file is None:
        raise ValueError(f"--as must be spans, or one of {', '.join(get_args(Form))} and a FILE, got {form!r}.")
    else:
        number = write_conversations(run, file, cast(Form, form), split=split)
    if is_json:
        return print_json({"form": form, "num_conversations": number, "file": file})
    print(f"{number} rows of {form}" + ("" if file is None else f" are in {file}"))

"""Commands for a recorded run: replay, rescore, conversations, bisect, fork."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmrl.cli.options import AsJSON, refusals

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


def replay(
    run: Run,
    step: Annotated[int, typer.Option(min=1, help="Step to compute again.")],
    entries: Annotated[
        list[str] | None,
        typer.Argument(
            help="Entries to change before the step is computed again, such as loss=dapo or train.clip_epsilon=0.3"
        ),
    ] = None,
    quantities: Annotated[
        str, typer.Option(help="Quantities to compare, separated by commas; rewards and advantages need no model.")
    ] = "prompts,rewards,advantages,log_probs,metrics,weights",
    reward: Annotated[
        str | None,
        typer.Option(help="Reward function of the run, FILE.py:FUNCTION; with --what-if, another one to train with."),
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Compare with the step under --reward; changed entries imply this option.")
    ] = False,
    drop_rollout: Annotated[list[str] | None, typer.Option(help="Rollout to leave out of batch and baseline.")] = None,
    last_step: Annotated[
        int | None, typer.Option(help="Last of several steps; in a what-if, each side continues with its own weights.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="HTML file for a what-if, with changed and recorded steps.")] = None,
    as_json: AsJSON = False,
) -> None:
    """Compute recorded steps again and name the first quantity that differs; or compute them with something changed.

    Exits with 1 if a quantity differs by more than rounding.
    """
    from llmrl.cli.replay import run_replay

    with refusals(ValueError, TypeError, OSError):
        is_equal = run_replay(
            run,
            step,
            quantities.split(","),
            reward,
            entries or [],
            drop_rollout or [],
            last_step=last_step,
            page=page,
            is_what_if=what_if,
            is_json=as_json,
        )
    raise typer.Exit(not is_equal)


def rescore(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or a JSON lines file of conversations (OpenAI).")
    ],
    reward: Annotated[str, typer.Option(help="Reward function: FILE.py:FUNCTION.")],
    page: Annotated[
        Path | None, typer.Option(help="HTML file to write, with the rollouts of large changes first.")
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Score the rollouts of a run, or the conversations of a file, with a reward function, and compare the rewards."""
    from llmrl.cli.replay import run_rescore

    with refusals(ValueError, TypeError, OSError):
        run_rescore(run, reward, page=page, is_json=as_json)


def conversations(
    run: Run,
    file: Annotated[Path | None, typer.Argument(help="New JSON lines file.")] = None,
    form: Annotated[
        str, typer.Option("--as", help="Form: messages, sft, preferences, or spans (to OpenTelemetry's OTLP endpoint).")
    ] = "messages",
    split: Annotated[str, typer.Option(help="train, or the name of an evaluation: eval/sums.")] = "train",
    as_json: AsJSON = False,
) -> None:
    """Write the conversations of a run in OpenAI's format, as a data set, or send them as spans."""
    from llmrl.cli.replay import run_conversations

    with refusals(ValueError, OSError):
        run_conversations(run, file, form, split, is_json=as_json)


def bisect(
    run: Run,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Folder of a run that should be equal.")],
    page: Annotated[Path | None, typer.Option(help="HTML file to write, with the step of both runs.")] = None,
    as_json: AsJSON = False,
) -> None:
    """Name the first step, row, token and quantity in which two runs differ.

    Exits with 1 if they differ.
    """
    from llmrl.cli.replay import run_bisect

    with refusals(ValueError, OSError):
        is_equal = run_bisect(run, other, page=page, is_json=as_json)
    raise typer.Exit(not is_equal)


def fork(
    run: Run,
    entries: Annotated[list[str], typer.Argument(help="run.path=FOLDER of the new run, and entries that it changes.")],
    step: Annotated[int, typer.Option(min=1, help="Last step that both runs share.")],
    as_json: AsJSON = False,
) -> None:
    """Make a new run from the middle of an old one; resume the new run to continue training."""
    from llmrl.cli.replay import run_fork

    with refusals(ValueError, OSError):
        run_fork(run, step, entries, is_json=as_json)

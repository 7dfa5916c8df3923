"""`llmrl eval`: pass@k of a model in an environment, with confidence intervals."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torchrl.envs import EnvBase

from llmrl._utils.files import UnsafeFileError
from llmrl._utils.json_values import from_yaml
from llmrl._utils.types import JSON
from llmrl.cli.models import ChatModel
from llmrl.cli.options import shown_number
from llmrl.envs.primer import dataset_env_of
from llmrl.runs.evaluation import EvaluationReport, Evaluator
from llmrl.runs.folder_lock import FolderInUseError
from llmrl.runs.run_folder import RunFolder, holds_run


def open_folder(path: Path) -> RunFolder:
    """Open a new folder for results, so that another process cannot take it. Raises ValueError if that is impossible.

    Open it before the engine: otherwise results are lost that have no place.
    """
    if holds_run(path):
        raise ValueError(f"--out {path} already contains a run; choose another folder.")
    try:
        return RunFolder(path, trackers=())
    except (OSError, FolderInUseError, UnsafeFileError) as error:
        raise ValueError(f"--out must be a new folder or an empty one, and {path} cannot be used: {error}") from error


def check_has_problems(name: str, env: EnvBase) -> None:
    """Raise ValueError if an environment has no problems to evaluate."""
    if dataset_env_of(env) is None:
        raise ValueError(
            f"--env {name} has no problems, and an evaluation needs them: return a DatasetChatEnv, with transforms or "
            "without."
        )


def options_of(words: Sequence[str]) -> dict[str, JSON]:
    """Return the options of an environment, given as on the command line, with values in YAML.

    Raises ValueError if one is not NAME=VALUE, or if a value is not valid YAML.

    Example:
        >>> options_of(["num_digits=2", "prompt=Count."])
        {'num_digits': 2, 'prompt': 'Count.'}
    """
    options: dict[str, JSON] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not name.isidentifier():
            raise ValueError(f"{word!r} is not an option of the environment; write NAME=VALUE, such as num_digits=2.")
        try:
            options[name] = cast(JSON, from_yaml(value))
        except ValueError as error:
            quoted = shlex.quote(f"{name}={json.dumps(value, ensure_ascii=False)}")
            raise ValueError(
                f"{name} must be a value in YAML, got {value!r}: {error}. Quote a text: {quoted}"
            ) from error
    return options


def _progress_of(evaluator: Evaluator) -> Callable[[], Text]:
    started = time.perf_counter()
    num_all = sum(evaluator.num_rollouts.values())
    return lambda: Text(f"{evaluator.num_played} of {num_all} answers, {time.perf_counter() - started:.0f} s")


def run(
    name: str,
    env: EnvBase,
    model: ChatModel,
    *,
    sampling: Mapping[str, float],
    seed: int,
    limit: int | None,
    folder: RunFolder | None,
    console: Console,
) -> EvaluationReport:
    """Generate, score, print and save; return the report.

    Args:
        name: name of the environment.
        sampling: sampling arguments of the policy.
        limit: maximum number of problems; None plays all.
        folder: folder to save rollouts and results in (`open_folder`), which is closed at the end.
    """
    from llmrl.policies import vLLMWrapper

    with contextlib.ExitStack() as closing:
        if folder is not None:
            closing.callback(folder.close)
        with model.start_engine(console, seed=seed) as engine:
            tokenizer = engine.get_tokenizer()
            policy = vLLMWrapper(engine, renderer=model.renderer, generate_kwargs=sampling)
            with Evaluator({name: env}, policy, num_problems=limit) as evaluator:
                with Live(console=console, refresh_per_second=4, get_renderable=_progress_of(evaluator)):
                    report = evaluator.evaluate()[name]
        console.print(table_of(report))
        console.print(f"{len(report.rollouts)} answers in {report.seconds:.0f} s")
        if folder is not None:
            folder.save_tokenizer(tokenizer)
            folder.log_evaluation(0, "eval", report.rollouts)
            folder.write_summary({"evaluation": report.to_summary()})
            console.print(f"saved: [bold]llmrl view {folder.path}[/bold]", soft_wrap=True)
    return report


def table_of(report: EvaluationReport) -> Table:
    """Return the results as a table."""
    title = f"{report.num_problems} problems, {report.num_samples} answers each"
    table = Table("", "mean", "95 % interval", title=title)
    for k, estimate in report.pass_at.items():
        table.add_row(f"pass@{k}", f"{estimate.mean:.3f}", f"{estimate.low:.3f} … {estimate.high:.3f}")
    for name, value in {"reward": report.reward, **report.reward_breakdown}.items():
        table.add_row(name, shown_number(value, ".3f"), "")
    if (without_signal := report.groups_all_equal) is not None:
        table.add_row("problems without a signal", f"{without_signal:.3f}", "")
    table.add_row("completion tokens", f"{report.completion_tokens:.1f}", "")
    for status, count in sorted(report.num_by_status.items()):
        table.add_row(status, f"{count / len(report.rollouts):.3f}", "")
    return table

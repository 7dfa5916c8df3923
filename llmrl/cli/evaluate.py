"""`llmrl eval`: an environment and a model in, pass@k and intervals out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmrl.data import Rollout
from llmrl.envs import task_environments
from llmrl.runs.evaluation import interval_of_mean, pass_at_k
from llmrl.runs.run_folder import RunFolder, holds_run


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """What to measure.

    Raises:
        ValueError: for an unknown environment.
        FileExistsError: when `out` holds a run.
    """

    env: str
    model: str
    """What vLLM loads."""
    data: str | None
    split: str
    limit: int | None
    num_samples: int
    temperature: float
    max_new_tokens: int
    max_model_len: int
    seed: int
    out: Path | None

    def __post_init__(self) -> None:
        if self.env not in task_environments():
            raise ValueError(f"--env must be one of {', '.join(task_environments())}; got {self.env!r}.")
        if self.out is not None and holds_run(self.out):
            raise FileExistsError(f"{self.out} holds a run already; name another folder.")


def run(settings: EvaluationSettings, env: Any, console: Console) -> dict[str, Any]:
    """Generate, score, print, save; gives the results."""
    from llmrl.collectors import LLMCollector
    from llmrl.engines import AsyncVLLM
    from llmrl.policies import vLLMWrapper

    num_problems = len(env.base_env.prompts.items)
    num_problems = min(num_problems, settings.limit or num_problems)
    engine = AsyncVLLM.from_pretrained(settings.model, max_model_len=settings.max_model_len, seed=settings.seed)
    try:
        sampling = {"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature}
        policy = vLLMWrapper(engine, generate_kwargs=sampling)
        with LLMCollector(env, policy=policy, yield_completed_trajectories=True) as collector:
            started = time.perf_counter()
            with console.status(f"{num_problems} problems × {settings.num_samples} answers"):
                rollouts = collector.play(num_problems * settings.num_samples)
    finally:
        engine.shutdown()
    results = results_of(rollouts)
    print_results(results, console)
    console.print(f"{len(rollouts)} answers in {time.perf_counter() - started:.0f} s", highlight=False)
    if settings.out is not None:
        _save(settings.out, rollouts, results, console)
    return results


def results_of(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Mean reward and parts, pass@1 and pass@k with 95 % intervals, statuses. An unscored rollout counts as wrong."""
    problems: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        problems[rollout.group_id].append(rollout)
    num_samples = min(len(group) for group in problems.values())
    rights = {
        group_id: [float(rollout.is_scored and rollout.reward >= 1.0) for rollout in group[:num_samples]]
        for group_id, group in problems.items()
    }
    results: dict[str, Any] = {"num_problems": len(problems), "num_samples": num_samples}
    for k in sorted({1, num_samples}):
        values = [pass_at_k(num_samples, round(sum(right)), k) for right in rights.values()]
        results[f"pass@{k}"] = {"mean": sum(values) / len(values), "interval": interval_of_mean(values)}
    scored = [rollout for rollout in rollouts if rollout.is_scored]
    results["reward"] = sum(rollout.reward for rollout in scored) / len(scored) if scored else None
    names = sorted({name for rollout in scored for name in rollout.breakdown})
    results["reward_breakdown"] = {
        name: sum(rollout.breakdown.get(name, 0.0) for rollout in scored) / len(scored) for name in names
    }
    statuses: dict[str, int] = defaultdict(int)
    for rollout in rollouts:
        statuses[f"{rollout.status.name.lower()} {rollout.reason}".strip()] += 1
    results["num_by_status"] = dict(statuses)
    results["completion_tokens"] = sum(rollout.num_completion_tokens for rollout in rollouts) / len(rollouts)
    return results


def print_results(results: dict[str, Any], console: Console) -> None:
    """A table."""
    title = f"{results['num_problems']} problems, {results['num_samples']} answers each"
    table = Table("", "mean", "95 % interval", title=title)
    for name, value in results.items():
        if name.startswith("pass@"):
            low, high = value["interval"]
            table.add_row(name, f"{value['mean']:.3f}", f"{low:.3f} … {high:.3f}")
    for name, value in {"reward": results["reward"], **results["reward_breakdown"]}.items():
        table.add_row(name, "–" if value is None else f"{value:.3f}", "")
    table.add_row("completion tokens", f"{results['completion_tokens']:.1f}", "")
    for status, count in sorted(results["num_by_status"].items()):
        table.add_row(status, f"{count / sum(results['num_by_status'].values()):.3f}", "")
    console.print(table)


def _save(out: Path, rollouts: Sequence[Rollout], results: dict[str, Any], console: Console) -> None:
    folder = RunFolder(out, trackers=())
    folder.log_rollouts(0, "eval", [rollout.to_record() for rollout in rollouts])
    folder.write_summary({"evaluation": results})
    folder.close()
    console.print(f"saved: [bold]llmrl view {out}[/bold]", highlight=False, soft_wrap=True)

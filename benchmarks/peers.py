"""Seconds of training until the mean reward of one-digit sums is 0.9: llmrl, TRL, TorchRL and a plain loop.

All libraries use the same model, problems, prompts, batch (16 prompts with 8 answers of up to 12 tokens), AdamW,
learning rate, token-mean loss and gradient clipping, in float32 on all cores. Each runs in its own process; CPU seconds
and peak memory include its child processes. `trl` is TRL's `GRPOTrainer`, which generates with transformers because its
vLLM needs a GPU. `torchrl` is the loop of TorchRL's GRPO script with TorchRL's environment, collector, wrapper,
advantage and loss; it also generates with transformers, because TorchRL sends weights to vLLM by NCCL. `plain` is a
loop without a library. Seconds are those of the steps, without imports and loading. Values are medians of three seeds.
TRL's asynchronous trainer and the trainer of verifiers are omitted, because they send weights to vLLM between GPUs; the
latter also needs DeepSpeed.

The benchmark needs two idle cores for one and a half hours. `python -m benchmarks.peers --help` shows how to run parts
of it.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.demo_speed import TARGET_REWARD, seconds_to_target

GOAL = 0.67
_FOLDER = Path(__file__).parent
_SCRIPT = _FOLDER.parent / "sota-implementations" / "grpo" / "grpo-sync.py"


@dataclass(frozen=True, kw_only=True)
class Task:
    """The settings of every loop."""

    model: str
    num_steps: int = 30
    target_reward: float = TARGET_REWARD
    seed: int = 0
    groups_per_batch: int = 16
    group_size: int = 8
    max_new_tokens: int = 12
    learning_rate: float = 2e-5


def ours(task: Task, log: Path) -> list[str]:
    """Return the command of the demo's GRPO script, which writes its own log."""
    entries = {
        "run.path": log.with_suffix(""),
        "model.path": task.model,
        "model.max_model_len": 64,  # prompts of 45 and answers of 12 tokens; the peers hold no more either
        "train.token_budget": 512,  # a quarter of the batch, as the peers' micro-batches of 32 answers
        "seed": task.seed,
        "train.num_steps": task.num_steps,
        "train.target_reward": task.target_reward,
        "train.learning_rate": task.learning_rate,
        "collect.groups_per_batch": task.groups_per_batch,
        "collect.group_size": task.group_size,
        "collect.max_new_tokens": task.max_new_tokens,
        "eval.num_problems": 0,
    }
    return [sys.executable, str(_SCRIPT), *(f"{name}={value}" for name, value in entries.items())]


def plain(task: Task, log: Path) -> list[str]:
    """Return the command of the loop without a library."""
    code = (
        "import json, sys; from pathlib import Path; from benchmarks.plain_loop import run_plain_loop;"
        "given = json.loads(sys.argv[1]); model = given.pop('model');"
        "Path(sys.argv[2]).write_text('\\n'.join(map(json.dumps, run_plain_loop(model, **given))))"
    )
    return [sys.executable, "-c", code, json.dumps(asdict(task)), str(log)]


def trl(task: Task, log: Path) -> list[str]:
    """Return the command of TRL's `GRPOTrainer`."""
    return [sys.executable, *_worker("peer_trl", task, log)]


def torchrl(task: Task, log: Path) -> list[str]:
    """Return the command of the loop of TorchRL's GRPO script, with TorchRL's own parts."""
    return [sys.executable, *_worker("peer_torchrl", task, log)]


def _worker(name: str, task: Task, log: Path) -> list[str]:
    from llmrl.envs.tasks.addition import AdditionEnv, addition_problems

    problems = log.with_name("problems.json")
    prompt = AdditionEnv.task.system_prompt
    problems.write_text(json.dumps([{**row, "system": prompt} for row in addition_problems("train")]))
    return [str(_FOLDER / f"{name}.py"), json.dumps(asdict(task)), str(problems), str(log)]


PEERS: dict[str, Callable[[Task, Path], list[str]]] = {"llmrl": ours, "plain": plain, "trl": trl, "torchrl": torchrl}


def measured(name: str, task: Task) -> dict[str, float]:
    """Run a loop; return its seconds, rates, CPU time and memory.

    Raises RuntimeError with the end of the output if the loop fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        command = PEERS[name](task, log)
        with (Path(folder) / "output").open("w+") as output:
            process = subprocess.Popen(command, cwd=_FOLDER.parent, stdout=output, stderr=subprocess.STDOUT)
            cpu_seconds, peak_gib = _watch(process)
            output.seek(0)
            if process.returncode:
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{output.read()[-3000:]}")
        rows = _of_run(log.with_suffix("")) if name == "llmrl" else list(map(json.loads, log.read_text().splitlines()))
    found = {
        "seconds to 0.9": seconds_to_target(rows),
        "steps": len(rows),
        "last reward": rows[-1]["reward_mean"],
        "processor seconds": cpu_seconds,
        "peak memory GiB": peak_gib,
        "seconds a step": _mean(rows, "seconds"),
        "tokens/s generated": _rate(rows, "num_generated", "generate_seconds"),
        "tokens/s trained": _rate(rows, "num_generated", "train_seconds"),
    }
    differences = [row["log_prob_difference"] for row in rows if "log_prob_difference" in row]
    return found | ({"log-prob difference": statistics.mean(differences)} if differences else {})


def _mean(rows: list[dict[str, float]], name: str) -> float:
    return statistics.mean(row[name] for row in rows)


def _medians(of_seeds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each measure over the seeds, and the range of the seconds."""
    found = {name: statistics.median(row[name] for row in of_seeds) for name in of_seeds[0]}
    seconds = [row["seconds to 0.9"] for row in of_seeds]
    return found | {"seconds to 0.9, least": min(seconds), "seconds to 0.9, most": max(seconds)}


def _rate(rows: list[dict[str, float]], count: str, seconds: str) -> float:
    return sum(row[count] for row in rows) / sum(row[seconds] for row in rows)


def _of_run(folder: Path) -> list[dict[str, float]]:
    """Return the steps of a run of llmrl, with the metric names of the peers."""
    with (folder / "metrics.csv").open() as file:
        steps = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [
        {
            **{name: row[name] for name in ("reward_mean", "seconds", "generate_seconds", "train_seconds")},
            "num_generated": row["completion_tokens_mean"] * row["num_rollouts"],
            "log_prob_difference": row["log_prob_difference_mean"],
        }
        for row in steps
        if "seconds" in row
    ]


def _watch(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Wait for a process; return the CPU seconds and the peak memory in GiB of it and its descendants.

    Memory is proportional (PSS): pages that processes share are counted once.
    """
    seconds: dict[tuple[int, float], float] = {}
    peak = 0
    while process.poll() is None:
        memory = 0
        try:
            top = psutil.Process(process.pid)
            family = [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            break
        for member in family:
            try:
                times = member.cpu_times()
                seconds[member.pid, member.create_time()] = times.user + times.system
                memory += member.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        peak = max(peak, memory)
        time.sleep(0.5)
    process.wait()
    return sum(seconds.values()), peak / 2**30


def run(
    names: tuple[str, ...] = tuple(PEERS), task: Task | None = None, seeds: tuple[int, ...] = (0, 1, 2)
) -> dict[str, Any]:
    """Train with each library and compare the medians of the seeds; a library that fails is reported and omitted."""
    from llmrl.testing.embedded_model import ensure_embedded_model

    task = Task(model=str(ensure_embedded_model())) if task is None else task
    of_seeds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    errors: dict[str, str] = {}
    for seed in seeds:  # alternate the libraries, so that a disturbance of the machine affects all
        for name in names:
            if name in errors:
                continue
            try:
                of_seeds[name].append(measured(name, replace(task, seed=seed)))
                print(name, seed, of_seeds[name][-1], file=sys.stderr, flush=True)
            except (RuntimeError, ValueError) as error:
                errors[name] = str(error).strip().splitlines()[-1][:200]
                print(error, file=sys.stderr)
    medians: dict[str, Any] = {
        name: {"not run": errors[name]} if name in errors else _medians(rows) for name, rows in of_seeds.items()
    }
    columns = list(dict.fromkeys(column for found in medians.values() for column in found))
    table = Table("", *medians, title=f"one-digit sums to a mean reward of {task.target_reward}")
    for column in columns:
        cells = [found.get(column, "–") for found in medians.values()]
        table.add_row(column, *(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console().print(table)
    seconds = {name: found["seconds to 0.9"] for name, found in medians.items() if "seconds to 0.9" in found}
    memory = {name: found["peak memory GiB"] for name, found in medians.items() if "peak memory GiB" in found}
    others = [name for name in seconds if name != "llmrl" and "llmrl" in seconds]
    ratio = max((seconds["llmrl"] / seconds[name] for name in others), default=float("nan"))
    return {
        "name": "peers",
        "ratio": ratio,
        "ratio_of": "seconds of training to mean reward 0.9, llmrl / the fastest peer, medians of the seeds",
        "goal": GOAL,
        "met": ratio <= GOAL and all(memory["llmrl"] <= memory[name] for name in others),
        "medians": medians,
    }


def main() -> None:
    """Run the benchmark with options for libraries, seeds, model and steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--model", help="folder of another model, such as a tiny one")
    parser.add_argument("--num-steps", type=int, default=30, help="maximum number of steps of each library")
    options = parser.parse_args()
    from llmrl.testing.embedded_model import ensure_embedded_model

    model = options.model or str(ensure_embedded_model())
    task = Task(model=model, num_steps=options.num_steps)
    print(json.dumps(run(tuple(options.only), task, tuple(options.seeds))))


if __name__ == "__main__":
    main()

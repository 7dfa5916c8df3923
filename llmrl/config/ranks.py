"""The processes over which a trainer is sharded: their start, and communication between them."""

from __future__ import annotations

import datetime
import functools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from llmrl._utils.ranks import rank_and_size
from llmrl.config.sections import ScriptConfig

T = TypeVar("T")


def start_ranks(cfg: ScriptConfig) -> None:
    """Replace this process by `torchrun` with `train.num_ranks` processes, unless it is one of them or the only one."""
    num_ranks = cfg.train.num_ranks
    if num_ranks == 1 or "RANK" in os.environ:
        return
    _divide_cores(num_ranks)
    # The terminal sends Ctrl-C to every process. The run of rank 0 handles it; torchrun would end all processes.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGHUP,SIGQUIT"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.flush()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    spec = sys.modules["__main__"].__spec__  # None unless the script was started by `python -m`
    program = [sys.argv[0]] if spec is None else ["-m", spec.name]
    os.execv(sys.executable, [*torchrun, *program, *sys.argv[1:]])


def call_on_ranks(num_ranks: int, function: Callable[..., T], *args: object) -> T:
    """Call a function in `num_ranks` new processes of a process group, and return rank 0's result.

    The function is called in this process if `num_ranks` is 1, or if this process is already one of several ranks.
    Function and arguments are pickled, and the standard output of the processes is discarded.
    """
    if num_ranks == 1 or dist.is_initialized() or "RANK" in os.environ:
        return function(*args)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _divide_cores(num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(folder, redirects=Std.OUT),
        )
        result, error = elastic_launch(config, _on_rank)(function, args)[0]
    if error is not None:
        raise error
    return result


def _on_rank(function: Callable[..., T], args: Sequence[object]) -> tuple[T | None, Exception | None]:
    """Return the result of a function, or its ValueError or OSError, which torchrun would report as a crash."""
    try:
        return function(*args), None
    except (ValueError, OSError) as error:
        return None, error
    finally:
        leave_ranks()


def _divide_cores(num_ranks: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))


def join_ranks(cfg: ScriptConfig) -> int:
    """Join the process group of torchrun, set the number of ranks and rank 0's `run` in `cfg`, and return the rank."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo" if cfg.train.device == "cpu" else "cpu:gloo,cuda:nccl")
    rank, cfg.train.num_ranks = rank_and_size(_everybody())
    cfg.run = broadcast_from_rank0(cfg.run)
    return rank


def leave_ranks() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def this_rank() -> int:
    """Return this process's rank; rank 0 has the engines, the collector and the run's folder."""
    return rank_and_size(_everybody())[0]


def broadcast_from_rank0(value: T) -> T:
    """Return rank 0's value on every rank; the other ranks wait for the value without a time limit."""
    group = _everybody()
    if group is None:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0, group=group, device=torch.device("cpu"))
    return held[0]


def _everybody() -> dist.ProcessGroup | None:
    """Return the group of all ranks on the CPU; None if there is one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return _patient_group(dist.group.WORLD)


@functools.cache
def _patient_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    # A dead rank closes its connection and so is noticed at once; the long timeout only serves
    # ranks that wait for collection.
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))

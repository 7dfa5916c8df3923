"""The process environment that an engine's child process starts with."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from llmrl.engines.child_process import PARENT_VARIABLE

_START_LOCK = threading.Lock()


def available_cores() -> int:
    """Return the number of cores that this process may run on.

    Example:
        >>> available_cores() >= 1
        True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def engine_variables(*, log_level: str, cpu_threads: int | None, is_eager: bool) -> dict[str, str]:
    """Return the environment variables for a vLLM engine process.

    Processes are spawned: what vLLM forks by default, dies of the CUDA that its parent has looked at.

    Args:
        log_level: level of vLLM's logger.
        cpu_threads: threads of an engine on CPU, counted but not bound to cores: a bound engine beside a trainer
            leaves one core idle and fights for the other. None on a GPU.
        is_eager: no compilation.
    """
    variables = {"VLLM_LOGGING_LEVEL": log_level, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if cpu_threads is None:
        return variables
    variables |= {
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # One worker lives in the engine's own process on CPU: one start-up and one hop per step less.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(cpu_threads),
        # Threads that spin for long between parallel regions starve others that need the core, their own partners
        # too: beside another busy process this is worth a factor of 2 to 10, alone it costs nothing.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000"),
        # A weight update allocates each layer anew; memory that is kept instead of given back saves a fifth of it.
        "MALLOC_MMAP_THRESHOLD_": os.environ.get("MALLOC_MMAP_THRESHOLD_", str(1 << 30)),
        "MALLOC_TRIM_THRESHOLD_": os.environ.get("MALLOC_TRIM_THRESHOLD_", str(1 << 32)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if log_level != "DEBUG":
        variables |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    if is_eager:
        variables["TORCH_COMPILE_DISABLE"] = "1"
    return variables


def transfer_variables(weight_transfer: bool | str) -> dict[str, str]:
    """Return the environment variables that a weight-transfer backend needs in the engine's processes.

    Example:
        >>> transfer_variables("nccl")
        {}
    """
    # Handles of CUDA IPC are Python objects: they reach a worker pickled, and vLLM unpickles them only where this is
    # set. It opens no port; the caller of the engine (this process) may then run code in it.
    return {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if weight_transfer == "ipc" else {}


@contextmanager
def starting_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Start a child process under `variables`, one start at a time, and leave this process as it was.

    `__main__` is hidden meanwhile: a spawned child would otherwise import the user's script again, which is slow and,
    in a script without a main guard, would start another engine.
    """
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    with _START_LOCK:
        before = dict(os.environ)
        os.environ.update(variables)
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        if "__file__" in hidden:
            del main.__file__
        main.__spec__ = None
        try:
            yield
        finally:
            for name, value in hidden.items():
                setattr(main, name, value)
            for name in set(os.environ) - set(before):
                del os.environ[name]
            for name, text in before.items():
                if os.environ.get(name) != text:
                    os.environ[name] = text

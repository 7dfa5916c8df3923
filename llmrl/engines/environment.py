"""The environment of an engine's child process."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from llmrl.engines import child_process
from llmrl.engines.child_process import PARENT_VARIABLE

_START_LOCK = threading.Lock()


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def engine_variables(*, log_level: str, cpu_threads: int | None, is_eager: bool) -> dict[str, str]:
    """Return the environment variables of an engine process, which is spawned: a fork fails after CUDA was used.

    `cpu_threads` is the number of threads of an engine on CPU, not bound to cores; None on a GPU.
    """
    variables = {"VLLM_LOGGING_LEVEL": log_level, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if cpu_threads is None:
        return variables
    variables |= {
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # On CPU the engine runs in one process: it starts faster, and a step needs no IPC.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(cpu_threads),
        # Threads that spin for long starve other threads that need the core: with another busy
        # process, a short spin makes the engine 2 to 10 times as fast, and otherwise costs nothing.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000"),
        # A weight update allocates each layer again; keeping freed memory saves a quarter of the
        # update's time. Memory of tensors as large as an embedding is returned, because activations
        # would take the freed place and each update would need new memory.
        "MALLOC_MMAP_THRESHOLD_": os.environ.get("MALLOC_MMAP_THRESHOLD_", str(64 << 20)),
        "MALLOC_TRIM_THRESHOLD_": os.environ.get("MALLOC_TRIM_THRESHOLD_", str(1 << 32)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if log_level != "DEBUG":
        variables |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    if is_eager:
        variables["TORCH_COMPILE_DISABLE"] = "1"
    return variables


def transfer_variables(weight_transfer: bool | str) -> dict[str, str]:
    """Return the environment variables that a weight-transfer backend needs."""
    # CUDA IPC handles are pickled, and vLLM unpickles them only if this is set. The variable opens
    # no port, but lets the engine's caller (this process) run code in the engine.
    return {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if weight_transfer == "ipc" else {}


@contextmanager
def starting_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` while a child process starts, one at a time, and restore the environment afterwards.

    `child_process` stands in for `__main__` meanwhile: a spawned child imports the main module, which would run the
    user's script again, whereas `child_process` sets the log level before vLLM is imported.
    """
    main = sys.modules["__main__"]
    with _START_LOCK:  # before reading what to restore, which another start may have replaced
        hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
        before = dict(os.environ)
        os.environ.update(variables)
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        if "__file__" in hidden:
            del main.__file__
        main.__spec__ = importlib.util.find_spec(child_process.__name__)
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

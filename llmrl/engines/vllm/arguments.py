"""From our arguments to vLLM's: every name is known or refused."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from llmrl._utils.arguments import refuse_unknown
from llmrl.engines.base import EngineError
from llmrl.engines.vllm.private import EXECUTOR, PLUGIN_GROUP, VLLM_VERSION

if TYPE_CHECKING:
    from llmrl.engines.vllm.private import AsyncEngineArgs

LLMRL_BACKEND = "llmrl"
"""The weight-transfer backend that llmrl registers in vLLM's workers: shared memory, gloo and files."""
NCCL_BACKEND = "llmrl-nccl"
"""As vLLM knows `nccl` where llmrl starts it: its own, with a deadline."""
ADAPTER_BACKEND = "adapters"
"""LoRA adapters take the place of weights: vLLM's own way to load them, and no weight-transfer backend of its."""
PLUGIN_NAME = "llmrl_weight_transfer"
"""Of the entry point by which vLLM's processes find it."""

_GIB = 1 << 30
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM makes room for."""
# They decide what a completion is, so a second way to set them could only contradict the first.
_OWNED = {
    "model": "model",
    "logprobs_mode": None,
    "max_logprobs": None,
    "disable_log_stats": None,
    "enable_log_requests": None,
    "weight_transfer_config": "weight_transfer",
    "enable_sleep_mode": "enable_sleep",
    "enable_lora": "weight_transfer",
    "kv_cache_memory_bytes": "kv_cache_memory",
}


def weight_transfer_backend(weight_transfer: bool | str, *, is_cpu: bool) -> str | None:
    """Return the vLLM weight-transfer backend to start with, `None` for none.

    Raises EngineError if llmrl's backend is wanted and vLLM's processes could not find it, or one that moves weights
    between GPUs where vLLM runs on CPU, and ImportError if vLLM is of another version than the tests ran with.
    """
    if weight_transfer is False:
        return None
    backend = (LLMRL_BACKEND if is_cpu else "nccl") if weight_transfer is True else weight_transfer
    require_vllm_version()
    if is_cpu and backend in ("nccl", "ipc"):
        raise EngineError(
            f"weight_transfer={backend!r} moves weights between GPUs, and this vLLM runs on CPU; pass "
            f"weight_transfer=True, which is {LLMRL_BACKEND!r} here."
        )
    if backend in (LLMRL_BACKEND, "nccl"):
        installed = importlib.metadata.entry_points(group=PLUGIN_GROUP)
        if PLUGIN_NAME not in {point.name for point in installed}:
            raise EngineError(
                f"weight_transfer needs llmrl's vLLM plugin {PLUGIN_NAME!r}, which vLLM finds through the installed "
                "package; install llmrl (pip install -e .) or pass weight_transfer=False."
            )
    return backend


def require_vllm_version() -> None:
    """Raises ImportError for a vLLM that may have another weight-update API, with the version that is needed."""
    import vllm

    if not vllm.__version__.startswith(f"{VLLM_VERSION}."):
        raise ImportError(
            f"llmrl updates the weights of vLLM {VLLM_VERSION}, found {vllm.__version__}: its update API may differ. "
            f"Install vllm=={VLLM_VERSION}.* or start engines with weight_transfer=False."
        )


def default_kv_cache_memory() -> int:
    """Return the bytes of key-value cache for an engine on CPU: 2 GiB, or a quarter of the free memory if less."""
    import psutil

    return min(2 * _GIB, psutil.virtual_memory().available // 4)


class EngineOptions(TypedDict, total=False):
    """How an engine of vLLM starts: options of `AsyncVLLM.from_pretrained` and `EngineReplicas.from_pretrained`."""

    max_model_len: int | None
    """Prompt and completion together; the model's own limit when not given."""
    dtype: str | None
    """dtype of the engine's weights; float32 on CPU and bfloat16 on GPU when not given, as the trainer's."""
    max_num_seqs: int | None
    """Requests decoded together; 128 on CPU when not given."""
    kv_cache_memory: int | None
    """Bytes of key-value cache; on CPU 2 GiB, or a quarter of the free memory if that is less."""
    gpu_memory_utilization: float | None
    """Share of the device's memory, where `kv_cache_memory` is not given."""
    enforce_eager: bool | None
    """No compilation and no graphs; true on CPU when not given, where it saves 17 s or more at the start for some 15 %
    of speed."""
    seed: int
    """Seed of the engine's sampler, for requests without their own; of several engines, the first one's. 0 by default.
    """
    enable_prefix_caching: bool
    """Reuse the key-value blocks of shared prefixes, by default; emptied at each weight update."""
    weight_transfer: bool | str
    """A vLLM weight-transfer backend; true, the default, picks llmrl's on CPU and NCCL on GPU. `adapters` takes LoRA
    adapters in place of weights, of up to `max_lora_rank` (16) and `max_loras` (4) versions at a time (`engine_args`).
    """
    quantization: Literal["int8"] | None
    """`int8` rounds the linear layers of a folder's model, on a CPU, and those of each update."""
    enable_sleep: bool
    """Allow `sleep`, on a GPU that a trainer shares."""
    cpu_threads: int | None
    """Threads of a CPU engine; all cores when not given, right for a loop that never generates and trains at once. Give
    fewer where a trainer runs beside it."""
    hang_timeout_seconds: float | None
    """An engine that has requests and in this time (300 s by default) no token for any of them hangs: it is ended, and
    its requests raise an `EngineError`. The time that it is paused does not count. None waits for ever."""
    log_level: str
    """Level of vLLM's logger, here and in its processes; `"ERROR"` by default."""
    engine_args: Mapping[str, object] | None
    """Anything else that `vllm.AsyncEngineArgs` takes."""
    num_devices: int
    """TorchRL's word for `tensor_parallel_size` of `engine_args`."""
    verbose: bool
    """TorchRL's: whether `log_level` is `"INFO"`."""
    compile: bool
    """TorchRL's: the reverse of `enforce_eager`."""
    enable_fp32_output: bool
    """TorchRL's: only false, since `dtype="float32"` computes all of the model so."""


_NAMED_AS_VLLM = (
    "max_model_len", "dtype", "max_num_seqs", "gpu_memory_utilization", "enforce_eager", "seed",
    "enable_prefix_caching",
)  # fmt: skip


def translate_torchrl_options(options: EngineOptions) -> EngineOptions:
    """Return options with TorchRL's words replaced; raises ValueError for `enable_fp32_output=True`.

    Example:
        >>> translate_torchrl_options({"seed": 0, "num_devices": 2, "compile": False})
        {'seed': 0, 'engine_args': {'tensor_parallel_size': 2}, 'enforce_eager': True}
    """
    said = options.copy()
    if said.pop("enable_fp32_output", False):
        raise ValueError("enable_fp32_output=True is not supported: pass dtype='float32', for all of the model.")
    if "num_devices" in said:
        said["engine_args"] = {"tensor_parallel_size": said.pop("num_devices"), **(said.get("engine_args") or {})}
    if said.pop("verbose", False):
        said["log_level"] = "INFO"
    is_compiled = said.pop("compile", None)
    if is_compiled is not None and said.get("enforce_eager") is None:
        said["enforce_eager"] = not is_compiled
    return said


def build_engine_args(folder: str, options: EngineOptions, *, is_cpu: bool) -> AsyncEngineArgs:
    """Return vLLM's arguments for the model in a folder.

    Raises:
        TypeError: for a name in `engine_args` that vLLM has not, or that has its own argument here.
        EngineError: see `weight_transfer_backend`; and for `enable_sleep` on CPU, or without a way for new weights.
    """
    from llmrl.engines.vllm.private import AsyncEngineArgs, WeightTransferConfig

    engine_args: dict[str, Any] = dict(options.get("engine_args") or {})
    known = [field.name for field in fields(AsyncEngineArgs)]
    refuse_unknown("engine_args of AsyncVLLM", engine_args, known)
    for name in engine_args:
        if name in _NAMED_AS_VLLM or name in _OWNED:
            instead = _OWNED.get(name, name)
            advice = f"pass {instead}= to from_pretrained" if instead else "llmrl sets it, log-probs depend on it"
            raise TypeError(f"engine_args may not hold {name!r}: {advice}.")
    given = {name: value for name, value in options.items() if name in _NAMED_AS_VLLM and value is not None}
    arguments: dict[str, object] = {"seed": 0, "enable_prefix_caching": True, **given}
    if is_cpu:
        arguments.setdefault("max_num_seqs", 128)
    arguments.setdefault("enforce_eager", is_cpu)
    # As `TransformersWrapper` by default. On CPU bfloat16 is no faster as a rule, and small updates are lost in it.
    arguments.setdefault("dtype", "float32" if is_cpu else "bfloat16")
    weight_transfer = options.get("weight_transfer", True)
    backend = weight_transfer_backend(weight_transfer, is_cpu=is_cpu)
    enable_sleep = options.get("enable_sleep", False)
    if enable_sleep and (is_cpu or backend in (None, ADAPTER_BACKEND)):
        why = f"weight_transfer={weight_transfer!r} brings it no weights to wake with"
        why = "vLLM gives nothing back on a CPU" if is_cpu else why
        raise EngineError(f"enable_sleep=True is not supported: {why}.")
    arguments["enable_sleep_mode"] = enable_sleep
    if backend == ADAPTER_BACKEND:
        arguments["enable_lora"] = True
        engine_args |= _adapter_args(engine_args)
    elif backend is not None:
        arguments["weight_transfer_config"] = WeightTransferConfig(
            backend=NCCL_BACKEND if backend == "nccl" else backend
        )
    kv_cache_memory = options.get("kv_cache_memory")
    if kv_cache_memory is None and is_cpu and "gpu_memory_utilization" not in arguments:
        kv_cache_memory = default_kv_cache_memory()
    if kv_cache_memory is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_memory
    if is_cpu:  # vLLM's 128 shares no prefix that is shorter, which those of small tasks are; its CPU kernels want 32s
        arguments["block_size"] = 32
    num_workers = engine_args.get("tensor_parallel_size", 1) * engine_args.get("pipeline_parallel_size", 1)
    if is_cpu and num_workers == 1:
        arguments["distributed_executor_backend"] = "uni"
    elif num_workers > 1 and backend is not None and engine_args.get("nnodes", 1) == 1 and not _is_in_placement_group():
        arguments["distributed_executor_backend"] = EXECUTOR
    return AsyncEngineArgs(
        model=folder,
        # Of the distribution that is sampled from, so that on-policy importance ratios are 1.
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        enable_log_requests=False,
        max_logprobs=-1,  # what truncation kept is read from them
        use_tqdm_on_load=False,
        **{**arguments, **engine_args},
    )


def _adapter_args(engine_args: Mapping[str, Any]) -> dict[str, int]:
    """Return how many adapters vLLM holds, of what rank: the next that it can.

    Raises EngineError for a rank above 512, or fewer than two adapters at a time.
    """
    max_loras = engine_args.get("max_loras", 4)
    rank = engine_args.get("max_lora_rank", 16)
    if max_loras < 2:
        raise EngineError(
            f"max_loras must be at least 2, got {max_loras}: the next adapter is loaded beside the current one."
        )
    ranks = [one for one in _LORA_RANKS if one >= rank]
    if not ranks:
        raise EngineError(f"max_lora_rank must be at most {_LORA_RANKS[-1]}, got {rank}; send merged weights instead.")
    return {"max_loras": max_loras, "max_lora_rank": ranks[0]}


def _is_in_placement_group() -> bool:
    """Return whether Ray has a place for each worker, so that vLLM leaves them to Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.util.get_current_placement_group() is not None

"""Translation of llmrl's options to vLLM's arguments; unknown names are refused."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import warnings
from collections.abc import Mapping
from dataclasses import fields
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from llmrl._utils.arguments import refuse_unknown
from llmrl.engines.base import EngineError
from llmrl.engines.vllm.model_types import key_value_bytes, read_config
from llmrl.engines.vllm.passed_through import check_passed_through, untested
from llmrl.engines.vllm.private import (
    EXECUTOR,
    PLUGIN_GROUP,
    TRIED_VERSIONS,
    VLLM_VERSION,
    is_tried,
    missing_names,
)

if TYPE_CHECKING:
    from llmrl.engines.vllm.private import AsyncEngineArgs

logger = logging.getLogger(__name__)

LLMRL_BACKEND = "llmrl"
"""llmrl's weight-transfer backend in vLLM's workers: shared memory, gloo and files."""
NCCL_BACKEND = "llmrl-nccl"
"""Name in vLLM of its `nccl` backend with llmrl's deadline."""
ADAPTER_BACKEND = "adapters"
"""Updates as LoRA adapters, which need no weight-transfer backend of vLLM."""
PLUGIN_NAME = "llmrl_weight_transfer"
"""Name of the entry point with which vLLM's processes find llmrl's backends."""

_DRAFTS = {"ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}}
"""vLLM's `speculative_config` for each value of `EngineOptions.speculative`."""
_CPU_BLOCK = 32
"""Tokens per key-value block: with vLLM's 128, short prefixes are not shared; its kernels need multiples of 32."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM supports."""
# Arguments that llmrl sets -> llmrl's option for it, or None; `engine_args` may not contain them.
_OWNED = {
    "model": "model",
    "logprobs_mode": None,
    "max_logprobs": None,
    "language_model_only": None,
    "disable_log_stats": None,
    "enable_log_requests": None,
    "weight_transfer_config": "weight_transfer",
    "enable_sleep_mode": "enable_sleep",
    "enable_lora": "weight_transfer",
    "kv_cache_memory_bytes": "kv_cache_memory",
}


def weight_transfer_backend(weight_transfer: bool | str, *, is_cpu: bool) -> str | None:
    """Return the vLLM weight-transfer backend to start with, or None.

    Raises EngineError if vLLM's processes cannot find llmrl's backend, or the backend needs GPUs
    and vLLM runs on CPU, and ImportError if vLLM lacks a name that updates use.
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
    """Warn if updates were not tested with vLLM's version. Raises ImportError if vLLM lacks a name that they use."""
    import vllm

    if is_tried(vllm.__version__):
        return
    tried = f"llmrl was tried with vLLM {' and '.join(TRIED_VERSIONS)}, found {vllm.__version__}"
    advice = f"Install vllm=={VLLM_VERSION}.* or start engines with weight_transfer=False."
    if missing := missing_names():
        raise ImportError(f"{tried}, which lacks {', '.join(missing)}. {advice}")
    warnings.warn(f"{tried}: its update API may differ, though all names are there. {advice}", stacklevel=2)


def default_kv_cache_memory(folder: str, *, max_num_seqs: int, max_model_len: int | None, dtype: str) -> int:
    """Return the bytes of key-value cache on CPU, all of which vLLM touches when it starts.

    The result is the least of 2 GiB, a quarter of the free memory, and what `max_num_seqs` requests
    of `max_model_len` tokens can use.
    """
    import psutil

    most = min(2 << 30, psutil.virtual_memory().available // 4)
    if max_model_len is None or (token := key_value_bytes(read_config(folder), dtype)) is None:
        return most
    num_blocks = 1 + max_num_seqs * ceil(max_model_len / _CPU_BLOCK)  # one block is vLLM's own
    return min(most, num_blocks * _CPU_BLOCK * token)


class EngineOptions(TypedDict, total=False):
    """Options of `AsyncVLLM.from_pretrained` and `EngineReplicas.from_pretrained`."""

    max_model_len: int | None
    """Maximum number of tokens of prompt and completion together; by default the model's."""
    dtype: str | None
    """dtype of the engine's weights; by default the trainer's: float32 on CPU, bfloat16 on GPU, or float16 if the
    GPU has no bfloat16."""
    max_num_seqs: int | None
    """Maximum number of requests decoded together; by default 128 on CPU."""
    kv_cache_memory: int | None
    """Bytes of key-value cache; by default on CPU the least of 2 GiB, a quarter of the free memory, and what
    `max_num_seqs` requests of `max_model_len` tokens can use."""
    gpu_memory_utilization: float | None
    """Share of the device's memory to use, if `kv_cache_memory` is not given."""
    enforce_eager: bool | None
    """Whether to disable compilation and graphs; by default true on CPU, where it saves 17 s or more at the start for
    some 15 % of speed."""
    seed: int
    """Seed of the sampler (of the first of several engines), for requests without their own; by default 0."""
    enable_prefix_caching: bool
    """Whether to reuse key-value blocks of shared prefixes until the next update; by default true."""
    weight_transfer: bool | str
    """vLLM's weight-transfer backend; true, the default, selects llmrl's on CPU and NCCL on GPU. `adapters` uses LoRA
    adapters instead, with `max_lora_rank` (16) and `max_loras` (4 versions at a time) from `engine_args`."""
    quantization: Literal["int8"] | None
    """`int8` quantises the linear layers of the model and of each update; only on a CPU."""
    speculative: Literal["ngram"] | None
    """`ngram` drafts the tokens that followed the same tokens earlier in the request, and keeps those that the model
    confirms. It is faster if answers repeat their prompt, and keeps the distribution."""
    enable_sleep: bool
    """Whether to allow `sleep`, on a GPU shared with a trainer."""
    cpu_threads: int | None
    """Number of threads of a CPU engine; by default all cores. Use fewer if a trainer runs concurrently."""
    hang_timeout_seconds: float | None
    """Time without a new token (by default 300 s) after which an engine with requests is ended, and its requests raise
    EngineError. Pauses do not count. None disables the check."""
    log_level: str
    """Level of vLLM's logger, here and in its processes; by default `"ERROR"`."""
    engine_args: Mapping[str, object] | None
    """Other arguments of `vllm.AsyncEngineArgs`. Arguments with which log-probs are not the trainer's are refused; with
    arguments that llmrl's tests do not cover, training ends if the first batch's log-probs differ."""
    num_devices: int
    """TorchRL's name of `tensor_parallel_size` in `engine_args`."""
    verbose: bool
    """TorchRL's switch for `log_level="INFO"`."""
    compile: bool
    """TorchRL's inverse of `enforce_eager`."""
    enable_fp32_output: bool
    """TorchRL's option; must be false. `dtype="float32"` computes the whole model in float32."""


_NAMED_AS_VLLM = (
    "max_model_len", "dtype", "max_num_seqs", "gpu_memory_utilization", "enforce_eager", "seed",
    "enable_prefix_caching",
)  # fmt: skip


def translate_torchrl_options(options: EngineOptions) -> EngineOptions:
    """Replace TorchRL's option names.

    Raises ValueError for `enable_fp32_output=True`, and for a name of TorchRL beside vLLM's or llmrl's for the same.

    Example:
        >>> translate_torchrl_options({"seed": 0, "num_devices": 2, "compile": False})
        {'seed': 0, 'engine_args': {'tensor_parallel_size': 2}, 'enforce_eager': True}
    """
    said = options.copy()
    if said.pop("enable_fp32_output", False):
        raise ValueError("enable_fp32_output=True is not supported: pass dtype='float32' for the whole model.")
    engine_args = said.get("engine_args") or {}
    for name, other, is_given in (
        ("num_devices", "engine_args['tensor_parallel_size']", "tensor_parallel_size" in engine_args),
        ("verbose", "log_level", "log_level" in said),
        ("compile", "enforce_eager", said.get("enforce_eager") is not None),
    ):
        if is_given and said.get(name) is not None:
            raise ValueError(f"{name} and {other} set the same, and both are given; pass {other} alone.")
    num_devices = said.pop("num_devices", None)
    if num_devices is not None:
        said["engine_args"] = {"tensor_parallel_size": num_devices, **engine_args}
    if said.pop("verbose", False):
        said["log_level"] = "INFO"
    is_compiled = said.pop("compile", None)
    if is_compiled is not None:
        said["enforce_eager"] = not is_compiled
    return said


def check_options(options: EngineOptions) -> None:
    """Raise ValueError as `check_passed_through` does, or if `speculative` is unknown."""
    check_passed_through(options.get("engine_args") or {})
    speculative = options.get("speculative")
    if speculative is not None and speculative not in _DRAFTS:
        raise ValueError(f"speculative must be 'ngram' or None, got {speculative!r}.")


def build_engine_args(folder: str, options: EngineOptions, *, is_cpu: bool) -> AsyncEngineArgs:
    """Return vLLM's arguments for the model in a folder, from options that `check_options` has passed.

    Raises TypeError if a name in `engine_args` is unknown to vLLM or is set by llmrl, and EngineError as
    `weight_transfer_backend` does, or if `enable_sleep` is used on CPU or without a backend that restores weights.
    """
    from llmrl.engines.vllm.private import AsyncEngineArgs, WeightTransferConfig

    engine_args: dict[str, Any] = dict(options.get("engine_args") or {})
    known = [field.name for field in fields(AsyncEngineArgs)]
    refuse_unknown("engine_args of AsyncVLLM", engine_args, known)
    if names := untested(engine_args):
        logger.warning(
            "engine_args: llmrl's tests do not compare %s with a trainer; the log-probs of the first batch must agree.",
            ", ".join(names),
        )
    for name in engine_args:
        if name in _NAMED_AS_VLLM or name in _OWNED:
            instead = _OWNED.get(name, name)
            advice = "llmrl sets it, because log-probs depend on it"
            if instead:
                advice = f"pass {instead}= to from_pretrained"
            raise TypeError(f"engine_args may not hold {name!r}: {advice}.")
    given = {name: value for name, value in options.items() if name in _NAMED_AS_VLLM and value is not None}
    arguments: dict[str, object] = {"seed": 0, "enable_prefix_caching": True, **given}
    if is_cpu:
        arguments.setdefault("max_num_seqs", 128)
    arguments.setdefault("enforce_eager", is_cpu)
    # The same default as in `TransformersWrapper`. On CPU bfloat16 is rarely faster, and loses small updates.
    arguments.setdefault("dtype", "float32" if is_cpu else _half_dtype())
    weight_transfer = options.get("weight_transfer", True)
    backend = weight_transfer_backend(weight_transfer, is_cpu=is_cpu)
    enable_sleep = options.get("enable_sleep", False)
    if enable_sleep and (is_cpu or backend in (None, ADAPTER_BACKEND)):
        why = f"weight_transfer={weight_transfer!r} cannot give it weights when it wakes up"
        if is_cpu:
            why = "vLLM frees no memory on a CPU"
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
        kv_cache_memory = default_kv_cache_memory(
            folder,
            max_num_seqs=arguments["max_num_seqs"],  # type: ignore[arg-type]
            max_model_len=options.get("max_model_len"),
            dtype=str(arguments["dtype"]),
        )
    if kv_cache_memory is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_memory
    if (speculative := options.get("speculative")) is not None:
        arguments["speculative_config"] = _DRAFTS[speculative]
    if is_cpu:
        arguments["block_size"] = _CPU_BLOCK
    num_workers = engine_args.get("tensor_parallel_size", 1) * engine_args.get("pipeline_parallel_size", 1)
    is_on_one_host = engine_args.get("nnodes", 1) == 1
    if is_cpu and num_workers == 1:
        arguments["distributed_executor_backend"] = "uni"
    elif num_workers > 1 and backend is not None and is_on_one_host and not _is_in_placement_group():
        arguments["distributed_executor_backend"] = EXECUTOR
    return AsyncEngineArgs(
        model=folder,
        # These are log-probs of the sampled distribution, so that on-policy importance ratios are 1.
        logprobs_mode="processed_logprobs",
        structured_outputs_config={"backend": "xgrammar"},  # `Grammars` recomputes its masks
        disable_log_stats=True,
        enable_log_requests=False,
        max_logprobs=-1,  # no limit, because sampling masks are derived from the reported ids
        language_model_only=True,  # image encoders are not trained, and need additional packages
        use_tqdm_on_load=False,
        **{**arguments, **engine_args},
    )


def _half_dtype() -> str:
    import torch

    from llmrl.engines.vllm.private import current_platform

    return "bfloat16" if torch.bfloat16 in current_platform.supported_dtypes else "float16"


def _adapter_args(engine_args: Mapping[str, Any]) -> dict[str, int]:
    """Return vLLM's number of adapters, and their rank rounded up. Raises EngineError if one is out of range."""
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
    """Return whether this process is in a Ray placement group, where Ray must start vLLM's workers."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.util.get_current_placement_group() is not None

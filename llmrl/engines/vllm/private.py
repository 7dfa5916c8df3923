"""All uses of vLLM beyond its top-level names, imported lazily; an upgrade of vLLM must check them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import sys
from collections.abc import Coroutine, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmrl.engines.base import PauseMode

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    import torch
    from vllm import CompletionOutput, SamplingParams
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest as LoRARequest
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.stats import IterationStats as IterationStats
    from vllm.v1.metrics.stats import SchedulerStats as SchedulerStats

    from llmrl._utils.background_loop import BackgroundLoop

VLLM_VERSION = "0.32"
"""Version that the set-up installs and that the tests run with."""
TRIED_VERSIONS = ("0.31", VLLM_VERSION)
"""Versions with which engines and weight updates were tested; vLLM's weight-update API is not stable."""
PLUGIN_GROUP = "vllm.general_plugins"
"""Group of the entry points that vLLM calls in each of its processes."""
EXECUTOR = f"{__name__}.InStepExecutor"
"""Name of the executor for vLLM's arguments."""
_SHARED_MEMORY = "/dev/shm/"
_SEGMENTS = "llmrl_segments"
_STARTS = "llmrl_version_starts"
RELOAD_METHOD = "reload_weights"
"""Method of vLLM's workers that reads weights from a folder."""

# Module of vLLM -> its names that llmrl uses.
_NAMES = {
    "config": ("ModelConfig", "VllmConfig", "WeightTransferConfig", "set_current_vllm_config"),
    "distributed.weight_transfer.base": (
        "WeightTransferEngine",
        "WeightTransferInitInfo",
        "WeightTransferInitRequest",
        "WeightTransferUpdateInfo",
        "WeightTransferUpdateRequest",
    ),
    "distributed.weight_transfer.factory": ("WeightTransferEngineFactory",),
    "distributed.weight_transfer.ipc_engine": (
        "DEFAULT_PACKED_BUFFER_SIZE_BYTES",
        "IPCTrainerInitInfo",
        "IPCTrainerWeightTransferEngine",
    ),
    "distributed.weight_transfer.nccl_engine": (
        "NCCLTrainerInitInfo",
        "NCCLTrainerWeightTransferEngine",
        "NCCLWeightTransferEngine",
        "NCCLWeightTransferInitInfo",
        "NCCLWeightTransferUpdateInfo",
    ),
    "engine.arg_utils": ("AsyncEngineArgs",),
    "exceptions": ("VLLMClientError",),
    "lora.request": ("LoRARequest",),
    "model_executor.kernels.linear.scaled_mm.cpu": ("CPUInt8ScaledMMLinearKernel",),
    "model_executor.layers.attention": ("is_deferred_attention_layer",),
    "model_executor.layers.fused_moe.fused_moe_method_base": ("FusedMoEMethodBase",),
    "model_executor.layers.linear": ("LinearBase", "UnquantizedLinearMethod"),
    "model_executor.layers.quantization.base_config": ("QuantizeMethodBase",),
    "model_executor.layers.rotary_embedding": ("RotaryEmbedding",),
    "model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
    "model_executor.layers.vocab_parallel_embedding": (
        "ParallelLMHead",
        "UnquantizedEmbeddingMethod",
        "VocabParallelEmbedding",
    ),
    "model_executor.model_loader.reload": ("finalize_layerwise_reload", "initialize_layerwise_reload"),
    "model_executor.model_loader.reload.layerwise": (
        "_get_original_loader",
        "_layerwise_process",
        "get_layerwise_info",
    ),
    "model_executor.model_loader.reload.meta": ("materialize_layer", "restore_layer_on_meta"),
    "model_executor.models.registry": ("ModelRegistry",),
    "outputs": ("CompletionOutput",),
    "platforms": ("current_platform",),
    "sampling_params": ("RequestOutputKind", "StructuredOutputsParams"),
    "utils.network_utils": ("get_ip",),
    "v1.engine.async_llm": ("AsyncLLM",),
    "v1.engine.output_processor": ("RequestState",),
    "v1.engine.exceptions": ("EngineDeadError", "EngineGenerateError"),
    "v1.sample.rejection_sampler": ("apply_sampling_constraints", "expand_batch_to_tokens"),
    "v1.structured_output.backend_types": ("StructuredOutputOptions",),
    "v1.structured_output.backend_xgrammar": ("XgrammarBackend", "has_xgrammar_unsupported_json_features"),
    "v1.executor.multiproc_executor": ("MultiprocExecutor",),
    "v1.metrics.loggers": ("PrometheusStatLogger",),
}
# Class of vLLM -> its methods and fields that weight updates use.
_MEMBERS = {
    "v1.engine.core_client.AsyncMPClient": ("get_output_async", "set_weight_version_async"),
    "v1.engine.output_processor.RequestState": ("_new_completion_output",),
    "v1.engine.async_llm.AsyncLLM": (
        "finish_weight_update",
        "init_weight_transfer_engine",
        "pause_generation",
        "reset_prefix_cache",
        "resume_generation",
        "start_weight_update",
        "update_weights",
    ),
}
_MODULES = {name: f"vllm.{module}" for module, names in _NAMES.items() for name in names}


def _find(name: str) -> Any:
    return getattr(importlib.import_module(_MODULES[name]), name)


def is_tried(version: str) -> bool:
    """Return whether engines and weight updates were tried with this version of vLLM.

    Example:
        >>> is_tried("0.32.1"), is_tried("0.3.1")
        (True, False)
    """
    return version.startswith(tuple(f"{minor}." for minor in TRIED_VERSIONS))


def missing_names() -> list[str]:
    """Return the dotted names that llmrl uses and the installed vLLM lacks."""
    missing = []
    for name, module in _MODULES.items():
        try:
            _find(name)
        except (ImportError, AttributeError):
            missing.append(f"{module}.{name}")
    for path, members in _MEMBERS.items():
        module, _, name = path.rpartition(".")
        owner = getattr(importlib.import_module(f"vllm.{module}"), name)
        known = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
        missing += [f"vllm.{path}.{member}" for member in members if member not in known]
    return missing


def __getattr__(name: str) -> Any:
    if name == "InStepExecutor":
        return _make_executor()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _find(name)


# -- the engine's process, as seen from its parent ---------------------------------------------------------------


def pause_at_once(llm: AsyncLLM, mode: PauseMode) -> Coroutine[object, object, None]:
    """Pause the scheduler without the delay of 20 ms in `pause_generation`."""
    return llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)


def num_unfinished_tokens(llm: AsyncLLM) -> int:
    """Return the number of tokens so far of requests in flight."""
    states = list(llm.output_processor.request_states.values())
    return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)


def all_stop_token_ids(llm: AsyncLLM, params: SamplingParams) -> set[int]:
    """Return the tokens that end an answer to a request with these parameters."""
    resolved = params.clone()
    processor = llm.input_processor
    eos_token_id = processor.renderer.get_eos_token_id()
    resolved.update_from_generation_config(processor.generation_config_fields, eos_token_id)
    return resolved.all_stop_token_ids


async def start_llm(arguments: AsyncEngineArgs, stat_logger: object) -> AsyncLLM:
    """Start the engine; `stat_logger` receives statistics of each step."""
    llm = _find("AsyncLLM").from_engine_args(arguments, stat_loggers=[lambda config, index: stat_logger])
    manager = getattr(llm, "logger_manager", None)
    if manager is not None:  # only vLLM's own server shows its Prometheus metrics, which cost time in each step
        prometheus = _find("PrometheusStatLogger")
        manager.stat_loggers[:] = [one for one in manager.stat_loggers if not isinstance(one, prometheus)]
    if "weight_versions" not in _find("CompletionOutput").__dataclass_fields__:
        _report_versions(llm)
    vars(llm)[_SEGMENTS] = _segments_of(llm)
    return llm


def _report_versions(llm: AsyncLLM) -> None:
    """Make vLLM 0.31 report the version of each token, as vLLM 0.32 does.

    The engine's process sends its outputs and the answer to `set_weight_version` in order, and samples nothing while
    weights change. Outputs in the queue when the answer arrives are of the old version, and later outputs of the new.
    """
    client = llm.engine_core
    take = client.get_output_async
    announce = client.set_weight_version_async
    current = "default"

    async def announce_in_order(label: str) -> None:
        await announce(label)
        client.outputs_queue.put_nowait(label)

    async def take_with_version() -> EngineCoreOutputs:
        nonlocal current
        while isinstance(outputs := await take(), str):
            current = outputs
        for output in outputs.outputs:  # the detokenizers have counted all earlier outputs, but not these
            if (state := llm.output_processor.request_states.get(output.request_id)) is not None:
                starts = vars(state).setdefault(_STARTS, [])
                if not starts or starts[-1][0] != current:
                    starts.append((current, state.detokenizer.num_output_tokens()))
        return outputs

    client.set_weight_version_async = announce_in_order
    client.get_output_async = take_with_version
    _add_versions_to_answers()


@functools.cache
def _add_versions_to_answers() -> None:
    states = _find("RequestState")
    make = states._new_completion_output

    def make_with_versions(self: RequestState, *arguments: object, **options: object) -> CompletionOutput:
        output = make(self, *arguments, **options)
        starts = vars(self).get(_STARTS, [])
        ends = [start for _, start in starts[1:]] + [self.detokenizer.num_output_tokens()]
        spans = zip(starts, ends, strict=False)
        output.weight_versions = [SimpleNamespace(version=v, start=s, end=e) for (v, s), e in spans]
        return output

    states._new_completion_output = make_with_versions


def _segments_of(llm: AsyncLLM) -> set[str]:
    """Return the names of the engine's shared-memory segments."""
    import psutil

    names: set[str] = set()
    for process in processes_of(llm):
        with contextlib.suppress(psutil.Error, OSError):  # the process ended, or this is not Linux
            engine = psutil.Process(process.pid)
            for one in (engine, *engine.children(recursive=True)):
                lines = Path(f"/proc/{one.pid}/maps").read_text(errors="replace").splitlines()
                names |= {line.rpartition(_SHARED_MEMORY)[2] for line in lines if f"{_SHARED_MEMORY}psm_" in line}
    return names


def _remove_segments(names: set[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            Path(_SHARED_MEMORY, name).unlink()
            resource_tracker.unregister(f"/{name}", "shared_memory")  # avoids its warning of a leak at exit


def processes_of(llm: AsyncLLM) -> list[BaseProcess]:
    """Return the engine's processes; empty before it starts."""
    return list(getattr(llm.engine_core.resources.engine_manager, "processes", ()))


def close_llm(llm: AsyncLLM, background: BackgroundLoop) -> None:
    """End the engine and its event loop, unless they have ended."""
    if background.is_closed:
        return
    processes = processes_of(llm)
    try:
        background.run(_shut_down(llm), timeout=30)
    finally:
        background.close()
        for process in processes:  # vLLM kills a process that does not end, and leaves a zombie
            process.join(10)
        _remove_segments(vars(llm).get(_SEGMENTS, set()))
        # vLLM's finalizer would shut the engine down again, perhaps during interpreter exit.
        llm.shutdown = lambda timeout=None: None


async def _shut_down(llm: AsyncLLM) -> None:
    # Requests in flight must fail before the sockets they wait on are closed.
    llm.output_processor.propagate_error(_find("EngineDeadError")())
    await asyncio.sleep(0)
    llm.shutdown()


# -- inside the engine's processes -------------------------------------------------------------------------------


def put_files_into(folder: str) -> None:
    """Make vLLM put the rendezvous file of an engine's workers into a folder, but no other temporary file."""
    if "vllm" in sys.modules:
        network_utils = importlib.import_module("vllm.utils.network_utils")
        vars(network_utils)["tempfile"] = SimpleNamespace(gettempdir=lambda: folder)


def register_weight_transfer(backend: str, module: str, class_name: str) -> None:
    """Register a weight-transfer engine with vLLM's workers; may be called again."""
    factory = _find("WeightTransferEngineFactory")
    if backend not in factory._registry:
        factory.register_engine(backend, module, class_name)


def forget_packing_of_experts(model: torch.nn.Module) -> None:
    """Make vLLM pack new weights of experts for its CPU kernel; it packs only when it creates the kernel."""
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    for method in methods:
        if isinstance(method, _find("FusedMoEMethodBase")):
            method.moe_kernel = None


def compute_int8_by_one_dnn() -> None:
    """Make int8 layers use oneDNN on any CPU, and keep a reference to the scales, which oneDNN knows by address only.

    vLLM's own kernel for AMX makes an engine in float32 fail, and a reload of weights would free the scales.
    """
    if not _find("current_platform").is_cpu():
        return

    def process_and_hold(self: Any, layer: torch.nn.Module) -> None:
        self.linear_method = self._apply_weights_onednn
        self.process_weights_for_onednn(layer)
        self.held_scales = getattr(layer, self.layer_param_names[1])

    _find("CPUInt8ScaledMMLinearKernel").process_weights_after_loading = process_and_hold


@functools.cache
def replace_cpu_kernels() -> None:
    """Replace functions of vLLM's CPU build that compute wrong results: sampling of drafts, rotary embedding.

    The kernel behind `expand_batch_to_tokens` writes temperature, top-k and top-p of drafted tokens into a 64-bit
    integer copy that it drops, so drafts are sampled with uninitialised values; with top-k, a step without drafts
    makes the engine fail. The rotary embedding treats the heads of [num_tokens, num_heads, head_dim] as tokens.
    """
    if not _find("current_platform").is_cpu():
        return
    sampler = importlib.import_module("vllm.v1.sample.rejection_sampler")
    constrain = sampler.apply_sampling_constraints
    rotary = _find("RotaryEmbedding")
    rotate_rows = rotary.forward_cpu

    def expand(
        values: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
    ) -> torch.Tensor:
        counts = ends.diff(prepend=ends.new_zeros(1))
        replaced = values.masked_fill(values == replace_from, replace_to)
        return replaced.repeat_interleave(counts, output_size=num_tokens)

    def rotate(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> object:
        has_heads = query.ndim > positions.ndim + 1
        return self.forward_native(positions, query, key) if has_heads else rotate_rows(self, positions, query, key)

    vars(sampler)["expand_batch_to_tokens"] = expand
    vars(sampler)["apply_sampling_constraints"] = lambda logits, *rest: (
        constrain(logits, *rest) if len(logits) else logits
    )
    rotary.forward_cpu = rotate


def forget_loaded(model: torch.nn.Module) -> None:
    """Discard the weights that wait in a layerwise reload."""
    get_layerwise_info = _find("get_layerwise_info")
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


@functools.cache
def _make_executor() -> type:
    class InStepExecutor(_find("MultiprocExecutor")):  # type: ignore[misc]
        """vLLM's multiprocess executor, changed to wait for every worker before it raises an error.

        vLLM 0.32 stops at the first error, and then reads the other workers' answers as answers to the next call.
        """

        response_mqs: list[MessageQueue]

        def _init_executor(self) -> None:
            super()._init_executor()
            self.response_mqs = _AllAnswers(self.response_mqs)

    # vLLM pickles the class by its qualified name.
    InStepExecutor.__qualname__ = "InStepExecutor"
    return InStepExecutor


class _AllAnswers(list["MessageQueue"]):
    """Queues that are all read when the first of them is read."""

    def __iter__(self) -> Iterator[MessageQueue]:
        queues = list(super().__iter__())
        answers: list[object] = []
        for index, queue in enumerate(queues):
            yield _Together(queue, index, queues, answers)


class _Together:
    """One of several queues that are read together."""

    def __init__(self, queue: MessageQueue, index: int, queues: list[MessageQueue], answers: list[object]) -> None:
        self._queue = queue
        self._index = index
        self._queues = queues
        self._answers = answers

    def dequeue(self, timeout: float | None = None) -> object:
        """Return this queue's answer once all queues have one."""
        if not self._answers:
            self._answers += [queue.dequeue(timeout=timeout) for queue in self._queues]
        return self._answers[self._index]

    def __getattr__(self, name: str) -> object:
        return getattr(self._queue, name)

"""Start of vLLM: its arguments, process environment and event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from llmrl._utils.arguments import check_least
from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.garbage import search_rarely
from llmrl.engines.base import EngineError
from llmrl.engines.engine_folder import FOLDER_VARIABLE, engine_folder
from llmrl.engines.environment import available_cores, engine_variables, starting_environment, transfer_variables
from llmrl.engines.load import LoadMeter
from llmrl.engines.vllm.arguments import ADAPTER_BACKEND, EngineOptions, build_engine_args
from llmrl.engines.vllm.model_types import check_model
from llmrl.engines.vllm.private import start_llm
from llmrl.engines.vllm.quantized import checkpoint_for

if TYPE_CHECKING:
    from llmrl.engines.vllm.private import AsyncLLM


def start_vllm(model: str, options: EngineOptions) -> tuple[AsyncLLM, BackgroundLoop, LoadMeter]:
    """Start an engine. Raises as `AsyncVLLM.from_pretrained` does."""
    log_level = options.get("log_level", "ERROR")
    cpu_threads = options.get("cpu_threads")
    weight_transfer = options.get("weight_transfer", True)
    check_least(1, cpu_threads=cpu_threads)
    logging.getLogger("vllm").setLevel(log_level)
    with starting_environment({"VLLM_LOGGING_LEVEL": log_level, "VLLM_LOGGING_STREAM": "ext://sys.stderr"}):
        try:
            from llmrl.engines.vllm.private import current_platform
        except ImportError as error:
            raise ImportError(
                "AsyncVLLM needs vLLM: run `make setup` in a checkout (CPU), or pip install 'llmrl[gpu]'."
            ) from error

    is_cpu = bool(current_platform.is_cpu())
    is_eager = options.get("enforce_eager")
    if is_eager is None:
        is_eager = is_cpu
    threads = (cpu_threads or available_cores()) if is_cpu else None
    variables = engine_variables(log_level=log_level, cpu_threads=threads, is_eager=is_eager)
    takes_adapters = weight_transfer == ADAPTER_BACKEND
    with checkpoint_for(model, options.get("quantization"), is_cpu=is_cpu, takes_adapters=takes_adapters) as folder:
        background = BackgroundLoop("llmrl-vllm")
        load = LoadMeter()
        stack = contextlib.ExitStack()
        try:
            variables |= transfer_variables(weight_transfer)
            variables[FOLDER_VARIABLE] = stack.enter_context(engine_folder())
            background.submit(_hold(stack))
            with starting_environment(variables):
                background.run(_import_vllm())
                arguments = build_engine_args(folder, options, is_cpu=is_cpu)
                check_model(
                    folder,
                    arguments.max_model_len,
                    dtype=str(arguments.dtype),
                    is_cpu=is_cpu,
                    is_updated=weight_transfer is not False,
                    is_drafting=arguments.speculative_config is not None,
                )
                return background.run(start_llm(arguments, load)), background, load
        except (TypeError, ImportError, EngineError):
            background.close()
            raise
        except Exception as error:
            background.close()
            raise EngineError(f"vLLM did not start with model {model!r}: {error}") from error


async def _import_vllm() -> None:
    """Import vLLM on the loop's thread: errors in vLLM's imports, which vLLM stores, hold the frames of all callers.

    With a caller's frame they would hold its local variables, such as the engine, which would never be collected.
    """
    search_often = search_rarely(asyncio.get_running_loop())  # otherwise a quarter of the time is garbage collection
    try:
        from llmrl.engines.vllm.private import AsyncEngineArgs  # noqa: F401
    finally:
        search_often()


async def _hold(stack: contextlib.ExitStack) -> None:
    """Keep the folder of an engine's sockets until its loop ends."""
    with stack:
        while True:
            await asyncio.sleep(3600)

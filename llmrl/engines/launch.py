"""Several vLLM engines of one model, started together and again when one dies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llmrl.engines.environment import available_cores
from llmrl.engines.ray_cluster import connect
from llmrl.engines.replicas import DEFAULT_HANG_TIMEOUT_SECONDS, EngineReplicas


def start_replicas(
    model: str,
    num_replicas: int,
    *,
    use_ray: bool,
    ray_options: Mapping[str, Any] | None,
    ray_init_config: Mapping[str, Any] | None,
    hang_timeout_seconds: float | None,
    options: Mapping[str, Any],
) -> EngineReplicas:
    """Start `num_replicas` engines, in child processes of this one or as Ray actors; see `AsyncVLLM.from_pretrained`.

    Raises:
        ValueError: when `num_replicas` is below 1.
        EngineError: when one of them does not start; the others are ended then.
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas}.")
    if use_ray:
        connect(ray_init_config)
        start = _ray_starter(model, options, ray_options)
    else:
        start = _local_starter(model, options, num_replicas)
    with ThreadPoolExecutor(num_replicas, thread_name_prefix="llmrl-start") as pool:
        futures = [pool.submit(start, index) for index in range(num_replicas)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        for future in futures:
            if future.exception() is None:
                future.result().shutdown()
        raise errors[0]
    engines = [future.result() for future in futures]
    timeout = DEFAULT_HANG_TIMEOUT_SECONDS if hang_timeout_seconds is None else hang_timeout_seconds
    return EngineReplicas(engines, restart=start, hang_timeout_seconds=timeout)


def _local_starter(model: str, options: Mapping[str, Any], num_replicas: int) -> Callable[[int], Any]:
    from llmrl.engines.vllm import AsyncVLLM

    options = dict(options)
    if options["cpu_threads"] is None:
        options["cpu_threads"] = max(1, available_cores() // num_replicas)
    return lambda index: AsyncVLLM.from_pretrained(model, **options)


def _ray_starter(model: str, options: Mapping[str, Any], ray_options: Mapping[str, Any] | None) -> Callable[[int], Any]:
    from llmrl.engines.ray_engine import RayEngine
    from llmrl.engines.vllm import AsyncVLLM

    make_engine = functools.partial(AsyncVLLM.from_pretrained, model, **options)
    return lambda index: RayEngine.start(make_engine, ray_options=ray_options)

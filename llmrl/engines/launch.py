"""Start of several vLLM engines of one model."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from llmrl._utils.arguments import check_least, keywords_of, refuse_unknown
from llmrl.engines.base import UpdatableEngine
from llmrl.engines.environment import available_cores
from llmrl.engines.ray.cluster import connect
from llmrl.engines.ray.engine import RayEngine
from llmrl.engines.vllm.arguments import EngineOptions
from llmrl.engines.vllm.engine import AsyncVLLM


def start_engines(
    model: str | os.PathLike[str],
    num_replicas: int,
    use_ray: bool,
    ray_options: Mapping[str, object] | None,
    ray_init_config: Mapping[str, object] | None,
    options: EngineOptions,
) -> tuple[list[UpdatableEngine], Callable[[int], UpdatableEngine]]:
    """Start engines concurrently; return them and a function that starts a replacement by index.

    Raises as `EngineReplicas.from_pretrained` does.
    """
    refuse_unknown("EngineReplicas.from_pretrained", options, keywords_of(AsyncVLLM.from_pretrained) or ())
    check_least(1, num_replicas=num_replicas)
    for name, value in (("ray_options", ray_options), ("ray_init_config", ray_init_config)):
        if value is not None and not use_ray:
            raise ValueError(f"{name} has no effect without use_ray=True.")
    options = options.copy()
    if use_ray:
        connect(ray_init_config)
    elif options.get("cpu_threads") is None:
        options["cpu_threads"] = max(1, available_cores() // num_replicas)
    options["hang_timeout_seconds"] = None  # `EngineReplicas` watches the engines
    # Each engine has its own seed, since equal seeds give equal answers to a prompt.
    seeds = itertools.count(options.get("seed", 0))

    def start(index: int) -> UpdatableEngine:
        own: EngineOptions = {**options, "seed": next(seeds)}
        make_engine = functools.partial(AsyncVLLM.from_pretrained, os.fspath(model), **own)
        return RayEngine.start(make_engine, ray_options=ray_options) if use_ray else make_engine()

    with ThreadPoolExecutor(num_replicas, thread_name_prefix="llmrl-start") as pool:
        futures = [pool.submit(start, index) for index in range(num_replicas)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        for future in futures:
            if future.exception() is None:
                future.result().shutdown()
        raise errors[0]
    return [future.result() for future in futures], start

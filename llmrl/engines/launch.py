"""Several vLLM engines of one model, started together and again when one dies."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llmrl._utils.arguments import keywords_of, refuse_unknown
from llmrl.engines.base import UpdatableEngine
from llmrl.engines.environment import available_cores
from llmrl.engines.ray.cluster import connect
from llmrl.engines.ray.engine import RayEngine
from llmrl.engines.vllm.engine import AsyncVLLM


def start_engines(
    model: str | os.PathLike[str],
    num_replicas: int,
    use_ray: bool,
    ray_options: Mapping[str, object] | None,
    ray_init_config: Mapping[str, object] | None,
    options: Mapping[str, Any],
) -> tuple[list[UpdatableEngine], Callable[[int], UpdatableEngine]]:
    """Start the engines at once; return them, and what starts another in one's place; see `EngineReplicas`.

    Raises:
        TypeError: for an option that `AsyncVLLM.from_pretrained` has not.
        ValueError: when `num_replicas` is below 1, or an option of Ray's is given without it.
        EngineError: when one of them does not start; the others are ended then.
    """
    refuse_unknown("EngineReplicas.from_pretrained", options, keywords_of(AsyncVLLM.from_pretrained) or ())
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas}.")
    for name, value in (("ray_options", ray_options), ("ray_init_config", ray_init_config)):
        if value is not None and not use_ray:
            raise ValueError(f"{name} has no effect without use_ray=True.")
    if use_ray:
        connect(ray_init_config)
    elif options.get("cpu_threads") is None:
        options = {**options, "cpu_threads": max(1, available_cores() // num_replicas)}
    # Who has several watches over them.
    options = {**options, "hang_timeout_seconds": None}
    # Each its own, those started in a dead one's place too: engines of one seed give a prompt the same answers.
    seeds = itertools.count(options.get("seed", 0))

    def start(index: int) -> UpdatableEngine:
        seed = next(seeds)
        make_engine = functools.partial(AsyncVLLM.from_pretrained, os.fspath(model), **{**options, "seed": seed})
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

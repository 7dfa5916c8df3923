"""Engines that are killed during conversations and updates: growth of the trainer's process.

Two replicas run in Ray actors, each with a transformers engine of a tiny model. One maps the trainer's memory, and the
other receives deltas by gloo, as if on another host. Weights are updated continuously. Whenever both replicas serve,
one of them is killed, every third time during an update. No conversation is lost. The process that trains is measured
just before each death; the log files that Ray keeps of each actor are not included. The ratio compares the last quarter
of the deaths with the second one. `python -m benchmarks.soak_deaths` kills four vLLM engines, too few for quarters.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from benchmarks.soak import by_quarter, settled
from llmrl.engines import AsyncVLLM, EngineReplicas
from llmrl.engines.base import EngineError, TransferInfo
from llmrl.engines.ray.engine import RayEngine
from llmrl.engines.transformers.engine import TransformersEngine
from llmrl.testing.tiny_model import make_tiny_model
from llmrl.weight_sync import VLLMWeightSyncScheme, WeightSyncError
from llmrl.weight_sync.buffers import UNREACHABLE, PackedLayout, open_shared, read_tag
from llmrl.weight_sync.gloo import Receiver, open_group

NUM_DEATHS = 54
# Number of first deaths that are not counted, while pools and caches fill.
NUM_FIRST = 6
NUM_AT_ONCE = 16


class TakingEngine(TransformersEngine):
    """Engine that receives weights as vLLM's worker does, from the trainer's memory or a broadcast."""

    weight_transfer_backend, model_dtype, quantization, num_workers = "llmrl", torch.float32, None, 1

    def __init__(self, path: str, is_far: bool) -> None:
        torch.set_num_threads(1)
        super().__init__(path, max_model_len=512)
        self._is_far = is_far
        self._receiver: Receiver | None = None
        self._taken: dict[str, torch.Tensor] | None = None

    async def progress(self) -> int | None:
        """Return None, because the engine does not report single tokens."""
        return None

    def pause(self, mode: str = "keep", *, clear_cache: bool = True) -> None:
        """Do nothing, because weights change between two tokens without a pause."""

    def resume(self) -> None:
        """Do nothing, because there is no pause."""

    def reset_prefix_cache(self, *, reset_running_requests: bool = True) -> bool:
        """Do nothing, because there is no prefix cache."""
        return True

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Connect to the trainer."""
        if init_info.get("path") and self._is_far:
            raise EngineError(UNREACHABLE)
        if address := init_info.get("master_address"):
            self._receiver = Receiver(open_group(address, init_info["master_port"], rank=1, world_size=2))

    def start_weight_update(self) -> None:
        """Discard an unfinished update."""
        self._taken = None

    def update_weights(self, update_info: Any) -> None:
        """Receive all weights."""
        self._taken = None
        if update_info.get("is_discarded"):
            return
        layout = PackedLayout.from_plain(update_info["names"], update_info["dtype_names"], update_info["shapes"])
        try:
            if path := update_info.get("path"):
                buffer = open_shared(path, layout.num_bytes)
            elif num_bytes := update_info.get("num_delta_bytes"):
                buffer = self._receiver.receive_delta(num_bytes)
            else:
                buffer = self._receiver.receive(layout.num_bytes, pages=None, checksum=update_info["checksum"])
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(str(error)) from error
        if read_tag(buffer) != update_info["tag"]:
            raise EngineError("the received weights have another tag")
        self._taken = dict(layout.views(buffer))

    def finish_weight_update(self, weight_version: str | int | None = None) -> int:
        """Load the received weights."""
        version = self.policy_version + 1 if weight_version is None else int(weight_version)
        if self._taken is not None:
            self.load_weights(self._taken, version=version)
        self._taken = None
        return self.policy_version


def start_in_ray(path: str) -> Callable[[int], RayEngine]:
    """Return a function that starts the replica with an index in a Ray actor."""
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2, object_store_memory=1 << 27)

    def start(index: int) -> RayEngine:
        return RayEngine.start(lambda: TakingEngine(path, is_far=index == 1), ray_options={"num_cpus": 0})

    return start


def start_vllm(path: str) -> Callable[[int], AsyncVLLM]:
    """Return a function that starts a vLLM engine."""

    def start(_: int) -> AsyncVLLM:
        return AsyncVLLM.from_pretrained(path, max_model_len=512, kv_cache_memory=1 << 26, cpu_threads=1)

    return start


def process_of(engine: Any) -> int:
    """Return the id of an engine's process."""
    if isinstance(engine, RayEngine):
        return ray.get(engine.actor.__ray_call__.remote(lambda _: os.getpid()))
    [process] = engine.llm.engine_core.resources.engine_manager.processes
    return int(process.pid)


def make_collector(engine: EngineReplicas[Any]) -> Any:
    """Return a collector of conversations of two turns."""
    from llmrl import LLMCollector, RolloutLimits
    from llmrl.envs import MessageChatEnv, MessageEnv, MessageStep
    from llmrl.policies import LLMWrapperBase
    from llmrl.rendering import TemplateRenderer
    from llmrl.testing.embedded_model import ensure_embedded_model

    class Talk(MessageEnv):
        def __init__(self, item: dict[str, str]) -> None:
            self.num_turns = 0

        async def init(self) -> Any:
            return [{"role": "user", "content": "Say something."}]

        async def step(self, message: Any) -> MessageStep:
            self.num_turns += 1
            await asyncio.sleep(0.02)
            return MessageStep(messages=[{"role": "user", "content": "And?"}], is_done=self.num_turns == 2)

    renderer = TemplateRenderer.from_pretrained(str(ensure_embedded_model()))
    # One token in twelve ends an answer, because a random model rarely samples the end of a turn.
    sampling = {"max_new_tokens": 96, "stop_token_ids": list(range(0, engine.vocab_size, 12))}
    policy = LLMWrapperBase(engine, renderer=renderer, generate_kwargs=sampling)
    limits, env = RolloutLimits(max_turns=4, num_engine_retries=20), MessageChatEnv(Talk, [{}])
    return LLMCollector(env, policy=policy, groups_per_batch=1, max_concurrent_rollouts=NUM_AT_ONCE, limits=limits)


def soak(start: Callable[[int], Any], path: str, num_deaths: int) -> tuple[list[dict[str, float]], Counter[str]]:
    """Kill engines; return the resources in use before each death, and counts of how conversations ended."""
    from transformers import AutoModelForCausalLM

    parts: list[dict[str, float]] = []
    counts: Counter[str] = Counter()
    model, choose = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), random.Random(0)
    engines = EngineReplicas([start(0), start(1)], restart=start, max_restarts=1000)
    sender = VLLMWeightSyncScheme(master_address="127.0.0.1", anchor_every=20).create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(None, engines)

    def update() -> None:
        with torch.no_grad():
            next(model.parameters())[choose.randrange(100)] += 0.01
        try:
            sender.update_weights()
            counts["updates"] += 1
        except WeightSyncError:  # the next update tries again
            counts["failed updates"] += 1

    with tempfile.TemporaryDirectory() as folder, engines, make_collector(engines) as collector:
        tempfile.tempdir = folder
        while len(parts) < num_deaths:
            for rollout in collector.play(NUM_AT_ONCE):
                counts[rollout.status.name] += 1
            collector.rollouts = []
            update()
            if len(engines.serving) < 2:
                time.sleep(0.5)  # the starting engine also needs the cores
                continue
            parts.append(settled(Path(folder)))
            assert len({engine.policy_version for engine in engines}) == 1
            victim = process_of(engines[len(parts) % 2])
            delay = choose.uniform(0.0, 0.05) if len(parts) % 3 == 0 else 0.3
            killing = threading.Timer(delay, os.kill, (victim, signal.SIGKILL))
            killing.start()
            if len(parts) % 3 == 0:
                update()
            for rollout in collector.play(2 * NUM_AT_ONCE):
                counts[rollout.status.name] += 1
            killing.join()
        tempfile.tempdir = None
        counts |= Counter(deaths=engines.num_deaths, restarts=engines.num_restarts, retried=engines.num_retried)
        sender.shutdown()
    return parts, counts


def run() -> dict[str, Any]:
    """Kill engines, print the use in each quarter, and return the largest ratio."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(folder)
        parts, counts = soak(start_in_ray(path), path, NUM_DEATHS)
    ray.shutdown()
    title = f"{counts['deaths']} deaths in {time.monotonic() - started:.0f} s"
    figures = by_quarter(parts[NUM_FIRST:], title, "deaths")
    print(dict(counts))
    figures["medians"]["counts"] = {name: int(count) for name, count in sorted(counts.items())}
    return {"name": "soak_deaths", **figures, "met": figures["met"] and counts["ERROR"] == 0}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as vllm_folder:
        vllm_path = make_tiny_model(vllm_folder)
        vllm_parts, vllm_counts = soak(start_vllm(vllm_path), vllm_path, 4)
    print(*vllm_parts, dict(vllm_counts), sep="\n")

"""The device of the trainer's model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmrl._utils.ranks import gathered
from llmrl.config.ranks import this_rank
from llmrl.config.sections import ScriptConfig
from llmrl.engines import AsyncVLLM, Engine
from llmrl.engines.ray.cluster import connect

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class GpuReservation:
    """An idle Ray actor that keeps other actors off a GPU."""

    def gpu(self) -> str:
        """Return the GPU that Ray assigned."""
        import ray

        return str(ray.get_gpu_ids()[0])


class TrainerDevice:
    """The device of the trainer's model; each rank has its own GPU. Create this object before the engines.

    With Ray, the object reserves the trainer's GPUs. Raises RuntimeError if `train.device` is a GPU
    and the host has fewer GPUs than ranks.
    """

    def __init__(self, cfg: ScriptConfig) -> None:
        self.name: str = cfg.train.device
        self._engine_sleeps = cfg.engine_sleeps
        self._reservations: list[ActorHandle] = []
        if cfg.train.cpu_threads is not None:
            torch.set_num_threads(cfg.train.cpu_threads)
        if not self.name.startswith("cuda"):
            return
        # torchrun sets these to the rank on this host and the number of such ranks.
        place = int(os.environ.get("LOCAL_RANK", 0))
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if torch.cuda.device_count() < num_here:
            raise RuntimeError(
                f"train.device is {self.name!r}, but this process sees {torch.cuda.device_count()} GPUs for "
                f"{num_here} ranks; choose hardware=cpu, or lower train.num_ranks."
            )
        if cfg.engine.use_ray:
            # The first rank of each host reserves the GPUs of all ranks on that host.
            own = self._reserve(cfg, num_here) if place == 0 else []
            reserved = gathered(own, torch.distributed.group.WORLD if cfg.train.num_ranks > 1 else None)
            self.name = f"cuda:{reserved[this_rank() - place][place]}"
        elif num_here > 1:
            self.name = f"cuda:{place}"
        torch.cuda.set_device(torch.device(self.name).index or 0)

    def _reserve(self, cfg: ScriptConfig, num_gpus: int) -> list[int]:
        ray = connect(cfg.ray.init_config)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(GpuReservation).options(num_cpus=0, num_gpus=1, scheduling_strategy=here)
        self._reservations = [actor.remote() for _ in range(num_gpus)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [local_gpu_index(gpu, visible) for gpu in ray.get([one.gpu.remote() for one in self._reservations])]

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks over which the model is sharded; None with a single rank."""
        if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
            return None
        return init_device_mesh(torch.device(self.name).type, (torch.distributed.get_world_size(),))

    def claim(self, engine: Engine) -> None:
        """Let an engine on the same GPU sleep until its next update, if `engine.sleep_while_training` is set."""
        if self._engine_sleeps and isinstance(engine, AsyncVLLM):
            engine.sleep()


def local_gpu_index(gpu: str, visible: str | None) -> int:
    """Return this process's index of a GPU by its name on the host; `visible` is `CUDA_VISIBLE_DEVICES`.

    Example:
        >>> local_gpu_index("6", "4,5,6,7"), local_gpu_index("6", None)
        (2, 6)
    """
    return visible.split(",").index(gpu) if visible else int(gpu)

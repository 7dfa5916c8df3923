"""Where the trainer's model is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from llmrl.engines.ray_cluster import connect
from llmrl.runs.config import ScriptConfig
from llmrl.runs.setup import ray_config

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class GpuReservation:
    """What runs in an actor that keeps a GPU free of other actors: nothing."""

    def gpu(self) -> str:
        """The GPU that Ray gave it."""
        import ray

        return str(ray.get_gpu_ids()[0])


class TrainerDevice:
    """Where the trainer's model is, with `train.cpu_threads`. On Ray a GPU of this host is reserved while this lives.

    Make it before the engines are started, which are then not given that GPU.

    Args:
        cfg: the configuration.

    Raises:
        RuntimeError: when `train.device` is a GPU and there is none.
    """

    def __init__(self, cfg: ScriptConfig) -> None:
        self.name: str = cfg.train.device
        self._reservation: ActorHandle | None = None
        if cfg.train.cpu_threads is not None:
            torch.set_num_threads(cfg.train.cpu_threads)
        if not self.name.startswith("cuda"):
            return
        if not torch.cuda.is_available():
            raise RuntimeError(f"train.device is {self.name!r} and this process sees no GPU; choose hardware=cpu.")
        if cfg.engine.use_ray:
            self.name = f"cuda:{self._reserve(cfg)}"

    def _reserve(self, cfg: ScriptConfig) -> int:
        ray = connect(ray_config(cfg))
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(GpuReservation).options(num_cpus=0, num_gpus=1, scheduling_strategy=here)
        self._reservation = actor.remote()
        return local_gpu_index(ray.get(self._reservation.gpu.remote()), os.environ.get("CUDA_VISIBLE_DEVICES"))


def local_gpu_index(gpu: str, visible: str | None) -> int:
    """The number by which this process knows a GPU of this host.

    Args:
        gpu: the host's name for it.
        visible: `CUDA_VISIBLE_DEVICES` of this process.

    Example:
        >>> local_gpu_index("6", "4,5,6,7"), local_gpu_index("6", None)
        (2, 6)
    """
    return visible.split(",").index(gpu) if visible else int(gpu)

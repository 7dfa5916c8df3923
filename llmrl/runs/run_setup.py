"""From a script's configuration to the parts of a training run: environment, engine, weight sync, collector, device.

The configuration is nested attributes, as hydra gives them; `sota-implementations/config/` has them with their reasons.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from llmrl.collectors import LLMCollector, RayLLMCollector, RolloutLimits
from llmrl.engines import AsyncVLLM, EngineRegistry, EngineReplicas, SamplingConfig
from llmrl.engines.ray_cluster import connect
from llmrl.envs import make_task_env
from llmrl.policies import vLLMWrapper
from llmrl.rendering import Renderer
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme
from llmrl.weight_sync.gloo import own_address

Part = Literal["train", "eval"]
MakeEnv = Callable[[Any, Part], EnvBase]
"""Builds the environment of a configuration that is trained on, or the one that is held out."""

# What engines are started with, by the way that weights take to them.
_WEIGHT_TRANSFER: dict[str, bool | str] = {"direct": True, "ipc": "ipc", "files": "llmrl"}


def task_env(cfg: Any, part: Part) -> EnvBase:
    """The task environment that `env` names: a group of answers a problem to train on, `num_eval_samples` held out.

    Raises:
        ValueError, TypeError: see `make_task_env`.

    Example:
        >>> from omegaconf import OmegaConf
        >>> env = {"name": "addition", "options": {"num_digits": 1}, "data": None, "train_split": "train",
        ...        "eval_split": "test", "num_eval_problems": 3, "num_eval_samples": 4}
        >>> env = task_env(OmegaConf.create({"seed": 0, "env": env, "collect": {"group_size": 8}}), "eval")
        >>> len(env.base_env.prompts.items), env.base_env.prompts.num_samples
        (3, 4)
    """
    of_env = plain(cfg.env)
    is_training = part == "train"
    env = make_task_env(
        of_env["name"],
        of_env["train_split"] if is_training else of_env["eval_split"],
        data=of_env["data"],
        repeats=cfg.collect.group_size if is_training else of_env["num_eval_samples"],
        seed=cfg.seed,
        **of_env["options"],
    )
    limit = of_env["num_eval_problems"]
    if limit is not None and not is_training:
        prompts = env.base_env.prompts
        prompts.items = [prompts.items[index] for index in range(min(limit, len(prompts.items)))]
    return env


def compute_dtype(cfg: Any) -> Any:
    """The torch dtype that engine and trainer compute in.

    Raises:
        ValueError: for one that the trainer cannot compute in.

    Example:
        >>> from omegaconf import OmegaConf
        >>> compute_dtype(OmegaConf.create({"model": {"dtype": "float32"}}))
        torch.float32
    """
    import torch

    if cfg.model.dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"model.dtype must be 'float32' or 'bfloat16', got {cfg.model.dtype!r}; engine and trainer compute in it."
        )
    return getattr(torch, cfg.model.dtype)


def start_engine(cfg: Any, model_path: str) -> Any:
    """vLLM as `engine` says: one, or replicas, here or in Ray actors.

    Raises:
        ValueError: for an unknown `sync.transport`, or collectors on Ray whose engines are not.
        EngineError: when an engine does not start.
    """
    if cfg.sync.transport not in _WEIGHT_TRANSFER:
        raise ValueError(f"sync.transport must be one of {', '.join(_WEIGHT_TRANSFER)}; got {cfg.sync.transport!r}.")
    if cfg.collect.num_collectors is not None and not cfg.engine.use_ray:
        raise ValueError(
            "collect.num_collectors needs engine.use_ray=true: collector actors reach engines through Ray."
        )
    options: dict[str, Any] = {
        "max_model_len": cfg.model.max_model_len,
        "dtype": cfg.model.dtype,
        "max_num_seqs": cfg.engine.max_num_seqs,
        "gpu_memory_utilization": cfg.engine.gpu_memory_utilization,
        "enforce_eager": cfg.engine.enforce_eager,
        "cpu_threads": cfg.engine.cpu_threads,
        "seed": cfg.seed,
        "weight_transfer": _WEIGHT_TRANSFER[cfg.sync.transport],
        "engine_args": {"tensor_parallel_size": cfg.engine.tensor_parallel_size},
    }
    if cfg.engine.use_ray:
        options |= {"ray_options": plain(cfg.engine.ray_options), "ray_init_config": ray_config(cfg), "use_ray": True}
    elif cfg.engine.num_replicas is None:
        return AsyncVLLM.from_pretrained(model_path, **options)
    options["num_replicas"] = 1 if cfg.engine.num_replicas is None else cfg.engine.num_replicas
    return EngineReplicas.from_pretrained(model_path, **options)


def sync_scheme(cfg: Any) -> VLLMWeightSyncScheme:
    """How new weights reach the engines, as `sync` says."""
    if cfg.sync.transport == "files":
        folder = cfg.sync.folder or str(Path(cfg.run.path, "weights").absolute())
        return VLLMDoubleBufferSyncScheme(remote_addr=folder)
    # Engines on other hosts meet the trainer at an address that they can reach.
    return VLLMWeightSyncScheme(master_address=own_address() if cfg.ray.address is not None else None)


@dataclass(frozen=True, slots=True)
class PolicyFactory:
    """Builds the policy of a collector actor, over the engines that a registry names."""

    registry: EngineRegistry
    renderer: Renderer | None
    sampling: SamplingConfig

    def __call__(self) -> vLLMWrapper:
        """The policy."""
        return vLLMWrapper(self.registry.connect(), renderer=self.renderer, generate_kwargs=self.sampling)


def make_collector(
    cfg: Any,
    policy: vLLMWrapper,
    env: EnvBase,
    *,
    make_env: MakeEnv,
    registry: EngineRegistry | None,
    postproc: Callable[[TensorDictBase], TensorDictBase] | None,
) -> LLMCollector:
    """Groups of answers as training rows: of `env`, here, or with a registry of each actor's own, on Ray."""
    arguments: dict[str, Any] = {
        "groups_per_batch": cfg.collect.groups_per_batch,
        "max_staleness": cfg.collect.max_staleness,
        "limits": RolloutLimits(max_turns=cfg.collect.max_turns),
        "weight_sync_schemes": {"policy": sync_scheme(cfg)},
        "postproc": postproc,
    }
    if registry is None:
        return LLMCollector(env, policy=policy, **arguments)
    return RayLLMCollector(
        partial(make_env, cfg, "train"),
        policy_factory=PolicyFactory(registry, policy.renderer, policy.sampling),
        num_collectors=cfg.collect.num_collectors,
        engine=policy.engine,
        num_cpus=cfg.collect.cpus_per_collector,
        ray_init_config=ray_config(cfg),
        **arguments,
    )


class GpuReservation:
    """What runs in an actor that keeps a GPU free of other actors: nothing."""

    def gpu(self) -> str:
        """The GPU that Ray gave it."""
        import ray

        return str(ray.get_gpu_ids()[0])


class TrainerDevice:
    """Where the trainer's model is. On Ray a GPU of this host is reserved, which engines are then not given.

    Args:
        cfg: the configuration.

    Raises:
        RuntimeError: when `train.device` is a GPU and there is none.

    Example:
        >>> from omegaconf import OmegaConf
        >>> TrainerDevice(OmegaConf.create({"train": {"device": "cpu"}})).name
        'cpu'
    """

    def __init__(self, cfg: Any) -> None:
        import torch

        self.name: str = cfg.train.device
        self._seat: Any = None
        if not self.name.startswith("cuda"):
            return
        if not torch.cuda.is_available():
            raise RuntimeError(f"train.device is {self.name!r} and this process sees no GPU; choose hardware=cpu.")
        if cfg.engine.use_ray:
            self.name = f"cuda:{self._reserve(cfg)}"

    def _reserve(self, cfg: Any) -> int:
        ray = connect(ray_config(cfg))
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._seat = ray.remote(GpuReservation).options(num_cpus=0, num_gpus=1, scheduling_strategy=here).remote()
        return local_gpu_index(ray.get(self._seat.gpu.remote()), os.environ.get("CUDA_VISIBLE_DEVICES"))


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


def ray_config(cfg: Any) -> dict[str, Any]:
    """Arguments of `ray.init`: the cluster at `ray.address`, or a new one on this machine, even where one runs."""
    if cfg.ray.address is None:
        return {"address": "local", "include_dashboard": False}
    return {"address": cfg.ray.address}


def plain(value: Any) -> Any:
    """A part of a configuration as dicts and lists.

    Example:
        >>> plain({"a": [1]})
        {'a': [1]}
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

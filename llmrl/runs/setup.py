"""Builds the parts of a training run from a configuration: environment, engine, weight sync, collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from llmrl._utils.types import Tokenizer
from llmrl.collectors import GroupRules, LLMCollector, RayLLMCollector
from llmrl.collectors.weights import WeightScheme
from llmrl.config.dry_run import with_differing_rewards
from llmrl.config.imitation import DistillationConfig, SFTConfig
from llmrl.config.ranks import this_rank
from llmrl.config.sections import EvalEnvConfig, ScriptConfig
from llmrl.engines import AsyncVLLM, Engine, EngineRegistry, EngineReplicas, SamplingConfig, ServerEngine
from llmrl.engines.vllm.arguments import ADAPTER_BACKEND
from llmrl.envs import MixedEnv, make_task_env
from llmrl.policies import LLMWrapperBase, vLLMWrapper
from llmrl.rendering import Renderer
from llmrl.runs.evaluation import check_metric
from llmrl.runs.null_engine import NullEngine
from llmrl.trainer import EngineTeacher, TransformersWrapper, load_teacher
from llmrl.transforms.parts import writes_reward
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, default_scheme
from llmrl.weight_sync.gloo import own_address
from llmrl.weight_sync.in_process import LoadsWeights

Postproc = Callable[[TensorDictBase], TensorDictBase]

# The engine's option for each `sync.transport`.
_WEIGHT_TRANSFER: dict[str, bool | str] = {"direct": True, "ipc": "ipc", "files": "llmrl"}
_TEACHER_TIMEOUT_S = 120.0
"""Long enough for a teacher's server that starts at the same time."""


def make_env(cfg: ScriptConfig) -> EnvBase:
    """Return the environment of the task for training, with `collect.group_size` answers per problem.

    Raises the errors of `make_task_env`, and ValueError if the algorithm needs a reward that the environment lacks.
    """
    group = {"repeats": cfg.collect.group_size, "seed": cfg.seed}
    env = make_task_env(cfg.env.name, cfg.env.train_split, data=cfg.env.data, **group, **cfg.env.options)
    if not isinstance(cfg, DistillationConfig) or cfg.teacher.use_reward:
        check_reward(env, f"env.name={cfg.env.name}")
    return env


def make_eval_envs(cfg: ScriptConfig) -> dict[str, EnvBase]:
    """Return the evaluation environments by name: the task's held-out problems and `eval.envs`.

    The result is empty if `eval.num_problems` is 0. Raises the errors of `make_task_env`, and
    ValueError for an unknown `eval.metric`.
    """
    envs: dict[str, EvalEnvConfig] = {}
    if cfg.eval.num_problems != 0:
        own = EvalEnvConfig(name=cfg.env.name, data=cfg.env.data, split=cfg.env.eval_split, options=cfg.env.options)
        envs = {cfg.env.label: own, **cfg.eval.envs}
    samples = {"repeats": cfg.eval.num_samples, "seed": cfg.seed}
    made = {
        name: make_task_env(env.name, env.split, data=env.data, **samples, **env.options) for name, env in envs.items()
    }
    has_loss = isinstance(cfg, SFTConfig) and cfg.conversations.held_out is not None
    check_metric(cfg.eval.metric, made, measured=["loss"] * has_loss)
    return made


def check_reward(env: EnvBase, name: str) -> None:
    """Raise ValueError if no part of the environment gives a reward; `name` is for the message."""
    if not writes_reward(env):
        raise ValueError(
            f"{name} gives no reward, so there is nothing to learn or to measure: add a reward, such as "
            "env.append_transform(RubricReward(...))."
        )


def start_engine(cfg: ScriptConfig) -> AbstractContextManager[AsyncVLLM | EngineReplicas | NullEngine]:
    """Start vLLM as `engine` configures it: one engine or replicas, here or in Ray actors. A context manager.

    Ranks above 0 get a `NullEngine`.

    Raises ValueError if the model has no chat template, and EngineError if an engine does not start.
    """
    if this_rank() > 0:
        return nullcontext(NullEngine(cfg.model.folder))
    cfg.model.check_template()
    options: dict[str, Any] = {
        "max_model_len": cfg.model.max_model_len,
        "dtype": cfg.model.dtype,
        "max_num_seqs": cfg.engine.max_num_seqs,
        "gpu_memory_utilization": cfg.engine.gpu_memory_utilization,
        "enforce_eager": cfg.engine.enforce_eager,
        "cpu_threads": cfg.engine.cpu_threads,
        "seed": cfg.seed,
        "quantization": cfg.engine.quantization,
        "speculative": cfg.engine.speculative,
        "weight_transfer": _WEIGHT_TRANSFER[cfg.sync.transport],
        "enable_sleep": cfg.engine_sleeps,
        "engine_args": {**cfg.engine.engine_args, "tensor_parallel_size": cfg.engine.tensor_parallel_size},
    }
    if cfg.sync.lora == "adapter":
        options["weight_transfer"] = ADAPTER_BACKEND
        options["engine_args"] |= {"max_lora_rank": cfg.model.lora.rank, "max_loras": cfg.sync.max_adapters}
    if not cfg.engine.use_ray:
        return AsyncVLLM.from_pretrained(cfg.model.folder, num_replicas=cfg.engine.num_replicas, **options)
    options |= {"ray_options": cfg.engine.ray_options, "ray_init_config": cfg.ray.init_config, "use_ray": True}
    return EngineReplicas.from_pretrained(cfg.model.folder, num_replicas=cfg.engine.num_replicas or 1, **options)


@contextmanager
def start_teacher(
    cfg: DistillationConfig, policy: TransformersWrapper, *, tokenizer: Tokenizer
) -> Iterator[TransformersWrapper | EngineTeacher]:
    """Load the teacher, connect to its server, or use the student itself, as `teacher` configures it.

    Raises:
        ValueError: if the tokenizers differ, or if the teacher is a server and the student's temperature is not 1.
        EngineError: if the server cannot be reached within two minutes.
    """
    if cfg.teacher.url is not None:
        with ServerEngine(cfg.teacher.url, start_timeout_seconds=_TEACHER_TIMEOUT_S) as engine:
            yield EngineTeacher(policy, engine, tokenizer=tokenizer)
    elif cfg.teacher.path is not None:
        yield load_teacher(policy, cfg.teacher.path, tokenizer=tokenizer)
    else:
        yield policy


def sync_scheme(cfg: ScriptConfig, engine: Engine) -> WeightScheme:
    """Return the weight sync scheme: a copy if the engine is in this process, otherwise as `sync` configures it."""
    if isinstance(engine, LoadsWeights):
        return default_scheme(engine)
    if cfg.sync.transport == "files":
        folder = cfg.sync.folder or str(Path(cfg.run.path, "weights").absolute())
        options = cfg.sync.arguments_of(VLLMDoubleBufferSyncScheme)
        return VLLMDoubleBufferSyncScheme(remote_addr=folder, rank=this_rank(), **options)
    # Engines on other hosts need an address of the trainer that they can reach.
    address = own_address() if cfg.ray.address is not None else None
    options = cfg.sync.arguments_of(VLLMWeightSyncScheme)
    return VLLMWeightSyncScheme(master_address=address, rank=this_rank(), **options)


def connected_policy(registry: EngineRegistry, renderer: Renderer | None, sampling: SamplingConfig) -> vLLMWrapper:
    """Return the policy of a collector actor, with the engines of a registry."""
    return vLLMWrapper(registry.connect(), renderer=renderer, generate_kwargs=sampling)


def make_collector(
    cfg: ScriptConfig,
    env: EnvBase | MixedEnv,
    *,
    policy: LLMWrapperBase,
    postproc: Postproc | None,
    group_rules: GroupRules | None = None,
) -> LLMCollector:
    """Return the collector of `env` that `collect` configures, on Ray if `collect.num_collectors` is set.

    On Ray, each actor builds its own environment (`make_env`) and a policy with the same engines.
    In a dry run, the rewards are made to differ, so that the loss is not zero.
    """
    if cfg.dry_run and postproc is not None:
        postproc = _after(with_differing_rewards, postproc)
    arguments = cfg.collect.arguments_of(LLMCollector.__init__) | {
        "limits": cfg.collect.limits,
        "weight_sync_schemes": {"policy": sync_scheme(cfg, policy.engine)},
        "postproc": postproc,
        "group_rules": group_rules,
    }
    if cfg.collect.num_collectors is None or this_rank() > 0:
        return LLMCollector(env, policy=policy, **arguments)
    assert isinstance(policy.engine, EngineReplicas), "start_engine returns replicas on Ray"
    registry = EngineRegistry.start()
    registry.publish(policy.engine)
    return RayLLMCollector(
        partial(make_env, cfg),
        policy_factory=partial(connected_policy, registry, policy.renderer, policy.sampling),
        num_collectors=cfg.collect.num_collectors,
        engine=policy.engine,
        num_cpus=cfg.collect.cpus_per_collector,
        ray_init_config=cfg.ray.init_config,
        **arguments,
    )


def _after(first: Postproc, then: Postproc) -> Postproc:
    return lambda batch: then(first(batch))

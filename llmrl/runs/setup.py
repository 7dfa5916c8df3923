"""From a script's configuration to the parts of a training run: environment, engine, weight sync, collector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from llmrl._utils.types import Tokenizer
from llmrl.collectors import LLMCollector, RayLLMCollector
from llmrl.collectors.collector import CollectorOptions
from llmrl.config.dry_run import with_differing_rewards
from llmrl.config.imitation import DistillationConfig
from llmrl.config.ranks import this_rank
from llmrl.config.sections import EvalEnvConfig, GRPOConfig, ScriptConfig
from llmrl.engines import AsyncVLLM, EngineRegistry, EngineReplicas, SamplingConfig, ServerEngine
from llmrl.engines.base import HasTokenizer
from llmrl.engines.vllm.arguments import ADAPTER_BACKEND
from llmrl.envs import make_task_env
from llmrl.policies import vLLMWrapper
from llmrl.rendering import Renderer
from llmrl.runs.null_engine import NullEngine
from llmrl.testing import ensure_embedded_model
from llmrl.trainer import EngineTeacher, LoRAConfig, TransformersWrapper, load_teacher
from llmrl.trainer.optimizer import ScheduleName
from llmrl.transforms.parts import writes_reward
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme
from llmrl.weight_sync.gloo import own_address

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Postproc = Callable[[TensorDictBase], TensorDictBase]

# What engines are started with, by the way that weights take to them.
_WEIGHT_TRANSFER: dict[str, bool | str] = {"direct": True, "ipc": "ipc", "files": "llmrl"}
_TEACHER_TIMEOUT_S = 120.0
"""For a teacher's server that is being started beside the run."""


def make_env(cfg: ScriptConfig) -> EnvBase:
    """Make the task environment that is trained on: a group of answers to each problem.

    Raises:
        ValueError, TypeError: see `make_task_env`; when it gives no reward, and the algorithm learns from one.
    """
    group = {"repeats": cfg.collect.group_size, "seed": cfg.seed}
    env = make_task_env(cfg.env.name, cfg.env.train_split, data=cfg.env.data, **group, **cfg.env.options)
    if not isinstance(cfg, DistillationConfig) or cfg.teacher.use_reward:
        check_reward(env, f"env.name={cfg.env.name}")
    return env


def make_eval_envs(cfg: ScriptConfig) -> dict[str, EnvBase]:
    """Make what is evaluated, by name: the task's held-out problems, and `eval.envs`, `eval.num_samples` answers each.

    Nothing where `eval.num_problems` is 0.

    Raises:
        ValueError, TypeError: see `make_task_env`.
    """
    if cfg.eval.num_problems == 0:
        return {}
    held_out = {"name": cfg.env.name, "data": cfg.env.data, "split": cfg.env.eval_split, "options": cfg.env.options}
    envs = {cfg.env.name: EvalEnvConfig(**held_out), **cfg.eval.envs}
    samples = {"repeats": cfg.eval.num_samples, "seed": cfg.seed}
    return {
        name: make_task_env(env.name, env.split, data=env.data, **samples, **env.options) for name, env in envs.items()
    }


def check_reward(env: EnvBase, name: str) -> None:
    """Refuse an environment where no part gives a reward, so that nothing could be learned from it.

    Args:
        env: transformed.
        name: its name, for the message.

    Raises:
        ValueError: saying how to add a reward.
    """
    if not writes_reward(env):
        raise ValueError(
            f"{name} gives no reward, so that nothing can be learned from it or measured in it: add one, "
            "env.append_transform(RubricReward(...))."
        )


def check_template(cfg: ScriptConfig, engine: HasTokenizer | None = None) -> None:
    """Refuse a model without a chat template, before an engine is started.

    Args:
        cfg: configuration of the run.
        engine: that is there already. A model that is not on this machine is left to the engine that loads it.

    Raises:
        ValueError: naming the entry that gives one.
    """
    if cfg.model.chat_template is not None:
        chat_template(cfg)
        return
    try:
        from transformers import AutoTokenizer

        if engine is not None:
            tokenizer = engine.get_tokenizer()
        else:
            tokenizer = AutoTokenizer.from_pretrained(model_folder(cfg), local_files_only=True)
    except (OSError, ValueError):
        return
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the model {cfg.model.path} has no chat template, as base models have none: give the one to train it with "
            "as model.chat_template (chat_template of train), a file or Jinja text, or take a model that has one."
        )


def chat_template(cfg: ScriptConfig) -> str | None:
    """Return the text of `model.chat_template`; None where the model's own is taken.

    Raises:
        ValueError: when it is neither a file nor Jinja text.
    """
    given = cfg.model.chat_template
    if given is None or "{" in given:
        return given
    if not Path(given).is_file():
        raise ValueError(f"model.chat_template={given!r} is no file here and no Jinja text.")
    return Path(given).read_text(encoding="utf-8")


def tokenizer_of(cfg: ScriptConfig, engine: HasTokenizer) -> PreTrainedTokenizerBase:
    """Return the engine's tokenizer, with the chat template that `model` gives it."""
    tokenizer = engine.get_tokenizer()
    template = chat_template(cfg)
    if template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    return tokenizer


def model_folder(cfg: ScriptConfig) -> str:
    """Return what transformers and vLLM load: `model.path`, or the folder of the embedded model."""
    return str(ensure_embedded_model() if cfg.model.path == "embedded" else cfg.model.path)


def autocast_dtype(cfg: ScriptConfig) -> torch.dtype | None:
    """Return what the trainer computes in over its float32 weights; None where that is float32, too."""
    return None if cfg.model.dtype == "float32" else torch.bfloat16


class ScoringOptions(TypedDict):
    """How the trainer's model is computed: arguments of `TransformersWrapper`."""

    autocast_dtype: torch.dtype | None
    token_budget: int
    bin_length: int | None
    head_kernel: Literal["torch", "liger"]
    compile_layers: bool
    offload_activations: bool


def scoring_options(cfg: ScriptConfig) -> ScoringOptions:
    """Return how the trainer's model is computed, as `train` and `model` say."""
    return {
        "autocast_dtype": autocast_dtype(cfg),
        "token_budget": cfg.train.token_budget,
        "bin_length": cfg.train.bin_length,
        "head_kernel": cfg.train.head_kernel,
        "compile_layers": cfg.train.compile_layers,
        "offload_activations": cfg.train.offload_activations,
    }


class OptimizerOptions(TypedDict):
    """What is trained how fast: arguments of `make_optimizer`."""

    learning_rate: float
    weight_decay: float
    schedule: ScheduleName
    warmup_steps: int
    num_steps: int


def optimizer_options(cfg: ScriptConfig) -> OptimizerOptions:
    """Return how fast the model learns, as `train` says."""
    return {
        "learning_rate": cfg.train.learning_rate,
        "weight_decay": cfg.train.weight_decay,
        "schedule": cfg.train.schedule,
        "warmup_steps": cfg.train.warmup_steps,
        "num_steps": cfg.train.num_steps,
    }


def clip_bounds(cfg: GRPOConfig | DistillationConfig) -> tuple[float, float]:
    """Return how far below and above 1 the ratio goes before it is clipped."""
    low = cfg.train.clip_epsilon
    high = cfg.train.clip_epsilon_high
    return low, low if high is None else high


def lora_config(cfg: ScriptConfig) -> LoRAConfig | None:
    """Return the adapters that `model.lora` describes; None where all weights are trained."""
    lora = cfg.model.lora
    if lora.rank is None:
        return None
    targets = "all-linear" if lora.target_modules == ["all-linear"] else tuple(lora.target_modules)
    return LoRAConfig(rank=lora.rank, alpha=lora.alpha, target_modules=targets)


def start_engine(cfg: ScriptConfig) -> AbstractContextManager[AsyncVLLM | EngineReplicas | NullEngine]:
    """Start vLLM as `engine` says: one, or replicas, here or in Ray actors. A context manager.

    On ranks of a trainer above 0, which are handed batches, what stands for it.

    Raises:
        ValueError: when the model has no chat template.
        EngineError: when an engine does not start.
    """
    if this_rank() > 0:
        return nullcontext(NullEngine(model_folder(cfg)))
    check_template(cfg)
    options: dict[str, Any] = {
        "max_model_len": cfg.model.max_model_len,
        "dtype": cfg.model.dtype,
        "max_num_seqs": cfg.engine.max_num_seqs,
        "gpu_memory_utilization": cfg.engine.gpu_memory_utilization,
        "enforce_eager": cfg.engine.enforce_eager,
        "cpu_threads": cfg.engine.cpu_threads,
        "seed": cfg.seed,
        "quantization": cfg.engine.quantization,
        "weight_transfer": _WEIGHT_TRANSFER[cfg.sync.transport],
        "enable_sleep": cfg.engine_sleeps,
        "engine_args": {"tensor_parallel_size": cfg.engine.tensor_parallel_size},
    }
    if cfg.sync.lora == "adapter":
        options["weight_transfer"] = ADAPTER_BACKEND
        options["engine_args"] |= {"max_lora_rank": cfg.model.lora.rank, "max_loras": cfg.sync.max_adapters}
    if cfg.engine.use_ray:
        options |= {"ray_options": cfg.engine.ray_options, "ray_init_config": ray_config(cfg), "use_ray": True}
    elif cfg.engine.num_replicas is None:
        return AsyncVLLM.from_pretrained(model_folder(cfg), **options)
    options["num_replicas"] = 1 if cfg.engine.num_replicas is None else cfg.engine.num_replicas
    return EngineReplicas.from_pretrained(model_folder(cfg), **options)


@contextmanager
def start_teacher(
    cfg: DistillationConfig, policy: TransformersWrapper, *, tokenizer: Tokenizer
) -> Iterator[TransformersWrapper | EngineTeacher]:
    """Load the teacher that `teacher` describes, connect to its server, or take the student itself.

    Raises:
        ValueError: when it has another tokenizer, or is a server and the student's temperature is not 1.
        EngineError: when the server cannot be reached within two minutes.
    """
    if cfg.teacher.url is not None:
        with ServerEngine(cfg.teacher.url, start_timeout_seconds=_TEACHER_TIMEOUT_S) as engine:
            yield EngineTeacher(policy, engine, tokenizer=tokenizer)
    elif cfg.teacher.path is not None:
        yield load_teacher(policy, cfg.teacher.path, tokenizer=tokenizer)
    else:
        yield policy


def sync_scheme(cfg: ScriptConfig) -> VLLMWeightSyncScheme:
    """Make what brings new weights to the engines, as `sync` says."""
    kept: dict[str, Any] = {
        "pause_mode": cfg.sync.pause_mode,
        "reset_running_requests": cfg.sync.reset_running_requests,
        "rank": this_rank(),
        "anchor_every": cfg.sync.anchor_every,
    }
    if cfg.sync.transport == "files":
        folder = cfg.sync.folder or str(Path(cfg.run.path, "weights").absolute())
        return VLLMDoubleBufferSyncScheme(remote_addr=folder, **kept)
    # Engines on other hosts meet the trainer at an address that they can reach.
    address = own_address() if cfg.ray.address is not None else None
    return VLLMWeightSyncScheme(master_address=address, lora=cfg.sync.lora, **kept)


@dataclass(frozen=True, slots=True)
class PolicyFactory:
    """Builds the policy of a collector actor, over the engines that a registry names."""

    registry: EngineRegistry
    renderer: Renderer | None
    sampling: SamplingConfig

    def __call__(self) -> vLLMWrapper:
        """Make the policy."""
        return vLLMWrapper(self.registry.connect(), renderer=self.renderer, generate_kwargs=self.sampling)


def make_collector(
    cfg: ScriptConfig, env: EnvBase, *, policy: vLLMWrapper, **arguments: Unpack[CollectorOptions]
) -> LLMCollector:
    """Make `LLMCollector(env, policy=policy, **arguments)`, or with `collect.num_collectors` the same on Ray.

    There each actor builds an environment (`make_env`) and a policy of its own, over the engines that this one has. The
    rewards of a dry run are made to differ, so that there is something to learn.
    """
    postproc = arguments.get("postproc")
    if cfg.dry_run and postproc is not None:
        arguments["postproc"] = _after(with_differing_rewards, postproc)
    if cfg.collect.num_collectors is None or this_rank() > 0:
        return LLMCollector(env, policy=policy, **arguments)
    assert isinstance(policy.engine, EngineReplicas), "start_engine makes no other on Ray"
    registry = EngineRegistry.start()
    registry.publish(policy.engine)
    return RayLLMCollector(
        partial(make_env, cfg),
        policy_factory=PolicyFactory(registry, policy.renderer, policy.sampling),
        num_collectors=cfg.collect.num_collectors,
        engine=policy.engine,
        num_cpus=cfg.collect.cpus_per_collector,
        ray_init_config=ray_config(cfg),
        **arguments,
    )


def _after(first: Postproc, then: Postproc) -> Postproc:
    return lambda batch: then(first(batch))


def ray_config(cfg: ScriptConfig) -> dict[str, object]:
    """Return the arguments of `ray.init`: the cluster at `ray.address`, or a new one here, even where one runs."""
    if cfg.ray.address is None:
        return {"address": "local", "include_dashboard": False}
    return {"address": cfg.ray.address}

"""Dry run: the task and algorithm of a configuration with a tiny model on the CPU."""

from __future__ import annotations

import atexit
import copy
import functools
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tensordict import TensorDictBase

from llmrl._utils.types import Row
from llmrl.config.engine import EngineConfig, RayConfig
from llmrl.config.fit import GIB, lines_of, planned_run
from llmrl.config.imitation import DistillationConfig, SFTConfig
from llmrl.config.sections import EnvConfig, EvalEnvConfig, GRPOConfig, RunConfig, ScriptConfig
from llmrl.envs.sources import is_local
from llmrl.trainer.memory_plan import plan_memory

Config = TypeVar("Config", bound=ScriptConfig)

NUM_STEPS = 2

# Problems for each task with data on a hub.
_ROWS: dict[str, list[Row]] = {
    "gsm8k": [{"question": f"Tom has {n} boxes of 6 eggs. How many?", "answer": f"#### {6 * n}"} for n in (2, 3)],
    "math": [{"problem": f"Half of {n}?", "solution": f"It is $\\boxed{{{n // 2}}}$."} for n in (4, 6)],
    "ifeval": [
        {"prompt": f"Name a {what}.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        for what in ("colour", "river")
    ],
}


def as_dry_run(cfg: Config) -> Config:
    """Return the configuration of a dry run: two CPU steps with a tiny model, two groups and a temporary folder.

    Hardware settings are replaced; the task and the algorithm are kept with smaller sizes. Problems from a local file
    are used. Problems from a hub are replaced by built-in ones if the task belongs to llmrl.
    """
    cfg = copy.deepcopy(cfg)
    cfg.resume = False
    cfg.run = RunConfig(path=str(_temporary_folder()), trackers=[], checkpoint_every=NUM_STEPS, sample_every=1)
    cfg.export = replace(cfg.export, push_to_hub=None)
    cfg.model = replace(cfg.model, path=_tiny_model(), max_model_len=2048, dtype="float32")
    if isinstance(cfg, DistillationConfig) and (cfg.teacher.path or cfg.teacher.url):
        cfg.teacher = replace(cfg.teacher, path=_tiny_model(), url=None)  # its tokenizer must be the student's
    cfg.env = replace(cfg.env, data=_problems(cfg.env))
    if cfg.eval.num_problems != 0:
        cfg.eval = replace(cfg.eval, num_problems=2)
    for env in cfg.eval.envs.values():
        env.data = _problems(env)
    cfg.engine = EngineConfig(cpu_threads=1)
    cfg.ray = RayConfig()
    cfg.sync = replace(cfg.sync, transport="direct", folder=None)
    if isinstance(cfg, SFTConfig):
        cfg.conversations = replace(cfg.conversations, path=_conversations(), held_out=_conversations())
    cfg.collect = replace(
        cfg.collect, groups_per_batch=2, max_new_tokens=8, num_collectors=None, cpus_per_collector=None
    )
    if isinstance(cfg, GRPOConfig):
        cfg.collect = replace(cfg.collect, replace_constant_groups=False)  # all answers of the tiny model are wrong
    cfg.train = replace(cfg.train, num_steps=NUM_STEPS, warmup_steps=min(cfg.train.warmup_steps, 1))
    cfg.train = replace(cfg.train, device="cpu", num_ranks=1, context_ranks=1, cpu_threads=None, head_kernel="torch")
    return cfg


def _problems(env: EnvConfig | EvalEnvConfig) -> object:
    if isinstance(env.data, str) and is_local(env.data):
        return env.data
    return _ROWS.get(env.name, env.data)


def plan_of(cfg: ScriptConfig) -> list[str]:
    """Return the lines that a dry run prints about its configuration: engines, trainer, memory, batch."""
    engine = cfg.engine
    train = cfg.train
    collect = cfg.collect
    count = engine.num_replicas or 1
    where = "in Ray actors" if engine.use_ray else "here"
    engines = [f"{count} of {cfg.model.dtype}, {where}"]
    if engine.tensor_parallel_size > 1:
        engines.append(f"each over {engine.tensor_parallel_size} GPUs")
    if engine.gpu_memory_utilization:
        engines.append(f"{engine.gpu_memory_utilization:.0%} of a GPU's memory")
    trainer = [f"{train.device}, computes in {cfg.model.dtype}, {train.token_budget} tokens per micro-batch"]
    if train.num_ranks > 1:
        trainer.append(f"sharded over {train.num_ranks} processes")
    if train.gradient_checkpointing:
        trainer.append("gradient checkpointing")
    collectors = "in this process" if collect.num_collectors is None else f"by {collect.num_collectors} Ray actors"
    staleness = "in turn" if collect.max_staleness is None else f"at once, up to {collect.max_staleness} versions old"
    return [
        "dry run: a summary of the configuration, followed by two steps of a tiny model on the CPU",
        f"  engines  {', '.join(engines)}; weights by {cfg.sync.transport}",
        f"  trainer  {', '.join(trainer)}",
        f"  memory   {_memory(cfg)}",
        f"  batch    {collect.groups_per_batch} prompts, {collect.group_size} answers each of at most "
        f"{collect.max_turns} x {collect.max_new_tokens} tokens; collected {collectors}, {staleness}",
        f"  steps    {train.num_steps}",
    ]


def _memory(cfg: ScriptConfig) -> str:
    model, training = planned_run(cfg)
    if model is None:
        return "of the trainer is only known when the model is here, and only for dense transformers"
    plan = plan_memory(model, training)
    served = model.num_parameters * (4 if cfg.model.dtype == "float32" else 2)
    return (
        f"{model.num_parameters / 1e9:.2f} B parameters: the trainer about {plan.total / GIB:.1f} GiB on each device "
        f"({', '.join(lines_of(plan))}), an engine {served / GIB:.1f} GiB before its key-value cache"
    )


@functools.cache
def _conversations() -> str:
    path = _temporary_folder() / "conversations.jsonl"
    said = [{"role": "user", "content": "Say A."}, {"role": "assistant", "content": "A"}]
    path.write_text(json.dumps({"messages": said}))
    return str(path)


@functools.cache
def _tiny_model() -> str:
    from llmrl.testing import make_tiny_model

    return make_tiny_model(_temporary_folder())


def _temporary_folder() -> Path:
    """Return a new folder that is deleted when this process exits."""
    folder = Path(tempfile.mkdtemp(prefix="llmrl-dry-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def with_differing_rewards(batch: TensorDictBase) -> TensorDictBase:
    """Add the sample index to each reward, because equal rewards, as a random model gets, give no gradient."""
    for row in batch.unbind(0) if batch.shape[0] else ():
        row["next", "reward"] = row["next", "reward"] + row["rollout", "sample_index"]
    return batch

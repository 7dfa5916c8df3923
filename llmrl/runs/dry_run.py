"""A dry run: a configuration's own task and algorithm, with nothing that costs time or a network."""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tensordict import TensorDictBase

from llmrl._utils.types import Row
from llmrl.runs.config import EngineConfig, RayConfig, RunConfig, ScriptConfig

Config = TypeVar("Config", bound=ScriptConfig)

NUM_STEPS = 2

# A problem for each task whose problems come from a hub.
_ROWS: dict[str, list[Row]] = {
    "gsm8k": [{"question": f"Tom has {n} boxes of 6 eggs. How many?", "answer": f"#### {6 * n}"} for n in (2, 3)],
    "math": [{"problem": f"Half of {n}?", "solution": f"It is $\\boxed{{{n // 2}}}$."} for n in (4, 6)],
    "ifeval": [
        {"prompt": f"Name a {what}.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        for what in ("colour", "river")
    ],
}


def as_dry_run(cfg: Config) -> Config:
    """The same configuration for two steps on CPU: a tiny model, two groups, built-in problems, a temporary folder.

    What was asked of hardware is replaced, of the task and the algorithm nothing but how much of it there is.
    """
    cfg = copy.deepcopy(cfg)
    cfg.resume = False
    cfg.run = RunConfig(path=str(_temporary_folder()), trackers=[], checkpoint_every=NUM_STEPS, sample_every=1)
    cfg.model = replace(cfg.model, path=_tiny_model(), max_model_len=2048, dtype="float32")
    cfg.env = replace(cfg.env, data=_ROWS.get(cfg.env.name))
    cfg.eval = replace(cfg.eval, num_problems=2, num_samples=1)
    for env in cfg.eval.envs.values():
        env.data = _ROWS.get(env.name)
    cfg.engine, cfg.ray = EngineConfig(), RayConfig()
    cfg.sync = replace(cfg.sync, transport="direct")
    cfg.collect = replace(cfg.collect, groups_per_batch=2, max_new_tokens=8, num_collectors=None)
    warmup_steps = min(cfg.train.warmup_steps, 1)
    cfg.train = replace(cfg.train, num_steps=NUM_STEPS, warmup_steps=warmup_steps)
    cfg.train = replace(cfg.train, device="cpu", cpu_threads=None, head_kernel="torch")
    return cfg


@functools.cache
def _tiny_model() -> str:
    from llmrl.testing import make_tiny_model

    return make_tiny_model(_temporary_folder())


def _temporary_folder() -> Path:
    """A new folder that is gone when this process has ended, however it ends."""
    folder = Path(tempfile.mkdtemp(prefix="llmrl-dry-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def with_differing_rewards(batch: TensorDictBase) -> TensorDictBase:
    """A batch with something to learn: a random model's answers are all wrong, so their number is added."""
    for row in batch.unbind(0) if batch.shape[0] else ():
        row["next", "reward"] = row["next", "reward"] + row["rollout", "sample_index"]
    return batch

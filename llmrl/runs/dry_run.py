"""A dry run: a configuration's own task and algorithm, with nothing that costs time or a network."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

NUM_STEPS = 2

# A problem for each task whose problems come from a hub.
_ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": f"Tom has {n} boxes of 6 eggs. How many?", "answer": f"#### {6 * n}"} for n in (2, 3)],
    "math": [{"problem": f"Half of {n}?", "solution": f"It is $\\boxed{{{n // 2}}}$."} for n in (4, 6)],
    "ifeval": [
        {"prompt": f"Name a {what}.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        for what in ("colour", "river")
    ],
}


def as_dry_run(cfg: Any) -> Any:
    """The same configuration for two steps on CPU: a tiny model, two groups, built-in problems, a temporary folder.

    What was asked of hardware is replaced, of the task and the algorithm nothing but how much of it there is.

    Example:
        >>> from omegaconf import OmegaConf
        >>> groups = dict.fromkeys(("run", "model", "env", "engine", "sync", "ray", "collect", "train"), {})
        >>> cfg = as_dry_run(OmegaConf.create({**groups, "env": {"name": "gsm8k"}}))
        >>> cfg.env.data[0].answer, cfg.train.num_steps
        ('#### 12', 2)
    """
    from omegaconf import OmegaConf

    changes = {
        "resume": False,
        "run": {"path": str(_temporary_folder()), "trackers": [], "checkpoint_every": NUM_STEPS, "sample_every": 1},
        "model": {"path": _tiny_model(), "max_model_len": 2048, "dtype": "float32"},
        "env": {"data": _ROWS.get(cfg.env.name), "num_eval_problems": 2, "num_eval_samples": 1},
        "engine": {
            "num_replicas": None,
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": None,
            "enforce_eager": None,
            "cpu_threads": None,
            "use_ray": False,
        },
        "sync": {"transport": "direct"},
        "ray": {"address": None},
        "collect": {"groups_per_batch": 2, "max_new_tokens": 8, "num_collectors": None},
        "train": {"num_steps": NUM_STEPS, "device": "cpu", "cpu_threads": None},
    }
    return OmegaConf.merge(cfg, changes)


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

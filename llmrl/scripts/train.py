"""`train`: the training loop of the GRPO script as one call."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from rich.console import Console
from torchrl.envs import EnvBase

from llmrl._utils.arguments import keywords_of, refuse_unknown
from llmrl._utils.imports import require
from llmrl._utils.other_libraries import EXPLAINED, SYNONYMS
from llmrl.config.entries import EntryError, entries_by_name, from_entries
from llmrl.config.model import ComputeDtype
from llmrl.config.sections import Aggregation, Divergence, GRPOConfig, LossName, Schedule
from llmrl.engines import Engine
from llmrl.engines.base import HasTokenizer
from llmrl.envs import DataLoadingPrimer, DatasetChatEnv, MixedEnv
from llmrl.envs.primer import dataset_env_of
from llmrl.runs.evaluation import check_metric
from llmrl.runs.run import Run
from llmrl.runs.setup import check_reward, start_engine
from llmrl.runs.trainer_device import TrainerDevice
from llmrl.scripts.grpo import grpo
from llmrl.trainer.trained_model import half_dtype

_EXPLAINED = {
    **dict.fromkeys(
        ("group_size", *(name for name, same in SYNONYMS.items() if "repeats" in same)),
        "the environment sets the number of answers per prompt, repeats=8",
    ),
    **dict.fromkeys(
        ("reward_funcs", "reward", "rubric"),
        "the environment gives the reward, env.append_transform(RubricReward(...))",
    ),
    **dict.fromkeys(("train_dataset", "dataset"), "the environment contains the data, DatasetChatEnv(rows, ...)"),
}
"""Arguments of TRL and verl that `train` does not have, and their replacements."""


class TrainOptions(TypedDict, total=False):
    """Keywords of `train` that set entries of `GRPOConfig`; `ENTRIES` maps them."""

    loss: LossName
    seed: int
    resume: bool
    trackers: Sequence[str]
    num_steps: int
    groups_per_batch: int
    max_new_tokens: int
    max_turns: int
    temperature: float
    max_staleness: int | None
    replace_constant_groups: bool
    max_model_len: int | None
    dtype: ComputeDtype
    chat_template: str | Path | None
    lora_rank: int | None
    quantize_base: bool
    learning_rate: float
    schedule: Schedule
    warmup_steps: int
    num_epochs: int
    num_minibatches: int
    importance_cap: float | None
    kl_to_ref_coeff: float | None
    clip_epsilon: float | None
    clip_epsilon_high: float | None
    dual_clip: float | None
    aggregation: Aggregation | None
    fixed_length: int | None
    max_divergence: float | None
    divergence: Divergence | None
    eval_every: int | None
    best_by: str | None
    patience: int | None
    export_every: int | None
    save_total_limit: int | None
    checkpoint_every: int
    keep_batches: bool
    push_to_hub: str | None


_OWN_NAMES = {
    "best_by": "eval.metric",
    "eval_every": "eval.every",
    "export_every": "export.every",
    "lora_rank": "model.lora.rank",
    "model": "model.path",
    "path": "run.path",
    "quantize_base": "model.lora.quantize_base",
}
ENTRIES: Mapping[str, str] = entries_by_name(GRPOConfig) | _OWN_NAMES
"""Configuration entry of each keyword of `train`."""
_DEFAULTS = {
    "run.trackers": [],
    "collect.groups_per_batch": 16,
    "collect.max_new_tokens": 256,
    "train.num_steps": 100,
    "train.learning_rate": 1e-6,
}
# Engine and trainer share the GPU, as in `hardware/gpu1.yaml`.
_ON_GPU = {
    "engine.gpu_memory_utilization": 0.4,
    "engine.enforce_eager": False,
    "sync.transport": "ipc",
    "train.device": "cuda",
    "train.token_budget": 16384,
    "train.gradient_checkpointing": True,
}


def train(
    model: str | Path,
    env: EnvBase | MixedEnv,
    *,
    eval_envs: EnvBase | Mapping[str, EnvBase] | None = None,
    path: str | Path | None = None,
    engine: Engine | None = None,
    console: Console | None = None,
    **options: Unpack[TrainOptions],
) -> Path:
    """Train a model by GRPO in an environment, on this machine's GPU or CPU, and return the folder of the run.

    The folder contains the trained model as `model/`. This function starts processes, so a script
    must call it under `if __name__ == "__main__":`.

    Args:
        model: Hugging Face name or folder, or `embedded` (SmolLM2-135M-Instruct from its package).
        env: a `DatasetChatEnv` with a `RubricReward`, or several as a `MixedEnv`; `repeats` is the
            number of answers per prompt that GRPO compares.
        eval_envs: environments of held-out problems by name, or a single environment, which is
            named `eval`; evaluated before and after training.
        path: folder of the run; a new folder in `runs/` by default.
        engine: engine to use instead of vLLM, such as a `TransformersEngine` of the same model. The
            engine receives the model's weights before the first step, and is not shut down.
        options: entries of the configuration (`TrainOptions`), such as `num_steps=100`,
            `loss="dapo"`, `resume=True`. `docs/how-to/change-the-loop.md` describes them.

    Raises:
        TypeError: if an argument is unknown, with the nearest known name.
        ValueError: if an argument is out of range, or the environment or the model is unsuitable.
        MissingExtraError: if the extra `scripts` is not installed.
        NothingLearned: if no step changed the weights.
        FileExistsError: if `path` holds a run and `resume` is false.
        FileNotFoundError: if `resume` is true and `path` holds no run.
    """
    given: dict[str, Any] = dict(options)
    known = [name for name in keywords_of(train) or () if name != "env"]
    refuse_unknown("train", given, known, {name: text for name in given if (text := _explain(name, known))})
    for module in ("omegaconf", "matplotlib"):
        require(module, extra="scripts")
    evaluated = {"eval": eval_envs} if isinstance(eval_envs, EnvBase) else dict(eval_envs or {})
    group_size = _check_envs(env, evaluated)
    if not evaluated and (given.get("eval_every"), given.get("best_by")) != (None, None):
        raise ValueError("eval_every and best_by need eval_envs, environments of held-out problems; got none.")
    if engine is not None and not isinstance(engine, HasTokenizer):
        raise TypeError(f"engine must have the method get_tokenizer, and {type(engine).__name__} does not.")
    given |= {"model": str(model), "path": str(path or time.strftime("runs/train-%Y%m%d-%H%M%S"))}
    if isinstance(given.get("chat_template"), Path):
        given["chat_template"] = str(given["chat_template"])
    entries = _DEFAULTS | {"env.name": _dataset_of(env).prompts.name, "collect.group_size": group_size}
    if torch.cuda.is_available():
        entries |= {**_ON_GPU, "model.dtype": str(half_dtype()).removeprefix("torch.")}
    with _named_as_arguments():
        cfg = from_entries(GRPOConfig, entries | {ENTRIES[name]: value for name, value in given.items()})
        check_metric(cfg.eval.metric, evaluated)
    cfg.model.check_template(engine)
    with Run(cfg, console=console, continued_by=_how_to_continue) as run:
        device = TrainerDevice(cfg)
        used: Engine = run.enter(start_engine(cfg)) if engine is None else run.lend(engine)
        grpo(cfg, run, device, used, env, evaluated)
    return Path(cfg.run.path)


@contextmanager
def _named_as_arguments() -> Iterator[None]:
    """Replace the names of configuration entries in errors by the arguments of `train`."""
    try:
        yield
    except EntryError as error:
        entry, place, rest = error.entry.partition("[")
        raise EntryError(f"{_argument_of(entry)}{place}{rest}", error.problem) from None


def _explain(name: str, known: Collection[str]) -> str | None:
    """Return the replacement for an unknown argument; None if `train` has an argument with a similar name."""
    if name in _EXPLAINED:
        return _EXPLAINED[name]
    entries = entries_by_name(GRPOConfig)
    same = (name, *SYNONYMS.get(name, ()))
    if not any(one in known for one in same):
        for entry in (entries[one] for one in same if one in entries):
            return f"the script has it, as {entry}: llmrl train FILE.py:FUNCTION {entry}=..."
    return EXPLAINED.get(name)


def _argument_of(entry: str) -> str:
    own = {its_entry: name for name, its_entry in _OWN_NAMES.items()}
    return own.get(entry, entry.rpartition(".")[2])


def _how_to_continue(path: str, changes: Mapping[str, object]) -> str:
    changed = {"path": path, "resume": True, **{_argument_of(name): value for name, value in changes.items()}}
    return "the same call with " + ", ".join(f"{name}={value!r}" for name, value in changed.items())


def _dataset_of(env: EnvBase | MixedEnv) -> DatasetChatEnv | DataLoadingPrimer | MixedEnv:
    if isinstance(env, MixedEnv):
        return env
    dataset_env = dataset_env_of(env)
    if dataset_env is None:
        raise ValueError(f"{type(env).__name__} has no dataset to draw prompts from: build a DatasetChatEnv.")
    return dataset_env


def _check_envs(env: EnvBase | MixedEnv, eval_envs: Mapping[str, EnvBase]) -> int:
    """Check the environments, and return the number of answers per training prompt."""
    prompts = _dataset_of(env).prompts
    if prompts.num_samples < 2:
        raise ValueError(
            f"env has repeats={prompts.num_samples}, and GRPO compares several answers per prompt: set repeats=8, say."
        )
    trained = dict(env.items()) if isinstance(env, MixedEnv) else {prompts.name: env}
    for key, one in {**trained, **eval_envs}.items():
        check_reward(one, f"the environment {key!r}")
    names = list(trained)
    for key, eval_env in eval_envs.items():
        name = _dataset_of(eval_env).prompts.name
        if name in names:
            raise ValueError(
                f"the environment {key!r} has name={name!r}, like another environment, so their conversations would "
                f"have the same ids; build it with name={key!r}."
            )
        names.append(name)
    return prompts.num_samples

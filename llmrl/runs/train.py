"""`train`: the GRPO script's loop as one call, for those who do not want to see it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never

import torch
from rich.console import Console
from torchrl.envs import EnvBase

from llmrl._utils.arguments import keywords_of, refuse_unknown
from llmrl._utils.imports import require
from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.config.engine import EngineConfig, SyncConfig
from llmrl.config.entries import EntryError
from llmrl.config.sections import (
    CollectConfig,
    EnvConfig,
    EvalConfig,
    ExportConfig,
    GRPOConfig,
    GRPOTrainConfig,
    LoRAEntries,
    ModelConfig,
    RunConfig,
    Schedule,
)
from llmrl.engines import Engine
from llmrl.engines.base import HasTokenizer
from llmrl.envs import DataLoadingPrimer, DatasetChatEnv, MixedEnv
from llmrl.envs.primer import dataset_env_of
from llmrl.objectives import GRPOLoss, MCAdvantage
from llmrl.policies import LLMWrapperBase
from llmrl.runs.evaluation import Evaluator
from llmrl.runs.run import Run
from llmrl.runs.setup import (
    check_reward,
    check_template,
    clip_bounds,
    lora_config,
    model_folder,
    optimizer_options,
    scoring_options,
    start_engine,
    tokenizer_of,
)
from llmrl.runs.trainer_device import TrainerDevice
from llmrl.trainer import TransformersWrapper, load_model, make_optimizer, make_reference, minibatches, train_step

_EXPLAINED = {
    **dict.fromkeys(
        ("num_generations", "group_size", "rollout_n"), "the answers to a prompt are the environment's, repeats=8"
    ),
    **dict.fromkeys(
        ("reward_funcs", "reward", "rubric"), "the environment has the reward, env.append_transform(RubricReward(...))"
    ),
    **dict.fromkeys(("train_dataset", "dataset"), "the environment has the data, DatasetChatEnv(rows, ...)"),
}
"""Where arguments of TRL and verl are, that are none here."""

_ARGUMENTS = {
    "eval.every": "eval_every",
    "eval.metric": "best_by",
    "export.every": "export_every",
    "model.lora.rank": "lora_rank",
    "model.path": "model",
}
"""Of entries that are not called as the argument that gives them."""


def train(
    model: str | Path,
    env: EnvBase | MixedEnv,
    *,
    eval_envs: EnvBase | Mapping[str, EnvBase] | None = None,
    eval_every: int | None = None,
    best_by: str | None = None,
    patience: int | None = None,
    path: str | Path | None = None,
    resume: bool = False,
    export_every: int | None = None,
    save_total_limit: int | None = None,
    push_to_hub: str | None = None,
    trackers: Sequence[str] = (),
    num_steps: int = 100,
    groups_per_batch: int = 16,
    max_new_tokens: int = 256,
    max_turns: int = 1,
    max_model_len: int | None = None,
    chat_template: str | Path | None = None,
    temperature: float = 1.0,
    max_staleness: int | None = None,
    learning_rate: float = 1e-6,
    schedule: Schedule = "constant",
    warmup_steps: int = 0,
    num_epochs: int = 1,
    num_minibatches: int = 1,
    kl_to_ref_coeff: float | None = None,
    lora_rank: int | None = None,
    seed: int = 0,
    engine: Engine | None = None,
    console: Console | None = None,
    **unknown: Never,
) -> Path:
    """Train a model by GRPO in an environment, on this machine's GPU or its CPU, and save it.

    It is the loop of `sota-implementations/grpo/grpo.py`, with checkpoints, a live view, metrics and conversations in
    the run's folder: to change more than is named here, copy that script. It starts processes: in a file of your own
    call it under `if __name__ == "__main__":`. Needs the extra `scripts`.

    Args:
        model: a Hugging Face name or folder, or `embedded` (SmolLM2-135M-Instruct from its package).
        env: a `DatasetChatEnv` with a `RubricReward`; its `repeats` are the answers that are compared. Several as a
            `MixedEnv`.
        eval_envs: environments of problems held out, by name, or one of them, which is then named `eval`; evaluated
            before and after training.
        eval_every: steps between evaluations; None adds none.
        best_by: metric of the evaluation, such as `eval/eval/pass@1`, by which the best model is kept in `model-best`.
        patience: evaluations in a row without a better one, after which training ends.
        path: the run's folder; by default a new one in `runs/`.
        resume: go on with the run in `path`.
        export_every: steps between exports of the model (`exports/step-…` in the run's folder), written beside the
            training; None: at its end alone, as `model`.
        save_total_limit: exports that are kept, the last ones; None keeps all.
        push_to_hub: a repository, `me/my-model`, that is given each export and the model, with a card of the run; it is
            private where it is made.
        trackers: trackers of metrics, besides `metrics.csv`: `tensorboard`, `wandb`, `trackio`, `mlflow`.
        num_steps: batches of the whole run.
        groups_per_batch: prompts of a batch.
        max_new_tokens: most tokens of a turn.
        max_turns: answers of one conversation.
        max_model_len: tokens of a whole conversation; by default the model's own limit.
        chat_template: in place of the model's own, as base models have none: a file, or Jinja text.
        temperature: temperature of sampling.
        max_staleness: versions that a group may be old; None generates and trains in turn, 1 at once.
        learning_rate: the highest; small models bear ten times the default.
        schedule, warmup_steps: see `make_optimizer`.
        num_epochs, num_minibatches: see `minibatches`.
        kl_to_ref_coeff: weight of the KL to the model as it was; None has no reference.
        lora_rank: train adapters of this rank in place of the weights.
        seed: seed of sampling and torch.
        engine: generates in place of vLLM, such as a `TransformersEngine` of the same model. It is given the model's
            weights before the first step, and is not shut down.
        console: where it reports.

    Returns:
        The run's folder: `model/` in it is what was trained, and `llmrl view` shows the rest.

    Raises:
        TypeError: for an argument that does not exist, with the nearest one; those of TRL and verl are known.
        ValueError: for an environment without a dataset or a reward, or with one answer a prompt, for environments of
            one name, for arguments of other types or out of range, and for a model without a chat template; before
            anything is started.
        MissingExtraError: without the extra `scripts`, before anything is started.
        NothingLearned: when no step changed the weights.
        OSError: when the hub gives no repository `push_to_hub`.
        FileExistsError, FileNotFoundError: when `path` holds a run, or none to resume.
    """
    refuse_unknown("train", unknown, [name for name in keywords_of(train) or () if name != "env"], _EXPLAINED)
    for module in ("omegaconf", "matplotlib"):
        require(module, extra="scripts")
    evaluated = {"eval": eval_envs} if isinstance(eval_envs, EnvBase) else dict(eval_envs or {})
    group_size = _check_envs(env, evaluated)
    if not evaluated and (eval_every, best_by) != (None, None):
        raise ValueError("eval_every and best_by need eval_envs: environments of problems held out.")
    if engine is not None and not isinstance(engine, HasTokenizer):
        raise TypeError(f"engine must know its tokenizer (get_tokenizer), and {type(engine).__name__} does not.")
    on_gpu = torch.cuda.is_available()
    own_template = None if chat_template is None else str(chat_template)
    names: Any = trackers if isinstance(trackers, str) else list(trackers)
    with _by_arguments():
        cfg = GRPOConfig(
            run=RunConfig(path=str(path or time.strftime("runs/train-%Y%m%d-%H%M%S")), trackers=names),
            env=EnvConfig(name=_dataset_of(env).prompts.name),
            collect=CollectConfig(
                groups_per_batch=groups_per_batch,
                group_size=group_size,
                max_new_tokens=max_new_tokens,
                max_turns=max_turns,
                temperature=temperature,
                max_staleness=max_staleness,
            ),
            eval=EvalConfig(every=eval_every, metric=best_by, patience=patience),
            export=ExportConfig(every=export_every, save_total_limit=save_total_limit, push_to_hub=push_to_hub),
            seed=seed,
            resume=resume,
            model=ModelConfig(
                path=str(model),
                max_model_len=max_model_len,
                dtype="bfloat16" if on_gpu else "float32",
                lora=LoRAEntries(rank=lora_rank),
                chat_template=own_template,
            ),
            train=GRPOTrainConfig(
                num_steps=num_steps,
                learning_rate=learning_rate,
                schedule=schedule,
                warmup_steps=warmup_steps,
                num_epochs=num_epochs,
                num_minibatches=num_minibatches,
                kl_to_ref_coeff=kl_to_ref_coeff,
                # Engine and trainer share the GPU, as in `hardware/gpu1.yaml`.
                device="cuda" if on_gpu else "cpu",
                token_budget=16384 if on_gpu else 8192,
                gradient_checkpointing=on_gpu,
            ),
            engine=EngineConfig(gpu_memory_utilization=0.4, enforce_eager=False) if on_gpu else EngineConfig(),
            sync=SyncConfig(transport="ipc" if on_gpu else "direct"),
        )
    check_template(cfg, engine)
    _train(cfg, env, evaluated, engine, console)
    return Path(cfg.run.path)


@contextmanager
def _by_arguments() -> Iterator[None]:
    """Name entries of the configuration as the arguments of `train` are called."""
    try:
        yield
    except EntryError as error:
        entry, place, rest = error.entry.partition("[")
        raise EntryError(f"{_argument_of(entry)}{place}{rest}", error.problem) from None


def _argument_of(entry: str) -> str:
    return _ARGUMENTS.get(entry, entry.rpartition(".")[2])


def _how_to_continue(path: str, changes: Mapping[str, object]) -> str:
    """Return how a call of `train` is continued: what is changed of it."""
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
    """Return the number of answers to each prompt that is trained on."""
    prompts = _dataset_of(env).prompts
    if prompts.num_samples < 2:
        raise ValueError(
            f"env has repeats={prompts.num_samples}: GRPO compares the answers to one prompt; build it with repeats=8."
        )
    trained = dict(env.items()) if isinstance(env, MixedEnv) else {prompts.name: env}
    for key, one in {**trained, **eval_envs}.items():
        check_reward(one, f"the environment {key!r}")
    names = list(trained)
    for key, eval_env in eval_envs.items():
        name = _dataset_of(eval_env).prompts.name
        if name in names:
            raise ValueError(
                f"the environment {key!r} has name={name!r}, as another one has, so that their conversations have the "
                f"same ids; build it with name={key!r}."
            )
        names.append(name)
    return prompts.num_samples


def _train(
    cfg: GRPOConfig,
    env: EnvBase | MixedEnv,
    eval_envs: Mapping[str, EnvBase],
    own_engine: Engine | None,
    console: Console | None,
) -> None:
    """Do what `main` of the script does, with environments and an engine that are there; a test compares them."""
    with Run(cfg, console=console, continued_by=_how_to_continue) as run:
        device = TrainerDevice(cfg)
        engine: Any = run.enter(start_engine(cfg)) if own_engine is None else run.lend(own_engine)
        tokenizer = tokenizer_of(cfg, engine)
        sampling = cfg.collect.generate_kwargs
        policy = LLMWrapperBase(engine, tokenizer=tokenizer, generate_kwargs=sampling)

        model = load_model(
            model_folder(cfg),
            device=device.name,
            gradient_checkpointing=cfg.train.gradient_checkpointing,
            lora=lora_config(cfg),
        )
        actor = TransformersWrapper(model, generate=False, generate_kwargs=sampling, **scoring_options(cfg))
        device.shard(model)  # where there are several ranks
        loss = GRPOLoss(
            actor,
            clip_epsilon=clip_bounds(cfg),
            importance_cap=cfg.train.importance_cap,
            kl_to_ref_coeff=cfg.train.kl_to_ref_coeff,
        )
        reference = make_reference(actor, model_folder(cfg)) if cfg.train.kl_to_ref_coeff is not None else None
        optimizer, schedule = make_optimizer(model, **optimizer_options(cfg))

        limits = RolloutLimits(max_turns=cfg.collect.max_turns)
        collector = run.enter(
            LLMCollector(
                env,
                policy=policy,
                groups_per_batch=cfg.collect.groups_per_batch,
                max_staleness=cfg.collect.max_staleness,
                limits=limits,
                postproc=MCAdvantage(grpo_size=cfg.collect.group_size),
            )
        )
        evaluator = run.enter(Evaluator(eval_envs, policy, limits=limits, num_problems=cfg.eval.num_problems))

        run.track(collector, engine, tokenizer=tokenizer, model=model, optimizer=optimizer, schedule=schedule)
        run.evaluate(0, evaluator)
        for step, batch in run.steps(cfg.train.num_steps, target_reward=cfg.train.target_reward):
            device.claim(engine)
            if reference is not None:
                reference(batch)
            updates = minibatches(
                batch,
                loss,
                num_epochs=cfg.train.num_epochs,
                num_minibatches=cfg.train.num_minibatches,
                seed=cfg.seed + step,
            )
            reports = [train_step(loss, part, optimizer, max_grad_norm=cfg.train.max_grad_norm) for part in updates]
            schedule.step()
            with run.timer("sync"):
                version = run.follow(collector.start_update(model))
            run.log(step, reports, version=version)
            if run.is_due(step, cfg.eval.every):
                run.evaluate(step, evaluator)
        run.finish(evaluator)

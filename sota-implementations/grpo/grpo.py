"""GRPO: sample a group of answers to each prompt, and make the better answers more likely (arXiv:2402.03300).

With `collect.max_staleness`, the engine generates the next batches while this process trains on one; otherwise the two
alternate. This file contains everything that changes the model; `Run` handles the folder, resumption and the live view.

python sota-implementations/grpo/grpo-sync.py                              # the demo
python sota-implementations/grpo/grpo-async.py                             # the demo, overlapped
python sota-implementations/grpo/grpo-sync.py task=gsm8k hardware=gpu1     # another task on other hardware
python sota-implementations/grpo/grpo-sync.py task=gsm8k hardware=gpu1 dry_run=true   # test the configuration
python sota-implementations/grpo/grpo-sync.py run.path=runs/mine resume=true
"""

from __future__ import annotations

import os

# Set before torch is imported: idle OpenMP threads that spin take cores from the engine.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from collections.abc import Mapping

from torchrl.envs import EnvBase

from llmrl.collectors import GroupRules
from llmrl.config.launch import launch
from llmrl.config.sections import GRPOConfig
from llmrl.engines import Engine
from llmrl.envs import MixedEnv
from llmrl.objectives import MCAdvantage
from llmrl.policies import vLLMWrapper
from llmrl.runs.evaluation import Evaluator
from llmrl.runs.run import Run
from llmrl.runs.setup import make_collector, make_env, make_eval_envs, start_engine
from llmrl.runs.trainer_device import TrainerDevice
from llmrl.trainer import make_reference, minibatches, train_step


def main(cfg: GRPOConfig) -> None:
    """Train by GRPO."""
    with Run(cfg) as run:
        # Environments. To use your own, build a transformed `DatasetChatEnv` here.
        env, eval_envs = make_env(cfg), make_eval_envs(cfg)

        # Engine: vLLM, one or several replicas, on the devices that the trainer does not use.
        device = TrainerDevice(cfg)
        engine = run.enter(start_engine(cfg))
        grpo(cfg, run, device, engine, env, eval_envs)


def grpo(
    cfg: GRPOConfig,
    run: Run,
    device: TrainerDevice,
    engine: Engine,
    env: EnvBase | MixedEnv,
    eval_envs: Mapping[str, EnvBase],
) -> None:
    """Train with these environments and this engine; `llmrl.train` also calls this function."""
    tokenizer = cfg.model.tokenizer_of(engine)
    sampling = cfg.collect.generate_kwargs
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs=sampling)

    # Trainer: float32 weights that compute in the engine's dtype.
    model = cfg.load_model(device.name, mesh=device.mesh)  # sharded over the ranks, if there are several
    actor = cfg.build_actor(model, generate_kwargs=sampling)
    # The ratio uses the trainer's own log-probs; a truncated importance weight corrects for those of the engine.
    loss = cfg.build_loss(actor)  # `GRPOLoss(actor, importance_cap=...)`, or the loss that the entry `loss` names
    reference = make_reference(actor, cfg.model.folder) if cfg.train.kl_to_ref_coeff is not None else None
    optimizer, schedule = cfg.train.build_optimizer(model)

    # Collector: samples groups of answers to the same prompt. A group is compared by reward, in games within a role.
    advantage = MCAdvantage(grpo_size=cfg.collect.group_size, normalization=cfg.normalization, by="role")
    rules = GroupRules(group_filter=advantage.has_signal if cfg.collect.replace_constant_groups else None)
    collector = run.enter(make_collector(cfg, env, policy=policy, postproc=advantage, group_rules=rules))
    evaluator = run.enter(Evaluator(eval_envs, policy, limits=cfg.collect.limits, num_problems=cfg.eval.num_problems))

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
        with run.timer("sync"):  # what is collected ahead lets the next step train while the engines load
            version = run.follow(collector.start_update(model))
        run.log(step, reports, version=version)
        if run.is_due(step, cfg.eval.every):
            run.evaluate(step, evaluator)
    run.finish(evaluator)


if __name__ == "__main__":
    launch(main, GRPOConfig, "../config/grpo.yaml")

"""On-policy distillation: the student samples answers, and a teacher scores each token with its log-prob.

The teacher is another model, loaded here (`teacher.path`) or served (`teacher.url`), or the student itself with a hint
in its prompt (`teacher.hint`). The KL gives each token's advantage, alone or with rewards (`teacher.use_reward=true`).

python sota-implementations/distillation/distillation.py                        # the student with the answer as hint
python sota-implementations/distillation/distillation.py teacher.hint=null teacher.path=runs/mine/model
"""

from __future__ import annotations

import os

# Set before torch is imported: idle OpenMP threads that spin take cores from the engine.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from llmrl.config.imitation import DistillationConfig
from llmrl.config.launch import launch
from llmrl.config.losses import build_loss
from llmrl.envs.primer import dataset_env_of
from llmrl.objectives import DistillationLoss, MCAdvantage, TeacherAdvantage
from llmrl.policies import vLLMWrapper
from llmrl.rendering import make_renderer
from llmrl.runs.evaluation import Evaluator
from llmrl.runs.run import Run
from llmrl.runs.setup import make_collector, make_env, make_eval_envs, start_engine, start_teacher
from llmrl.runs.trainer_device import TrainerDevice
from llmrl.trainer import TeacherTopK, train_step, write_hinted_log_probs, write_log_probs, write_top_k


def main(cfg: DistillationConfig) -> None:
    """Train by on-policy distillation."""
    with Run(cfg) as run:
        # Environments, and the engine: vLLM, one or several replicas, on the devices that the trainer does not use.
        env, eval_envs = make_env(cfg), make_eval_envs(cfg)
        data: Any = dataset_env_of(env)
        if cfg.teacher.hint is not None:
            cfg.teacher.hint_for(data.prompts.items[0])  # a column that is missing ends the run before an engine starts
        device = TrainerDevice(cfg)
        engine = run.enter(start_engine(cfg))
        tokenizer, sampling = cfg.model.tokenizer_of(engine), cfg.collect.generate_kwargs
        renderer = make_renderer(tokenizer)
        policy = vLLMWrapper(engine, renderer=renderer, generate_kwargs=sampling)
        model = cfg.load_model(device.name, mesh=device.mesh)  # sharded over the ranks, if there are several
        actor = cfg.build_actor(model, generate_kwargs=sampling)
        by_tokens = build_loss("grpo", cfg.train, actor)
        by_distributions = DistillationLoss(actor, teacher=TeacherTopK(), kl_direction="reverse")
        loss = by_tokens if cfg.teacher.top_k is None else by_distributions
        optimizer, schedule = cfg.train.build_optimizer(model)

        # Teacher: another model, or the student with its current weights; a hint may extend the teacher's prompt.
        teacher = run.enter(start_teacher(cfg, actor, tokenizer=tokenizer))
        advantages, key = TeacherAdvantage(cfg.teacher.coeff), ("next", "teacher_log_probs", "full")
        render = partial(renderer.render, add_generation_prompt=True)

        def teach(batch: TensorDictBase) -> TensorDictBase:
            if cfg.teacher.top_k is not None:
                return write_top_k(teacher, batch, cfg.teacher.top_k)
            if cfg.teacher.hint is None:
                return advantages(write_log_probs(teacher, batch, key))
            hints = [cfg.teacher.hint_for(data.prompts.item_of(row["rollout", "group_id"])) for row in batch.unbind(0)]
            return advantages(write_hinted_log_probs(teacher, batch, key, hints=hints, render=render))

        # Collector: samples answers as training rows; with rewards, the answers to a prompt are compared.
        compare = None
        if cfg.teacher.use_reward:
            compare = MCAdvantage(grpo_size=cfg.collect.group_size)
        collector = run.enter(make_collector(cfg, env, policy=policy, postproc=compare))
        evaluator = run.enter(
            Evaluator(eval_envs, policy, limits=cfg.collect.limits, num_problems=cfg.eval.num_problems)
        )

        run.track(collector, engine, tokenizer=tokenizer, model=model, optimizer=optimizer, schedule=schedule)
        run.evaluate(0, evaluator)
        for step, batch in run.steps(cfg.train.num_steps, target_reward=cfg.train.target_reward):
            device.claim(engine)
            report = train_step(loss, teach(batch), optimizer, max_grad_norm=cfg.train.max_grad_norm)
            schedule.step()
            with run.timer("sync"):  # with batches collected ahead, the next step trains while the engines load
                version = run.follow(collector.start_update(model))
            rows = [] if cfg.teacher.top_k is not None else batch.unbind(0)  # this loss reports the KL itself
            kl = [row["kl_to_teacher"][row["masks", "all_assistant_mask"]] for row in rows]
            run.log(step, report, version=version, **({"kl_to_teacher": float(torch.cat(kl).mean())} if kl else {}))
            if run.is_due(step, cfg.eval.every):
                run.evaluate(step, evaluator)
        run.finish(evaluator)


if __name__ == "__main__":
    launch(main, DistillationConfig, "../config/distillation.yaml")

"""Expert iteration: sample, keep the best answers of each prompt, learn them by supervised training, again.

With `collect.in_background` a buffer of the best answers is filled while the model learns from it: a step waits only
when the buffer's rows were learned `train.max_reuse` times.

python sota-implementations/expert-iteration/expert-iteration-sync.py            # one-digit sums, on two cores
python sota-implementations/expert-iteration/expert-iteration-async.py
python sota-implementations/expert-iteration/expert-iteration-sync.py task=gsm8k hardware=gpu1
python sota-implementations/expert-iteration/expert-iteration-sync.py run.path=runs/mine resume=true
"""

from __future__ import annotations

import os

# Before torch: idle threads that spin would take the engine's cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from llmrl.collectors.best_answers import BestAnswers
from llmrl.config.imitation import ExpertIterationConfig
from llmrl.config.launch import launch
from llmrl.objectives import SFTLoss, TopKRewardSelector
from llmrl.policies import vLLMWrapper
from llmrl.runs.evaluation import Evaluator
from llmrl.runs.run import Run
from llmrl.runs.setup import (
    make_collector,
    make_env,
    make_eval_envs,
    start_engine,
)
from llmrl.runs.trainer_device import TrainerDevice
from llmrl.trainer import train_step
from llmrl.watch.step_metrics import metrics_of


def main(cfg: ExpertIterationConfig) -> None:
    """Train by expert iteration."""
    with Run(cfg) as run:
        # What is asked. For an environment of your own build a `DatasetChatEnv`, transformed, here.
        env, eval_envs = make_env(cfg), make_eval_envs(cfg)

        # What answers: vLLM, or several, on what the trainer's device leaves.
        device = TrainerDevice(cfg)
        engine = run.enter(start_engine(cfg))
        tokenizer = cfg.model.tokenizer_of(engine)
        sampling = cfg.collect.generate_kwargs
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs=sampling)

        # What learns: float32 weights, computing in the engine's dtype.
        model = cfg.load_model(device.name, mesh=device.mesh)  # sharded where there are several ranks
        actor = cfg.build_actor(model, generate_kwargs=sampling)
        loss = SFTLoss(actor)
        optimizer, schedule = cfg.train.build_optimizer(model)

        # What plays: groups of answers to the same prompt, of which the best are kept.
        collector = run.enter(
            make_collector(
                cfg,
                env,
                policy=policy,
                postproc=TopKRewardSelector(cfg.collect.group_size, cfg.collect.num_best).select,
            )
        )
        evaluator = run.enter(
            Evaluator(eval_envs, policy, limits=cfg.collect.limits, num_problems=cfg.eval.num_problems)
        )
        best = BestAnswers(
            cfg.train.buffer_size, rows_per_sample=cfg.train.rows_per_update, max_reuse=cfg.train.max_reuse
        )

        run.track(
            collector, engine, tokenizer=tokenizer, model=model, optimizer=optimizer, schedule=schedule, best=best
        )
        run.evaluate(0, evaluator)
        for step, batch in run.steps(
            cfg.train.num_steps,
            target_reward=cfg.train.target_reward,
            in_background=cfg.collect.in_background,
            needs_batch=lambda: best.is_learned,
        ):
            device.claim(engine)
            best.extend(batch)
            reports = [
                train_step(loss, best.sample(), optimizer, max_grad_norm=cfg.train.max_grad_norm)
                for _ in range(cfg.train.num_updates if best.rows else 0)
            ]
            schedule.step()
            with run.timer("sync"):  # what is collected ahead lets the next step train while the engines load
                version = run.follow(collector.start_update(model))
            metrics = metrics_of(reports) | {"num_kept_rows": batch.shape[0], "num_buffer_rows": len(best.rows)}
            run.log(step, metrics, version=version)
            if run.is_due(step, cfg.eval.every):
                run.evaluate(step, evaluator)
        run.finish(evaluator)


if __name__ == "__main__":
    launch(main, ExpertIterationConfig, "../config/expert-iteration.yaml")

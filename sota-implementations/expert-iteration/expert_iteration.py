"""Expert iteration: sample answers, keep the best ones of each prompt, train on these by SFT, and repeat.

With `collect.in_background`, a buffer of the best answers is filled while the model trains on the buffer. A step waits
for new answers only after each row was used `train.max_reuse` times on average.

python sota-implementations/expert-iteration/expert-iteration-sync.py            # one-digit sums, on two cores
python sota-implementations/expert-iteration/expert-iteration-async.py
python sota-implementations/expert-iteration/expert-iteration-sync.py task=gsm8k hardware=gpu1
python sota-implementations/expert-iteration/expert-iteration-sync.py run.path=runs/mine resume=true
"""

from __future__ import annotations

import os

# Set before torch is imported: idle OpenMP threads that spin take cores from the engine.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from llmrl.collectors.best_answers import BestAnswers
from llmrl.config.imitation import ExpertIterationConfig
from llmrl.config.launch import launch
from llmrl.objectives import SFTLoss, TopKRewardSelector
from llmrl.policies import vLLMWrapper
from llmrl.runs.evaluation import Evaluator
from llmrl.runs.run import Run
from llmrl.runs.setup import make_collector, make_env, make_eval_envs, start_engine
from llmrl.runs.trainer_device import TrainerDevice
from llmrl.trainer import train_step
from llmrl.watch.step_metrics import metrics_of


def main(cfg: ExpertIterationConfig) -> None:
    """Train by expert iteration."""
    with Run(cfg) as run:
        # Environments. To use your own, build a transformed `DatasetChatEnv` here.
        env, eval_envs = make_env(cfg), make_eval_envs(cfg)

        # Engine: vLLM, one or several replicas, on the devices that the trainer does not use.
        device = TrainerDevice(cfg)
        engine = run.enter(start_engine(cfg))
        tokenizer = cfg.model.tokenizer_of(engine)
        sampling = cfg.collect.generate_kwargs
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs=sampling)

        # Trainer: float32 weights that compute in the engine's dtype.
        model = cfg.load_model(device.name, mesh=device.mesh)  # sharded over the ranks, if there are several
        actor = cfg.build_actor(model, generate_kwargs=sampling)
        loss = SFTLoss(actor)
        optimizer, schedule = cfg.train.build_optimizer(model)

        # Collector: samples groups of answers to the same prompt, and keeps the best ones.
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
            with run.timer("sync"):  # with batches collected ahead, the next step trains while the engines load
                version = run.follow(collector.start_update(model))
            metrics = metrics_of(reports) | {"num_kept_rows": batch.shape[0], "num_buffer_rows": len(best.rows)}
            run.log(step, metrics, version=version)
            if run.is_due(step, cfg.eval.every):
                run.evaluate(step, evaluator)
        run.finish(evaluator)


if __name__ == "__main__":
    launch(main, ExpertIterationConfig, "../config/expert-iteration.yaml")

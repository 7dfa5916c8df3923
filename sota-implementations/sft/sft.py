"""SFT on the conversations of a file, such as a cold start before reinforcement learning.

python sota-implementations/sft/sft.py                                       # sums with thoughts in tags, on two cores
python sota-implementations/sft/sft.py conversations.path=mine.jsonl conversations.held_out=others.jsonl
python sota-implementations/sft/sft.py task=gsm8k hardware=gpu1 conversations.path=mine.jsonl train.num_steps=200
python sota-implementations/sft/sft.py run.path=runs/mine resume=true
python sota-implementations/grpo/grpo-sync.py task=reasoned-addition model.path=runs/mine/model     # then GRPO
"""

from __future__ import annotations

import os

# Set before torch is imported: idle OpenMP threads that spin take cores from the engine.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import torch

from llmrl.collectors import Demonstrations
from llmrl.config.imitation import SFTConfig
from llmrl.config.launch import launch
from llmrl.objectives import SFTLoss
from llmrl.policies import vLLMWrapper
from llmrl.rendering import make_renderer
from llmrl.runs.evaluation import Evaluator
from llmrl.runs.null_engine import NullEngine
from llmrl.runs.run import Run
from llmrl.runs.setup import make_eval_envs, start_engine, sync_scheme
from llmrl.runs.trainer_device import TrainerDevice
from llmrl.trainer import train_step, write_log_probs


def main(cfg: SFTConfig) -> None:
    """Train by supervised fine-tuning."""
    with Run(cfg) as run:
        # Training data: conversations, rendered as in sampling; only the assistant's tokens are trained.
        tokenizer = cfg.model.tokenizer_of(NullEngine(cfg.model.folder))
        renderer = make_renderer(tokenizer)
        conversations = run.enter(
            Demonstrations(
                cfg.conversations.path,
                renderer,
                conversations_per_batch=cfg.collect.groups_per_batch,
                max_tokens=cfg.model.max_model_len,
                seed=cfg.seed,
            )
        )
        held_out = None
        if cfg.conversations.held_out is not None:
            others = Demonstrations(
                cfg.conversations.held_out, renderer, conversations_per_batch=1, max_tokens=cfg.model.max_model_len
            )
            held_out = others.all_rows()

        # Engine for the evaluation on the task's held-out problems, if there is one.
        eval_envs = make_eval_envs(cfg)
        device = TrainerDevice(cfg)
        engine = run.enter(start_engine(cfg)) if eval_envs else NullEngine(cfg.model.folder)
        policy = vLLMWrapper(engine, renderer=renderer, generate_kwargs=cfg.collect.generate_kwargs)
        if eval_envs:
            conversations.connect(engine, {"policy": sync_scheme(cfg, engine)})

        # Trainer: float32 weights that compute in the engine's dtype.
        model = cfg.load_model(device.name, mesh=device.mesh)  # sharded over the ranks, if there are several
        actor = cfg.build_actor(model)
        loss = SFTLoss(actor, reduction="token_mean")
        optimizer, schedule = cfg.train.build_optimizer(model)

        evaluator = run.enter(
            Evaluator(eval_envs, policy, limits=cfg.collect.limits, num_problems=cfg.eval.num_problems)
        )

        def held_out_loss() -> dict[str, float]:
            """Return the mean negative log-likelihood of the held-out conversations' trained tokens."""
            if held_out is None:
                return {}
            scored = write_log_probs(actor, held_out, ("log_probs", "full"))
            each = [row["log_probs", "full"][row["masks", "all_assistant_mask"]] for row in scored.unbind(0)]
            return {"loss": -float(torch.cat(each).mean())}

        run.track(conversations, engine, tokenizer=tokenizer, model=model, optimizer=optimizer, schedule=schedule)
        run.evaluate(0, evaluator, **held_out_loss())
        for step, batch in run.steps(cfg.train.num_steps):
            device.claim(engine)
            report = train_step(loss, batch, optimizer, max_grad_norm=cfg.train.max_grad_norm)
            schedule.step()
            run.log(step, report, version=step)
            if run.is_due(step, cfg.eval.every):
                conversations.update_policy_weights_(model)
                run.evaluate(step, evaluator, **held_out_loss())
        conversations.update_policy_weights_(model)
        run.finish(evaluator, **held_out_loss())


if __name__ == "__main__":
    launch(main, SFTConfig, "../config/sft.yaml")

"""Steps of GRPO, with the essential check: after the weight sync, engine and trainer agree on sampled tokens."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from llmrl import (
    AsyncVLLM,
    GRPOLoss,
    LLMCollector,
    MCAdvantage,
    TransformersWrapper,
    ensure_embedded_model,
    train_step,
    vLLMWrapper,
)
from llmrl.envs import make_addition_env


def main(engine: AsyncVLLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(ensure_embedded_model(), dtype=torch.float32)
    loss = GRPOLoss(TransformersWrapper(model, generate=False, token_budget=2048))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    env = make_addition_env("train", repeats=4)
    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 12})
    advantages = MCAdvantage(grpo_size=4)
    with LLMCollector(env, policy=policy, groups_per_batch=1, postproc=advantages) as collector:
        for step, batch in zip(range(2), collector, strict=False):
            report = train_step(loss, batch, optimizer)
            version = collector.update_policy_weights_(model)
            difference = report.measurements["log_prob_difference_mean"]
            print(f"step {step}: log-prob difference {difference:.4f}, now version {version}")


if __name__ == "__main__":
    engine = AsyncVLLM.from_pretrained(ensure_embedded_model(), max_model_len=512)
    main(engine)
    engine.shutdown()

"""The GRPO script with a defect: the loss is over the prompt's tokens, too."""

from __future__ import annotations

from llmrl.config.launch import launch
from llmrl.config.sections import GRPOConfig
from llmrl.scripts import grpo

train_step = grpo.train_step


def train_on_prompts_too(loss, batch, *args, **kwargs):
    for row in batch.unbind(0):
        row.set(("masks", "all_assistant_mask"), row.get(("masks", "all_attention_mask")).clone())
    return train_step(loss, batch, *args, **kwargs)


if __name__ == "__main__":
    grpo.train_step = train_on_prompts_too
    launch(grpo.main, GRPOConfig, "../config/grpo.yaml")

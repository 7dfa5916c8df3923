"""The GRPO script with a defect: advantages have the wrong sign."""

from __future__ import annotations

from llmrl.config.launch import launch
from llmrl.config.sections import GRPOConfig
from llmrl.scripts import grpo


class WrongSign(grpo.MCAdvantage):
    def __call__(self, *args, **kwargs):
        batch = super().__call__(*args, **kwargs)
        if batch is not None:
            for row in batch.unbind(0):
                row.set("advantage", -row.get("advantage"))
        return batch


if __name__ == "__main__":
    grpo.MCAdvantage = WrongSign
    launch(grpo.main, GRPOConfig, "../config/grpo.yaml")

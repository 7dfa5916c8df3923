"""The GRPO script with a defect: the engine never gets the trained weights."""

from __future__ import annotations

from concurrent.futures import Future

from llmrl.collectors import LLMCollector
from llmrl.config.launch import launch
from llmrl.config.sections import GRPOConfig
from llmrl.scripts import grpo


def start_no_update(self, *args, **kwargs):
    done = Future()
    done.set_result(self.policy_version)
    return done


if __name__ == "__main__":
    LLMCollector.start_update = start_no_update
    launch(grpo.main, GRPOConfig, "../config/grpo.yaml")

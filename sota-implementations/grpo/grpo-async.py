"""Asynchronous GRPO: the engine generates the next batches while the trainer trains on one. See `grpo.py`.

Groups are at most `collect.max_staleness` versions old when they are trained on. The weights may change during a
request; each token records the version that sampled it.
"""

from __future__ import annotations

from grpo import GRPOConfig, launch, main

if __name__ == "__main__":
    launch(main, GRPOConfig, "../config/grpo-async.yaml")

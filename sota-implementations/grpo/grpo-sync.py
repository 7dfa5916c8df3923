"""GRPO, synchronous: generate a batch, train on it, hand the new weights to the engine, again. See `grpo.py`."""

from __future__ import annotations

from grpo import GRPOConfig, launch, main

if __name__ == "__main__":
    launch(main, GRPOConfig, "../config/grpo.yaml")

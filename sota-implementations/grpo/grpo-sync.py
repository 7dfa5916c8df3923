"""Synchronous GRPO: generate a batch, train on it, send the new weights to the engine, repeat. See `grpo.py`."""

from __future__ import annotations

from grpo import GRPOConfig, launch, main

if __name__ == "__main__":
    launch(main, GRPOConfig, "../config/grpo.yaml")

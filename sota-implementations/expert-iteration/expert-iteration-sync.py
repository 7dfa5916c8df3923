"""Synchronous expert iteration: sample, keep the best answers, train on them, repeat. See `expert_iteration.py`."""

from __future__ import annotations

from expert_iteration import ExpertIterationConfig, launch, main

if __name__ == "__main__":
    launch(main, ExpertIterationConfig, "../config/expert-iteration.yaml")

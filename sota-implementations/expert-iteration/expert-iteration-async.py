"""Expert iteration with a buffer that is filled in the background during training. See `expert_iteration.py`."""

from __future__ import annotations

from expert_iteration import ExpertIterationConfig, launch, main

if __name__ == "__main__":
    launch(main, ExpertIterationConfig, "../config/expert-iteration-async.yaml")

"""GRPO, asynchronous: the engine generates the next batches while this process trains on one.

Groups are at most `collect.max_staleness` versions old when they are trained on; weights change under requests in
flight, and every token knows the version that sampled it.

python sota-implementations/grpo/grpo-async.py                             # the demo, overlapped
python sota-implementations/grpo/grpo-async.py task=gsm8k hardware=gpu8 collect.max_staleness=2
python sota-implementations/grpo/grpo-async.py task=gsm8k hardware=gpu8 dry_run=true  # does it hold together?
python sota-implementations/grpo/grpo-async.py run.path=runs/mine resume=true
"""

from __future__ import annotations

import os

# Before torch: idle threads that spin would take the engine's cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import hydra
from grpo_run import make_run
from omegaconf import DictConfig


@hydra.main(config_path="../config", config_name="grpo-async", version_base=None)
def main(cfg: DictConfig) -> None:
    """Set up, train, report."""
    with make_run(cfg) as run:
        run.execute()


if __name__ == "__main__":
    main()

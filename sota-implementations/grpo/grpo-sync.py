"""GRPO, synchronous: generate a batch, train on it, hand the new weights to the engine, again.

python sota-implementations/grpo/grpo-sync.py                              # the demo
python sota-implementations/grpo/grpo-sync.py task=gsm8k hardware=gpu1     # another task on other hardware
python sota-implementations/grpo/grpo-sync.py task=gsm8k hardware=gpu1 dry_run=true   # does it hold together?
python sota-implementations/grpo/grpo-sync.py run.path=runs/mine resume=true
"""

from __future__ import annotations

import os

# Before torch: idle threads that spin would take the engine's cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import hydra
from grpo_run import make_run
from omegaconf import DictConfig


@hydra.main(config_path="../config", config_name="grpo-sync", version_base=None)
def main(cfg: DictConfig) -> None:
    """Set up, train, report."""
    with make_run(cfg) as run:
        run.execute()


if __name__ == "__main__":
    main()

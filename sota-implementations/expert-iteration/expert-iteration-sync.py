"""Expert iteration: sample, keep the best answers of each prompt, learn them by supervised training, again.

python sota-implementations/expert-iteration/expert-iteration-sync.py            # one-digit sums, on two cores
python sota-implementations/expert-iteration/expert-iteration-sync.py task=gsm8k hardware=gpu1
python sota-implementations/expert-iteration/expert-iteration-sync.py run.path=runs/mine resume=true
"""

from __future__ import annotations

import os

# Before torch: idle threads that spin would take the engine's cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import hydra
from expert_iteration_run import make_run
from omegaconf import DictConfig


@hydra.main(config_path="../config", config_name="expert-iteration-sync", version_base=None)
def main(cfg: DictConfig) -> None:
    """Set up, train, report."""
    with make_run(cfg) as run:
        run.execute()


if __name__ == "__main__":
    main()

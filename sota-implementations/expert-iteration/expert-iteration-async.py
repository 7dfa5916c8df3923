"""Expert iteration, asynchronous: a buffer of best answers is filled in the background while the model learns from it.

A step waits only when the buffer's rows were learned `train.max_reuse` times: where no new batch is ready it learns
from what was kept.

python sota-implementations/expert-iteration/expert-iteration-async.py            # one-digit sums, on two cores
python sota-implementations/expert-iteration/expert-iteration-async.py task=gsm8k hardware=gpu8
python sota-implementations/expert-iteration/expert-iteration-async.py run.path=runs/mine resume=true
"""

from __future__ import annotations

import os

# Before torch: idle threads that spin would take the engine's cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import hydra
from expert_iteration_run import make_run
from omegaconf import DictConfig


@hydra.main(config_path="../config", config_name="expert-iteration-async", version_base=None)
def main(cfg: DictConfig) -> None:
    """Set up, train, report."""
    with make_run(cfg) as run:
        run.execute()


if __name__ == "__main__":
    main()

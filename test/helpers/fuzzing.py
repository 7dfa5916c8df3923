"""How long a test searches at random: a few seeds in the suite, minutes of them when asked.

`LLMRL_FUZZ_MINUTES=60 pytest --timeout=0 -s test/test_foo.py -k random` lets each random search run for an hour, from
the seed in `LLMRL_FUZZ_SEED` (0 by default), and prints how many seeds it has tried.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator


def fuzz_seeds(num_seeds: int) -> Iterator[int]:
    """Seeds to try: `num_seeds` of them, or as many as fit into `LLMRL_FUZZ_MINUTES`."""
    first = int(os.environ.get("LLMRL_FUZZ_SEED", "0"))
    minutes = os.environ.get("LLMRL_FUZZ_MINUTES")
    if minutes is None:
        yield from range(first, first + num_seeds)
        return
    deadline = time.monotonic() + 60 * float(minutes)
    seed = first
    while time.monotonic() < deadline:
        yield seed
        seed += 1
    print(f"tried seeds {first} to {seed - 1}")

"""`follow`: rewrites a page while its runs are running."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmrl.runs.folder_lock import is_in_use
from llmrl.viewer.run_data import read_run
from llmrl.viewer.write_page import write_page

# Maximum share of time spent on writing, because the run needs the processor.
_MAX_SHARE = 0.1


def follow(
    runs: Sequence[str | Path], path: str | Path, *, max_rollouts: int | None = None, interval: float = 2.0
) -> Iterator[tuple[Path, bool]]:
    """Write the page, and rewrite it whenever a run has logged more, until no run is running.

    Yields the path, and whether a run is running, after each write. Raises FileNotFoundError if a folder holds no run.

    Args:
        max_rollouts: number of the last rollouts of each run to show; None shows all.
        interval: minimum seconds between checks; longer if writing is slow.
    """
    while True:
        seen = [_modified(run) for run in runs]
        started = time.perf_counter()
        read = [read_run(run, max_rollouts=max_rollouts) for run in runs]
        is_live = any(run.is_running for run in read)
        yield write_page(read, path), is_live
        if not is_live:
            return
        time.sleep(max(interval, (time.perf_counter() - started) / _MAX_SHARE))
        while seen == [_modified(run) for run in runs]:
            time.sleep(interval)


def _modified(run: str | Path) -> tuple[float, ...]:
    """Return the modification times of the files that a page shows, and whether the run is running."""
    names = ("metrics.csv", "rollouts.jsonl", "health.jsonl", "summary.json")
    times = [path.stat().st_mtime if (path := Path(run, name)).exists() else 0.0 for name in names]
    return (*times, float(is_in_use(Path(run))))

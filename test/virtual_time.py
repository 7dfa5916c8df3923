"""An event loop on which nobody waits: the one that the benchmarks simulate with."""

from __future__ import annotations

from benchmarks.virtual_time import VirtualTimeLoop, run

__all__ = ["VirtualTimeLoop", "run"]

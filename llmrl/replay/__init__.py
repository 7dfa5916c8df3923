"""Replay of recorded runs: compute steps again, also changed, rescore, compare runs."""

import os

# Set before torch is imported: idle OpenMP threads that spin take cores from the threads that compute.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

"""Replay of recorded runs: computes steps again, also with changes, rescores rollouts, and compares two runs."""

import os

# Set before torch is imported: idle OpenMP threads that spin take cores from the threads that compute.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

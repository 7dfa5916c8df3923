"""Ask a recorded run: compute a step again, with one thing changed, or compare two runs."""

import os

# Before torch: idle threads that spin would take the cores of those that compute.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

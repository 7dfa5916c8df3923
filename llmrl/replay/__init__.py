"""Ask a recorded run: compute a step again, with one thing changed, or compare two runs."""

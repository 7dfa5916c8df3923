"""Measurements beside a peer. `python -m benchmarks list` shows them."""

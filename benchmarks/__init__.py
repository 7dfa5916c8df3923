"""Measurements of llmrl and its peers. `python -m benchmarks list` shows them."""

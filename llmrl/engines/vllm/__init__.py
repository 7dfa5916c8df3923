"""vLLM engines, each in its own process."""

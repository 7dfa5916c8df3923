"""Inference with a transformers model in this process."""

"""Losses of training batches."""

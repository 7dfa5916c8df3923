"""Losses: what a batch is trained on."""

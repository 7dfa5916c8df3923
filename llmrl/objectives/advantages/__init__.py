"""Advantages of rollouts relative to their groups."""

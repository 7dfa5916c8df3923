"""Advantages: rollouts compared within their groups."""

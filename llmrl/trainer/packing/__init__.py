"""Rows without padding: how they are laid out, and how their tokens see each other."""

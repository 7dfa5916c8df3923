"""Configuration of a run: its sections, the ranges of its entries, and the start of a script."""

"""The configuration of a run: its sections, their ranges, and how a command starts from it."""

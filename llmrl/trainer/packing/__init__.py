"""Packing of rows without padding, and attention over packed rows."""

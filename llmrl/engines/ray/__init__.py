"""Engines in Ray actors."""

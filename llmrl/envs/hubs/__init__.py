"""Adapters to environments that other projects provide."""

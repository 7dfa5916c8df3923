"""Engines behind OpenAI-compatible servers."""

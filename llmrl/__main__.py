"""`python -m llmrl`: the command line where its script is not on the path."""

from __future__ import annotations

from llmrl.cli.app import app

if __name__ == "__main__":  # engines are processes that import the main module again
    app()

"""`python -m llmrl`: the command line, for environments in which the script `llmrl` is not on the path."""

from __future__ import annotations

from llmrl.cli.app import app

if __name__ == "__main__":  # processes of engines import the main module again
    app()

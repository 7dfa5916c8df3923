"""Looking at a run: one self-contained page, or a table on the terminal."""

from llmrl.runs.viewer.page import write_page
from llmrl.runs.viewer.run_data import RunData, read_run
from llmrl.runs.viewer.terminal import print_run

__all__ = ["RunData", "print_run", "read_run", "write_page"]

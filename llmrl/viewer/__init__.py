"""Looking at a run: one self-contained page, or a table on the terminal."""

from llmrl.viewer.page import write_page
from llmrl.viewer.run_data import RunData, read_run
from llmrl.viewer.terminal import print_run

__all__ = ["RunData", "print_run", "read_run", "write_page"]

"""Viewers of runs: a self-contained HTML page, and a table on the terminal."""

from llmrl.viewer.follow import follow
from llmrl.viewer.run_data import RunData, last_run, read_run
from llmrl.viewer.terminal import print_run
from llmrl.viewer.write_page import RunPage, write_page

__all__ = ["RunData", "RunPage", "follow", "last_run", "print_run", "read_run", "write_page"]

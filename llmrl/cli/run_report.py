"""`llmrl train --json`: the script, and the run as one JSON object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from llmrl.cli.options import print_json
from llmrl.cli.train import MODULE
from llmrl.cli.view import report_of
from llmrl.config.launch import run_script
from llmrl.runs.run_folder import holds_run
from llmrl.viewer import read_run


def run_and_report(entries: Sequence[str]) -> int:
    """Run the script with its output on stderr, print the run as one JSON object, and return the exit status."""
    given = [entry for entry in entries if entry.lstrip("+").startswith("run.path=")]
    if not given:
        given = [time.strftime("run.path=runs/train-%Y%m%d-%H%M%S")]
        entries = [*entries, *given]
    path = Path(given[-1].partition("=")[2].strip("'"))
    status = run_script(["-m", MODULE, *entries])
    if holds_run(path):
        print_json(report_of(read_run(path, max_rollouts=1), path))
    return status

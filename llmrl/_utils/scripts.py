"""`run_script`: runs a training script as a program of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence


def run_script(arguments: Sequence[str]) -> int:
    """Run Python with arguments, its output on standard error, and return the exit status.

    Ctrl-C reaches only the script, which ends its run; this process waits for it. Call it from the main thread.
    """
    with subprocess.Popen([sys.executable, *arguments], stdout=sys.stderr.fileno()) as script:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return script.wait()
        finally:
            signal.signal(signal.SIGINT, before)

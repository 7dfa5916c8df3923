"""Child process that compares mathematical answers; run by path, so that it imports nothing of ours.

Writes a line when it is ready; then reads a JSON list `[reference, given]` a line, writes `true` or `false` a line. It
is a process of its own because math-verify limits its time with signals, which only work in a main thread, and because
an answer can be an expression that never ends.
"""

from __future__ import annotations

import json
import logging
import sys


def main() -> None:
    """Serve until the input ends."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    answers = sys.stdout
    sys.stdout = sys.stderr
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        reference, given = (f"${text}$" if "$" not in text else text for text in json.loads(line))
        try:
            is_right = bool(
                verify(parse(reference, parsing_timeout=2), parse(given, parsing_timeout=2), timeout_seconds=2)
            )
        except Exception:  # an answer that cannot be parsed or compared is wrong
            is_right = False
        answers.write(f"{json.dumps(is_right)}\n")
        answers.flush()


if __name__ == "__main__":
    main()

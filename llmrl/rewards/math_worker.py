"""Child process that compares mathematical answers; run by path, without imports from llmrl.

It writes "ready", then reads a JSON list `[reference, given]` per line and writes `true` or `false`. It is a process
because math-verify's timeouts use signals, which need a main thread, and because evaluation may never end.
"""

from __future__ import annotations

import json
import logging
import sys


def main() -> None:
    """Answer requests until the input ends."""
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

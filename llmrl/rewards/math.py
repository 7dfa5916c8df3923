"""Scoring of competition mathematics (Hendrycks et al. 2021, https://arxiv.org/abs/2103.03874) with math-verify."""

from __future__ import annotations

import atexit
import functools
import json
import select
import subprocess
import sys
import threading
from pathlib import Path

from llmrl._utils.imports import require
from llmrl.rewards.answers import extract_answer

_MAX_CHARACTERS = 500
_TIMEOUT_SECONDS = 30.0
_START_SECONDS = 120.0
_NUM_REMEMBERED = 4096
_WORKER = Path(__file__).with_name("math_worker.py")


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`, or None.

    Example:
        >>> boxed_answer(r"So $x = \boxed{\frac{1}{2}}$.")
        '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : end].strip()
    return None


class MathVerifier:
    r"""Compares answers in a child process, which is started on demand and restarted if it hangs."""

    def __init__(self, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        # The answers of a group are often equal, and each is checked twice: for the reward and for `success`.
        self._asked_once = functools.lru_cache(maxsize=_NUM_REMEMBERED)(self._asked)
        self._process: subprocess.Popen[str] | None = None

    def is_equal(self, reference: str, given: str) -> bool:
        """Return whether two LaTeX or plain expressions have equal values; False if unparsable or on a timeout.

        Raises:
            MissingExtraError: if math-verify is not installed.
            RuntimeError: if the child process does not start, or exits twice for the same answer.
        """
        if _stripped(reference) == _stripped(given):
            return True
        if max(len(reference), len(given)) > _MAX_CHARACTERS:
            return False
        with self._lock:
            return self._asked_once(reference, given)

    def _asked(self, reference: str, given: str) -> bool:
        question = json.dumps([reference, given]) + "\n"
        for _ in range(2):  # the process may have ended for another reason, such as memory
            try:
                process = self._running()
                assert process.stdin is not None
                process.stdin.write(question)
                process.stdin.flush()
                line = self._line(self.timeout_seconds)
            except BrokenPipeError:
                line = ""
            except BaseException:  # such as KeyboardInterrupt: the next question would read this one's answer
                self._stop()
                raise
            if line:
                return line.strip() == "true"
            self._stop()
            if line is None:  # timed out
                return False
        raise RuntimeError(f"math-verify's process ended twice while it compared {given!r:.80} with {reference!r:.80}.")

    def _line(self, timeout_seconds: float) -> str | None:
        """Return the process's next line; "" if it has exited, None on a timeout."""
        assert self._process is not None and self._process.stdout is not None
        is_ready = select.select([self._process.stdout], [], [], timeout_seconds)[0]
        return self._process.stdout.readline() if is_ready else None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            require("math_verify", extra="envs")
            # -I keeps the worker's folder off the path, where our math.py would shadow Python's.
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            atexit.register(self._stop)
            if self._line(_START_SECONDS) != "ready\n":
                self._stop()
                raise RuntimeError(f"math-verify's process did not start; {sys.executable} -I {_WORKER} shows why.")
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
            atexit.unregister(self._stop)


def _stripped(text: str) -> str:
    return "".join(text.replace("$", "").split())


_verifier = MathVerifier()


def is_math_right(completion: str, answer: str, *, reasoning: bool = False) -> bool:
    r"""Return whether a completion's answer equals the reference.

    The answer is the last `\boxed{…}`; without one, it is the last line, or all of `<answer>` with `reasoning`.

    Example:
        >>> is_math_right(r"Hence $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"), is_math_right("I cannot.", "2")
        (True, False)
    """
    given = extract_answer(completion, reasoning=reasoning)
    if given is None:
        return False
    return _verifier.is_equal(answer, boxed_answer(given) or (given if reasoning else given.splitlines()[-1]))

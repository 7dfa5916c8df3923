"""`WorkerProcess` and `Workers`: programs in another virtual environment that answer requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from llmrl.sandbox.frames import BrokenFrame, FrameBuffer, encode
from llmrl.sandbox.reaper import reaping

_PROGRAM = Path(__file__).with_name("worker_program.py")
_MAX_ANSWER_BYTES = 64 << 20
_MAX_OUTPUT_BYTES = 16 << 10
_TERM_SECONDS = 2.0
_CANCEL_SECONDS = 10.0
"""Time in which a worker must answer after a request was cancelled; otherwise it is ended."""
_LEFT_OUT = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")


Answer = dict[str, Any]
"""Answer of a worker, a JSON object."""


class WorkerDied(RuntimeError):
    """The worker ended, or was ended, before it answered."""


class WorkerError(RuntimeError):
    """The worker answered with an error."""


class Request(Future[Answer]):
    """A request that was sent, as a future of its answer."""

    number: int


class Workers:
    """A worker process for a player; a worker that died is replaced at the next use.

    Args:
        python: function that returns the interpreter of the worker's virtual environment, and may create it first.
        player: name of the file that `worker_program.py` runs, in its folder.
        opening: arguments of the request `open`.
        open_seconds: time limit of `open`.
    """

    def __init__(
        self, python: Callable[[], Path], player: str, opening: Mapping[str, object], open_seconds: float
    ) -> None:
        self._python = python
        self._player = player
        self._opening = opening
        self.open_seconds = open_seconds
        self._worker: WorkerProcess | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Workers], tuple[object, ...]]:
        # A copy in another process starts its own worker.
        return Workers, (self._python, self._player, self._opening, self.open_seconds)

    def current(self) -> WorkerProcess:
        """Return the worker; start it and wait until it is open, if needed."""
        with self._lock:
            if self._worker is None or not self._worker.is_alive:
                words = [str(_PROGRAM), str(_PROGRAM.with_name(self._player))]
                self._worker = WorkerProcess(self._python(), words, self._opening, open_seconds=self.open_seconds)
            return self._worker

    async def ask(self, method: str, arguments: Mapping[str, object]) -> Answer:
        """Return the answer to a request; raise WorkerError or WorkerDied. Cancelling this cancels the request."""
        worker = await asyncio.to_thread(self.current)
        request = await asyncio.to_thread(worker.ask, method, arguments)
        try:
            return await asyncio.wrap_future(request)
        except asyncio.CancelledError:
            worker.cancel(request)
            raise

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()


class WorkerProcess:
    """A process that answers requests concurrently; its descendants are ended with it.

    Its last argument is the descriptor of a socket, over which it receives `{"number", "method", "arguments"}` and
    answers `{"number", "result" | "error", "traceback"?}` (`llmrl.sandbox.frames`). The first request is `open`. If the
    process dies, the error contains the end of its standard output and error.

    Args:
        python: interpreter of its virtual environment; the interpreter's folder comes first in the worker's `PATH`.
        words: arguments of the interpreter.
        opening: arguments of the request `open`.
        open_seconds: time limit of `open`.

    Raises WorkerError or WorkerDied if it does not open.
    """

    def __init__(
        self, python: Path, words: Sequence[str], opening: Mapping[str, object], *, open_seconds: float
    ) -> None:
        self._numbers = itertools.count()
        self._pending: dict[int, Request] = {}
        self._lock = threading.Lock()
        self._output = b""
        self._reason = ""
        self._channel, inner = socket.socketpair()
        end, self._ending = os.pipe()
        command = [str(python), "-I", *words, str(inner.fileno())]
        variables = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
        variables["PATH"] = f"{python.parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
        try:
            self._process = subprocess.Popen(
                reaping(command, end=end, term_seconds=_TERM_SECONDS),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(end, inner.fileno()),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._ending)
            self._channel.close()
            raise
        finally:
            os.close(end)
            inner.close()
        self._finalizer = weakref.finalize(self, _end, self._process, self._ending)
        assert self._process.stdout is not None
        me = weakref.ref(self)
        self._drain = threading.Thread(target=_drain, args=(me, self._process.stdout.fileno()), daemon=True)
        self._drain.start()
        threading.Thread(target=_receive, args=(me, self._channel), daemon=True).start()
        try:
            self.opened: Answer = self.ask("open", opening).result(open_seconds)
            """Answer to `open`."""
        except FutureTimeoutError:
            raise WorkerDied(f"the worker did not open within {open_seconds:g} s.{self._said()}") from None
        except WorkerError as error:
            raise WorkerError(f"{error}{self._said()}") from None
        finally:
            if not hasattr(self, "opened"):
                self.close()

    @property
    def is_alive(self) -> bool:
        """Whether the worker accepts requests."""
        return not self._reason

    def ask(self, method: str, arguments: Mapping[str, object]) -> Request:
        """Send a request, the result of which may raise WorkerError or WorkerDied; raise WorkerDied after the end."""
        request = Request()
        request.number = next(self._numbers)
        with self._lock:
            if self._reason:
                raise WorkerDied(self._reason)
            self._pending[request.number] = request
        self._send({"number": request.number, "method": method, "arguments": dict(arguments)})
        return request

    def cancel(self, request: Request) -> None:
        """Cancel a request; a worker that does not react in time is ended."""
        stopped = Request()
        with self._lock:
            if self._pending.get(request.number) is not request:
                return  # answered already
            self._pending[request.number] = stopped
        self._send({"number": request.number, "method": "cancel"})

        def check() -> None:
            if not stopped.done():
                self.fail(f"the worker did not react within {_CANCEL_SECONDS:g} s when a request was cancelled.")

        timer = threading.Timer(_CANCEL_SECONDS, check)
        timer.daemon = True
        timer.start()
        stopped.add_done_callback(lambda _: timer.cancel())

    def fail(self, reason: str) -> None:
        """End the process, and fail all requests with a reason."""
        with self._lock:
            if self._reason:
                return
            self._reason = f"{reason}{self._said()}"
            pending, self._pending = list(self._pending.values()), {}
        for request in pending:
            with contextlib.suppress(InvalidStateError):
                request.set_exception(WorkerDied(self._reason))
        self._finalizer()
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process and its descendants; may be called repeatedly."""
        self.fail("the worker was closed.")

    def _send(self, message: object) -> None:
        try:
            with self._lock:
                self._channel.sendall(encode(message))
        except OSError:  # the reading thread handles the worker's end
            pass

    def _said(self) -> str:
        text = self._output.decode(errors="replace").strip()
        return f" Its output ends with:\n{text[-2000:]}" if text else ""

    def _received(self, answer: Answer) -> None:
        with self._lock:
            request = self._pending.pop(answer["number"], None)
        if request is None:
            return
        with contextlib.suppress(InvalidStateError):
            if "error" in answer:
                error = WorkerError(answer["error"])
                error.add_note(answer.get("traceback", ""))
                request.set_exception(error)
            else:
                request.set_result(answer["result"])


def _drain(me: weakref.ref[WorkerProcess], descriptor: int) -> None:
    while data := os.read(descriptor, 1 << 16):
        if (worker := me()) is None:
            return
        worker._output = (worker._output + data)[-_MAX_OUTPUT_BYTES:]
        del worker


def _receive(me: weakref.ref[WorkerProcess], channel: socket.socket) -> None:
    buffer = FrameBuffer(_MAX_ANSWER_BYTES)
    reason = ""
    while not reason:
        data = b""
        answers: list[Answer] = []
        try:
            data = channel.recv(1 << 20)
            answers = list(buffer.add(data))
        except BrokenFrame as error:
            reason = f"the worker sent {error}."
        except OSError:  # the channel was closed
            pass
        worker = me()
        if worker is None:
            return
        for answer in answers:
            worker._received(answer)
        if not data:
            # Wait for the end of the process, and read the rest of its output.
            code = worker._process.wait()
            worker._drain.join(_TERM_SECONDS)
            reason = f"the worker ended with exit code {code}."
            if code < 0:
                reason = f"the worker ended by {signal.Signals(-code).name}."
        if reason:
            worker.fail(reason)
        del worker


def _end(process: subprocess.Popen[bytes], ending: int) -> None:
    with contextlib.suppress(OSError):
        os.write(ending, b"x")
    os.close(ending)
    threading.Thread(target=process.wait, daemon=True).start()  # so that no zombie is left

"""The confined process: runs pieces of code in one namespace. Standard library only."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import resource
import socket
import sys
import traceback
import types

from llmrl.sandbox import frames

_FILE_NAME = "<code>"


def serve(channel: socket.socket, *, cpu_seconds: float) -> None:
    """Run the code of each request, and answer with the result, until the channel closes."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = [""]
    this_process = os.getpid()
    # Copies, because code may close or replace its output.
    outputs = [os.dup(1), os.dup(2)]
    while True:
        try:
            request = frames.receive(channel)
        except (frames.BrokenFrame, OSError):
            return
        if request is None:
            return
        _open_outputs(outputs)
        _limit_cpu(cpu_seconds)
        answer = _run(request["code"], main.__dict__)
        if os.getpid() != this_process:
            os._exit(0)  # the code has forked, and this is the child
        with contextlib.suppress(OSError):
            channel.sendall(frames.encode({"number": request["number"], **answer}))


def _open_outputs(outputs: list[int]) -> None:
    for number, (output, name) in enumerate(zip(outputs, ("stdout", "stderr"), strict=True), 1):
        os.dup2(output, number)
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _limit_cpu(seconds: float) -> None:
    # The kernel counts from the start of the process: add the time used so far, so that each piece
    # of code has the full limit. The supervisor limits wall time.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = int(usage.ru_utime + usage.ru_stime + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _run(code: str, namespace: dict[str, object]) -> dict[str, int | bool | None]:
    """Run code, and return its exit code and whether it called `sys.exit`; tracebacks go to standard error."""
    exit_code: int | None = 0
    is_exit = False
    try:
        linecache.cache[_FILE_NAME] = (len(code), None, io.StringIO(code, None).readlines(), _FILE_NAME)
        exec(compile(code, _FILE_NAME, "exec"), namespace)
    except SystemExit as exit_:
        is_exit = True
        exit_code = _exit_code(exit_.code)
    except BaseException as error:
        exit_code = 1
        _print_error(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    return {"returncode": exit_code, "is_exit": is_exit}


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(BaseException):
        print(code, file=sys.stderr)
    return 1


def _print_error(error: BaseException) -> None:
    try:
        # Leave out the first frame, which is that of `_run`.
        frame = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, frame))
    except BaseException:
        text = f"{type(error).__name__}\n"
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    data = text.encode("utf-8", "backslashreplace")
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
        os.write(2, data[:1_000_000])

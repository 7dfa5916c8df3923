"""What a command or a file in a conversation's sandbox can do to the one who asks: nothing but fail."""

from __future__ import annotations

import asyncio
import time

import pytest
from cages import HOSTILE
from waiting import patient

from llmrl.sandbox.confined import ConfinedSandbox
from llmrl.sandbox.launch import LEVELS, IsolationError, PythonLimits
from llmrl.sandbox.service import PythonExecutorService
from llmrl.tools.sandboxes import ConversationSandbox
from llmrl.tools.tool import ToolError

pytestmark = pytest.mark.usefixtures("own_programs")
LIMITS = PythonLimits(file_bytes=1 << 20)


@pytest.fixture(scope="module", params=LEVELS)
def service(request):
    try:
        service = PythonExecutorService(isolation=request.param, timeout=60, num_ready=1, limits=LIMITS)
    except IsolationError as error:
        pytest.skip(str(error))
    yield service
    service.close()


@pytest.fixture
def ask(service):
    """Calls a method of a conversation's sandbox; afterwards the sandbox has its files still."""
    sandbox = ConfinedSandbox(service)
    with asyncio.Runner() as runner:

        def ask(name, *arguments, **named):
            return runner.run(getattr(sandbox, name)(*arguments, **named))

        ask("start")
        ask("put", "kept", b"1")
        yield ask
        assert ask("get", "kept") == b"1"
        ask("close")


def sh(ask, command, **named):
    return ask("run", ["sh", "-c", command], **named)


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e", "\r", "\ufeff", "\0"])
def test_marks_that_unicode_calls_ends_of_lines_are_output(ask, mark):
    told = sh(ask, "cat; cat kept >&2", stdin=f"a{mark}b\n{mark}".encode())
    assert (told.exit_code, told.stdout, told.stderr) == (0, f"a{mark}b\n{mark}", "1")
    name = f"a{mark}b"
    if mark != "\0":
        ask("put", name, b"2")
        assert ask("get", name) == b"2"
        with pytest.raises(FileNotFoundError):
            ask("get", f"{name}{mark}")
        assert ask("run", [name]).exit_code == 127


def test_a_child_that_keeps_the_output_ends_neither_the_command_nor_the_sandbox(ask):
    started = time.monotonic()
    told = sh(ask, f"setsid sh -c 'sleep 600 # {HOSTILE}' & echo said", timeout=300)
    assert (told.exit_code, told.stdout, told.timed_out) == (0, "said\n", False)

    def attempt(limit):
        told = sh(ask, f"setsid sh -c 'echo on; sleep 600 # {HOSTILE}' & echo said; sleep 600", timeout=limit)
        return told if len(told.stdout.split()) == 2 else None

    told = patient(attempt)
    assert told.timed_out and sorted(told.stdout.split()) == ["on", "said"]
    assert time.monotonic() - started < 200
    assert sh(ask, f"ps ax 2>/dev/null | grep '[h]{HOSTILE[1:]}'").stdout == ""


def test_a_flood_of_output_keeps_its_ends_and_the_sandbox(ask):
    told = sh(ask, "echo first; yes | head -c 300000000; echo last; yes error | head -c 100000000 >&2", timeout=100)
    assert told.exit_code == 0 and told.stdout.startswith("first\ny\n") and told.stdout.endswith("y\nlast\n")
    assert len(told.stdout) + len(told.stderr) < LIMITS.output_bytes and "bytes left out" in told.stderr
    told = patient(lambda limit: told if (told := sh(ask, "yes", timeout=limit)).stdout else None)
    assert told.timed_out and told.stdout.startswith("y\ny\n")
    told = sh(ask, "head -c 2000000 /dev/zero")
    assert told.exit_code == 0 and told.stdout.startswith("\0\0")


def test_input_that_no_process_reads_is_thrown_away(ask):
    assert ask("run", ["true"], stdin=bytes(1 << 20)).exit_code == 0
    told = sh(ask, "exec <&-; exec >&- 2>&-; sleep 0.2; exit 5", stdin=bytes(1 << 20))
    assert told.exit_code == 5 and not told.timed_out
    told = sh(ask, "exec >&- 2>&-; wc -c > size", stdin=bytes(1 << 20))
    assert told.exit_code == 0 and ask("get", "size").split() == [b"1048576"]


def test_a_forged_answer_is_a_result(ask):
    for answer in ("x", "[1]", '[0, "", "", 1]', "[" * 3000):
        told = sh(ask, f"(sleep 0.3; printf '\\n%s\\n' '{answer}' > /proc/$PPID/fd/1) 2>/dev/null & true")
        assert isinstance(told.exit_code, int) and isinstance(told.stdout, str)


MAKE = """
import os, socket, sys
os.mkfifo('pipe'); os.mkdir('folder'); os.symlink('/etc/passwd', 'link'); os.symlink('/dev/zero', 'endless')
os.symlink('..', 'up'); os.symlink('loop', 'loop'); os.symlink('pipe', 'to-pipe'); os.mknod('socket', 0o140600)
os.symlink('/proc', 'proc')
"""
REFUSED = (
    "pipe", "to-pipe", "socket", "folder", "link", "endless", "up", "loop", ".", "/", "/dev/zero", "/dev/urandom",
    "/dev/stdin", "/dev/fd/0", "/proc/self/mem", "/proc/self/fd/0", "/proc/kmsg", "/proc/self/environ", "/etc/passwd",
    "proc/self/maps", "up/../etc/passwd", "../../../../../../etc/hostname", "/sys/kernel/notes", "",
)  # fmt: skip


def test_files_without_an_end_or_outside_are_refused_at_once(ask):
    assert ask("run", ["python3", "-c", MAKE]).exit_code == 0
    started = time.monotonic()
    for path in REFUSED:
        with pytest.raises(OSError, match=r"outside|leads out|regular|folder|loop|No such|symbolic|device"):
            ask("get", path)
        if path != "/dev/stdin":
            with pytest.raises(OSError):
                ask("put", path, b"2")
    assert time.monotonic() - started < 60
    sh(ask, "ln -s kept inner")
    assert ask("get", "inner") == b"1"


def test_the_tools_say_what_they_do_not_take(service):
    conversation = ConversationSandbox(ConfinedSandbox(service))
    with asyncio.Runner() as runner:
        runner.run(conversation.reset())
        for path in ("/dev/zero", "/proc/self/maps"):
            with pytest.raises(ToolError, match="leads out of the sandbox's folder"):
                runner.run(conversation.file_read(path))
        runner.run(conversation.shell("mkfifo pipe"))
        with pytest.raises(ToolError, match="not a regular file"):
            runner.run(conversation.file_read("pipe"))
        for timeout in (float("nan"), -1.0, 0.0):
            with pytest.raises(ToolError, match="positive number of seconds, got"):
                runner.run(conversation.shell("true", timeout))
        assert "pipe" in runner.run(conversation.shell("ls", float("inf"))).text
        runner.run(conversation.close())

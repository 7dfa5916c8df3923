"""Supervises one confined interpreter: its start, limits and end. Standard library only.

The supervisor is trusted, the interpreter is not: only the supervisor has the service's socket.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import signal
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrl.sandbox import frames, interpreter, kernel, system_calls


@dataclass(frozen=True)
class Confinement:
    """Limits and confinement of one interpreter."""

    folder: str
    """Home and working directory: initially empty, and removed at the end."""
    readable: tuple[str, ...]
    """Files and folders that the interpreter may read, if the level can enforce it."""
    user: int | None
    """Unprivileged user that the interpreter becomes; None if it keeps the supervisor's user."""
    has_own_processes: bool
    """Whether the interpreter has its own process namespace."""
    is_landlocked: bool
    """Whether Landlock confines the interpreter instead of namespaces."""
    is_python_hidden: bool
    """Whether only root can read Python's own files."""
    memory_bytes: int
    file_bytes: int
    num_processes: int
    num_open_files: int
    cpu_seconds: float
    output_bytes: int


# The kernel counts pending signals per user, including timers.
_MAX_PENDING_SIGNALS = 256
# Time limit in seconds for ending processes that start others while they are killed.
_CATCH_SECONDS = 2.0
# Answers contain only the result; output is sent separately.
_MAX_ANSWER_BYTES = 1 << 10


class KeptOutput:
    """The first and the last bytes that were read from a pipe."""

    def __init__(self, num_kept: int) -> None:
        self._num_each = max(1, num_kept // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._num_seen = 0

    def read(self, pipe: int) -> bytes | None:
        """Read from a pipe, and return the data: empty at the pipe's end, None if there is none yet."""
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return None
        self._num_seen += len(data)
        room = self._num_each - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 4 * self._num_each:
            del self._tail[: -self._num_each]
        return data

    def drain(self, pipe: int) -> None:
        """Read what is left in a pipe: at most 1 MiB, because another process may still write."""
        for _ in range(16):
            if not self.read(pipe):
                break

    def text(self) -> str:
        """Return the text, with a mark for omitted bytes."""
        del self._tail[: -self._num_each]
        mark = b""
        if num_lost := self._num_seen - len(self._head) - len(self._tail):
            mark = f"\n[… {num_lost} bytes left out …]\n".encode()
        return (self._head + mark + self._tail).decode("utf-8", "replace")


class Supervisor:
    """Serves one socket with one interpreter, until either ends."""

    def __init__(self, service: socket.socket, confinement: Confinement) -> None:
        self.service = service
        self.confinement = confinement
        self._number = 0
        """Random number of the current request, so that code cannot answer the next one in advance."""
        self._start_interpreter()

    def _start_interpreter(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._incoming = frames.FrameBuffer(_MAX_ANSWER_BYTES)
        self._outputs = [os.pipe(), os.pipe()]
        self._process = os.fork()
        if not self._process:
            try:
                try:
                    channel = self._become_interpreter(theirs)
                except BaseException as error:
                    os.write(2, f"The interpreter could not be confined: {error}\n".encode(errors="replace"))
                else:
                    interpreter.serve(channel, cpu_seconds=self.confinement.cpu_seconds)
                    os._exit(0)
            finally:
                os._exit(70)
        theirs.close()
        for read_end, write_end in self._outputs:
            os.set_blocking(read_end, False)
            os.close(write_end)

    def _become_interpreter(self, channel: socket.socket) -> socket.socket:
        confinement = self.confinement
        self.service.close()
        self._channel.close()
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        for number, (_, write_end) in enumerate(self._outputs, 1):
            os.dup2(write_end, number)
        keep = os.dup2(channel.fileno(), 3)
        os.closerange(4, 4096)
        os.chdir(confinement.folder)
        confine(confinement)
        kernel.set_parent_death_signal(signal.SIGKILL)  # a change of user clears it
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        return socket.socket(fileno=keep)

    def serve(self) -> None:
        """Run requests until the service's socket or the interpreter ends, then end all processes."""
        try:
            kernel.hide_memory()  # code may have the same user, and no filter confines this process
            self.service.sendall(frames.encode({"why": ""}))
            while (request := self._next_request()) is not None:
                answer = self._run(request["code"], request["timeout"])
                self.service.sendall(frames.encode(answer))
                if answer["reason"]:
                    break
        except (frames.BrokenFrame, OSError):
            pass
        finally:
            self.end_all()
            with contextlib.suppress(OSError):
                self.service.shutdown(socket.SHUT_RDWR)
            if not self.confinement.has_own_processes:
                remove_folder(self.confinement.folder)

    def _next_request(self) -> Any:
        # The interpreter is stopped between requests, so that its threads use no CPU time.
        self._signal_interpreter(signal.SIGSTOP)
        request = frames.receive(self.service)
        self._signal_interpreter(signal.SIGCONT)
        return request

    def _signal_interpreter(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, number)

    def _run(self, code: str, timeout: float) -> frames.Answer:
        self._number = int.from_bytes(os.urandom(6))
        kept = [KeptOutput(self.confinement.output_bytes) for _ in self._outputs]
        answer = None
        try:
            self._channel.sendall(frames.encode({"code": code, "number": self._number}))
            answer, reason = self._watch(kept, time.monotonic() + timeout)
        except (frames.BrokenFrame, OSError):
            reason = "died"
        num_left = 0
        if answer is None:
            answer = {"returncode": self._collect_dead(reason), "is_exit": False}
        else:
            num_left, are_caught = self._end_leftovers()
            if not are_caught:
                reason = "died"
                self.end_all()
        for (read_end, _), output in zip(self._outputs, kept, strict=True):
            output.drain(read_end)
        return {
            "returncode": answer["returncode"],
            "is_exit": bool(answer["is_exit"]),
            "reason": reason,
            "num_left_processes": num_left,
            "stdout": kept[0].text(),
            "stderr": kept[1].text(),
        }

    def _watch(self, kept: list[KeptOutput], deadline: float) -> tuple[dict[str, int] | None, str]:
        """Wait for the interpreter's answer, and return it, or the reason why there is none."""
        poller = select.poll()
        channel = self._channel.fileno()
        service = self.service.fileno()
        poller.register(channel, select.POLLIN)
        poller.register(service, select.POLLHUP | select.POLLRDHUP)
        outputs = {read_end: output for (read_end, _), output in zip(self._outputs, kept, strict=True)}
        for read_end in outputs:
            poller.register(read_end, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            for ready, event in poller.poll(max(1, int(1000 * min(left, 3600)))):  # poll takes 2**31 ms at most
                if ready == service:
                    raise OSError("the service is gone")
                if ready == channel:
                    data = self._channel.recv(1 << 16)
                    if not data:
                        return None, "died"
                    for answer in self._incoming.add(data):
                        if is_answer(answer) and answer["number"] == self._number:
                            return answer, ""
                elif not outputs[ready].read(ready) and event & select.POLLHUP:
                    poller.unregister(ready)  # the code has closed it
        return None, "timeout"

    def _collect_dead(self, reason: str) -> int:
        returncode = -int(signal.SIGKILL)
        if reason == "died":
            # The channel closes just before the process can be waited for, unless code closed it.
            for _ in range(50):
                # It is not reaped yet: its id is that of its group.
                ended = os.waitid(os.P_PID, self._process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    break
                time.sleep(0.002)
        self.end_all()
        return returncode

    def _end_leftovers(self) -> tuple[int, bool]:
        """Stop the interpreter, and kill the processes that the code left running.

        Return their number, and whether all have ended.
        """
        # A list misses processes that start while it is read; a signal to a group reaches all of it.
        self._signal_group(signal.SIGSTOP)
        num_ended = 0
        known: set[int] = set()
        deadline = time.monotonic() + _CATCH_SECONDS
        while time.monotonic() < deadline:
            seen = descendants(os.getpid()) - {self._process}
            if has_new := bool(seen - known):
                self._signal_others(signal.SIGSTOP)
                seen |= descendants(os.getpid()) - {self._process}
            num_killed = _kill(seen)
            num_ended = max(num_ended, num_killed)
            _reap(seen)
            if not num_killed and not has_new:  # a process that just ended may have started another
                return num_ended, True
            known |= seen
            time.sleep(0.001)  # large processes take a while to end
        return num_ended, False

    def _signal_group(self, number: int) -> None:
        """Signal the interpreter and all descendants that have not left its process group."""
        with contextlib.suppress(OSError):
            os.killpg(self._process, number)

    def _signal_others(self, number: int) -> None:
        """Signal all processes of the interpreter's own namespace or user at once, if it has either."""
        confinement = self.confinement
        if confinement.has_own_processes:
            with contextlib.suppress(OSError):
                os.kill(-1, number)  # all other processes of the namespace
        elif confinement.user is not None:
            # One signal reaches all processes of the interpreter's user, even those of a fork bomb.
            sender = os.fork()
            if not sender:
                with contextlib.suppress(BaseException):
                    os.setresuid(confinement.user, confinement.user, confinement.user)
                    os.kill(-1, number)
                os._exit(0)
            os.waitpid(sender, 0)

    def end_all(self) -> None:
        """Kill the interpreter and all its descendants."""
        if self._process:
            self._signal_group(signal.SIGKILL)
        self._signal_others(signal.SIGKILL)
        deadline = time.monotonic() + _CATCH_SECONDS
        while (left := descendants(os.getpid())) and time.monotonic() < deadline:
            _kill(left)
            _reap(left)
            time.sleep(0.001)
        self._process = 0


def _kill(processes: set[int]) -> int:
    """Kill the processes that have not ended, and return their number."""
    num_killed = 0
    # The latest first: in a chain of processes that start the next and end, only the latest runs.
    for process in sorted(processes, reverse=True):
        if not is_zombie(process):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
                num_killed += 1
    return num_killed


def _reap(processes: set[int]) -> None:
    """Wait for the processes that have ended and are children of this process."""
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def is_answer(message: object) -> bool:
    """Return whether a message from the interpreter, possibly forged, has the format of an answer.

    Example:
        >>> is_answer({"number": 1, "returncode": 0, "is_exit": False}), is_answer({"number": 1, "returncode": "0"})
        (True, False)
    """
    kinds = {"number": int, "returncode": int, "is_exit": bool}
    return isinstance(message, dict) and all(type(message.get(name)) is kind for name, kind in kinds.items())


def confine(confinement: Confinement) -> None:
    """Permanently give up everything that the confinement does not grant."""
    limits = {
        # With a core-file handler, as on most systems, zero would start it; one byte does not.
        resource.RLIMIT_CORE: 1,
        resource.RLIMIT_AS: confinement.memory_bytes,
        resource.RLIMIT_FSIZE: confinement.file_bytes,
        resource.RLIMIT_NOFILE: confinement.num_open_files,
        resource.RLIMIT_NPROC: confinement.num_processes,
        resource.RLIMIT_SIGPENDING: _MAX_PENDING_SIGNALS,
    }
    is_user_shared = confinement.user is None and not confinement.has_own_processes
    if is_user_shared:
        # The kernel counts processes per user, and this user has others.
        limits[resource.RLIMIT_NPROC] += _num_own_threads()
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))
    os.umask(0o077)
    if not confinement.has_own_processes:
        kernel.be_killed_first()  # not the supervisor: the interpreter would survive it
    if confinement.user is not None:
        keep, where = None, ""
        if confinement.is_python_hidden and confinement.is_landlocked:
            keep, where = kernel.READ_EVERYTHING, ", and only root can read Python's files"
        try:
            kernel.become_user(confinement.user, keep=keep)
        except OSError as error:
            raise OSError(error.errno, f"root may not become another user here{where}: {error.strerror}") from None
    elif confinement.has_own_processes:
        kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    if confinement.is_landlocked:
        kernel.restrict(readable=confinement.readable, writable=(confinement.folder,))
    has_new_landlock = kernel.landlock_version() >= kernel.LANDLOCK_OF_TRUNCATION
    system_calls.filter_system_calls(
        is_user_shared=is_user_shared,
        is_truncation_open=confinement.is_landlocked and not has_new_landlock,
    )


def descendants(process: int) -> set[int]:
    """Return the ids of all descendants of a process, including zombies."""
    found: set[int] = set()
    waiting = [process]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                for child in (task / "children").read_text().split():
                    if int(child) not in found:
                        found.add(int(child))
                        waiting.append(int(child))
    return found


def is_zombie(process: int) -> bool:
    """Return whether a process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
    return True


def _num_own_threads() -> int:
    user = os.getuid()
    count = 0
    for process in Path("/proc").glob("[1-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == user:
                count += len(list((process / "task").iterdir()))
    return count


def remove_folder(path: str) -> None:
    """Remove a folder that no process writes to, of any depth and mode, without following links.

    The content of each subfolder moves to the top, which needs neither recursion nor long paths.
    """
    prefix = os.urandom(8).hex()
    numbers = itertools.count()

    def is_opened(name: str, within: int) -> bool:
        if stat.S_ISDIR(os.lstat(name, dir_fd=within).st_mode):
            os.chmod(name, 0o700, dir_fd=within)
            return True
        return False

    with contextlib.suppress(OSError):
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            while names := os.listdir(top):  # noqa: PTH208
                for name in names:
                    if not is_opened(name, top):
                        os.unlink(name, dir_fd=top)
                        continue
                    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                    for child in os.listdir(inner):  # noqa: PTH208
                        is_opened(child, inner)
                        os.rename(child, f"{prefix}-{next(numbers)}", src_dir_fd=inner, dst_dir_fd=top)
                    os.close(inner)
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(path)  # noqa: PTH106

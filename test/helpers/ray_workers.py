"""Ray's processes for actors, forked from one that has imported what actors import.

A node starts this file as the program that sets up a process for actors. It asks a process that serves the nodes of the
tests to fork that process instead, and ends: the node knows what was forked by a token among its arguments.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
from pathlib import Path

ADDRESS = "LLMRL_TEST_RAY_WORKERS"  # of the socket that is served
SERVE = "serve"


def ask(arguments):
    """Ask for a process with these arguments and our environment, folder and files."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        socket.send_fds(connection, [b"files"], [0, 1, 2])
        connection.sendall(pickle.dumps((arguments, dict(os.environ), str(Path.cwd()))))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # the end: it was started


def answer(connection):
    """Start a process that was asked for, and wait for its end."""
    from warm_processes import server_for

    with connection, connection.makefile("rb") as rest:
        _, files, *_ = socket.recv_fds(connection, len(b"files"), 3)
        arguments, environment, folder = pickle.load(rest)
        pid = server_for(environment).start(arguments, environment, dict(enumerate(files)), folder=folder)
        for file in files:
            os.close(file)
    os.waitpid(pid, 0)


@contextlib.contextmanager
def forked_workers(folder):
    """Let nodes that are started meanwhile, with this file as `setup_worker_path`, fork their processes for actors."""
    from warm_processes import server_for

    os.environ[ADDRESS] = str(folder / "ray-workers")
    # Not in a thread of this process, which Ray's own C++ code blocks while it waits for a node.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[ADDRESS])
        listener.listen()
        files = {number: number for number in (0, 1, 2, listener.fileno())}
        server = server_for(os.environ)
        pid = server.start([__file__, SERVE, str(listener.fileno())], os.environ, files)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        del os.environ[ADDRESS]


def main():
    match sys.argv[1:]:
        case [command, number] if command == SERVE:
            listener = socket.socket(fileno=int(number))
            while True:
                threading.Thread(target=answer, args=[listener.accept()[0]], daemon=True).start()
        case arguments:
            of_setup = ("--language=", "--serialized-runtime-env-context=")
            ask([one for one in arguments if not one.startswith(of_setup)])


if __name__ == "__main__":
    main()

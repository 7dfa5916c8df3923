"""A stand-in for `docker` and `podman`: containers are folders, and what runs in them runs here, without isolation.

It takes `build`, `run`, `exec` and `rm` as the two programs document them, and refuses options that it does not know.
An image is known by its name; a command of `exec` leads a process group, as that of a container does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

HOME = Path(os.environ["FAKE_CONTAINERS"])


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", allow_abbrev=False)
    build.add_argument("--quiet", action="store_true")
    build.add_argument("folder", type=Path)
    run = commands.add_parser("run", allow_abbrev=False)
    for name in ("--detach", "--rm", "--init"):
        run.add_argument(name, action="store_true", required=True)
    for name in ("--name", "--entrypoint", "--workdir", "--network"):
        run.add_argument(name)
    run.add_argument("image")
    run.add_argument("words", nargs=argparse.REMAINDER)
    execute = commands.add_parser("exec", allow_abbrev=False)
    execute.add_argument("--interactive", action="store_true")
    execute.add_argument("name")
    execute.add_argument("words", nargs=argparse.REMAINDER)
    remove = commands.add_parser("rm", allow_abbrev=False)
    remove.add_argument("--force", action="store_true")
    remove.add_argument("name")
    arguments = parser.parse_args()
    with (HOME / "log").open("a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    return {"build": _build, "run": _run, "exec": _exec, "rm": _rm}[arguments.command](arguments)


def _build(arguments):
    if not (arguments.folder / "Dockerfile").is_file():
        print("ERROR: failed to read dockerfile", file=sys.stderr)
        return 1
    print("sha256:built")
    return 0


def _run(arguments):
    if arguments.image not in ("debian:12-slim", "sha256:built"):
        print(f"Unable to find image '{arguments.image}'", file=sys.stderr)
        return 125
    (HOME / arguments.name).mkdir()
    print("0123456789ab")
    return 0


def _exec(arguments):
    if not (HOME / arguments.name).is_dir():
        print(f"Error: No such container: {arguments.name}", file=sys.stderr)
        return 1
    os.chdir(HOME / arguments.name)
    if os.fork():  # as with runc, what is killed with the client is not the command
        return os.waitstatus_to_exitcode(os.wait()[1]) % 256
    os.setsid()
    try:
        os.execvp(arguments.words[0], arguments.words)
    except OSError as error:
        print(f"OCI runtime exec failed: {error}", file=sys.stderr)
        os._exit(127)


def _rm(arguments):
    shutil.rmtree(HOME / arguments.name, ignore_errors=True)
    for file in Path("/tmp").glob(f"{arguments.name}-*"):  # a container's `/tmp` goes with it
        file.unlink()
    return 0


sys.exit(main())

"""Sandboxes by the commands of Docker, Podman and SSH, against stand-ins for these."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import pytest
from waiting import is_running, patient, wait_until

from llmrl.testing import check_sandbox
from llmrl.tools import ContainerSandbox, SSHSandbox

HELPERS = Path(__file__).resolve().parents[1] / "helpers"


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """Commands `docker`, `podman` and `ssh`; the folder of the containers."""
    containers, folder = tmp_path / "containers", tmp_path / "bin"
    for path in (containers, folder):
        path.mkdir()
    for name, helper in (("docker", "container"), ("podman", "container"), ("ssh", "ssh")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{HELPERS}/fake_{helper}_program.py" "$@"\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_CONTAINERS", str(containers))
    return containers


def logged(programs):
    return [json.loads(line) for line in (programs / "log").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda: ContainerSandbox("debian:12-slim"), lambda: SSHSandbox("worker@machine", options=["-p", "2222"])],
    ids=["docker", "ssh"],
)
def test_a_sandbox_by_command_keeps_the_contract(programs, make):
    asyncio.run(check_sandbox(make))
    assert [path.name for path in programs.iterdir() if path.name != "log"] == []


def test_a_command_that_is_late_is_ended_in_the_sandbox_too(programs):
    async def play(sandbox, limit):
        await sandbox.start()
        late = await sandbox.run(["sh", "-c", "echo $$ > pid; sleep 300"], timeout=limit)
        assert late.timed_out
        pid = b""
        with contextlib.suppress(FileNotFoundError):  # it had no time to begin
            pid = await sandbox.get("pid")  # of this machine, where the stand-in runs commands
        await sandbox.close()
        return int(pid) if pid else None

    pid = patient(lambda limit: asyncio.run(play(ContainerSandbox("debian:12-slim"), limit)))
    wait_until(lambda: not is_running(pid))


def test_a_command_that_is_cancelled_is_ended_in_the_sandbox_too(programs):
    async def play(sandbox):
        await sandbox.start()
        running = asyncio.create_task(sandbox.run(["sh", "-c", "echo $$ > pid; sleep 300"], timeout=300))
        await asyncio.to_thread(wait_until, lambda: any(path.read_text() for path in programs.glob("*/pid")))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        pid = int(await sandbox.get("pid"))  # of this machine, where the stand-in runs commands
        await sandbox.close()
        return pid

    pid = asyncio.run(play(ContainerSandbox("debian:12-slim")))
    wait_until(lambda: not is_running(pid))


def test_a_container_is_built_started_without_network_and_removed(programs, tmp_path):
    async def play(sandbox):
        await sandbox.start()
        await sandbox.close()

    (tmp_path / "image").mkdir()
    (tmp_path / "image/Dockerfile").write_text("FROM debian:12-slim\n")
    asyncio.run(play(ContainerSandbox(tmp_path / "image", program="podman", folder=None)))
    build, run, remove = logged(programs)
    assert build == ["build", "--quiet", str(tmp_path / "image")] and remove[:2] == ["rm", "--force"]
    assert run[4] == remove[2] and run[5:7] == ["--network", "none"]
    assert run[7:11] == ["--init", "--entrypoint", "sh", "sha256:built"]


def test_what_cannot_start_says_why(programs, tmp_path, monkeypatch):
    for sandbox, words in (
        (ContainerSandbox("no-such-image"), "docker run failed: Unable to find image 'no-such-image'"),
        (ContainerSandbox(tmp_path), "docker build failed: ERROR: failed to read dockerfile"),
        (SSHSandbox("no-such-host"), "no-such-host does not answer: ssh: Could not resolve hostname"),
    ):
        with pytest.raises(OSError, match=words):
            asyncio.run(sandbox.start())
    with pytest.raises(ValueError, match="ssh reads as an option"):
        SSHSandbox("-oProxyCommand=true")
    monkeypatch.setenv("PATH", str(tmp_path))
    for make in (lambda: ContainerSandbox("debian:12-slim"), lambda: SSHSandbox("machine")):
        with pytest.raises(FileNotFoundError, match="is not installed"):
            make()

"""The script that starts Ray on several machines: what it says, and that it ends what it has started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "sota-implementations" / "grpo" / "launch-ray.sh"
# Stand-ins for other programs: each notes how it was called.
FAKES = {
    "ray": '[ "$1" != start ] || trap \'echo "ended" >> "$LOG"; exit\' TERM\n'
    'echo "ray $*" >> "$LOG"; [ "$1" = start ] || { echo secret; exit; }\nwhile :; do sleep 0.1; done',
    "ssh": 'echo "ssh $1" >> "$LOG"; shift; exec setsid sh -c "$*"',
    "python": 'if [ "$1" = -c ]; then until grep "^ray start --head" "$LOG"; do sleep 0.1; done >/dev/null; '
    'grep -c "^ray start" "$LOG"; else echo "train $*" >> "$LOG"; exit 7; fi',
    "scontrol": "printf '%s\\n' \"$(hostname -s)\" node2",
}


@pytest.fixture
def call(tmp_path):
    for name, body in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    log.write_text("")

    def call(*arguments, **variables):
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "VIRTUAL_ENV": ""}
        command = ["bash", str(SCRIPT), *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env={**environment, **variables}
        )
        return result, log.read_text()

    return call


def test_it_is_well_formed_and_says_how_it_is_used(call):
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    assert os.access(SCRIPT, os.X_OK)
    result, _ = call("--help")
    assert result.returncode == 0 and result.stdout.startswith("Usage: launch-ray.sh --hosts")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--hosts is needed outside of a SLURM allocation"),
        (["--hots", "a"], "there is no option '--hots'"),
        (["--hosts"], "--hosts needs a value"),
        (["--hosts", "a,,b"], "--hosts is HOST[,HOST…], got 'a,,b'"),
        (["--hosts", "a, b"], "--hosts is HOST[,HOST…], got 'a, b'"),
        (["--hosts", "a", "--port", "x"], "--port and --timeout are numbers such as 300, got 'x'"),
        (["--hosts", "a", "--port", "0"], "numbers such as 300, got '0'"),
        (["--hosts", "a", "--timeout", "0300"], "numbers such as 300, got '0300'"),  # octal for bash
        (["--hosts", "a", "--script", "no.py"], "there is no script 'no.py'"),
    ],
)
def test_wrong_use_exits_with_2_and_a_sentence(call, arguments, words):
    result, log = call(*arguments)
    assert result.returncode == 2 and words in result.stderr and "--help" in result.stderr and not log


def test_a_dry_run_says_what_would_be_done_and_does_nothing(call):
    arguments = ("--hosts", "node2,node3", "--address", "10.0.0.1", "--venv", "/venv", "--dry-run", "--", "task=gsm8k")
    result, log = call(*arguments)
    head, first, second, training = result.stdout.splitlines()
    assert result.returncode == 0 and not log
    assert head.startswith("here: ray start --head --node-ip-address=10.0.0.1 --port=6379 ")
    assert first.startswith("node2: ssh node2 ") and second.startswith("node3: ssh node3 ")
    assert "/venv/bin/activate" in first and "--address=10.0.0.1:6379" in first
    assert training.startswith("when 3 machines are there: python ")
    assert training.endswith("/grpo-async.py hardware=ray-cluster ray.address=10.0.0.1:6379 task=gsm8k")


def test_under_slurm_the_machines_are_those_of_the_allocation(call):
    result, _ = call("--address", "10.0.0.1", "--dry-run", SLURM_JOB_NODELIST="node[1-2]")
    assert result.returncode == 0, result.stderr
    assert "node2: srun --overlap --nodes=1 --ntasks=1 --nodelist=node2 ray start --address=10.0.0.1:6379" in (
        result.stdout
    )
    result, _ = call("--hosts", "a", SLURM_JOB_NODELIST="node[1-2]")
    assert result.returncode == 2 and "has allocated machines already" in result.stderr


@pytest.mark.slow
def test_it_trains_when_all_machines_are_there_and_ends_ray_afterwards(call):
    result, log = call("--hosts", "node2", "--address", "10.0.0.1", "--", "task=gsm8k")
    lines = log.splitlines()
    assert result.returncode == 7, "the script's"
    assert "ssh node2" in lines and sum(line.startswith("ray start") for line in lines) == 2
    trained = next(index for index, line in enumerate(lines) if line.startswith("train "))
    assert lines[trained].endswith("task=gsm8k")
    assert {index > trained for index, line in enumerate(lines) if line.startswith("ended")} == {True}
    assert sum(line.startswith("ended") for line in lines) == 2
    assert "secret" not in log


@pytest.mark.slow
def test_a_machine_that_does_not_come_ends_the_wait(call, tmp_path):
    (tmp_path / "ssh").write_text("#!/bin/sh\necho no route >&2; exit 255\n")
    result, log = call("--hosts", "node2", "--address", "10.0.0.1", "--timeout", "2")
    assert result.returncode == 1 and "1 of 2 machines came in 2 s" in result.stderr and "no route" in result.stderr
    assert "train" not in log and log.count("ended") == 1

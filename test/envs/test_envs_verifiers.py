"""An environment of verifiers in its own process, with the real verifiers, and workers that go wrong."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from endpoint_agents import LoggingEngine, trained_spans
from waiting import is_running, wait_until

from llmrl.collectors import LLMCollector
from llmrl.data import RolloutStatus
from llmrl.envs import VerifiersEnv
from llmrl.envs.hubs import virtual_env, worker_process
from llmrl.envs.hubs.virtual_env import InstallError, python_with
from llmrl.envs.hubs.worker_process import WorkerDied, WorkerProcess
from llmrl.policies import LLMWrapperBase

TRIALS = str(Path(__file__).parents[1] / "helpers" / "verifiers_trials")


def trials_env(**options):
    try:
        return VerifiersEnv("verifiers-trials", requirements=[TRIALS], **options)
    except InstallError as error:
        pytest.skip(f"verifiers cannot be installed here: {error}")


@pytest.fixture(scope="module")
def played(model_path, tokenizer, own_programs):
    """All tasks, played one after the other, and what the engine sampled."""
    from llmrl.rendering import make_renderer

    renderer = make_renderer(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "_CANCEL_SECONDS", 0.5)
        env = trials_env(timeout_seconds=60.0, split="other")
        engine = LoggingEngine(["15<|im_end|>"], encode=renderer.encode, decode=renderer.decode)
        policy = LLMWrapperBase(engine, renderer=renderer)
        rows = env.prompts.items
        with LLMCollector(env, policy=policy, groups_per_batch=1, max_concurrent_rollouts=1) as collector:
            rollouts = collector.play(len(rows) - 1)
            env.timeout_seconds = 2.0
            rollouts += collector.play(1)
        env.close()
    return {rollout.columns["name"]: rollout for rollout in rollouts}, engine, env


def test_tasks_are_rows_and_scores_are_the_breakdown(played):
    rollouts, _, env = played
    assert [row["name"] for row in env.prompts.items][:2] == ["fine", "twice"] and len(env.prompts.items) == 8
    fine = rollouts["fine"]
    assert fine.columns["prompt"] == "7 + 8 = (other)" and fine.columns["answer"] == "15" and fine.columns["idx"] == 0
    assert (fine.status, fine.is_scored, fine.reward) == (RolloutStatus.COMPLETED, True, 2.5)
    assert fine.breakdown == {"right": 2.0, "short": 0.5, "length": 2.0}
    assert fine.info["info"] == {"said": "15"} and fine.info["stop_condition"] == "user_closed"
    assert [message["content"] for message in fine.messages] == ["Add.", "7 + 8 = (other)", "15"]


def test_rows_hold_what_the_engine_sampled(played):
    rollouts, engine, _ = played
    assert rollouts["twice"].num_turns == 2 and rollouts["twice"].messages[3]["content"] == "Are you sure?"
    trained = sum((trained_spans(one.conversation.reconcile()) for one in rollouts.values()), Counter())
    assert trained == Counter(engine.log) and len(engine.log) == 9


def test_what_goes_wrong_is_that_rollouts_error(played):
    rollouts, _, _ = played
    raises, nan = rollouts["raises"], rollouts["nan"]
    assert raises.status is RolloutStatus.ERROR and not raises.is_scored
    assert "TaskError" in raises.error and "no such answer" in raises.error
    assert "verifiers_trials.py" in raises.traceback
    assert not nan.is_scored and "'right'" in nan.error and "nan" in nan.error
    assert nan.info["metrics"] == {"length": "inf"}
    assert rollouts["prints"].reward == 2.5  # a gigabyte was read and forgotten


def test_a_worker_that_ends_or_hangs_is_replaced(played):
    rollouts, _, _ = played
    assert rollouts["dies"].status is RolloutStatus.ERROR
    assert "SIGKILL" in rollouts["dies"].error and "these were its last words" in rollouts["dies"].error
    assert rollouts["after"].reward == 2.5
    assert (rollouts["hangs"].status, rollouts["hangs"].reason) == (RolloutStatus.TRUNCATED, "timeout")


def test_what_verifiers_refuses_is_said_when_the_environment_is_made(own_programs):
    with pytest.raises(ValueError, match="NO_SUCH_KEY"):
        trials_env(config={"taskset": {"key": "NO_SUCH_KEY"}})


# Workers

WORKER = """
import json, os, socket, struct, sys, time
channel = socket.socket(fileno=int(sys.argv[1]))
def read():
    [size] = struct.unpack("<I", channel.recv(4, socket.MSG_WAITALL))
    return json.loads(channel.recv(size, socket.MSG_WAITALL))
def write(answer):
    body = json.dumps(answer).encode()
    channel.sendall(struct.pack("<I", len(body)) + body)
"""


@pytest.fixture
def start(tmp_path, own_programs):
    """Starts a worker of a few lines."""
    workers = []

    def start(code, *, open_seconds=30.0):
        program = tmp_path / "worker.py"
        program.write_text(WORKER + textwrap.dedent(code))
        workers.append(
            WorkerProcess(Path(sys.executable), [str(program)], {"text": "héllo"}, open_seconds=open_seconds)
        )
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


ECHO = "while request := read(): write({'number': request['number'], 'result': request.get('arguments')})"


def test_a_worker_answers_and_is_ended_with_all_that_it_started(start):
    worker = start(
        f"""
        import subprocess
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        write({{"number": read()["number"], "result": child.pid}})
        {ECHO}
        """
    )
    assert worker.ask("echo", {"a": 1}).result(240) == {"a": 1}
    worker.close()
    wait_until(lambda: not is_running(worker.opened))
    with pytest.raises(WorkerDied, match="closed"):
        worker.ask("echo", {})


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit('no package')", "exit code 1.*no package"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("channel.sendall(struct.pack('<I', 1 << 30)); time.sleep(600)", "message of 1073741824 bytes"),
        ("channel.sendall(struct.pack('<I', 2) + b'{]'); time.sleep(600)", "Expecting"),
        ("time.sleep(600)", "did not open within 1 s"),
    ],
)
def test_a_worker_that_does_not_open_says_why(start, code, reason):
    with pytest.raises(WorkerDied, match=f"(?s){reason}"):
        start(code, open_seconds=1.0 if "open" in reason else 240.0)


def test_requests_in_flight_fail_with_their_worker(start):
    worker = start("write({'number': read()['number'], 'result': None}); read(); read(); os._exit(7)")
    first = worker.ask("one", {})
    second = worker.ask("two", {})
    for request in (first, second):
        with pytest.raises(WorkerDied, match="exit code 7"):
            request.result(240)
    assert not worker.is_alive


# Virtual environments


def test_an_environment_is_made_once_and_anew_when_its_files_change(tmp_path, monkeypatch, own_programs):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = []

    def run(words):
        made.append(words)
        if "venv" in words:
            Path(words[-1]).mkdir()

    monkeypatch.setattr(virtual_env, "_run", run)
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("A = 1")
    first = python_with(["other==1", str(package)])
    assert python_with(["other==1", str(package)]) == first and len(made) == 2
    lines = (first.parents[1] / "requirements.txt").read_text().splitlines()
    assert lines[0] == "other==1" and (Path(lines[1]) / "module.py").read_text() == "A = 1"
    (package / "build").mkdir()  # as building it leaves one
    (package / "build" / "module.py").write_text("")
    assert python_with(["other==1", str(package)]) == first
    (package / "module.py").write_text("A = 2")
    assert python_with(["other==1", str(package)]) != first


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch, own_programs):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(InstallError, match="no-such-wheel"):
        python_with(["--no-index", "no-such-wheel==1.0"])

"""`command`: programs as agents."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from endpoint_agents import LoggingEngine
from waiting import is_running, wait_until

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus
from llmrl.envs import AgentEnv, agent_command, command
from llmrl.policies import LLMWrapperBase
from llmrl.transforms import RubricReward

ROWS = [{"query": "7 + 8 = {x}; $(touch no)", "answer": "15"}]

ASK = """
import json, os, sys, urllib.request

def ask(*messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


@pytest.fixture
def play(renderer, tmp_path):
    """Plays a program once."""

    def play(code, *, words="{query}", limits=None, rubric=None, **options):
        program = tmp_path / "agent.py"
        program.write_text(ASK + textwrap.dedent(code))
        engine = LoggingEngine(["15<|im_end|>"], encode=renderer.encode, decode=renderer.decode)
        env = AgentEnv(command(f"{sys.executable} {program} {words}", **options), ROWS)
        if rubric is not None:
            env = env.append_transform(RubricReward(rubric))
        policy = LLMWrapperBase(engine, renderer=renderer)
        with LLMCollector(env, policy=policy, groups_per_batch=1, limits=limits) as collector:
            return collector.play(1)[0]

    return play


def test_a_program_is_an_agent(play, tmp_path):
    def right(row, result):
        assert result.exit_code == 3 and (result.folder / "answer").read_text() == row["answer"]
        assert result.folder != Path.cwd() and "asked" in result.output
        return {"right": 1.0}

    rollout = play(
        """
        open("answer", "w").write(ask({"role": "user", "content": sys.argv[1]}))
        print("asked", sys.argv[1:], os.environ["MORE"], os.listdir("."), flush=True)
        sys.exit(3)
        """,
        score=right,
        env={"MORE": "{model} at {base_url}"},
    )
    assert (rollout.status, rollout.reward, rollout.breakdown) == (RolloutStatus.COMPLETED, 1.0, {"right": 1.0})
    assert rollout.messages[-2]["content"] == ROWS[0]["query"] and rollout.num_turns == 1
    assert rollout.info["exit_code"] == 3
    assert f"['{ROWS[0]['query']}'] policy at http://127.0.0.1:" in rollout.info["output"]
    assert rollout.info["output"].rstrip().endswith("['answer']")


@pytest.mark.slow
def test_a_program_is_ended_with_all_that_it_started(play, tmp_path, clock, monkeypatch):
    """Itself, a child in a session of its own, and both ignore SIGTERM."""
    monkeypatch.setattr(agent_command, "_TERM_SECONDS", 0.2)

    def take_too_long():
        wait_until((tmp_path / "pids").exists)
        clock.move(3600)

    thread = threading.Thread(target=take_too_long)
    thread.start()
    rollout = play(
        """
        import signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ask({"role": "user", "content": "?"})
        sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
        print("begun", flush=True)
        open(sys.argv[1] + ".new", "w").write(f"{os.getpid()} {child.pid}")
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        time.sleep(600)
        """,
        words=str(tmp_path / "pids"),
        timeout_seconds=600.0,
        rubric=the_answer,
    )
    thread.join()
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and not any(map(is_running, pids))
    assert (rollout.status, rollout.reason) == (RolloutStatus.TRUNCATED, "timeout")
    assert (rollout.num_turns, rollout.reward, rollout.info["output"]) == (1, 1.0, "begun\n")


def the_answer(completion, answer):
    return float(completion == answer)


def test_a_program_that_has_ended_is_not_waited_for(play, tmp_path):
    """Its child holds the output, and has cleared its environment and left its session."""
    rollout = play(
        """
        import subprocess
        ask({"role": "user", "content": "?"})
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={}, start_new_session=True)
        open(sys.argv[1], "w").write(str(child.pid))
        print("done", flush=True)
        """,
        words=str(tmp_path / "pid"),
        timeout_seconds=120.0,
        rubric=the_answer,
    )
    assert (rollout.status, rollout.reward, rollout.info["output"]) == (RolloutStatus.COMPLETED, 1.0, "done\n")
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("code", "expected"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 15)", -15), ("os.kill(os.getpid(), 9)", -9)]
)
def test_how_a_program_ended_is_recorded_and_may_be_a_failure(play, code, expected):
    ended = f'ask({{"role": "user", "content": "?"}}); print("so", flush=True); {code}'
    rollout = play(ended, words="")
    assert (rollout.status, rollout.info["exit_code"]) == (RolloutStatus.COMPLETED, expected)
    rollout = play(ended, words="", exit_codes=[0, 4])
    assert (rollout.status, rollout.is_scored, rollout.info["exit_code"]) == (RolloutStatus.ERROR, False, expected)
    assert f"exit code {expected}, expected one of [0, 4]; its output ends with: so" in rollout.error


def test_a_row_comes_by_standard_input_files_and_variables(play, tmp_path, monkeypatch):
    long = "ä" * 200_000
    monkeypatch.setitem(ROWS[0], "long", long)
    monkeypatch.setitem(ROWS[0], "parts", {"a": [1]})
    monkeypatch.setenv("LLMRL_TEST_SECRET", "hunter2")
    (tmp_path / "project").mkdir()
    (tmp_path / "project/setup.txt").write_text("set up")
    code = """
        import json
        seen = {
            "stdin": sys.stdin.read(), "names": sorted(os.listdir(".")), "row": json.load(open("in/row.json")),
            "config": json.loads(os.environ["CONFIG"]), "secret": os.environ.get("LLMRL_TEST_SECRET"),
            "home": os.environ.get("HOME"), "setup": open("setup.txt").read(),
        }
        json.dump(seen, open(sys.argv[1], "w"))
        ask({"role": "user", "content": "?"})
    """
    options = {
        "words": str(tmp_path / "seen"),
        "stdin": "{long}",
        "files": {"in/row.json": "{row}"},
        "folder": tmp_path / "project",
        "env": {"CONFIG": '{"model": "{model}", "parts": {parts}, "keep": "{{long}}"}', "LLMRL_TEST_SECRET": None},
    }
    rollout = play(code, **options)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    seen = json.loads((tmp_path / "seen").read_text())
    assert (seen["stdin"], seen["row"], seen["names"]) == (long, ROWS[0], ["in", "setup.txt"])
    assert seen["config"] == {"model": "policy", "parts": {"a": [1]}, "keep": "{long}"}
    assert (seen["secret"], seen["home"], seen["setup"]) == (None, os.environ["HOME"], "set up")
    play(code, **{**options, "env": {"CONFIG": "{}"}, "inherit": ["PATH"]})
    seen = json.loads((tmp_path / "seen").read_text())
    assert (seen["secret"], seen["home"]) == (None, None)
    rollout = play(code, words="{long}")
    assert rollout.status is RolloutStatus.ERROR
    assert "the argument '{long}' has 400000 bytes" in rollout.error and "stdin='{long}'" in rollout.error


@pytest.mark.parametrize(("link", "name"), [("out", "out/new.txt"), ("task.txt", "task.txt")])
def test_a_file_that_a_link_of_the_folder_leads_outside_is_refused(play, tmp_path, link, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "task.txt").write_text("kept")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / link).symlink_to(outside if link == "out" else outside / "task.txt")
    rollout = play("print(1)", folder=tmp_path / "project", files={name: "{query}"})
    assert rollout.status is RolloutStatus.ERROR and f"files has {name!r}, which symbolic links" in rollout.error
    assert [path.name for path in outside.iterdir()] == ["task.txt"]
    assert (outside / "task.txt").read_text() == "kept"


def test_a_link_within_the_folder_may_lead_to_a_file(play, tmp_path):
    (tmp_path / "project/deep").mkdir(parents=True)
    (tmp_path / "project/here").symlink_to("deep")
    code = 'print(open("deep/task.txt").read()); ask({"role": "user", "content": "?"})'
    rollout = play(code, folder=tmp_path / "project", files={"here/task.txt": "{answer}"})
    assert rollout.status is RolloutStatus.COMPLETED and rollout.info["output"] == "15\n", rollout.error


@pytest.mark.slow
def test_a_program_ends_with_its_rollout(play, tmp_path):
    rollout = play(
        """
        import time
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
        """,
        words=str(tmp_path / "pids"),
        limits=RolloutLimits(rollout_timeout_seconds=1.5),
    )
    assert rollout.reason == "timeout"
    pids = tmp_path / "pids"  # on a busy machine it had not even begun
    wait_until(lambda: not pids.exists() or not is_running(int(pids.read_text())), 30)


@pytest.fixture
def own_network():
    """A network namespace of its own, and the address of this machine in it."""
    if not (os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare") and shutil.which("nsenter")):
        pytest.skip("a network namespace needs root, ip, unshare and nsenter")
    name = f"llmrl{os.getpid()}"
    holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=-1, stdout=-1)
    holder.stdout.readline()  # the namespace is there
    inside = ["nsenter", "-t", str(holder.pid), "--net"]
    try:
        for words in (
            ["ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b"],
            ["ip", "link", "set", f"{name}b", "netns", str(holder.pid)],
            ["ip", "addr", "add", "10.213.7.1/30", "dev", f"{name}a"],
            ["ip", "link", "set", f"{name}a", "up"],
            [*inside, "ip", "addr", "add", "10.213.7.2/30", "dev", f"{name}b"],
            [*inside, "ip", "link", "set", f"{name}b", "up"],
        ):
            made = subprocess.run(words, capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
        yield inside, "10.213.7.1"
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True)
        holder.stdin.close()
        holder.wait()


def test_a_program_in_a_network_of_its_own_is_an_agent(renderer, tmp_path, own_network):
    inside, host = own_network
    program = tmp_path / "agent.py"
    program.write_text(ASK + 'print(ask({"role": "user", "content": "7 + 8"}), os.environ["OPENAI_BASE_URL"])')
    engine = LoggingEngine(["15<|im_end|>"], encode=renderer.encode, decode=renderer.decode)
    words = shlex.join([*inside, sys.executable, str(program)])
    policy = LLMWrapperBase(engine, renderer=renderer)
    # On this machine's loopback the agent reaches nothing, on the address that it has in the agent's network it does.
    with LLMCollector(AgentEnv(command(words), ROWS), policy=policy, groups_per_batch=1) as collector:
        assert "refused" in str(collector.play(1)[0].info["output"]) or "unreachable" in str(
            collector.play(1)[0].info["output"]
        )
    env = AgentEnv(command(words), ROWS, host="0.0.0.0", public_url=f"http://{host}:{{port}}")
    with LLMCollector(env, policy=policy, groups_per_batch=1) as collector:
        [rollout] = collector.play(1)
    assert rollout.info["output"].startswith(f"15 http://{host}:") and rollout.num_turns == 1


def test_a_program_that_is_not_there_is_an_error(renderer):
    engine = LoggingEngine([[1]])
    env = AgentEnv(command("no-such-program {query}"), ROWS)
    with LLMCollector(env, policy=LLMWrapperBase(engine, renderer=renderer), groups_per_batch=1) as collector:
        (rollout,) = collector.play(1)
    assert rollout.status is RolloutStatus.ERROR and "no-such-program" in rollout.error


def test_a_command_reads_columns_that_there_are():
    with pytest.raises(ValueError, match=r"reads the columns \['task'\], but the dataset has \['answer', 'query'\]"):
        AgentEnv(command("agent {task}"), ROWS)
    for wrong in ("", "  "):
        with pytest.raises(ValueError, match="the command is empty"):
            command(wrong)
    for template in ({"stdin": "{task}"}, {"files": {"a": "{task}"}}, {"env": {"A": "{task}"}}):
        with pytest.raises(ValueError, match=r"reads the columns \['task'\]"):
            AgentEnv(command("agent", **template), ROWS)
    with pytest.raises(ValueError, match=r"relative paths in the program's folder, got '\.\./a'"):
        command("agent", files={"../a": ""})
    with pytest.raises(FileNotFoundError, match="existing folder to copy, got '/no/such'"):
        command("agent", folder="/no/such")
    with pytest.raises(TypeError, match="inherit must be a list of names"):
        command("agent", inherit="PATH")
    with pytest.raises(ValueError, match="timeout_seconds must be positive"):
        command("agent", timeout_seconds=0)

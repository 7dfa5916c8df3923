"""Tasks in the forms of Harbor and terminal-bench, played in the cage: rewards, leaks, time limits, what is refused."""

from __future__ import annotations

import gc
import json

import pytest
from harbor_folders import DOCKERFILE, harbor_task, terminal_bench_task, write
from typer.testing import CliRunner
from waiting import patient

from llmrl._utils.asynchronous import run_sync
from llmrl.cli.app import app
from llmrl.collectors import LLMCollector
from llmrl.data import RolloutStatus
from llmrl.envs import HarborEnv, make_task_env
from llmrl.envs.hubs import harbor
from llmrl.envs.hubs.harbor_tasks import BadTask
from llmrl.policies import LLMWrapperBase
from llmrl.sandbox.confined import ConfinedSandbox
from llmrl.sandbox.launch import IsolationError, Launcher, PythonLimits
from llmrl.sandbox.service import PythonExecutorService
from llmrl.testing import ScriptedEngine

VERIFIER = "FROM python:3.12-slim\nWORKDIR /app\nCOPY . /tests/\n"
runner = CliRunner()


@pytest.fixture(scope="module", autouse=True)
def caged(own_programs):
    try:
        harbor.shared_cages(("/app", "/logs", "/solution", "/tests"), 60.0)
    except IsolationError as error:
        pytest.skip(str(error))


@pytest.fixture
def play(renderer):
    def play(env, answers, num_rollouts=1):
        texts = [f"{one}<|im_end|>" for one in answers]
        engine = ScriptedEngine(texts, encode=renderer.encode, decode=renderer.decode)
        policy = LLMWrapperBase(engine, renderer=renderer)
        with LLMCollector(env, policy=policy, groups_per_batch=1, max_concurrent_rollouts=1) as collector:
            return collector.play(num_rollouts)

    return play


def shell(command, **more):
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command, **more}})}</tool_call>"


def test_a_tasks_own_solution_earns_one_and_nothing_earns_zero(tmp_path):
    harbor_task(tmp_path, "shared")
    harbor_task(tmp_path, "bare", dockerfile=None)
    own = {"mode": "separate", "artifacts": '["/app/answer.txt"]', "tests_dockerfile": VERIFIER}
    harbor_task(tmp_path, "separate", **own)
    terminal_bench_task(tmp_path, "bench")
    harbor_task(tmp_path, "unsolved", solve=None)
    found = HarborEnv(tmp_path).play_solutions()
    nothing, solved = {"reward": 0.0}, {"reward": 1.0}
    assert found == dict.fromkeys(("bare", "bench", "separate", "shared"), (nothing, solved))


def test_the_model_works_with_a_shell_and_is_judged_by_the_tests(tmp_path, play):
    env = HarborEnv(harbor_task(tmp_path, "towns"))
    right, wrong = play(
        env, [shell("cat towns.txt; pwd; echo $LEVEL"), shell("echo Oslo > answer.txt"), "Done.", "Done."], 2
    )
    assert (right.status, right.reward, right.breakdown) == (RolloutStatus.COMPLETED, 1.0, {"reward": 1.0})
    assert right.messages[0]["content"].startswith("Write the name of the northern town")
    said = [message["content"] for message in right.messages if message["role"] == "tool"]
    assert said[0].split() == ["Rome", "Oslo", "/app", "easy", "[exit", "0]"]
    assert (wrong.reward, wrong.is_scored) == (0.0, True)


def test_neither_tests_nor_solution_are_there_before_the_agent_has_ended(tmp_path, play):
    look = "ls -A /tests /solution; find / -name test.sh -o -name solve.sh 2>/dev/null; env"
    env = HarborEnv(harbor_task(tmp_path, "towns"))
    (rollout,) = play(env, [shell(look), "Done."])
    said = rollout.messages[-2]["content"]
    assert "test.sh" not in said and "solve.sh" not in said and "Oslo" not in said and "EXPECTED" not in said
    assert str(tmp_path) not in said


def test_what_the_agent_writes_in_place_of_tests_and_rewards_counts_nothing(tmp_path, play):
    forge = (
        "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json;"
        "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 755 /tests/test.sh;"
        "chmod 500 /logs/verifier /tests; (sleep 1000; echo 1 > /logs/verifier/reward.json) &"
    )
    for number, task in enumerate(({}, {"mode": "separate", "tests_dockerfile": VERIFIER})):
        env = HarborEnv(harbor_task(tmp_path / str(number), "towns", **task))
        (rollout,) = play(env, [shell(forge), "Done."])
        assert rollout.reward == 0.0 and not (rollout.is_scored and rollout.reward)


def test_entries_of_the_reward_are_the_breakdown(tmp_path, play):
    test = '#!/bin/bash\nprintf \'{"found": 1, "style": 0.5, "length": 7}\' > /logs/verifier/reward.json\n'
    task = harbor_task(tmp_path, "towns", test=test)
    (rollout,) = play(HarborEnv(task, rewards={"found": 3.0, "style": 1.0}), ["Done."])
    assert rollout.breakdown == {"found": 1.0, "style": 0.5} and rollout.reward == pytest.approx(0.875)
    (rollout,) = play(HarborEnv(task), ["Done."])
    assert not rollout.is_scored and "['found', 'length', 'style'], but no 'reward'" in rollout.error


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "wrote no reward.txt or reward.json"),
        ("echo nan > /logs/verifier/reward.txt", "must be a finite number, got 'nan"),
        ("touch /logs/verifier/reward.txt", "must be a finite number, got ''"),
        ('echo \'{"a": "1"}\' > /logs/verifier/reward.json', "must have finite numbers by name"),
        ("echo '{\"a\": 1e999}' > /logs/verifier/reward.json", "must have finite numbers by name"),
        ("echo '{' > /logs/verifier/reward.json", "must have finite numbers by name"),
        ("sleep 60", "took more than 1 s"),
        ("yes | head -c 1000000000; exit 1", "wrote no reward.txt"),
    ],
)
def test_tests_that_give_no_reward_leave_the_rollout_unscored(tmp_path, play, script, words):
    task = harbor_task(
        tmp_path, "towns", test=f"#!/bin/bash\n{script}\n", verifier_seconds=1.0 if "took" in words else 60
    )
    (rollout,) = play(HarborEnv(task), ["Done."])
    assert (rollout.is_scored, rollout.reward) == (False, 0.0) and words in rollout.error


def test_the_agents_time_is_that_of_its_commands(tmp_path, play):
    answers = [shell("echo Oslo > answer.txt; sleep 600", timeout=600), shell("rm answer.txt"), "Done."]

    def attempt(limit):
        (rollout,) = play(HarborEnv(harbor_task(tmp_path / str(limit), "towns", agent_seconds=limit)), answers)
        said = [message["content"] for message in rollout.messages if message["role"] == "tool"]
        assert "[ended after" in said[0] and "time for this task is over" in said[1]
        return rollout if rollout.reward else None

    rollout = patient(attempt)
    assert (rollout.reward, rollout.is_scored) == (1.0, True), "it is judged by what it had done"


def test_a_cage_that_the_agent_ends_is_a_failed_rollout(tmp_path, play):
    (rollout,) = play(HarborEnv(harbor_task(tmp_path, "towns")), [shell("kill -9 -1; kill -9 $PPID"), "Done."])
    assert rollout.reward == 0.0


def test_names_splits_and_places_are_those_of_a_dataset(tmp_path):
    for split, names in (("train", "abc"), ("test", "d")):
        for name in names:
            harbor_task(tmp_path / split, name)
    env = make_task_env(f"harbor:{tmp_path}", "train", repeats=2)
    drawn = [env.reset()["task"] for _ in range(4)]
    assert drawn == ["a", "a", "b", "b"]
    place = env.prompts.state_dict()
    resumed = make_task_env(f"harbor:{tmp_path}", "train", repeats=2)
    resumed.prompts.load_state_dict(place)
    assert resumed.reset()["task"] == env.reset()["task"] == "c"
    assert list(make_task_env(f"harbor:{tmp_path}", "test").tasks) == ["d"]


def test_commands_find_it_and_it_keeps_its_contract(tmp_path):
    for name in ("a", "b"):
        harbor_task(tmp_path, name)
    result = runner.invoke(app, ["env", "check", f"harbor:{tmp_path}"])
    assert result.exit_code == 0, result.output
    assert "harbor:" in runner.invoke(app, ["env", "list"]).output


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"instruction": " "}, "has no instruction.md, or an empty one"),
        ({"test": ""}, "has no tests/test.sh"),
        ({"agent_seconds": -1.0}, "agent.timeout_sec -1; a positive number"),
        ({"agent_seconds": 0}, "agent.timeout_sec 0; a positive number"),
        ({"verifier_seconds": 0}, "verifier.timeout_sec 0; a positive number"),
        ({"agent_seconds": "nan"}, "agent.timeout_sec"),
        ({"environment": "mcp_servers = [{name = 'a'}]"}, "has MCP servers"),
        ({"environment": 'docker_image = "towns:1"'}, "need an image, the first is 'towns': it names the image"),
        ({"dockerfile": DOCKERFILE + "RUN apt-get install -y vim\n"}, "its Dockerfile has 'RUN apt-get"),
        ({"dockerfile": "FROM towns\nWORKDIR /app\n"}, "its Dockerfile has 'FROM towns'"),
        ({"dockerfile": "FROM ubuntu:24.04\n"}, "its Dockerfile has no WORKDIR"),
        ({"test": "#!/bin/bash\nset -e\nuvx pytest /tests\n"}, "test.sh calls 'uvx', which needs a network"),
        ({"artifacts": '["answer.txt"]'}, r"has artifacts \['answer.txt'\]; absolute paths"),
        ({"verifier": "collect = [{command = 'true'}]"}, "commands of verifier.collect"),
        (
            {"mode": "separate", "tests_dockerfile": "FROM ubuntu\nRUN true\nWORKDIR /a\n"},
            "its Dockerfile has 'RUN true'",
        ),
        ({"dockerfile": "FROM ubuntu\nWORKDIR /usr/src\n"}, r"must not be folders of the system .*\['/usr'\]"),
    ],
)
def test_a_task_that_cannot_be_played_here_is_refused_by_name(tmp_path, task, words):
    with pytest.raises(ValueError, match=words):
        HarborEnv(harbor_task(tmp_path, "towns", **task))


def test_folders_and_sandboxes_that_are_none_are_refused(tmp_path, monkeypatch):
    with pytest.raises(BadTask, match=r"neither task\.toml nor task\.yaml"):
        HarborEnv(tmp_path)
    latin = harbor_task(tmp_path / "other", "latin")
    (latin / "instruction.md").write_bytes(b"\xff")
    with pytest.raises(BadTask, match=r"latin' has a file instruction\.md that is not UTF-8"):
        HarborEnv(latin)
    write(tmp_path / "bad" / "task.toml", "schema_version = ")
    with pytest.raises(BadTask, match=r"bad' cannot be read: task\.toml: Invalid value"):
        HarborEnv(tmp_path)
    task = harbor_task(tmp_path, "towns", verifier="")
    with pytest.raises(ValueError, match="must be one of"):
        HarborEnv(task, sandbox="lxc")
    with pytest.raises(BadTask, match="has neither an image nor a Dockerfile"):
        HarborEnv(harbor_task(tmp_path, "bare", dockerfile=None), sandbox=lambda image: None)
    needs = harbor_task(tmp_path, "needs", solve="", environment="")
    (needs / "task.toml").write_text(
        (needs / "task.toml").read_text().replace("${LLMRL_TEST_TOWN:-Oslo}", "${NO_TOWN}")
    )
    with pytest.raises(BadTask, match="needs the environment variable NO_TOWN"):
        HarborEnv(needs)
    bench = terminal_bench_task(tmp_path, "bench")
    (bench / "task.yaml").write_text("instruction: Go.\nparser_name: swebench\n")
    with pytest.raises(BadTask, match="parser_name 'swebench'"):
        HarborEnv(bench)


def test_other_sandboxes_get_the_image_of_each_stage(tmp_path):
    """A cage in place of a container: what it is made of is recorded."""
    service = PythonExecutorService(num_ready=1, links=("/app", "/logs", "/solution", "/tests"))
    made = []

    class Container(ConfinedSandbox):
        async def start(self):
            await super().start()
            await self.run(["mkdir", "app", "logs", "solution", "tests"])
            await self.put("app/towns.txt", b"Oslo\n")

    def make(image):
        made.append(image)
        return Container(service)

    own = {"mode": "separate", "artifacts": '["/app/answer.txt"]', "tests_dockerfile": VERIFIER + "RUN true\n"}
    task = harbor_task(tmp_path, "towns", dockerfile=DOCKERFILE + "RUN true\n", **own)
    assert HarborEnv(task, sandbox=make).play_solutions() == {"towns": ({"reward": 0.0}, {"reward": 1.0})}
    assert made == 2 * [task / "environment", task / "tests"]
    service.close()


def test_links_need_a_file_system_of_ones_own():
    with pytest.raises(IsolationError, match="share the machine's file system"):
        Launcher("process", PythonLimits(), ("/app",))
    for link in ("app", "/app/data", "/proc", "/box"):
        with pytest.raises(ValueError, match="must be top-level folders"):
            PythonExecutorService(links=(link,))


def test_a_launcher_that_is_refused_leaves_no_folder_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="must not be folders of the system"):
        Launcher("namespaces", PythonLimits(), ("/usr",))
    gc.collect()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("level", ["namespaces", "bubblewrap"])
def test_links_lead_into_the_working_folder(level):
    try:
        service = PythonExecutorService(num_ready=1, isolation=level, links=("/app",))
    except IsolationError as error:
        pytest.skip(str(error))

    async def written():
        sandbox = ConfinedSandbox(service)
        await sandbox.start()
        await sandbox.run(["sh", "-c", "mkdir app && echo 1 > /app/one && ! touch /two"])
        found = await sandbox.get("app/one"), (await sandbox.run(["ls", "/", "-I", "lib*"])).stdout.split()
        await sandbox.close()
        return found

    text, names = run_sync(written())
    service.close()
    assert text == b"1\n" and {"app", "box", "tmp"} <= set(names) and "two" not in names

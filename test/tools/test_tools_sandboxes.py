"""Sandboxes of anybody's: the contract, the tools that run there, what becomes of one that fails."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter

import numpy as np
import pytest
from waiting import patient, wait_until

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus
from llmrl.envs import DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.sandbox.base import SandboxResult
from llmrl.testing import ScriptedEngine, check_sandbox
from llmrl.tools import (
    ConfinedSandbox,
    FileReadTool,
    PythonExecutorService,
    PythonInterpreter,
    Sandboxes,
    SandboxExecutor,
    ShellTool,
    ToolTransform,
)
from llmrl.transforms import RubricReward


@pytest.fixture(scope="module")
def service():
    service = PythonExecutorService(num_ready=2, timeout=60.0)
    yield service
    service.close()


class Remote:
    """A provider's: everything is counted, and some commands fail on its side."""

    events: Counter = Counter()  # noqa: RUF012
    loops: set = set()  # noqa: RUF012

    def __init__(self, *, starts=True):
        self.starts, self.files = starts, {}

    async def start(self):
        self.events["started"] += 1
        self.loops.add(asyncio.get_running_loop())
        if not self.starts:
            raise ConnectionError("the provider has no machine")

    async def run(self, argv, *, stdin=b"", timeout=30.0):
        if argv[-1] == "hang up":
            raise ConnectionError("the provider hung up")
        if argv[-1] == "sleep":
            return SandboxResult(-9, "", "", timed_out=True)
        return SandboxResult(int(argv[-1] == "false"), f"ran {' '.join(argv)}\n", "warned\n")

    async def put(self, path, data):
        self.files[path] = data

    async def get(self, path):
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory")
        return self.files[path]

    async def close(self):
        self.events["closed"] += 1
        self.loops.add(asyncio.get_running_loop())


@pytest.fixture(autouse=True)
def nothing_counted():
    Remote.events.clear()
    Remote.loops.clear()


def play(renderer, env, *answers):
    def said(answer):
        if isinstance(answer, str):
            return f"{answer}<|im_end|>"
        name, arguments = answer
        call = {"name": name, "arguments": arguments}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"

    engine = ScriptedEngine([said(answer) for answer in answers], encode=renderer.encode)
    policy = LLMWrapperBase(engine, renderer=renderer)
    limits = RolloutLimits(max_turns=len(answers))
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=limits) as collector:
        [rollout] = collector.play(1)
    env.close()
    return rollout, [message["content"] for message in rollout.messages if message["role"] == "tool"]


@pytest.mark.slow
def test_ours_keeps_the_contract(service):
    asyncio.run(check_sandbox(lambda: ConfinedSandbox(service)))
    wait_until(lambda: service.num_sessions == 0)


def test_ours_tells_of_a_cage_that_ended_and_goes_on(service):
    async def play_on():
        sandbox = ConfinedSandbox(service)
        await sandbox.start()
        await sandbox.put("a", b"1")
        # The command's parent is what keeps the folder.
        told = await sandbox.run(["sh", "-c", "kill -9 $PPID; sleep 5"])
        assert told.exit_code != 0 and "its files are lost" in told.stderr
        with pytest.raises(FileNotFoundError, match="in the sandbox"):
            await sandbox.get("a")
        told = await sandbox.run(["python3", "-c", "print('é' * 10**6)"])
        assert told.exit_code == 0 and "bytes left out" in told.stdout and len(told.stdout) < 10**5
        with pytest.raises(OSError, match=r"IsADirectoryError|PermissionError"):
            await sandbox.put("/usr", b"")
        assert (await sandbox.run(["sh", "-c", "touch /usr/mine"])).exit_code != 0
        await sandbox.close()

    asyncio.run(play_on())


def test_ours_takes_megabytes_of_input_and_refuses_more_without_loss(service):
    async def play_on():
        sandbox = ConfinedSandbox(service)
        await sandbox.put("a", b"1")
        told = await sandbox.run(["wc", "-c"], stdin=bytes(4_000_000))
        assert (told.exit_code, told.stdout.strip()) == (0, "4000000")
        told = await sandbox.run(["wc", "-c"], stdin=bytes(13_000_000))
        assert told.exit_code != 0 and "longer than 16 MiB" in told.stderr
        assert await sandbox.get("a") == b"1"
        await sandbox.close()

    asyncio.run(play_on())


@pytest.mark.parametrize("timeout", [math.inf, np.float64(60.0)])
def test_ours_takes_any_limit_of_time(service, timeout):
    async def played():
        sandbox = ConfinedSandbox(service)
        await sandbox.start()
        result = await sandbox.run(["echo", "1"], timeout=timeout)
        await sandbox.close()
        return result

    assert asyncio.run(played()) == SandboxResult(0, "1\n", "")


def test_the_check_names_what_a_sandbox_breaks_of_its_contract():
    with pytest.raises(AssertionError, match="exit code and both outputs are returned"):
        asyncio.run(check_sandbox(Remote))
    assert Remote.events["closed"] == 2


def test_the_check_closes_its_sandboxes_if_one_does_not_start():
    are_starting = iter([True, False])
    with pytest.raises(ConnectionError, match="has no machine"):
        asyncio.run(check_sandbox(lambda: Remote(starts=next(are_starting))))
    assert Remote.events["closed"] == 2


def test_a_model_works_in_its_own_cage_and_the_reward_looks_into_it(renderer, service):
    async def has_sorted(conversation_sandbox):
        sandbox = conversation_sandbox.sandbox
        is_sorted = (await sandbox.run(["sort", "-c", "sorted"])).exit_code == 0
        return float(is_sorted and await sandbox.get("sorted") != b"")

    sandboxes = Sandboxes(lambda: ConfinedSandbox(service))
    env = DatasetChatEnv([{"query": "Sort."}]).append_transform(
        ToolTransform([ShellTool(sandboxes), FileReadTool(sandboxes)])
    )
    rollout, told = play(
        renderer,
        env.append_transform(RubricReward(has_sorted)),
        ("shell", {"command": "printf 'b\\na\\n' | sort > sorted; echo told >&2; exit 3"}),
        ("file_read", {"path": "sorted"}),
        ("file_read", {"path": "nowhere"}),
        ("file_read", {"path": "sorted", "max_bytes": 1}),
        "Done.",
    )
    assert told == [
        "[stderr]\ntold\n[exit 3]", "a\nb\n", "Error: 'nowhere' cannot be read: No such file or directory in the "
        "sandbox: FileNotFoundError: [Errno 2] No such file or directory: 'nowhere'.", "a",
    ]  # fmt: skip
    assert rollout.reward == 1.0 and rollout.tool_calls == {"failed": 2, "answered": 2}
    wait_until(lambda: service.num_sessions == 0)


def test_a_users_sandbox_is_closed_in_every_case_and_its_failures_are_reported(renderer):
    tools = ToolTransform([ShellTool(Sandboxes(Remote))])
    rollout, told = play(
        renderer,
        DatasetChatEnv([{"query": "Go."}]).append_transform(tools),
        ("shell", {"command": "ls"}),
        ("shell", {"command": "hang up"}),
        ("shell", {"command": "sleep", "timeout": 2}),
        ("shell", {"command": 7}),
        "Done.",
    )
    assert told[:3] == [
        "ran sh -c ls\n[stderr]\nwarned\n[exit 0]",
        "Error: shell failed with ConnectionError: the provider hung up",
        "[ended after 2 s]",
    ]
    assert "argument 'command'" in told[3] and rollout.status is RolloutStatus.TRUNCATED
    assert Remote.events == {"started": 1, "closed": 1} and len(Remote.loops) == 1


def test_the_time_limit_of_calls_is_none_of_the_start_of_a_sandbox(renderer):
    class Slow(Remote):
        async def start(self):
            await asyncio.sleep(0.1)
            self.events["built"] += 1

    tools = ToolTransform([ShellTool(Sandboxes(Slow))], timeout=0.01)
    rollout, _ = play(renderer, DatasetChatEnv([{"query": "Go."}]).append_transform(tools), "Done.")
    assert not rollout.error and Remote.events == {"built": 1, "closed": 1}


def test_a_sandbox_that_does_not_start_ends_its_rollout_with_the_reason(renderer):
    tools = ToolTransform([ShellTool(Sandboxes(lambda: Remote(starts=False)))])
    rollout, _ = play(renderer, DatasetChatEnv([{"query": "Go."}]).append_transform(tools), "Done.")
    assert rollout.status is RolloutStatus.ERROR and "the provider has no machine" in rollout.error
    assert Remote.events == {"started": 1, "closed": 1}


@pytest.mark.slow
def test_python_runs_in_anybodys_sandbox(renderer, service):
    executor = SandboxExecutor(lambda: ConfinedSandbox(service))
    blocks = (
        "open('kept', 'w').write('7')",
        "print(open('kept').read(), 6 * 7)",
        "1 / 0",
        "import time; time.sleep(900)",
    )

    def attempt(limit):
        env = DatasetChatEnv([{"query": "Go."}])
        env = env.append_transform(PythonInterpreter(persistent=True, executor=executor, timeout=limit))
        rollout, told = play(renderer, env, *(f"```python\n{block}\n```" for block in blocks))
        return (limit, rollout, told) if rollout.tool_calls["timeouts"] == 1 else None

    limit, rollout, told = patient(attempt, (1.0, 10.0, 100.0))
    assert told[1] == "Code block 1 executed successfully:\n7 42\n"
    assert "ZeroDivisionError" in told[2] and f"longer than {limit:g} s" in told[3]
    assert rollout.tool_calls == {"answered": 2, "failed": 1, "timeouts": 1}
    executor.close()
    executor.close()
    wait_until(lambda: service.num_sessions == 0)
    remote = SandboxExecutor(Remote)
    assert asyncio.run(remote.run("x")).stdout == "ran python3 -c x\n" and Remote.events == {"started": 1, "closed": 1}
    broken = SandboxExecutor(lambda: Remote(starts=False))
    with pytest.raises(ConnectionError, match="no machine"):
        asyncio.run(broken.run("x", session="chat"))
    for one in (remote, broken):
        one.close()


def test_a_session_of_which_the_sandbox_did_not_start_tries_again():
    made = []

    def make():
        made.append(Remote(starts=bool(made)))
        return made[-1]

    executor = SandboxExecutor(make)
    with pytest.raises(ConnectionError, match="no machine"):
        asyncio.run(executor.run("x", session="chat"))
    for _ in range(2):
        assert asyncio.run(executor.run("x", session="chat")).is_success
    executor.close()
    assert len(made) == 2 and Remote.events == {"started": 2, "closed": 2}

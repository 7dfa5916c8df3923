"""Published MCP servers, unmodified: their tools, one for each conversation, and rewards that read what they wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mcp_servers import SERVERS, description_of, install, wrong_answers
from tool_conversations import Chat
from waiting import wait_until
from web_sites import Site

from llmrl import DatasetChatEnv, RubricReward
from llmrl.collectors import LLMCollector
from llmrl.data import RolloutStatus
from llmrl.envs import ToolEnv
from llmrl.envs.hubs.virtual_env import InstallError
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine
from llmrl.tools import states_of
from llmrl.transforms import MCPToolTransform

pytest.importorskip("mcp")
IN_CI = [name for name, server in SERVERS.items() if server.in_ci]


@pytest.fixture(scope="module")
def installed(own_programs):
    try:
        return install(IN_CI)
    except InstallError as error:
        pytest.skip(f"MCP servers cannot be installed here: {error}")


@pytest.fixture(scope="module")
def described(installed):
    return {name: description_of(name, program) for name, (program, _) in installed.items()}


@pytest.fixture(scope="module")
def site(own_programs):
    site = Site()
    yield f"http://{site.address}/"
    site.server.shutdown()
    site.server.server_close()


@pytest.fixture(scope="module")
def transform(described):
    transform = MCPToolTransform(described, timeout=60.0)
    yield transform
    transform.close()


@pytest.mark.parametrize("name", IN_CI)
def test_each_call_is_answered_as_the_server_answers_it(transform, site, name):
    assert wrong_answers(Chat(transform), name, site) == []


def test_conversations_have_folders_and_servers_of_their_own(transform):
    first, second = Chat(transform), Chat(transform)
    first.call("files.write_file", path="mine.txt", content="1")
    assert "mine.txt" in first.call("files.list_directory", path=".")
    assert "mine.txt" not in second.call("files.list_directory", path=".")
    town = {"name": "Oslo", "entityType": "town", "observations": []}
    first.call("memory.create_entities", entities=[town])
    assert '"Oslo"' in first.call("memory.read_graph") and '"Oslo"' not in second.call("memory.read_graph")
    folders = states_of(first.data)
    assert (
        sorted(folders) == ["files", "git", "memory"]
        and len({*folders.values(), *states_of(second.data).values()}) == 6
    )
    transform.release(first.data)
    wait_until(lambda: not any(folder.exists() for folder in folders.values()))
    assert all(folder.is_dir() for folder in states_of(second.data).values()), "the other conversation goes on"


def call(tool, **arguments):
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def played(env, answers, tokenizer):
    from llmrl.rendering import make_renderer

    renderer = make_renderer(tokenizer)
    engine = ScriptedEngine([f"{one}<|im_end|>" for one in answers], encode=renderer.encode, decode=renderer.decode)
    policy = LLMWrapperBase(engine, renderer=renderer)
    with LLMCollector(env, policy=policy, groups_per_batch=1, max_concurrent_rollouts=1) as collector:
        return collector.play(2)


def test_a_reward_reads_what_the_model_has_written(described, tokenizer):
    """The folder of a conversation is prepared from its row, and read by the reward before it is removed."""

    def prepare(folder: Path, row):
        (folder / "towns.txt").write_text(row.get("towns", ""))

    def is_moved(files, towns):
        seen.append(files)
        return float((files / "moved.txt").read_text() == towns)

    seen = []
    servers = {"files": {**described["files"], "prepare": prepare}}
    rows = [{"query": "Move towns.txt to moved.txt.", "towns": towns} for towns in ("Oslo", "Rome")]
    transform = MCPToolTransform(servers)
    env = DatasetChatEnv(rows).append_transform(transform).append_transform(RubricReward(is_moved))
    answers = [call("files.move_file", source="towns.txt", destination="moved.txt"), "Done."] * 2
    rollouts = played(env, answers, tokenizer)
    env.close()
    assert [(one.status, one.reward) for one in rollouts] == [(RolloutStatus.COMPLETED, 1.0)] * 2
    assert len(set(seen)) == 2
    wait_until(lambda: not any(folder.exists() for folder in seen))


def test_a_class_and_servers_are_the_tools_of_one_environment(described, tokenizer):
    class Desk:
        def reset(self, query):
            return None

        def note(self, line: str) -> str:
            """Write a line down."""
            self.line = line
            return "noted"

        def get_reward(self):
            return float(self.line == "21:00")

    env = ToolEnv(Desk, [{"query": "What time is it in Tokyo at noon?"}, {"query": "And now?"}])
    env.insert_transform(0, MCPToolTransform({"time": described["time"]}))
    asked = call("time.convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo")
    rollouts = played(env, [asked, call("note", line="21:00"), "Done."] * 2, tokenizer)
    env.close()
    assert [one.reward for one in rollouts] == [1.0, 1.0]
    assert "T21:00:00+09:00" in rollouts[0].messages[2]["content"]

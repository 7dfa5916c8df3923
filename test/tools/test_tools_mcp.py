"""The tools of real MCP servers, over standard streams and over HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tool_conversations import Chat
from waiting import is_running, wait_until

from llmrl.transforms import MCPToolTransform

pytest.importorskip("mcp")
pytestmark = pytest.mark.usefixtures("own_programs")
SCRIPT = str(Path(__file__).parents[1] / "helpers" / "mcp_server.py")
BARE = """
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
import anyio, mcp.types as types
async def listed(context, params):
    return types.ListToolsResult(tools=[])
async def main():
    server = Server("bare", on_list_tools=listed)
    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())
anyio.run(main)
"""
STDIO = {"command": sys.executable, "args": [SCRIPT, "stdio"]}


@contextlib.contextmanager
def free_port():
    """A port that no other program is given meanwhile: servers may listen there beside a socket that only holds it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def start_http_server(port):
    process = subprocess.Popen([sys.executable, SCRIPT, "http", str(port)], stderr=subprocess.DEVNULL)

    def is_listening():
        assert process.poll() is None, "the HTTP server ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(is_listening)
    return process


@pytest.fixture(scope="module")
def http_port():
    with free_port() as port:
        process = start_http_server(port)
        yield port
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def transform(http_port):
    os.environ["LLMRL_TEST_SECRET"] = "hunter2"
    transform = MCPToolTransform({"local": STDIO, "web": {"url": f"http://127.0.0.1:{http_port}/mcp"}}, timeout=60.0)
    yield transform
    transform.close()
    del os.environ["LLMRL_TEST_SECRET"]


def test_tools_of_several_servers_are_in_the_prompt_with_their_schemas(transform):
    chat = Chat(transform)
    assert {"local.add", "web.add", "local.wait", "web.show"} <= set(chat.tool_names)
    schema = next(s["function"] for s in chat.data["tools"] if s["function"]["name"] == "web.add")
    assert schema["description"] == "Add two numbers."
    assert set(schema["parameters"]["properties"]) == {"a", "b"}


def test_calls_go_to_the_server_they_name(transform):
    chat = Chat(transform)
    assert chat.call("local.add", a=7, b=8) == "15"
    assert chat.call("web.add", a=1, b=2) == "3"
    assert chat.call("local.process_id") != chat.call("web.process_id")


@pytest.mark.parametrize("server", ["local", "web"])
def test_every_kind_of_content_becomes_text(transform, server):
    assert Chat(transform).call(f"{server}.show").splitlines() == [
        "words",
        "[image: image/png, 5 bytes]",
        "[audio: audio/wav, 3 bytes]",
        "[resource: report, file:///report.txt: of May]",
        "[resource: file:///a.txt]",
        "inside",
        "[resource: file:///b.bin, binary, 4 bytes]",
    ]


@pytest.mark.parametrize("server", ["local", "web"])
def test_failures_are_answered_to_the_model(transform, server):
    chat = Chat(transform)
    assert "the database is closed" in chat.call(f"{server}.fail")
    assert "b" in chat.call(f"{server}.add", a=1)
    assert chat.call(f"{server}.ad", a=1, b=2).startswith(f"Error: there is no tool '{server}.ad'. Did you mean")
    assert chat.call(f"{server}.add", a=1, b=1) == "2"


def test_a_program_sees_none_of_the_environment_s_secrets(transform):
    assert Chat(transform).call("local.secret") == "none"


@pytest.mark.parametrize("server", ["local", "web"])
def test_a_call_that_takes_too_long_is_stopped_and_the_connection_goes_on(http_port, server):
    transform = MCPToolTransform({"local": STDIO, "web": {"url": f"http://127.0.0.1:{http_port}/mcp"}}, timeout=0.5)
    try:
        chat = Chat(transform)
        started = time.monotonic()
        assert "took more than 0.5 s" in chat.call(f"{server}.wait", seconds=300)
        assert time.monotonic() - started < 300
        assert transform.counts["timeouts"] == 1
        wait_until(lambda: chat.call(f"{server}.add", a=1, b=1) == "2")
    finally:
        transform.close()


def test_a_program_that_dies_is_started_again(transform, tmp_path):
    chat = Chat(transform)
    assert "outcome" in (answer := chat.call("local.die")) or "is open again" in answer
    assert chat.call("local.add", a=1, b=1) == "2"
    # Between calls, and for a tool that may be repeated: the model does not notice.
    os.kill(int(chat.call("local.process_id")), signal.SIGKILL)
    assert int(chat.call("local.process_id")) > 0
    assert chat.call("local.die_once", path=str(tmp_path / "died")) == "alive"


def test_an_http_server_that_was_restarted_is_found_again():
    with free_port() as port:
        process = start_http_server(port)
        transform = MCPToolTransform({"web": {"url": f"http://127.0.0.1:{port}/mcp"}}, timeout=60.0)
        try:
            chat = Chat(transform)
            first = chat.call("web.process_id")
            process.kill()
            process.wait()
            assert chat.call("web.process_id").startswith("Error")
            process = start_http_server(port)
            second = chat.call("web.process_id")
            assert second != first and int(second) == process.pid
        finally:
            transform.close()
            process.kill()
            process.wait()


def test_a_server_that_cannot_be_reached_is_named():
    with pytest.raises(ConnectionError, match="MCP server 'gone' cannot be reached"):
        MCPToolTransform({"gone": {"command": sys.executable, "args": ["-c", "raise SystemExit(1)"]}})
    with pytest.raises(ConnectionError, match="'gone'"):
        MCPToolTransform({"gone": {"url": "http://127.0.0.1:9/mcp"}})


def test_a_server_that_says_nothing_is_given_up():
    script = "import time; time.sleep(600)"
    with pytest.raises(ConnectionError, match="did not answer within 1 s"):
        MCPToolTransform({"mute": {"command": sys.executable, "args": ["-c", script]}}, connect_timeout=1.0)


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ({"command": "a", "url": "b"}, "exactly one"),
        ({"comand": "a"}, "comand"),
        ({"url": "b", "args": []}, "cannot be combined with 'url'"),
        ({"command": "a", "prepare": print}, "'prepare', which requires 'per_conversation'"),
    ],
)
def test_a_server_described_wrongly_is_refused(server, reason):
    with pytest.raises(ValueError, match=reason):
        MCPToolTransform({"bad": server})


def test_resources_that_a_server_does_not_have_are_refused():
    with pytest.raises(ConnectionError, match="it has no resources"):
        MCPToolTransform({"local": {"command": sys.executable, "args": ["-c", BARE], "resources": True}})


def test_a_conversation_has_a_program_of_its_own():
    transform = MCPToolTransform({"local": {**STDIO, "per_conversation": True}})
    first, second = Chat(transform), Chat(transform)
    processes = {int(chat.call("local.process_id")) for chat in (first, second)}
    assert len(processes) == 2
    transform.release(first.data)
    wait_until(lambda: len([process for process in processes if is_running(process)]) == 1)
    assert int(second.call("local.process_id")) in processes
    transform.close()
    wait_until(lambda: not any(map(is_running, processes)))


def test_two_servers_with_one_name_for_rewards_are_refused():
    own = {**STDIO, "per_conversation": True}
    with pytest.raises(ValueError, match=r"under the name 'notes_1'.* rename one of them"):
        MCPToolTransform({"notes-1": own, "notes.1": own})


def test_a_program_that_cannot_be_prepared_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def prepare(folder, row):
        raise KeyError("towns")

    with pytest.raises(KeyError, match="towns"):
        MCPToolTransform({"local": {**STDIO, "per_conversation": True, "prepare": prepare}})
    assert list(tmp_path.iterdir()) == []


def test_closing_ends_the_programs():
    transform = MCPToolTransform({"local": STDIO})
    process = int(Chat(transform).call("local.process_id"))
    transform.close()
    transform.close()
    wait_until(lambda: not Path(f"/proc/{process}").exists())

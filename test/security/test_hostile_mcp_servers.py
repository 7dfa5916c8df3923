"""MCP servers that do harm: messages, lists and names without end, and errors that mean nothing."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import random
import sys
import threading
import tracemalloc

import hostile_mcp_server
import pytest
from tool_conversations import Chat
from waiting import is_running, wait_until

from llmrl.tools.mcp_transport import MAX_MESSAGE_BYTES, BoundedLines
from llmrl.transforms import MCPToolTransform

pytest.importorskip("mcp")
pytestmark = pytest.mark.usefixtures("own_programs")


def hostile(mode):
    return {"command": sys.executable, "args": [hostile_mcp_server.__file__, mode]}


def test_a_message_without_end_is_cut_and_the_connection_goes_on():
    transform = MCPToolTransform({"bad": hostile("calls")}, timeout=120.0)
    try:
        chat = Chat(transform)
        process = chat.call("bad.pid")
        tracemalloc.start()
        answer = chat.call("bad.huge", size=64 << 20)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert answer == "Error: the server sent a message of more than 8 MiB."
        assert most < 6 * MAX_MESSAGE_BYTES  # as text, and once more while it grows
        assert chat.call("bad.huge", size=2 << 20).startswith("éé")
        assert chat.call("bad.bytes") == "a\ufffd\ufffdb"
        # An error that speaks of a session is the tool's: the server goes on with all of its conversations.
        assert chat.call("bad.session") == "Error: no training session of that name"
        assert chat.call("bad.pid") == process
        # Answers to no request, twice, of another form; notifications and questions without end.
        for name in ("wrong_ids", "twice", "flood", "asks"):
            assert chat.call(f"bad.{name}") == process
        assert chat.call("bad.bad_content").startswith("Error: bad.bad_content failed with ValidationError")
        assert chat.call("bad.pid") == process
    finally:
        transform.close()


def test_output_beside_the_protocol_is_read_and_forgotten(capfd, caplog):
    transform = MCPToolTransform({"bad": hostile("calls")}, timeout=120.0)
    try:
        chat = Chat(transform)
        process = chat.call("bad.pid")
        for stream in ("noise", "errors"):
            assert chat.call(f"bad.{stream}", size=64 << 20) == process
    finally:
        transform.close()
    assert [record for record in caplog.records if record.name.startswith("mcp")] == []
    out, err = capfd.readouterr()
    assert "INFO at step" not in out + err and "yyy" not in err


def test_what_a_program_said_before_it_ended_is_in_the_error():
    broken = {
        "command": sys.executable,
        "args": ["-c", "raise SystemExit('x' * 5000 + 'the key TOWNS_KEY is not set')"],
    }
    with pytest.raises(ConnectionError, match=r"cannot be reached.*\n.*xxx.*the key TOWNS_KEY is not set") as failure:
        MCPToolTransform({"bad": broken})
    assert len(str(failure.value)) < 1500


def test_numbers_lists_and_questions_of_a_server_are_its_own_affair():
    transform = MCPToolTransform({"bad": hostile("calls")}, timeout=120.0)
    try:
        chat = Chat(transform)
        process = chat.call("bad.pid")
        assert "NaN" in chat.call("bad.nan")
        assert chat.call("bad.gone") == "Error: unknown tool: gone"
        assert "bad.gone" in chat.tool_names, "the prompt of a conversation does not change"
        # No model of the trainer's answers for the server, no person, and no folder is named.
        assert [code < 0 for code in json.loads(chat.call("bad.asks_and_tells"))] == [True] * 3
        assert chat.call("bad.pid") == process
    finally:
        transform.close()


def pid_of_server(chat):
    """The first answer that comes within the limit."""
    answers = []
    wait_until(lambda: answers.append(chat.call("bad.pid")) or answers[-1].isdigit())
    return answers[-1]


def test_a_server_that_answers_no_more_is_started_again():
    transform = MCPToolTransform({"bad": hostile("calls")}, timeout=3.0, connect_timeout=10.0)
    try:
        chat = Chat(transform)
        process = pid_of_server(chat)
        assert "took more than 3 s" in chat.call("bad.hang")
        wait_until(lambda: not is_running(int(process)))
        assert pid_of_server(chat) != process
    finally:
        transform.close()


@pytest.mark.parametrize(
    ("mode", "error", "reason"),
    [
        ("pages", ConnectionError, "'bad'.*more than 1000 tools"),
        ("many", ConnectionError, "'bad'.*more than 1000 tools"),
        ("named", ValueError, "'bad'.*of 200 characters"),
        ("unnamed", ValueError, "'bad'.*of 0 characters"),
        ("same", ValueError, "'bad' has 2 tools named 'bad.talk'"),
        ("described", ValueError, "'bad'.*'talk' with 400.. characters"),
        ("schema", ValueError, "'bad'.*'talk' with 40"),
    ],
)
def test_lists_names_and_descriptions_have_bounds(mode, error, reason):
    with pytest.raises(error, match=reason):
        MCPToolTransform({"bad": hostile(mode)})


def test_lines_are_bounded_however_they_come_in():
    generator = random.Random(0)
    for _ in range(200):
        lines = []
        for number in range(generator.randrange(1, 6)):
            size = generator.choice([0, 5, 300, 1000, 5000])
            lines.append(b'{"id": %d, "text": "%s"}' % (number, "é".encode() * (size // 2)))
        data, decoder, text = b"\n".join(lines) + b"\n", BoundedLines(), ""
        decoder.max_bytes = 999
        while data:
            size = generator.randrange(1, 700)
            text, data = text + decoder.decode(data[:size]), data[size:]
        read = [line for line in text.split("\n") if line]
        for number, line in enumerate(lines):
            own = [json.loads(one) for one in read if one.startswith(("{", '{"jsonrpc"')) and _is_json(one)]
            [answer] = [one for one in own if one["id"] == number]
            assert ("error" in answer) == (len(line) + 1 > 999)
            assert "error" in answer or answer == json.loads(line)
        assert max(map(len, read)) <= 999


def _is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("is_compressed", [False, True])
def test_an_http_answer_without_end_is_cut(is_compressed):
    body = b" " * (20 << 20)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            result = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "a", "version": "1"},
            }
            answer = {"jsonrpc": "2.0", "id": request.get("id"), "result": result}
            if request["method"] == "tools/list":
                answer["result"] = {"tools": [{"name": "huge", "inputSchema": {"type": "object"}}]}
            elif request["method"] not in ("initialize", "tools/call"):
                answer = {**answer, "result": None, "error": {"code": -32601, "message": "unknown"}}
                del answer["result"]
            is_huge = request["method"] == "tools/call"
            sent = json.dumps(answer).encode()
            if is_huge:
                sent = gzip.compress(body) if is_compressed else body
            self.send_response(200 if "id" in request else 202)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(sent)))
            if is_huge and is_compressed:
                self.send_header("content-encoding", "gzip")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(sent)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    transform = MCPToolTransform({"web": {"url": f"http://127.0.0.1:{server.server_port}/mcp"}}, timeout=120.0)
    try:
        answer = Chat(transform).call("web.huge")
        assert answer.startswith("Error: Failed to parse JSON response")
        assert is_compressed or "more than 8 MiB" in answer
    finally:
        transform.close()
        server.shutdown()
        server.server_close()

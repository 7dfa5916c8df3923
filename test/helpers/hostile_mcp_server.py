"""An MCP server that speaks JSON-RPC by hand, and badly: `python hostile_mcp_server.py MODE`."""

from __future__ import annotations

import json
import os
import sys
import time

MODE = sys.argv[1] if __name__ == "__main__" else ""
DESCRIPTIONS = {
    "many": [{"name": f"tool{index}", "inputSchema": {"type": "object"}} for index in range(1001)],
    "named": [{"name": "x" * 200, "inputSchema": {"type": "object"}}],
    "unnamed": [{"name": "", "inputSchema": {"type": "object"}}],
    "described": [{"name": "talk", "description": "y" * 40_000, "inputSchema": {"type": "object"}}],
    "schema": [{"name": "talk", "inputSchema": {"type": "object", "description": "z" * 40_000}}],
}
DESCRIPTIONS["same"] = 2 * [{"name": "talk", "inputSchema": {"type": "object"}}]
CALLED = {"huge", "session", "bytes", "pid", "split", "wrong_ids", "twice", "bad_content", "flood", "asks"}
CALLED |= {"noise", "errors", "hang", "nan", "gone", "asks_and_tells"}
ASKED = ("sampling/createMessage", "elicitation/create", "roots/list")


def say(message):
    sys.stdout.buffer.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    sys.stdout.flush()


def text(content):
    return {"content": [{"type": "text", "text": content}]}


for line in sys.stdin if __name__ == "__main__" else ():
    request = json.loads(line)
    number, method = request.get("id"), request.get("method")
    if number is None:
        continue
    if method == "initialize":
        version = request["params"]["protocolVersion"]
        about = {"name": "hostile", "version": "1"}
        say({"id": number, "result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}})
    elif method == "tools/list":
        tools = DESCRIPTIONS.get(MODE) or [{"name": name, "inputSchema": {"type": "object"}} for name in sorted(CALLED)]
        say({"id": number, "result": {"tools": tools, **({"nextCursor": "again"} if MODE == "pages" else {})}})
    elif method == "tools/call" and request["params"]["name"] == "huge":
        size = int(request["params"]["arguments"]["size"])
        sys.stdout.buffer.write(
            b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "' % number
        )
        for _ in range(size >> 20):
            sys.stdout.buffer.write(b"\xc3\xa9" * (1 << 19))
        sys.stdout.buffer.write(b'"}]}}\n')
        sys.stdout.flush()
    elif method == "tools/call" and request["params"]["name"] == "session":
        say({"id": number, "error": {"code": -32000, "message": "no training session of that name"}})
    elif method == "tools/call" and request["params"]["name"] == "bytes":
        sys.stdout.buffer.write(b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", ' % number)
        sys.stdout.buffer.write(b'"text": "a\xff\xfeb"}]}}\n')
        sys.stdout.flush()
    elif method == "tools/call" and request["params"]["name"] == "bad_content":
        say({"id": number, "result": {"content": [{"type": "text", "text": {"a": 1}}, {"type": "zip"}]}})
    elif method == "tools/call":
        match request["params"]["name"]:
            case "wrong_ids":
                say({"id": number + 1000, "result": text("another's")})
                say({"id": None, "error": {"code": 1, "message": "unasked"}})
            case "twice":
                say({"id": number, "result": text(str(os.getpid()))})
            case "flood":
                for index in range(100):
                    say({"method": "notifications/progress", "params": {"progressToken": index, "progress": 1e308}})
                    say({"method": "notifications/tools/list_changed"})
            case "noise":
                for index in range(int(request["params"]["arguments"]["size"]) >> 10):
                    sys.stdout.write(f"INFO at step {index}: {'x' * 1000}\n \n")
            case "errors":
                for _ in range(int(request["params"]["arguments"]["size"]) >> 20):
                    sys.stderr.write("ERROR " + "y" * (1 << 20) + "\n")
            case "hang":
                time.sleep(600)
            case "nan":
                say({"id": number, "result": {"content": [], "structuredContent": {"value": float("nan")}}})
                continue
            case "gone":
                say({"method": "notifications/tools/list_changed"})
                say({"id": number, "error": {"code": -32602, "message": "unknown tool: gone"}})
                continue
            case "asks_and_tells":
                told = []
                for method in ASKED:
                    say({"id": f"asked {method}", "method": method, "params": {}})
                    told.append(json.loads(sys.stdin.readline())["error"]["code"])
                say({"id": number, "result": text(json.dumps(told))})
                continue
            case "asks":
                for index in range(20):
                    say({"id": f"asked {index}", "method": "sampling/createMessage", "params": {"messages": []}})
        say({"id": number, "result": text(str(os.getpid()))})
    else:
        say({"id": number, "error": {"code": -32601, "message": "unknown"}})

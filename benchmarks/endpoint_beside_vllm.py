"""`llmrl serve` and vLLM's OpenAI server: time to the first token and CPU time per request, with 1 and 200 clients.

Both serve the same random one-layer model with the same engine, each in its own process, to the same clients in a third
process. Requests are streamed chat completions of 16 tokens, without and with log-probs: llmrl records log-probs for
each answer, and vLLM's server computes them when a client requests them. CPU time is that of the server's process; the
engine computes in a child process, which is not counted. Requests to the two servers alternate, so that a disturbance
of the machine affects both.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NUM_ROUNDS = 5
NUM_TOKENS = 16
CLIENTS = {1: 40, 200: 600}  # number of clients, and of requests in a round
ASKED = {"": {}, "log_probs_": {"logprobs": True}}
"""Additional entries of a request, by the prefix of the measured names."""
GOAL = 1.2
START_SECONDS = 300.0
_ENVIRON = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}

# Reads the URL and the numbers, sends the requests, and prints the seconds to each first token.
_CLIENT = """
import asyncio, json, sys, time, aiohttp

async def main():
    url, num_requests, num_clients, num_tokens, more = json.load(sys.stdin)
    numbers, seconds = iter(range(num_requests)), []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        async def ask():
            for number in numbers:
                body = {"model": "tiny", "messages": [{"role": "user", "content": f"{number} + 1 ="}], "stream": True,
                        "max_tokens": num_tokens, "ignore_eos": True, "temperature": 1.0, **more}
                started, first = time.perf_counter(), None
                async with client.post(url, json=body) as response:
                    assert response.status == 200, await response.text()
                    async for line in response.content:
                        if first is None and line.startswith(b"data: {"):
                            delta = json.loads(line[6:])["choices"][0]["delta"]
                            first = time.perf_counter() if delta.get("content") else None
                seconds.append((first or time.perf_counter()) - started)
        await asyncio.gather(*(ask() for _ in range(num_clients)))
    print(json.dumps(seconds))

asyncio.run(main())
"""


class Server:
    """A server in its own process, with a measurement of its CPU time."""

    def __init__(self, name: str, command: list[str], port: int, folder: Path) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}/v1/chat/completions"
        with (folder / f"{name}.log").open("w") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | _ENVIRON, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((folder / f"{name}.log").read_text()[-3000:]) from error
                time.sleep(0.5)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process, without its children."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def measure(self, num_clients: int, num_requests: int, more: dict[str, bool]) -> tuple[float, float]:
        """Return the median milliseconds to the first token, and the CPU milliseconds per request."""
        task = json.dumps([self.url, num_requests, num_clients, NUM_TOKENS, more])
        before = self.cpu_s()
        client = [sys.executable, "-c", textwrap.dedent(_CLIENT)]
        answer = subprocess.run(client, input=task, capture_output=True, text=True)
        if answer.returncode:
            raise RuntimeError(f"the clients of {self.name} failed: {answer.stderr[-2000:]}")
        seconds = json.loads(answer.stdout)
        return statistics.median(seconds) * 1e3, (self.cpu_s() - before) / num_requests * 1e3

    def close(self) -> None:
        """End the server and its engine."""
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _commands(model: str, port: int) -> dict[str, list[str]]:
    vllm = [
        "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "tiny", "--host",
        "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "2048", "--disable-uvicorn-access-log",
        "--max-num-seqs", "128",
    ]  # fmt: skip
    ours = ["-m", "llmrl", "serve", model, "--name", "tiny", "--port", str(port)]
    return {"llmrl": [sys.executable, *ours], "vllm": [sys.executable, *vllm]}


def run() -> dict[str, Any]:
    """Start both servers, and send requests to them alternately."""
    from llmrl.testing.tiny_model import make_tiny_model

    rows: dict[str, list[float]] = {}
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_tiny_model(folder / "tiny")
        try:
            for name in ("llmrl", "vllm"):
                port = _free_port()
                servers.append(Server(name, _commands(model, port)[name], port, folder))
            for server in servers:
                server.measure(8, 32, {})  # warm-up
            asked = [(prefix, more, *numbers) for prefix, more in ASKED.items() for numbers in CLIENTS.items()]
            for _ in range(NUM_ROUNDS):
                for prefix, more, num_clients, num_requests in asked:
                    for server in servers:
                        first_ms, cpu_ms = server.measure(num_clients, num_requests, more)
                        rows.setdefault(f"{server.name}_{prefix}first_{num_clients}_ms", []).append(first_ms)
                        rows.setdefault(f"{server.name}_{prefix}cpu_{num_clients}_ms", []).append(cpu_ms)
        finally:
            for server in servers:
                server.close()
    medians = {name: statistics.median(values) for name, values in rows.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(rows[f"llmrl_{name}_ms"], rows[f"vllm_{name}_ms"], strict=True))
        for name in (f"{prefix}{kind}_{number}" for prefix in ASKED for kind in ("first", "cpu") for number in CLIENTS)
    }
    table = Table(title=f"A streamed answer of {NUM_TOKENS} tokens, median of {NUM_ROUNDS}")
    for column in ("", "llmrl serve", "vLLM's server", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for name, ratio in ratios.items():
        kind, number = name.split("_")[-2:]
        what = "first token" if kind == "first" else "CPU per request"
        with_log_probs = ", log-probs" * name.startswith("log_probs")
        ours, theirs = (medians[f"{server}_{name}_ms"] for server in ("llmrl", "vllm"))
        table.add_row(f"{what}, {number} clients{with_log_probs}", f"{ours:.2f} ms", f"{theirs:.2f} ms", f"{ratio:.2f}")
    Console().print(table)
    return {
        "name": "endpoint_beside_vllm",
        "ratio": max(ratios.values()),
        "ratio_of": "llmrl serve to vLLM's server: the larger of time to the first token and CPU time per request",
        "goal": GOAL,
        "met": max(ratios.values()) <= GOAL,
        "medians": {**medians, **{f"ratio_{name}": ratio for name, ratio in ratios.items()}},
    }

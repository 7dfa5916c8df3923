"""CPU milliseconds that a request to the endpoint costs in addition to `engine.generate`, and collection by agents.

The engine is scripted. Requests come over HTTP from another process with a minimal client, so that only the endpoint is
measured: reading, rendering, parsing, recording and writing. The time is the CPU time of this process, so that other
work of the machine matters little. Collection plays one-turn conversations with an engine that takes 2 s per answer and
with the clients in this process; it is measured in real time on an idle machine.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import textwrap
import time
from typing import Any

from rich.console import Console
from rich.table import Table

NUM_IN_FLIGHT = 64
NUM_REQUESTS = 2048
NUM_SESSIONS = 1024
NUM_REPEATS = 3
NUM_CONVERSATIONS = 256
LATENCY_S = 2.0
GOAL_MS = 1.0
GOAL_SHARE = 0.95
ANSWER = "1 2 3 4<|im_end|>"

# Reads the URL and the keys, and sends the requests.
_CLIENT = """
import asyncio, json, sys, aiohttp

async def main():
    url, keys, num_requests, num_in_flight = json.load(sys.stdin)
    numbers = iter(range(num_requests))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        async def ask():
            for number in numbers:
                body = {"model": "policy", "messages": [{"role": "user", "content": f"{number} + 1 ="}]}
                headers = {"Authorization": "Bearer " + keys[number % len(keys)]}
                async with client.post(url, json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    await response.read()
        await asyncio.gather(*(ask() for _ in range(num_in_flight)))

asyncio.run(main())
"""


def _engine(renderer: Any, latency_s: float = 0.0) -> Any:
    from llmrl.testing import ScriptedEngine

    return ScriptedEngine([renderer.encode(ANSWER)], latency_s=latency_s, record_requests=False)


def direct_ms(renderer: Any) -> float:
    """Return the CPU milliseconds per request of the engine alone, including rendering."""
    from llmrl.engines import SamplingConfig

    async def main() -> float:
        engine, sampling, numbers = _engine(renderer), SamplingConfig(), iter(range(NUM_REQUESTS))

        async def ask() -> None:
            for number in numbers:
                messages = [{"role": "user", "content": f"{number} + 1 ="}]
                await engine.generate(renderer.render(messages, add_generation_prompt=True), sampling)

        started = time.process_time()
        await asyncio.gather(*(ask() for _ in range(NUM_IN_FLIGHT)))
        return (time.process_time() - started) / NUM_REQUESTS * 1e3

    return asyncio.run(main())


def served_ms(renderer: Any, *, num_sessions: int, num_in_flight: int) -> float:
    """Return the CPU milliseconds per request over HTTP, with a number of open sessions."""
    from llmrl.collectors.agents import KeyedSessions
    from llmrl.endpoint import EndpointServer, Session, SessionLimits, TurnTree
    from llmrl.engines import SamplingConfig

    async def main() -> float:
        engine, sessions = _engine(renderer), KeyedSessions()
        server = EndpointServer(sessions)
        await server.start()
        limits = SessionLimits(max_prompt_tokens=engine.max_model_len - 1)
        keys = [
            sessions.add(Session(str(number), TurnTree(renderer), engine.generate, SamplingConfig(), limits))
            for number in range(num_sessions)
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", textwrap.dedent(_CLIENT), stdin=subprocess.PIPE
        )
        task = [f"{server.url}/v1/chat/completions", keys, NUM_REQUESTS, num_in_flight]
        started = time.process_time()
        await process.communicate(json.dumps(task).encode())
        seconds = time.process_time() - started
        assert process.returncode == 0
        await server.close()
        return seconds / NUM_REQUESTS * 1e3

    return asyncio.run(main())


async def _play(row: Any, model: Any) -> float:
    import aiohttp

    body = {"model": model.name, "messages": [{"role": "user", "content": row["query"]}]}
    headers = {"Authorization": f"Bearer {model.api_key}"}
    async with aiohttp.ClientSession() as client:
        async with client.post(f"{model.base_url}/chat/completions", json=body, headers=headers) as response:
            await response.json()
    return 1.0


def collect_s(renderer: Any, *, is_agent: bool) -> float:
    """Return the seconds to collect a batch of one-turn conversations."""
    from llmrl.collectors import LLMCollector
    from llmrl.envs import AgentEnv, DatasetChatEnv
    from llmrl.policies import LLMWrapperBase
    from llmrl.transforms import RubricReward

    def one(completion: str) -> float:
        return 1.0

    rows = [{"query": f"{number} + 1 ="} for number in range(32)]
    env = AgentEnv(_play, rows) if is_agent else DatasetChatEnv(rows).append_transform(RubricReward(one))
    policy = LLMWrapperBase(_engine(renderer, LATENCY_S), renderer=renderer)
    options: dict[str, int] = {"groups_per_batch": NUM_CONVERSATIONS, "max_concurrent_rollouts": NUM_IN_FLIGHT}
    with LLMCollector(env, policy=policy, **options) as collector:
        started = time.perf_counter()
        assert len(collector.next()) == NUM_CONVERSATIONS
        return time.perf_counter() - started


def run() -> dict[str, Any]:
    """Measure alternately, so that a disturbance of the machine affects all cases alike."""
    from transformers import AutoTokenizer

    from llmrl.rendering import make_renderer
    from llmrl.testing.embedded_model import ensure_embedded_model

    renderer = make_renderer(AutoTokenizer.from_pretrained(str(ensure_embedded_model())))
    direct_ms(renderer)
    collect_s(renderer, is_agent=True)
    rows = [
        {
            "direct_ms": direct_ms(renderer),
            "served_ms": served_ms(renderer, num_sessions=NUM_IN_FLIGHT, num_in_flight=NUM_IN_FLIGHT),
            "served_1024_ms": served_ms(renderer, num_sessions=NUM_SESSIONS, num_in_flight=NUM_SESSIONS),
            "turns_s": collect_s(renderer, is_agent=False),
            "agents_s": collect_s(renderer, is_agent=True),
        }
        for _ in range(NUM_REPEATS)
    ]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    cost_ms, share = medians["served_ms"] - medians["direct_ms"], medians["turns_s"] / medians["agents_s"]
    table = Table(title=f"A request at the endpoint, median of {NUM_REPEATS}")
    table.add_column("")
    table.add_column("llmrl", justify="right")
    table.add_row("engine.generate with rendering", f"{medians['direct_ms']:.2f} ms")
    table.add_row(f"over HTTP, {NUM_IN_FLIGHT} in flight", f"{medians['served_ms']:.2f} ms")
    table.add_row(f"over HTTP, {NUM_SESSIONS:,} in flight and as many sessions", f"{medians['served_1024_ms']:.2f} ms")
    table.add_row(
        f"collection, {NUM_IN_FLIGHT} in flight, {LATENCY_S:g} s per answer: environment", f"{medians['turns_s']:.2f} s"
    )
    table.add_row("the same: agents", f"{medians['agents_s']:.2f} s")
    Console().print(table)
    return {
        "name": "endpoint",
        "ratio": cost_ms,
        "ratio_of": f"CPU milliseconds that a request costs in addition to engine.generate, {NUM_IN_FLIGHT} in flight",
        "goal": GOAL_MS,
        "met": cost_ms <= GOAL_MS and share >= GOAL_SHARE,
        "medians": {**medians, "collection_share": share, "goal_share": GOAL_SHARE},
    }

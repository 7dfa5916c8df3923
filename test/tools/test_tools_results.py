"""What tools of TorchRL's main branch do here: results in parts, stopping, requests, rates, Anthropic's calls."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest
from tensordict import TensorDict
from waiting import patient
from web_sites import Site

from llmrl._utils.asynchronous import run_sync
from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import ChatHistory, RolloutStatus
from llmrl.envs import ChatEnv, DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.rendering.tool_calls import find_tool_call_parser
from llmrl.testing import ScriptedEngine
from llmrl.tools import (
    FileRefPart,
    HttpTool,
    ImagePart,
    JsonPart,
    RateLimiter,
    StopTool,
    TextPart,
    ToolResult,
    ToolSession,
    ToolTransform,
)
from llmrl.transforms import RubricReward


def ask(tools, name, **arguments):
    """Return the message to the model, and how the call is counted."""
    session = ToolSession()
    return run_sync(tools.call(name, arguments, session)), dict(session.outcomes)


def test_results_in_parts_are_joined_and_images_are_refused_by_name():
    def look(what: str) -> ToolResult:
        """Look."""
        if what == "image":
            return ToolResult((TextPart("here"), ImagePart(b"1234", "image/jpeg")))
        parts = (TextPart("found"), JsonPart({"é": [1]}), FileRefPart("out/a.png"))
        return ToolResult(parts, is_error=what == "wrong", meta={"seconds": 1})

    tools = ToolTransform([look])
    assert ask(tools, "look", what="it") == ('found\n{"é": [1]}\n<file:out/a.png>', {"answered": 1})
    assert ask(tools, "look", what="wrong")[1] == {"failed": 1}
    text, outcomes = ask(tools, "look", what="image")
    assert "the tool returned an image (image/jpeg, 4 bytes)" in text and outcomes == {"failed": 1}
    tools.close()


def test_a_tool_ends_the_conversation_which_is_scored(renderer):
    def has_stopped(completion, status):
        return float(status is RolloutStatus.COMPLETED)

    env = DatasetChatEnv([{"query": "Go."}]).append_transform(ToolTransform([StopTool()]))
    call = '<tool_call>\n{"name": "stop", "arguments": {"reason": "found it"}}\n</tool_call><|im_end|>'
    policy = LLMWrapperBase(ScriptedEngine([call], encode=renderer.encode), renderer=renderer)
    env = env.append_transform(RubricReward(has_stopped))
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=RolloutLimits(max_turns=5)) as collector:
        [rollout] = collector.play(1)
    assert rollout.status is RolloutStatus.COMPLETED and rollout.num_turns == 1 and rollout.reward == 1.0
    assert rollout.messages[-1]["content"] == "[stop] found it" and rollout.tool_calls == {"answered": 1}


@pytest.fixture
def site():
    site = Site()
    yield site
    site.server.shutdown()
    site.server.server_close()


def test_requests_go_to_the_hosts_that_are_named_alone(site):
    pages = {
        "/": (200, "Grüße " * 50, {}),
        "/away": (302, "", {"Location": "http://example.org/"}),
        "/gone": (404, "nothing", {}),
    }
    site.answer = lambda path, headers: pages[path]
    host, url_of_site = site.address, f"http://{site.address}"
    tools = ToolTransform([HttpTool(allowed_hosts=[host], max_response_bytes=60, timeout=60)])
    text, outcomes = ask(tools, "http", url=f"{url_of_site}/")
    assert text.startswith("[status 200]\nGrüße Grüße") and text.endswith("[cut after 60 bytes]")
    assert outcomes == {"answered": 1}
    assert "[redirects to http://example.org/]" in ask(tools, "http", url=f"{url_of_site}/away")[0]
    assert ask(tools, "http", url=f"{url_of_site}/gone") == ("[status 404]\nnothing", {"failed": 1})
    for url in ("http://example.org/", f"file://{host}/", f"http://{host}@example.org/", "http://[", "", "http://a:b"):
        text, outcomes = ask(tools, "http", url=url)
        assert outcomes == {"failed": 1} and ("requests may go only to" in text or "is not a URL" in text)
    assert site.requested == ["/", "/away", "/gone"]
    assert ask(tools, "http", url=url_of_site, method="NO WAY")[1] == {"failed": 1}
    tools.close()
    port = host.rpartition(":")[2]
    tools = ToolTransform([HttpTool(allowed_hosts=[f"LOCALHOST:{port}"], timeout=60)])  # names have no case
    assert ask(tools, "http", url=f"http://LocalHost:{port}/gone")[0].startswith("[status 404]")
    tools.close()
    for hosts in ((), "example.org"):
        with pytest.raises(ValueError, match="allowed_hosts must name the hosts"):
            HttpTool(allowed_hosts=hosts)
    for host in ("https://api.example.org", "api.example.org/v1", "*.example.org"):
        with pytest.raises(ValueError, match="which matches nothing"):
            HttpTool(allowed_hosts=[host])
    for limit in ({"timeout": 0}, {"max_response_bytes": -1}):
        with pytest.raises(ValueError, match=next(iter(limit))):
            HttpTool(allowed_hosts=["api.example.org"], **limit)


def test_no_header_or_url_leads_a_request_elsewhere(site):
    seen = []
    site.answer = lambda path, headers: seen.append(dict(headers)) or (200, "fine", {})
    tools = ToolTransform([HttpTool(allowed_hosts=[site.address], timeout=60)])
    url = f"http://{site.address}/"
    for name in ("Host", "hOST", "Transfer-Encoding", "Content-Length", "Connection", "X-Forwarded-Host", "Expect"):
        text, outcomes = ask(tools, "http", url=url, method="POST", headers={name: "chunked"}, body="x")
        assert outcomes == {"failed": 1} and "headers may be accept" in text and name in text
    for method in ("CONNECT", "TRACE", "get x HTTP/1.1\r\nHost: a"):
        assert ask(tools, "http", url=url, method=method)[1] == {"failed": 1}
    for elsewhere in (f"http://example.org\\@{site.address}/", f"http://{site.address}\\@example.org/"):
        assert ask(tools, "http", url=elsewhere)[1] == {"failed": 1} or seen.pop()["Host"] == site.address
    assert ask(tools, "http", url=url, headers={"Accept": "a\r\nHost: b"})[1] == {"failed": 1}
    assert seen == []
    told = {"Authorization": "Bearer k", "content-type": "text/x"}
    assert ask(tools, "http", url=url, method="get", headers=told)[1] == {"answered": 1}
    assert seen[0]["Host"] == site.address and seen[0]["Authorization"] == "Bearer k"
    tools.close()


def test_calls_wait_for_their_rate_in_virtual_time():
    from llmrl.testing import run_in_virtual_time

    async def begin(limiter, count, seconds=0.0):
        begun, running, most = [], 0, 0

        async def call():
            nonlocal running, most
            async with limiter.slot():
                begun.append(asyncio.get_running_loop().time() - started)
                running += 1
                most = max(most, running)
                await asyncio.sleep(seconds)
                running -= 1

        started = asyncio.get_running_loop().time()
        await asyncio.gather(*(call() for _ in range(count)))
        return begun, most

    begun, _ = run_in_virtual_time(begin(RateLimiter(rate_per_second=2, burst=3), 6))
    assert begun == pytest.approx([0, 0, 0, 0.5, 1.0, 1.5])
    begun, most = run_in_virtual_time(begin(RateLimiter(max_concurrent=2), 5, seconds=1.0))
    assert begun == pytest.approx([0, 0, 1, 1, 2]) and most == 2
    for options in ({"max_concurrent": 0}, {"rate_per_second": -1}, {"burst": 0.5}):
        with pytest.raises(ValueError, match=next(iter(options))):
            RateLimiter(**options)


def test_the_time_of_a_call_begins_when_it_has_its_slot():
    def attempt(seconds):
        async def look() -> str:
            """Look."""
            await asyncio.sleep(seconds)
            return "seen"

        tools = ToolTransform([look], timeout=4 * seconds, rate_limits={"look": RateLimiter(max_concurrent=1)})

        async def five():
            return await asyncio.gather(*(tools.call("look", {}, ToolSession()) for _ in range(5)))

        answers = run_sync(five())
        tools.close()
        return answers == ["seen"] * 5 or None

    assert patient(attempt, (0.1, 1.0, 10.0))


def test_calls_of_several_steps_wait_for_the_same_limit():
    running = most = 0

    async def look() -> str:
        """Look."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return "seen"

    limiter = RateLimiter(max_concurrent=1)
    env = ChatEnv().append_transform(ToolTransform([look], tool_parser="hermes", rate_limits={"look": limiter}))
    data = env.reset(TensorDict({"query": "Look!"}))
    calls = '<tool_call>{"name": "look", "arguments": {}}</tool_call>' * 3
    for _ in range(2):
        full = data["history"].prompt.append({"role": "assistant", "content": calls})
        data = env.step(data.set("history", ChatHistory(full=full, batch_size=())))["next"]
        assert [message["content"] for message in data["history"].prompt.chats[-3:]] == ["seen"] * 3
    assert most == 1
    pickle.loads(pickle.dumps(limiter))
    env.close()


def test_a_limit_of_a_tool_that_there_is_not_is_refused():
    def look() -> str:
        """Look."""
        return "seen"

    with pytest.raises(ValueError, match=r"rate_limits has \['lok'\], but the names of the tools are \['look'\]"):
        ToolTransform([look], rate_limits={"lok": RateLimiter(max_concurrent=1)})


def test_calls_in_anthropics_format():
    parse = find_tool_call_parser("anthropic")
    blocks = [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "toolu_2", "name": "add", "input": "no object"},
        {"type": "thinking", "thinking": "…"},
    ]
    for text in (json.dumps(blocks), json.dumps({"role": "assistant", "content": blocks})):
        parsed = parse(text)
        assert parsed.content == "Let me see." and len(parsed.malformed) == 1
        assert parsed.tool_calls == (
            {"type": "function", "id": "toolu_1", "function": {"name": "add", "arguments": {"a": 1}}},
        )
    for text in ("15", "[1, 2]", "{}", '{"content": "15"}', "[" * 100_000, '[{"type": "tool_use"', "null", "[]x"):
        assert parse(text).content == text and not parse(text).tool_calls

"""`llmrl serve`: a model behind a URL, and what is kept of it."""

from __future__ import annotations

import asyncio
import errno
import json
import socket

import aiohttp
import anthropic
import openai
import pytest
from endpoint_agents import LoggingEngine
from rich.console import Console
from typer.testing import CliRunner

from llmrl.cli.app import app
from llmrl.cli.serve import ServeSettings, serve
from llmrl.endpoint.open_sessions import OpenSessions
from llmrl.policies import LLMWrapperBase
from llmrl.runs.run_folder import RunFolder
from llmrl.viewer import read_run

USER = {"role": "user", "content": "Begin."}


def served(renderer, act, *, out=None, api_key="secret", answers=("15<|im_end|>", "2<|im_end|>"), kind=LoggingEngine):
    """What `act` returns of a served model, and the engine that was asked."""
    engine = kind(answers, encode=renderer.encode, decode=renderer.decode)
    policy = LLMWrapperBase(engine, renderer=renderer, generate_kwargs={"max_new_tokens": 99, "temperature": 0.5})
    settings = ServeSettings(name="small", host="127.0.0.1", port=0, api_key=api_key, out=out)
    console = Console(record=True, width=200, stderr=True)

    async def main():
        until = asyncio.Event()
        serving = asyncio.ensure_future(serve(settings, policy, console, until=until))
        while not (text := console.export_text(clear=False)):
            assert not serving.done() or serving.result()
            await asyncio.sleep(0.01)
        url = next(word for word in text.split() if word.startswith("http"))
        try:
            return await act(url)
        finally:
            until.set()
            await serving

    return asyncio.run(main()), engine


async def talk(client, num_turns, **options):
    messages = [USER]
    for number in range(num_turns):
        answer = await client.chat.completions.create(model="small", messages=messages, **options)
        said = {"role": "assistant", "content": answer.choices[0].message.content}
        messages += [said, {"role": "user", "content": f"And {number}?"}]


def test_conversations_are_kept_for_the_viewer(renderer, tmp_path):
    async def act(url):
        client = openai.AsyncOpenAI(base_url=url, api_key="secret")
        await talk(client, 3)
        await talk(client, 1, extra_headers={"X-Session-ID": "mine"})
        await talk(client, 1, extra_headers={"X-Session-ID": "mine"})
        await talk(client, 2)

    served(renderer, act, out=tmp_path / "out")
    run = read_run(tmp_path / "out")
    assert [record["num_turns"] for record in run.rollouts] == [3, 2, 2]
    assert [record["group_id"] for record in run.rollouts] == ["unnamed/0", "named/mine", "unnamed/1"]
    assert [[turn["messages"][-1]["content"] for turn in record["turns"]] for record in run.rollouts] == [
        [], ["2", "15"], []
    ]  # fmt: skip
    assert [message["content"] for message in run.rollouts[0]["messages"]] == [
        "Begin.", "15", "And 0?", "2", "And 1?", "15"
    ]  # fmt: skip
    shown = {record["rollout_id"]: rows for record, rows in zip(run.rollouts, run.rows.values(), strict=True)}
    assert [sum(row.loss_mask) for rows in shown.values() for row in rows] == [8, 2, 3, 5]
    assert run.token_texts[renderer.encode("15")[0]] == "1"


@pytest.mark.slow
def test_a_conversation_that_cannot_be_saved_loses_no_other(renderer, tmp_path, monkeypatch, caplog):
    write = RunFolder.log_evaluation

    def write_unless_full(folder, step, name, rollouts):
        if rollouts[0].rollout_id == "named/a":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, step, name, rollouts)

    monkeypatch.setattr(RunFolder, "log_evaluation", write_unless_full)

    async def act(url):
        for name in ("a", "b"):
            client = openai.AsyncOpenAI(base_url=url, api_key="secret")
            await talk(client, 1, extra_headers={"X-Session-ID": name})

    served(renderer, act, out=tmp_path / "out")
    assert [record["rollout_id"] for record in read_run(tmp_path / "out").rollouts] == ["named/b"]
    assert "the conversation named/a could not be saved" in caplog.text


def test_a_request_that_names_an_earlier_answer_joins_its_session(renderer, tmp_path):
    async def act(url):
        create = openai.AsyncOpenAI(base_url=url, api_key="secret").responses.create
        await create(model="small", input="Hi")
        first = await create(model="small", input="Begin.")
        second = await create(model="small", input="And?", previous_response_id=first.id)
        await create(model="small", input="And then?", previous_response_id=second.id)
        with pytest.raises(openai.NotFoundError, match="no earlier answer"):
            await create(model="small", input="And?", previous_response_id="resp_0")

    served(renderer, act, out=tmp_path / "out")
    run = read_run(tmp_path / "out")
    assert [record["num_turns"] for record in run.rollouts] == [1, 3]
    asked = [message["content"] for message in run.rollouts[1]["messages"] if message["role"] == "user"]
    assert asked == ["Begin.", "And?", "And then?"] and len(run.rows) == 2


def test_clients_say_how_to_sample(renderer):
    async def act(url):
        client = openai.AsyncOpenAI(base_url=url, api_key="secret")
        await talk(client, 1, temperature=0.0, seed=3, max_tokens=7, extra_body={"top_k": -1})
        await talk(client, 1)
        with pytest.raises(openai.BadRequestError, match="temperature must be non-negative"):
            await talk(client, 1, temperature=-1.0)
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="secret")
        await claude.messages.create(model="small", messages=[USER], max_tokens=9, extra_body={"top_k": 4})

    _, engine = served(renderer, act)
    used = [(one.temperature, one.seed, one.max_new_tokens, one.top_k) for _, one, _ in engine.requests]
    assert used == [(0.0, 3, 7, 0), (0.5, None, 99, 0), (0.5, None, 9, 4)]


@pytest.mark.parametrize(("seed", "seeds"), [(7, [7, 8, 9]), (2**63 - 1, [2**63 - 1, 0, 1])])
def test_several_answers_of_a_request_with_a_seed_have_different_seeds(renderer, seed, seeds):
    async def act(url):
        client = openai.AsyncOpenAI(base_url=url, api_key="secret")
        await talk(client, 1, n=3, seed=seed)

    _, engine = served(renderer, act)
    assert [one.seed for _, one, _ in engine.requests] == seeds


class ParticularEngine(LoggingEngine):
    """Supports what vLLM does on a CPU."""

    def check_sampling(self, sampling):
        if sampling.seed is not None:
            raise ValueError("no seeds")
        if sampling.temperature > 2:
            raise ValueError("temperature must be at most 2")


def test_what_the_engine_does_not_support_is_the_clients_error_and_a_seed_is_overridden(renderer, tmp_path):
    async def act(url):
        client = openai.AsyncOpenAI(base_url=url, api_key="secret")
        await talk(client, 1, seed=3)
        for wrong in (
            {"temperature": 3.0},
            {"seed": 2**64 + 1},
            {"temperature": 1e300},
        ):
            with pytest.raises(openai.BadRequestError):
                await talk(client, 1, **wrong)

    _, engine = served(renderer, act, out=tmp_path / "out", kind=ParticularEngine)
    assert [one.seed for _, one, _ in engine.requests] == [None]
    [record] = read_run(tmp_path / "out").rollouts
    assert record["info"] == {"requests": {"num_answered": 1, "overridden": {"seed": 1}}}


@pytest.mark.slow
@pytest.mark.parametrize("answers", [["15<|im_end|>", "2<|im_end|>"], ["15<|im_end|>"]], ids=["different", "equal"])
def test_samples_of_one_prompt_are_conversations_of_their_own(renderer, tmp_path, answers):
    async def act(url):
        client = openai.AsyncOpenAI(base_url=url, api_key="secret")
        talks = [[USER] for _ in range(4)]
        for number in range(3):
            for messages in talks:
                answer = await client.chat.completions.create(model="small", messages=messages)
                said = {"role": "assistant", "content": answer.choices[0].message.content}
                messages += [said, {"role": "user", "content": f"And {number}?"}]

    served(renderer, act, out=tmp_path / "out", answers=answers)
    run = read_run(tmp_path / "out")
    assert [record["num_turns"] for record in run.rollouts] == [3, 3, 3, 3]
    assert [record["turns"] for record in run.rollouts] == [[]] * 4, "none has branches"


def test_counting_tokens_opens_no_session_and_takes_no_turn(renderer, tmp_path):
    """Two conversations with equal answers, of clients that count before they ask."""

    async def act(url):
        client = anthropic.AsyncAnthropic(base_url=url, api_key="secret").messages
        talks = [[USER] for _ in range(2)]
        for number in range(2):
            for messages in talks:
                count = await client.count_tokens(model="small", messages=messages)
                answer = await client.create(model="small", messages=messages, max_tokens=9)
                assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
                messages += [
                    {"role": "assistant", "content": answer.content[0].text},
                    {"role": "user", "content": f"And {number}?"},
                ]
        return await num_sessions(url)

    count, _ = served(renderer, act, out=tmp_path / "out", answers=["15<|im_end|>"])
    assert count == 2
    assert [record["num_turns"] for record in read_run(tmp_path / "out").rollouts] == [2, 2]


def test_a_request_for_a_model_that_is_not_there_opens_no_session(renderer):
    async def act(url):
        with pytest.raises(openai.NotFoundError, match="'other' does not exist here"):
            await openai.AsyncOpenAI(base_url=url, api_key="secret").responses.create(model="other", input="?")
        with pytest.raises(anthropic.NotFoundError, match="'other' does not exist here"):
            claude = anthropic.AsyncAnthropic(base_url=url, api_key="secret")
            await claude.messages.count_tokens(model="other", messages=[USER])
        return await num_sessions(url)

    assert served(renderer, act)[0] == 0


async def num_sessions(url):
    async with aiohttp.ClientSession() as client, client.get(url.removesuffix("/v1") + "/metrics") as response:
        lines = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines())
    return int(lines["llmrl_sessions"])


def test_requests_without_the_key_are_refused_and_metrics_count(renderer):
    async def act(url):
        await talk(openai.AsyncOpenAI(base_url=url, api_key="secret"), 2)
        for key in ("wrong", "secret2"):
            with pytest.raises(openai.AuthenticationError, match="the key is wrong"):
                await talk(openai.AsyncOpenAI(base_url=url, api_key=key), 1)
        with pytest.raises(openai.AuthenticationError, match="the key is wrong"):  # nor learns what is served
            await openai.AsyncOpenAI(base_url=url, api_key="x").responses.create(model="other", input="?")
        with pytest.raises(openai.AuthenticationError, match="the key is wrong"):
            await openai.AsyncOpenAI(base_url=url, api_key="x").models.list()
        assert len((await openai.AsyncOpenAI(base_url=url, api_key="secret").models.list()).data) == 2
        async with aiohttp.ClientSession() as client, client.get(url.removesuffix("/v1") + "/metrics") as response:
            return await response.text()

    text, _ = served(renderer, act)
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines())
    assert lines["llmrl_sessions"] == "1" and lines['llmrl_tokens_total{kind="completion"}'] == "5"
    assert lines['llmrl_requests_total{path="/chat/completions",status="200"}'] == "2"
    assert lines['llmrl_requests_total{path="/chat/completions",status="401"}'] == "2"


def raw(url, *lines, body=b""):
    """The answer to a request of these lines, which may hold any bytes; its body is sent as far as it is given."""
    port = int(url.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"\r\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
        client.sendall(b"\r\n\r\n" + body)
        answer = b""
        while part := client.recv(4096):
            answer += part
            if b"\r\n\r\n" in answer:
                return answer
    return answer


def test_the_key_is_looked_at_before_a_body_is_read(renderer):
    """A body that never comes whole is answered at once."""

    async def act(url):
        statuses = []
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"):
            for key in (b"", b"Authorization: Bearer wrong", b"Authorization: Bearer \xff\xfe", b"x-api-key: \xe9"):
                lines = [
                    f"POST {path} HTTP/1.1",
                    "Host: localhost",
                    "Content-Length: 60000000",
                    *([key] if key else []),
                ]
                statuses.append((await asyncio.to_thread(raw, url, *lines, body=b"{")).split(b"\r\n")[0])
        named = ["GET /v1/models HTTP/1.1", "Host: localhost", "Authorization: Bearer secret"]
        answer = await asyncio.to_thread(raw, url, *named, b"X-Session-ID: \xff")
        return statuses, answer

    (statuses, answer), _ = served(renderer, act)
    assert set(statuses) == {b"HTTP/1.1 401 Unauthorized"}
    assert answer.startswith(b"HTTP/1.1 400")


def test_without_a_key_no_page_of_a_browser_may_ask(renderer):
    question = json.dumps({"model": "small", "messages": [USER]}).encode()

    async def act(url):
        own = url.removeprefix("http://").removesuffix("/v1")
        port, statuses = own.split(":")[1], {}
        for host, origin in (
            (own, None),
            (f"localhost:{port}", None),
            (f"[::1]:{port}", None),
            (own, f"http://{own}"),
            (f"evil.org:{port}", None),
            (f"evil.org:{port}", f"http://evil.org:{port}"),
            (own, "https://evil.org"),
            (own, "null"),
            (own, f"http://{own}.evil.org"),
            (f"127.0.0.1.evil.org:{port}", None),
            ("", None),
        ):
            origins = [] if origin is None else [f"Origin: {origin}"]
            # What a page may send without asking first.
            lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {host}", *origins, "Content-Type: text/plain"]
            answer = await asyncio.to_thread(raw, url, *lines, f"Content-Length: {len(question)}", body=question)
            assert b"access-control" not in answer.lower()
            statuses[host.replace(port, "PORT"), origin and origin.replace(port, "PORT")] = answer.split()[1]
        return statuses

    statuses, engine = served(renderer, act, api_key=None)
    assert list(statuses.values()) == [b"200"] * 4 + [b"403"] * 7, statuses
    assert len(engine.log) == 4


def test_an_address_that_others_reach_wants_a_key(tmp_path):
    for key in ([], ["--api-key", ""]):  # an empty variable is no key
        result = CliRunner().invoke(app, ["serve", "--host", "0.0.0.0", *key])
        assert result.exit_code == 2 and "--api-key" in result.output
    for command in (["serve"], ["env", "serve", "guess"]):
        result = CliRunner().invoke(app, [*command, "--api-key", ""])
        assert result.exit_code == 2 and "--api-key is empty" in result.output
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "nothing")])
    assert result.exit_code == 2 and "nothing" in result.output


def test_idle_sessions_end(renderer):
    ended = []

    class Idle:
        is_asked, last_used_s = False, -1e9

        def __init__(self, name):
            self.name = name

        def end(self):
            ended.append(self.name)

    sessions = OpenSessions(Idle, on_end=lambda session: ended.append(session))
    first = sessions.find(None, "a", None)
    second = sessions.find(None, "b", None)
    second.is_asked = True
    sessions.end_idle()
    assert ended == ["named/a", first] and len(sessions) == 1
    assert sessions.find(None, "a", None) is not first and sessions.find(None, "b", None) is second

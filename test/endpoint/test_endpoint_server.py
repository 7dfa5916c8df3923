"""The endpoint over HTTP: the clients of OpenAI and Anthropic, and malformed requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections import Counter

import aiohttp
import anthropic
import openai
import pytest
from endpoint_agents import LoggingEngine, make_session
from rendering_families import TOOLS, family_renderer

from llmrl.collectors.agents import KeyedSessions
from llmrl.endpoint import EndpointServer
from llmrl.endpoint import exchange as exchange_module
from llmrl.endpoint import server as server_module
from llmrl.endpoint import session as session_module
from llmrl.endpoint.dialects.reading import parse_body
from llmrl.engines import SamplingConfig

FUNCTION = TOOLS[0]["function"]
USER = {"role": "user", "content": "Begin."}
THOUGHT = "<think>\nHm.\n</think>\n\n"
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
KEPT = ("role", "content", "reasoning_content", "tool_calls")
ANSWERS = [f"{THOUGHT}I add.\n{CALLS}{CALLS}<|im_end|>", f"{THOUGHT}It is 2.<|im_end|>"]


class Served:
    """One session behind a server."""

    def __init__(self, server, session, key, engine):
        self.server, self.session, self.key, self.engine = server, session, key, engine
        self.url = f"{server.url}/v1"

    def openai(self, **options):
        return openai.AsyncOpenAI(base_url=self.url, api_key=self.key, **options)

    def anthropic(self, **options):
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=self.key, **options)


def serve(renderer, act, *, answers=("15<|im_end|>", "2<|im_end|>"), latency_s=0.0, **limits):
    """What `act` returns of a session that is served."""

    async def main():
        engine = LoggingEngine(answers, encode=renderer.encode, decode=renderer.decode, latency_s=latency_s)
        sampling = SamplingConfig(max_new_tokens=512, stop_token_ids=renderer.stop_token_ids)
        session, sessions = make_session(renderer, engine, sampling=sampling, **limits), KeyedSessions()
        server = EndpointServer(sessions)
        await server.start()
        try:
            return await asyncio.wait_for(act(Served(server, session, sessions.add(session), engine)), 240)
        finally:
            session.end()
            await server.close()

    return asyncio.run(main())


@pytest.fixture
def thinking(model_path):
    return family_renderer(model_path, "qwen3")


def one_row(session):
    """That all turns are in one row, each trained."""
    (row,) = session.tree.reconcile().rows
    assert sum(row.columns.loss_mask) == sum(turn.node.num_completion_tokens for turn in session.tree.turns)
    return session.tree.num_turns


@pytest.mark.parametrize("is_streamed", [False, True])
def test_openais_chat_completions(thinking, is_streamed):
    async def act(served):
        client, messages = served.openai(), [USER]
        for _ in range(2):
            arguments = {"model": "policy", "messages": messages, "tools": list(TOOLS)}
            if is_streamed:
                async with client.chat.completions.stream(**arguments) as stream:
                    answer = await stream.get_final_completion()
            else:
                answer = await client.chat.completions.create(**arguments)
            choice = answer.choices[0]
            said = choice.message.model_dump(exclude_none=True)
            messages.append({key: said[key] for key in KEPT if key in said})
            for call in choice.message.tool_calls or ():
                assert json.loads(call.function.arguments) == {"a": 1}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        assert choice.finish_reason == "stop" and choice.message.content.strip() == "It is 2."
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
        return one_row(served.session)

    assert serve(thinking, act, answers=ANSWERS) == 2


@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropics_messages(thinking, is_streamed):
    tools = [{"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}]

    async def act(served):
        client, messages = served.anthropic(), [USER]
        for _ in range(2):
            arguments = {
                "model": "policy",
                "max_tokens": 500,
                "system": "Be brief.",
                "messages": messages,
                "tools": tools,
            }
            count = await client.messages.count_tokens(**{k: v for k, v in arguments.items() if k != "max_tokens"})
            if is_streamed:
                async with client.messages.stream(**arguments) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**arguments)
            usage = answer.usage
            assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
            messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
            uses = [block for block in answer.content if block.type == "tool_use"]
            assert all(use.input == {"a": 1} for use in uses)
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": "2"} for use in uses]
            if results:
                messages.append({"role": "user", "content": results})
                assert answer.stop_reason == "tool_use"
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert answer.content[1].text.strip() == "It is 2." and answer.stop_reason == "end_turn"
        return one_row(served.session)

    assert serve(thinking, act, answers=ANSWERS) == 2


@pytest.mark.parametrize("names_earlier", ["", "response", "items"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_openais_responses(thinking, is_streamed, names_earlier):
    tools = [{"type": "function", **FUNCTION}]

    async def act(served):
        client, items, previous = served.openai(), [USER], openai.omit
        for _ in range(2):
            arguments = {
                "model": "policy", "instructions": "Be brief.", "input": items, "tools": tools,
                "previous_response_id": previous,
            }  # fmt: skip
            if is_streamed:
                async with client.responses.stream(**arguments) as stream:
                    answer = await stream.get_final_response()
            else:
                answer = await client.responses.create(**arguments)
            calls = [item for item in answer.output if item.type == "function_call"]
            assert all(json.loads(call.arguments) == {"a": 1} for call in calls)
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"} for call in calls]
            if names_earlier == "response":
                items, previous = results, answer.id
            elif names_earlier == "items":
                named = [{"type": "item_reference", "id": item.id} for item in answer.output]
                items = [*items, *named, *results]
            else:
                items = [*items, *(item.to_dict() for item in answer.output), *results]
        assert answer.output_text.strip() == "It is 2." and answer.status == "completed"
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        return one_row(served.session)

    assert serve(thinking, act, answers=ANSWERS) == 2


def test_an_item_that_is_not_there_is_named(thinking):
    async def act(served):
        with pytest.raises(openai.NotFoundError, match="no earlier answer 'rs_7'"):
            await served.openai().responses.create(
                model="policy", input=[{"type": "item_reference", "id": "rs_7"}, USER]
            )

    serve(thinking, act)


def test_models_are_listed(renderer):
    async def act(served):
        first = [model.id async for model in served.openai().models.list()]
        second = [model.id async for model in served.anthropic().models.list()]
        with pytest.raises(openai.AuthenticationError, match="the key is unknown"):
            await openai.AsyncOpenAI(base_url=served.url, api_key="other").models.list()
        return first, second

    assert serve(renderer, act) == (["policy", "policy:aside"],) * 2


def test_several_answers_and_log_probs(renderer):
    async def act(served):
        create = served.openai().chat.completions.create
        answer = await create(model="policy", messages=[USER], n=2, logprobs=True)
        stream = await create(model="policy", messages=[USER], n=2, stream=True)
        streamed = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert len(answer.choices[0].logprobs.content) == len(served.session.tree.turns[0].node.log_probs)
        return [choice.message.content for choice in answer.choices], streamed, served.session.tree.num_turns

    assert serve(renderer, act) == (["15", "2"], ["15", "2"], 4)


@pytest.mark.slow
def test_a_client_with_a_short_timeout_asks_again_and_nothing_is_sampled_twice(renderer):
    async def act(served):
        client = served.openai(timeout=0.3, max_retries=5)
        answer = await client.chat.completions.create(model="policy", messages=[USER])
        counts = dict(served.session.counts)
        return answer.choices[0].message.content, len(served.engine.log), counts["num_repeated"] > 0

    assert serve(renderer, act, latency_s=1.2) == ("15", 1, True)


def test_a_client_that_vanishes_ends_its_sampling(renderer, monkeypatch):
    monkeypatch.setattr(exchange_module, "RETRY_SECONDS", 0.1)

    async def act(served):
        served.engine.hang_next()
        asking = asyncio.ensure_future(served.openai().chat.completions.create(model="policy", messages=[USER]))
        while not served.engine.num_in_flight:
            await asyncio.sleep(0.01)
        asking.cancel()
        while served.engine.num_in_flight:
            await asyncio.sleep(0.01)
        answer = await served.openai().chat.completions.create(model="policy", messages=[USER])
        return answer.choices[0].message.content, served.session.tree.num_turns

    assert serve(renderer, act) == ("2", 1)


def test_a_streaming_client_gets_signs_of_life_while_it_waits(renderer, monkeypatch):
    monkeypatch.setattr(server_module, "_PING_SECONDS", 0.05)

    async def act(served):
        stream = await served.openai().chat.completions.create(model="policy", messages=[USER], stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        served.engine.hang_next()
        async with served.anthropic().messages.stream(model="policy", messages=[USER], max_tokens=9) as stream:
            served.session.end()
            with pytest.raises(anthropic.APIStatusError, match="session has ended"):
                await stream.get_final_message()
        return text

    assert serve(renderer, act, latency_s=0.3) == "15"


def test_refusals_are_in_the_clients_own_words(renderer):
    async def act(served):
        create, message = served.openai().chat.completions.create, served.anthropic().messages.create
        with pytest.raises(openai.NotFoundError, match="'gpt' does not exist here; ask for 'policy'"):
            await create(model="gpt", messages=[USER])
        with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
            await message(model="claude", messages=[USER], max_tokens=9)
        with pytest.raises(openai.BadRequestError) as too_long:
            await create(model="policy", messages=[{"role": "user", "content": "word " * 99}])
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await message(model="policy", messages=[{"role": "user", "content": "word " * 99}], max_tokens=9)
        with pytest.raises(openai.AuthenticationError, match="the key is unknown"):
            await openai.AsyncOpenAI(base_url=served.url, api_key="x").responses.create(model="policy", input="?")
        await create(model="policy", messages=[USER])
        with pytest.raises(openai.PermissionDeniedError, match="used up its 1 answers"):
            await create(model="policy", messages=[USER])
        with pytest.raises(anthropic.PermissionDeniedError, match="used up its 1 answers"):
            await message(model="policy", messages=[USER], max_tokens=9)
        served.session.end()
        with pytest.raises(anthropic.PermissionDeniedError, match="session has ended"):
            await message(model="policy", messages=[USER], max_tokens=9)
        return len(served.engine.log)

    assert serve(renderer, act, max_turns=1, max_prompt_tokens=80) == 1


def test_an_engine_that_fails_is_reported_and_not_asked_again_by_the_client(renderer):
    async def act(served):
        served.engine.fail_next(1)
        for create in (served.openai().chat.completions.create, served.anthropic().messages.create):
            served.engine.fail_next(1)
            with pytest.raises(
                (openai.InternalServerError, anthropic.InternalServerError), match="because of fail_next"
            ):
                await create(model="policy", messages=[USER], max_tokens=9)
        return len(served.engine.requests)

    assert serve(renderer, act) == 2


def test_what_fails_within_the_server_is_reported_in_the_dialect(renderer, caplog):
    async def act(served):
        served.session.tree.prompt = None
        for create in (served.openai().chat.completions.create, served.anthropic().messages.create):
            with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="not callable"):
                await create(model="policy", messages=[USER], max_tokens=9)

    serve(renderer, act)
    assert caplog.text.count("/messages failed") == 1


BAD_BODIES = [
    (b"{", "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b"\xff\xfe", "not valid JSON"),
    (b"[]", "must be a JSON object"),
    ({"messages": "Hi"}, "messages must be a list"),
    ({"messages": []}, "at least one message"),
    ({"messages": [3]}, "messages[0] must be an object"),
    ({"messages": [{"content": "no role"}]}, ""),
    ({"messages": [{"role": "user", "content": 3}]}, "content must be a string"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is supported"),
    ({"messages": [{"role": "narrator", "content": "?"}]}, "got 'narrator'"),
    ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "the last message is the assistant's"),
    ({"messages": [USER], "tools": [{"type": "function"}]}, ""),
    ({"messages": [USER], "tools": [{"type": "web_search"}]}, ""),
    ({"messages": [USER], "tools": [{"type": []}]}, ""),
    ({"messages": [USER], "max_tokens": 0}, "must be at least 1"),
    ({"messages": [USER], "max_tokens": "9"}, "max_tokens must be an integer"),
    ({"messages": [USER], "stop": [""], "stop_sequences": [""]}, "none empty"),
    ({"messages": [USER], "stream": "yes"}, "stream must be true or false"),
]


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
def test_bad_requests_are_refused_in_the_dialect(renderer, path):
    async def act(served):
        async with aiohttp.ClientSession(headers={"x-api-key": served.key}) as client:
            for body, words in BAD_BODIES:
                data = body if isinstance(body, bytes) else json.dumps({"model": "policy", "max_tokens": 9, **body})
                async with client.post(served.url + path, data=data) as response:
                    error = (await response.json())["error"]
                    assert response.status == 400 and words in error["message"], (body, error)
                    assert error["type"] == "invalid_request_error" and "Traceback" not in error["message"]
            async with client.get(f"{served.url}/nowhere") as response:
                assert response.status == 404 and "error" in await response.json()
        return len(served.engine.log)

    assert serve(renderer, act) == 0


@pytest.mark.slow
def test_large_and_half_sent_requests_delay_no_others(renderer, clock, monkeypatch):
    monkeypatch.setattr(server_module, "_MAX_BYTES", 11 << 20)

    async def act(served):
        host, port = served.server.url.removeprefix("http://").split(":")
        halves = []
        key = f"x-api-key: {served.key}".encode()
        begun = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n" + key + b"\r\nContent-Length: 99\r\n\r\n{"
        for half in (begun[:20], begun):
            halves.append(socket.create_connection((host, int(port))))
            halves[-1].sendall(half)
        create = served.openai().chat.completions.create
        with pytest.raises(openai.BadRequestError, match=r"prompt is too long: 1000\d{4} characters"):
            await create(model="policy", messages=[{"role": "user", "content": "x" * 10_000_000}])
        with pytest.raises(openai.APIStatusError, match="longer than") as too_large:
            await create(model="policy", messages=[{"role": "user", "content": "x" * (12 << 20)}])
        assert too_large.value.status_code == 413
        answer = await create(model="policy", messages=[USER])
        clock.move(100)
        late = await asyncio.to_thread(halves[1].recv, 4096)
        assert b"408" in late.split(b"\r\n")[0]
        assert await asyncio.to_thread(halves[0].recv, 4096) == b""  # half a head has a deadline, too
        for half in halves:
            half.close()
        return answer.choices[0].message.content

    assert serve(renderer, act) == "15"


def test_other_requests_are_answered_while_a_large_body_is_parsed(renderer, monkeypatch):
    is_answered = threading.Event()
    parse_body, lengths = server_module.parse_body, []

    def parse(text):
        if len(text) > server_module._LARGE_BYTES:
            lengths.append(len(text))
            assert is_answered.wait(120), "the event loop stood still"
        return parse_body(text)

    monkeypatch.setattr(server_module, "parse_body", parse)

    async def act(served):
        create = served.openai().chat.completions.create
        large = [{"role": "user", "content": "x" * 1_000_000}]
        refused = asyncio.create_task(create(model="policy", messages=large))
        while not lengths:
            await asyncio.sleep(0.01)
        answer = await create(model="policy", messages=[USER])
        is_answered.set()
        with pytest.raises(openai.BadRequestError, match="prompt is too long"):
            await refused
        return answer.choices[0].message.content

    assert serve(renderer, act) == "15"


def test_other_threads_run_while_a_body_of_many_objects_is_parsed():
    """A thread alone is not enough: a parser in C holds the interpreter's lock from beginning to end."""
    text = json.dumps({"messages": [USER] * 100_000}).encode()
    num_turns, is_parsed = 0, threading.Event()

    def count():
        nonlocal num_turns
        while not is_parsed.wait(0.0001):
            num_turns += 1

    other = threading.Thread(target=count)
    other.start()
    before = num_turns
    parse_body(text)
    after = num_turns
    is_parsed.set()
    other.join()
    assert after - before > 3


def test_what_cannot_fit_is_refused_unread_or_measured_beside_the_others(renderer, monkeypatch):
    """Tools, calls and many small messages make a prompt long, too."""
    loop_thread, encoded_in = threading.get_ident(), []
    whole = renderer.render

    def render(messages, **options):
        encoded_in.append(threading.get_ident())
        return whole(messages, **options)

    def words(num):
        return "word " * num

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": words(40_000)})}}
    called = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "?"}]
    tool = {"type": "function", "function": {"name": "f", "description": words(40_000), "parameters": {}}}
    unread = {
        "300 messages": {"messages": [USER] * 300},
        "characters": {"messages": [USER], "tools": [tool]},
        "characters ": {"messages": called},
    }

    async def act(served):
        create = served.openai().chat.completions.create
        for length, asked in unread.items():
            with pytest.raises(openai.BadRequestError, match=f"prompt is too long: .*{length.strip()}"):
                await create(model="policy", **asked)
        assert not encoded_in
        with pytest.raises(openai.BadRequestError, match=r"prompt is too long: 4\d\d\d tokens"):
            await create(model="policy", messages=[{"role": "user", "content": words(4000)}])
        assert encoded_in and loop_thread not in encoded_in
        count = served.anthropic().messages.count_tokens
        long = await count(model="policy", messages=[{"role": "user", "content": words(4000)}])
        assert long.input_tokens > 4000 and loop_thread not in encoded_in
        answer = await create(model="policy", messages=[USER])
        monkeypatch.setattr(session_module, "_THREAD_CHARACTERS", 0)
        await create(model="policy", messages=[{"role": "user", "content": "What is long and fits?"}])
        return answer.choices[0].message.content, len(served.session.tree.turns)

    monkeypatch.setattr(renderer, "render", render)
    content, num_turns = serve(renderer, act, max_prompt_tokens=250, max_turns=2)
    assert (content, num_turns) == ("15", 2), "what was refused is no turn"


def test_of_a_prompt_that_is_far_too_long_a_sample_is_tokenized(renderer, monkeypatch):
    loop_thread, encoded = threading.get_ident(), []
    encode = type(renderer).encode

    def counted(self, text):
        encoded.append((threading.get_ident(), len(text)))
        return encode(self, text)

    async def act(served):
        create = served.openai().chat.completions.create
        most = served.session.limits.max_prompt_tokens
        # Nothing of a prompt that fits is tokenized on the loop, whatever its length in characters.
        for text, fits in (("word and word " * 70_000, False), (" " * 20 * most, True), ("word " * (most // 2), True)):
            encoded.clear()
            asked = create(model="policy", messages=[{"role": "user", "content": text}])
            if fits:
                assert (await asked).usage.prompt_tokens <= most
            else:
                with pytest.raises(openai.BadRequestError, match=r"prompt is too long: 2\d{5} tokens"):
                    await asked
                assert sum(size for _, size in encoded) < 100_000
            assert max((size for thread, size in encoded if thread == loop_thread), default=0) < 20_000

    monkeypatch.setattr(type(renderer), "encode", counted)
    serve(renderer, act)


def test_ways_that_clients_look_for_a_server(renderer):
    surrogate = {"type": "function", "function": {"name": "f\ud800", "parameters": {}}}

    async def act(served):
        headers = {"Authorization": f"Bearer {served.key}"}
        body = {"model": "policy", "messages": [USER]}
        async with aiohttp.ClientSession(served.server.url, headers=headers) as client:

            async def status(method, path, **more):
                async with client.request(method, path, **more) as response:
                    return response.status

            assert (await served.openai().models.retrieve("policy")).id == "policy"
            with pytest.raises(openai.NotFoundError, match="does not exist here; ask for 'policy'"):
                await served.openai().models.retrieve("gpt-5")
            for path in ("/health", "/v1/models", "/v1/models/", "/v1/models/policy:aside", "/models/policy/"):
                assert await status("GET", path) == await status("HEAD", path) == 200
            assert await status("OPTIONS", "/v1/chat/completions") == 204
            assert await status("POST", "/v1/chat/completions/", json=body) == 200
            assert await status("POST", "/v1/chat/completions", json={**body, "tools": [surrogate]}) == 200
            with pytest.raises(openai.BadRequestError, match="send messages to /v1/chat/completions"):
                await served.openai().completions.create(model="policy", prompt="Once")

    serve(renderer, act)


def test_each_request_has_one_answer_among_bad_ones_and_clients_that_vanish(renderer, caplog):
    draw = random.Random(0)
    statuses = {"good": 200, "malformed": 400, "stranger": 401, "other model": 404, "vanishes": None}
    kinds = draw.choices(list(statuses), k=200)
    asked = [[{"role": "user", "content": f"Question {number}."}] for number in range(len(kinds))]

    async def act(served):
        async with aiohttp.ClientSession() as client:

            async def ask(kind, messages):
                model, key = ("other" if kind == "other model" else "policy"), served.key
                body = json.dumps({"model": model, "messages": messages})
                headers = {"Authorization": f"Bearer {key if kind != 'stranger' else 'sk-unknown'}"}
                body = body if kind != "malformed" else body[: draw.randrange(1, len(body))]
                asking = client.post(f"{served.url}/chat/completions", data=body, headers=headers)
                with contextlib.suppress(TimeoutError):
                    patience = draw.uniform(0, 0.3) if kind == "vanishes" else None
                    async with asyncio.timeout(patience), asking as response:
                        return response.status, await response.json()
                return None, None

            answers = await asyncio.gather(*map(ask, kinds, asked))
        return answers, served.engine.log, served.session.tree.num_turns

    answers, log, num_turns = serve(renderer, act, latency_s=0.1)
    for kind, (status, answer) in zip(kinds, answers, strict=True):
        assert kind == "vanishes" or status == statuses[kind], (kind, answer)
        assert answer is None or ("choices" in answer) == (status == 200)
    sampled = Counter(prompt for prompt, _ in log)
    for kind, messages, (status, _) in zip(kinds, asked, answers, strict=True):
        num_sampled = sampled.pop(tuple(renderer.render(messages, add_generation_prompt=True)), 0)
        assert kind == "vanishes" or num_sampled == (status == 200)
        assert num_sampled <= 1
    # An answer that no client received is no turn.
    assert not sampled and kinds.count("good") <= num_turns <= len(log)
    assert not [record for record in caplog.records if record.name.startswith("aiohttp")]


def test_a_path_or_a_header_names_the_session_as_a_key_does(renderer):
    async def act(served):
        body = {"model": "policy", "messages": [USER]}
        async with aiohttp.ClientSession() as client:
            by_path = client.post(f"{served.server.url}/s/{served.key}/v1/chat/completions", json=body)
            by_header = client.post(f"{served.url}/chat/completions", json=body, headers={"X-Session-ID": served.key})
            without_key = client.post(f"{served.url}/chat/completions", json=body)
            return [response.status for response in [await by_path, await by_header, await without_key]]

    assert serve(renderer, act) == [200, 200, 401]


def test_clients_may_share_a_session(renderer):
    async def act(served):
        async def talk(name):
            messages = [{"role": "user", "content": name}]
            for _ in range(3):
                answer = await served.openai().chat.completions.create(model="policy", messages=messages)
                said = {"role": "assistant", "content": answer.choices[0].message.content}
                messages += [said, {"role": "user", "content": "?"}]

        await asyncio.gather(talk("one"), talk("two"))
        return served.session.tree.num_turns, len(served.session.tree.leaves)

    assert serve(renderer, act) == (6, 2)


@pytest.mark.slow
def test_a_server_that_closes_ends_its_connections(renderer):
    async def act(served):
        served.engine.hang_next()
        client = served.openai(max_retries=0)
        asking = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=[USER]))
        while not served.engine.num_in_flight:
            await asyncio.sleep(0.01)
        await served.server.close()
        with contextlib.suppress(openai.APIError):
            await asking
        return asking.done()

    assert serve(renderer, act)

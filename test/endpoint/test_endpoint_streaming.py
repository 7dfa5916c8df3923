"""Streams that clients read while the engine samples, and what is trained of those that they leave."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import anthropic
import openai
import pytest
from endpoint_agents import LoggingEngine, make_session, trained_spans
from rendering_families import TOOLS, family_renderer

from llmrl.collectors import LLMCollector
from llmrl.collectors.agents import KeyedSessions
from llmrl.endpoint import EndpointServer
from llmrl.engines import EngineError, EngineReplicas, SamplingConfig
from llmrl.envs import AgentEnv
from llmrl.policies import LLMWrapperBase

USER = {"role": "user", "content": "Begin."}
ANSWER = (
    "<think>\nOne and one.\n</think>\n\nI add them up, slowly.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
)
LONG = "one two three four five six seven eight nine ten eleven twelve<|im_end|>"


class GatedEngine(LoggingEngine):
    """Reports the first tokens of an answer, as many as are let through, and ends after all or when it is stopped."""

    num_through = 0

    async def generate(self, prompt_ids, sampling, *, stream=None, **names):
        completion = await super().generate(prompt_ids, sampling, **names)
        self.is_busy = True
        while not stream.is_stopped and self.num_through < len(completion.token_ids):
            stream.report(completion.token_ids[: self.num_through])
            await asyncio.sleep(0.005)
        self.is_busy = False
        return completion.cut(self.num_through, len(prompt_ids)) if stream.is_stopped else completion


def serve(renderer, act, *, answers=(ANSWER,), engine=None):
    """What `act` returns of the server's URL, a key, the session and its engine."""

    async def main():
        log = engine or GatedEngine(answers, encode=renderer.encode, decode=renderer.decode)
        sampling = SamplingConfig(max_new_tokens=512, stop_token_ids=renderer.stop_token_ids)
        session, sessions = make_session(renderer, log, sampling=sampling), KeyedSessions()
        server = EndpointServer(sessions)
        await server.start()
        try:
            return await asyncio.wait_for(act(f"{server.url}/v1", sessions.add(session), session, log), 240)
        finally:
            session.end()
            await server.close()

    return asyncio.run(main())


async def chat_stream(url, key, **more):
    client = openai.AsyncOpenAI(base_url=url, api_key=key)
    asked = {"model": "policy", "messages": [USER], "tools": list(TOOLS), **more}
    async with await client.chat.completions.create(**asked, stream=True) as stream:
        async for chunk in stream:
            delta = chunk.choices[0].delta
            yield getattr(delta, "reasoning_content", None) or "", delta.content or "", bool(delta.tool_calls)


async def responses_stream(url, key):
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    async with openai.AsyncOpenAI(base_url=url, api_key=key).responses.stream(
        model="policy", input=[USER], tools=tools
    ) as stream:
        async for event in stream:
            kind = event.type.removeprefix("response.")
            delta = event.delta if kind.endswith(".delta") else ""
            yield (
                delta if kind == "reasoning_text.delta" else "",
                delta if kind == "output_text.delta" else "",
                kind == "function_call_arguments.delta",
            )


async def anthropic_stream(url, key):
    tools = [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key).messages.stream(
        model="policy", messages=[USER], max_tokens=500, tools=tools
    ) as stream:
        async for event in stream:
            delta = event.delta if event.type == "content_block_delta" else None
            yield getattr(delta, "thinking", ""), getattr(delta, "text", ""), hasattr(delta, "partial_json")


@pytest.mark.parametrize("read", [chat_stream, responses_stream, anthropic_stream])
def test_text_comes_while_the_engine_samples_and_calls_after_it(model_path, read):
    async def act(url, key, session, engine):
        said = ["", ""]
        engine.num_through = len(renderer.encode(ANSWER)) - 2
        are_calls_after = []
        async for *texts, is_call in read(url, key):
            said = [whole + text for whole, text in zip(said, texts, strict=True)]
            if said == ["One and one.", "I add them up, slowly."]:  # and the engine ends only now
                engine.num_through = 1000
            if is_call:
                are_calls_after.append(not engine.is_busy)
        assert session.tree.num_turns == 1 and session.tree.turns[0].conversation.messages[-1]["tool_calls"]
        return said, are_calls_after

    renderer = family_renderer(model_path, "qwen3")
    assert serve(renderer, act) == (["One and one.", "I add them up, slowly."], [True])


def test_a_client_that_stops_reading_frees_the_engine_and_is_trained_on_what_it_saw(renderer):
    async def act(url, key, session, engine):
        seen, engine.num_through = "", 3
        async with aclosing(chat_stream(url, key)) as stream:
            async for _, text, _ in stream:
                seen += text
                if "three" in seen:
                    break
            engine.num_through = 7  # which the client is sent, and does not read
            [[exchange]] = session.exchanges.values()
            while "seven" not in exchange.texts[0].content:
                await asyncio.sleep(0.01)
        while engine.is_busy or not session.tree.turns:
            await asyncio.sleep(0.01)
        assert session.tree.turns[0].completion.token_ids == renderer.encode(LONG)[:7]
        engine.num_through = 1000
        messages = [USER, {"role": "assistant", "content": seen}, {"role": "user", "content": "And then?"}]
        answer = [text async for _, text, _ in chat_stream(url, key, messages=messages)]
        return seen, "".join(answer), session.tree.reconcile(), session.record()["requests"]

    seen, answer, reconciliation, record = serve(renderer, act, answers=[LONG, "15<|im_end|>"])
    assert seen == "one two three" and answer == "15"
    (_,) = reconciliation.rows  # the second answer continues what was seen of the first
    spans = trained_spans(reconciliation)
    assert sorted(renderer.decode(sampled) for _, sampled in spans) == ["15<|im_end|>", seen]
    assert record["num_stopped"] == 1


def test_of_several_answers_those_are_trained_that_were_read(renderer):
    async def act(url, key, session, engine):
        engine.num_through = 3
        async with aclosing(chat_stream(url, key, n=2)) as stream:
            async for _, text, _ in stream:
                if text:
                    break
        while not session.tree.turns:
            await asyncio.sleep(0.01)
        return [renderer.decode(turn.completion.token_ids) for turn in session.tree.turns]

    texts = serve(renderer, act, answers=[LONG, "15<|im_end|>"])
    assert texts in (["one two three", "15"], ["one two three"])  # the second may not have been sent


def test_an_agent_that_stops_reading_and_returns_is_trained_on_it(renderer):
    async def play(row, model):
        async with aclosing(chat_stream(model.base_url, model.api_key)) as stream:
            async for _, text, _ in stream:
                if text:
                    return 1.0

    engine = GatedEngine([LONG], encode=renderer.encode, decode=renderer.decode)
    engine.num_through = 3
    env = AgentEnv(play, [{"query": "Begin."}])
    with LLMCollector(env, policy=LLMWrapperBase(engine, renderer=renderer), groups_per_batch=1) as collector:
        (rollout,) = collector.play(1)
    assert rollout.status.name == "COMPLETED" and rollout.num_turns == 1
    (row,) = rollout.conversation.reconcile().rows
    trained = [
        token for token, is_trained in zip(row.columns.token_ids, row.columns.loss_mask, strict=True) if is_trained
    ]
    assert renderer.decode(trained) == "one two three" and not engine.is_busy


class Failing(LoggingEngine):
    """Fails once, after the first tokens."""

    async def generate(self, prompt_ids, sampling, *, stream=None, **names):
        if not self.log:
            self.log.append(None)
            stream.report(self._encode("No, it is"))
            await asyncio.sleep(0.2)
            raise EngineError("The engine died.")
        return await super().generate(prompt_ids, sampling, stream=stream, **names)


def test_an_engine_that_fails_after_a_part_was_sent_is_an_error_and_nothing_is_trained(renderer):
    engines = [Failing([LONG], encode=renderer.encode, decode=renderer.decode) for _ in range(2)]
    engines[1].log.append(None)

    async def act(url, key, session, engine):
        with pytest.raises(openai.APIError, match="failed after a part of the answer was sent"):
            async for _ in chat_stream(url, key):
                pass
        return session.tree.num_turns, session.failure

    replicas = EngineReplicas(engines)
    assert replicas.streams_tokens
    num_turns, failure = serve(renderer, act, engine=replicas)
    assert num_turns == 0 and failure is not None

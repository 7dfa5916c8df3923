"""ServerEngine against a small server on this machine that speaks OpenAI's completions as vLLM does."""

from __future__ import annotations

import asyncio
import gc
import math
import threading

import numpy as np
import pytest
import torch
from loopback_server import LoopbackServer
from waiting import wait_until

from llmrl._utils.background_loop import BackgroundLoop
from llmrl.engines import Engine, EngineError, EngineReplicas, SamplingConfig, ServerEngine

SAMPLING = SamplingConfig(max_new_tokens=4)


@pytest.fixture
def server():
    server = LoopbackServer()
    yield server
    server.close()


@pytest.fixture
def engine(server):
    with ServerEngine(server.url, policy_version=3, vocab_size=50) as engine:
        yield engine


def generate(engine, sampling=SAMPLING, prompt_ids=(1, 2)):
    return asyncio.run(engine.generate(prompt_ids, sampling))


def test_token_ids_go_in_and_come_out_with_log_probs_and_the_given_version(engine):
    assert isinstance(engine, Engine)
    assert (engine.model, engine.max_model_len, engine.is_alive) == ("tiny", 100, True)
    completion = generate(engine)
    assert (completion.token_ids, completion.log_probs, completion.versions) == ([7, 8], [-0.5, -0.25], [3, 3])
    engine.policy_version = 4
    assert generate(engine).versions == [4, 4]


def test_a_grammar_is_refused_since_the_server_does_not_report_what_it_kept(engine):
    with pytest.raises(ValueError, match="ServerEngine does not"):
        generate(engine, SAMPLING.with_changes(grammar="{}"))
    with pytest.raises(ValueError, match="ServerEngine does not"):
        engine.check_sampling(SAMPLING.with_changes(grammar="{}"))


@pytest.mark.parametrize(("whole", "real"), [(int, float), (np.int64, np.float32)])
def test_every_sampling_parameter_is_sent(engine, server, whole, real):
    server.answer = lambda body: {
        "finish_reason": "stop",
        "stop_reason": "END",
        "token_ids": [7],
        # Of the tokens that are left, each as likely: what the engine asks first of a server.
        "logprobs": {
            "token_logprobs": [-math.log(body["top_k"])],
            "top_logprobs": [{f"token_id:{7 + i}": -math.log(body["top_k"]) for i in range(body["top_k"])}],
        },
    }
    sampling = SamplingConfig(
        max_new_tokens=whole(400),
        temperature=real(0.75),
        top_p=real(0.875),
        top_k=whole(5),
        min_p=real(0.125),
        repetition_penalty=real(1.25),
        seed=whole(11),
        stop=("END",),
        stop_token_ids=(whole(3),),
        ignore_eos=True,
    )
    assert generate(engine, sampling).stop_string == "END"
    body = server.bodies[-1]
    sent = {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")}
    assert sent == {
        "temperature": 0.75,
        "top_p": 0.875,
        "top_k": 5,
        "min_p": 0.125,
        "repetition_penalty": 1.25,
        "seed": 11,
    }
    assert (body["stop"], body["stop_token_ids"], body["ignore_eos"]) == (["END"], [3], True)
    assert (body["prompt"], body["max_tokens"], body["model"]) == ([1, 2], 98, "tiny")


def test_token_ids_may_come_as_strings(engine, server):
    server.choice |= {"token_ids": None, "logprobs": {"tokens": ["token_id:9"], "token_logprobs": [-1.0]}}
    assert generate(engine).token_ids == [9]


def with_log_probs(*values):
    return {"logprobs": {"token_logprobs": list(values)}}


def with_tokens(*tokens):
    return {"token_ids": None, "logprobs": {"tokens": list(tokens), "token_logprobs": [-0.5] * len(tokens)}}


BAD_CHOICES = [
    ({"token_ids": None}, "without token ids"),
    ({"token_ids": None, "logprobs": None}, "without token ids"),
    (with_tokens("token_id:7", "b"), "without token ids"),
    (with_tokens("token_id:7", 8), "without token ids"),
    (with_tokens("token_id:-7"), "without token ids"),
    (with_tokens("token_id:7_0"), "without token ids"),
    (with_tokens("token_id: 7"), "without token ids"),
    (with_tokens("token_id:\u0667"), "without token ids"),
    (with_tokens("token_id:99"), r"token_ids\[0\] = 99"),
    ({"token_ids": "78"}, "token_ids as str"),
    ({"token_ids": {"7": 8}}, "token_ids as dict"),
    ({"token_ids": [7, 8.0]}, r"token_ids\[1\] = 8.0"),
    ({"token_ids": [7, True]}, r"token_ids\[1\] = True"),
    ({"token_ids": [7, None]}, r"token_ids\[1\] = None"),
    ({"token_ids": ["7", "8"]}, r"token_ids\[0\] = '7'"),
    ({"token_ids": [7, [8]]}, r"token_ids\[1\] = \[8\]"),
    ({"token_ids": [-1, 8]}, r"token_ids\[0\] = -1"),
    ({"token_ids": [7, 50]}, r"token_ids\[1\] = 50"),
    ({"token_ids": [7, 2**70]}, r"token_ids\[1\]"),
    ({"token_ids": [7]}, "log_probs of length 2"),
    ({"token_ids": [], **with_log_probs()}, "no token"),
    ({"token_ids": [7] * 5000, **with_log_probs(*[-0.5] * 5000)}, "5000 tokens; at most 4"),
    ({"logprobs": None}, "log_probs of length 0"),
    ({"logprobs": [-0.5, -0.25]}, "logprobs as list"),
    (with_log_probs(-0.5), "log_probs of length 1"),
    (with_log_probs(-0.5, -0.5, -0.5), "log_probs of length 3"),
    (with_log_probs(-0.5, None), r"log_probs\[1\] = None"),
    (with_log_probs(-0.5, "-0.5"), r"log_probs\[1\] = '-0.5'"),
    (with_log_probs(-0.5, True), r"log_probs\[1\] = True"),
    (with_log_probs(-0.5, 900.0), r"log_probs\[1\] = 900"),
    (with_log_probs(0.5, -0.5), r"log_probs\[0\] = 0.5"),
    (with_log_probs(-0.5, math.nan), r"log_probs\[1\] = nan"),
    (with_log_probs(-0.5, -math.inf), r"log_probs\[1\] = -inf"),
    (with_log_probs(math.inf, -math.inf), r"log_probs\[0\] = inf"),
    (with_log_probs(-0.5, -1e300), r"log_probs\[1\] = -1e\+300"),
    (with_log_probs(-0.5, -(10**400)), r"log_probs\[1\]"),
    ({"logprobs": {"token_logprobs": {"0": -0.5, "1": -0.5}}}, "log_probs as dict"),
    ({"finish_reason": "content_filter"}, "content_filter"),
    ({"finish_reason": None}, "None"),
    ({"finish_reason": ["stop"]}, r"\['stop'\]"),
]

BAD_BODIES = {
    b"": "did not answer as an OpenAI server",
    b"<html>busy</html>": "did not answer as an OpenAI server",
    b'{"choices": [{"finish_reason"': "did not answer as an OpenAI server",
    b"[" * 100_000: "did not answer as an OpenAI server",
    b"\xff\xfe": "did not answer as an OpenAI server",
    b'{"choices": [' + b" " * (1 << 21) + b"]}": "longer than",
    b"null": "one choice",
    b"[]": "one choice",
    b'"text"': "one choice",
    b"{}": "one choice",
    b'{"choices": []}': "one choice",
    b'{"choices": {}}': "one choice",
    b'{"choices": [7]}': "one choice",
    b'{"choices": [{}, {}]}': "one choice",
    b'{"error": "overloaded"}': "overloaded",
}


def test_answers_that_are_not_exact_are_refused_by_name(engine, server):
    good = server.choice
    for change, message in BAD_CHOICES:
        server.choice = {**good, **change}
        with pytest.raises(EngineError, match=message):
            generate(engine)
    for body, message in BAD_BODIES.items():
        server.body = body
        with pytest.raises(EngineError, match=message):
            generate(engine)
    server.choice, server.body = good, None
    assert engine.is_alive and engine.num_in_flight == 0 and generate(engine).token_ids == [7, 8]


def test_a_redirection_is_not_followed(engine, server):
    server.status, server.headers_sent = 302, {"Location": f"{server.url}/v1/models"}
    with pytest.raises(EngineError, match="302"):
        generate(engine)


def test_whole_numbers_and_rounding_are_no_faults(engine, server):
    server.choice |= with_log_probs(0, -3)
    completion = generate(engine)
    assert completion.log_probs == [0.0, -3.0] and {*map(type, completion.log_probs)} == {float}
    server.choice |= with_log_probs(1e-6, -0.0)
    assert generate(engine).log_probs == [1e-6, -0.0]


@pytest.mark.slow
def test_an_answer_has_a_deadline_and_the_server_is_taken_up_again(server):
    with pytest.raises(ValueError, match="reply_timeout_seconds"):
        ServerEngine(server.url, reply_timeout_seconds=0)
    for is_trickled in (False, True):
        server.latency_s, server.is_trickled = 0.0 if is_trickled else 30.0, is_trickled
        with ServerEngine(server.url, reply_timeout_seconds=0.2) as engine:
            with pytest.raises(EngineError, match=r"within 0.2 s; reply_timeout_seconds"):
                generate(engine)
            assert engine.num_in_flight == 0
            wait_until(lambda engine=engine: engine.is_alive)
    server.latency_s, server.is_trickled = 0.0, False
    with ServerEngine(server.url, reply_timeout_seconds=None) as engine:
        assert generate(engine).token_ids == [7, 8]


def test_a_server_that_stops_answering_is_one_of_several_that_died():
    servers = [LoopbackServer() for _ in range(2)]
    servers[0].latency_s = 1000.0
    limits = (0.2, 240.0)
    with EngineReplicas(
        [ServerEngine(one.url, reply_timeout_seconds=limit) for one, limit in zip(servers, limits, strict=True)]
    ) as engines:

        async def many():
            return await asyncio.gather(*(engines.generate([1], SAMPLING) for _ in range(4)))

        assert [completion.token_ids for completion in asyncio.run(many())] == [[7, 8]] * 4
        assert engines.num_retried == 2
    for server in servers:
        server.close()


def test_models_and_context_lengths_that_are_none_are_refused(server):
    for entry in (7, {}, {"id": None}, {"id": ["tiny"]}):
        server.model_entry = entry
        with pytest.raises(EngineError, match="did not list models"):
            ServerEngine(server.url)
    for limit in ("100", True, -1, 1.5, None):
        server.model_entry = {"id": "tiny", "max_model_len": limit}
        with pytest.raises(ValueError, match="max_model_len"):
            ServerEngine(server.url)


def distribution(probabilities, body):
    """That of a request: the largest `top_k` at its temperature."""
    log_probs = torch.tensor(probabilities, dtype=torch.float64).log()
    if body["top_k"]:
        log_probs = log_probs.where(log_probs >= log_probs.topk(body["top_k"]).values[-1], -torch.inf)
    return (log_probs / body["temperature"]).log_softmax(-1)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("probabilities", [(0.7, 0.2, 0.1), (1 - 2e-9, 1e-9, 1e-9), (0.5, 0.4999, 0.0001)])
def test_log_probs_of_another_distribution_are_refused_whatever_the_first_prompt(engine, server, probabilities, place):
    def answer(body, is_processed):
        processed = distribution(probabilities, body)
        token = place if processed[place].isfinite() else 0
        log_probs = processed if is_processed else distribution(probabilities, {"top_k": 0, "temperature": 1.0})
        assert 0 <= body["temperature"] <= 2, "vLLM takes no other"
        written = [max(float(value), -9999.0) for value in log_probs]
        top = {f"token_id:{index}": value for index, value in enumerate(written)}
        return {
            "finish_reason": "length",
            "token_ids": [token],
            "logprobs": {"token_logprobs": [written[token]], "top_logprobs": [top]},
        }

    server.answer = lambda body: answer(body, False)
    generate(engine)  # plain sampling at temperature 1: there is but one distribution
    with pytest.raises(EngineError, match="processed_logprobs"):
        generate(engine, SAMPLING.with_changes(temperature=0.5))
    server.answer = lambda body: answer(body, True)
    generate(engine, SAMPLING.with_changes(temperature=0.5))
    num_requests = len(server.bodies)
    generate(engine, SAMPLING.with_changes(temperature=0.5))
    assert len(server.bodies) == num_requests + 1, "it is checked once"


def test_refusals_and_failures_are_distinguished(engine, server):
    server.status = 400
    with pytest.raises(ValueError, match="no such luck"):
        generate(engine)
    for status in (429, 500):
        server.status = status
        with pytest.raises(EngineError, match="no such luck"):
            generate(engine)
    assert engine.is_alive
    with pytest.raises(ValueError, match="100"):
        generate(engine, prompt_ids=[1] * 100)
    with pytest.raises(ValueError, match="empty"):
        generate(engine, prompt_ids=[])


def test_cancelling_and_aborting_hang_up(engine, server):
    server.latency_s = 1000.0

    async def run():
        tasks = [asyncio.create_task(engine.generate([1], SAMPLING, request_id=name)) for name in "ab"]
        while len(server.bodies) < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="in flight"):
            await engine.generate([1], SAMPLING, request_id="a")
        tasks[0].cancel()
        await engine.abort("b")
        await engine.abort("never seen")
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, aborted = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert (aborted.finish_reason, aborted.token_ids) == ("abort", [])
    wait_until(lambda: server.num_hung_up == 2)
    assert engine.num_in_flight == 0


def test_shutdown_fails_what_is_in_flight_and_leaves_no_thread(server):
    server.latency_s = 1000.0
    others = set(threading.enumerate())
    engine = ServerEngine(server.url)

    async def run():
        task = asyncio.create_task(engine.generate([1], SAMPLING))
        while not server.bodies:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.shutdown)
        return await asyncio.gather(task, return_exceptions=True)

    [error] = asyncio.run(run())
    assert isinstance(error, EngineError)
    engine.shutdown()
    for ask in (lambda: engine.generate([1], SAMPLING), lambda: engine.score([1, 2]), lambda: engine.tokenize("a")):
        with pytest.raises(EngineError, match="shut down"):
            asyncio.run(ask())
    assert "llmrl-server-engine" not in {thread.name for thread in set(threading.enumerate()) - others}


def test_an_engine_that_is_collected_on_its_own_thread_leaves_no_thread(server, monkeypatch):
    loop = BackgroundLoop("test")
    monkeypatch.setattr("llmrl.engines.server.engine.BackgroundLoop", lambda name: loop)
    engines = [ServerEngine(server.url)]

    async def collect():
        engines.clear()
        gc.collect()

    loop.run(collect())
    wait_until(lambda: loop.is_closed)


@pytest.mark.slow
def test_a_server_that_goes_is_left_out_and_taken_up_again_when_it_is_back():
    servers = [LoopbackServer() for _ in range(2)]
    servers[1].choice = {**servers[1].choice, "token_ids": [9, 9]}
    with EngineReplicas([ServerEngine(server.url) for server in servers]) as engines:

        async def many():
            completions = await asyncio.gather(*(engines.generate([1], SAMPLING) for _ in range(8)))
            return [completion.token_ids[0] for completion in completions]

        assert sorted(asyncio.run(many())) == [7] * 4 + [9] * 4
        servers[0].close()
        assert asyncio.run(many()) == [9] * 8
        assert (engines.num_deaths, engines.serving) == (1, {1})
        servers[0] = LoopbackServer(servers[0].port)
        wait_until(lambda: engines.serving == {0, 1})
        assert sorted(asyncio.run(many())) == [7] * 4 + [9] * 4
    for server in servers:
        server.close()


def test_what_cannot_be_reached_or_is_not_served_says_so():
    with pytest.raises(EngineError, match="cannot be reached"):
        ServerEngine("http://127.0.0.1:9")
    server = LoopbackServer(model_entry={"id": "other"})
    with pytest.raises(ValueError, match=r"\['other'\]"):
        ServerEngine(server.url, model="tiny")
    with pytest.raises(ValueError, match="max_model_len"):
        ServerEngine(server.url)
    with ServerEngine(f"{server.url}/v1/", max_model_len=50, api_key="secret") as engine:
        generate(engine)
        assert engine.max_model_len == 50
        assert server.headers[-1]["Authorization"] == "Bearer secret"
    server.close()

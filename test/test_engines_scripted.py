"""ScriptedEngine honours the engine protocol: budget, stops, abort, versions, faults."""

from __future__ import annotations

import asyncio

import pytest

from llmrl.engines import Engine, EngineError, SamplingConfig, ScriptedEngine

SAMPLING = SamplingConfig(max_new_tokens=4)


def generate(engine, prompt_ids=(1,), sampling=SAMPLING, **options):
    return asyncio.run(engine.generate(prompt_ids, sampling, **options))


def test_it_is_an_engine():
    assert isinstance(ScriptedEngine([[1]]), Engine)


def test_answers_come_in_turn_and_again():
    engine = ScriptedEngine([[1], [2]])
    assert [generate(engine).token_ids for _ in range(3)] == [[1], [2], [1]]


def test_a_function_sees_the_prompt_and_text_is_encoded():
    engine = ScriptedEngine(lambda prompt_ids: "x" * len(prompt_ids), encode=lambda text: [ord(c) for c in text])
    assert generate(engine, [5, 6]).token_ids == [120, 120]


def test_text_without_an_encoder_is_refused():
    with pytest.raises(ValueError, match="encode="):
        generate(ScriptedEngine(["text"]))


def test_one_string_is_not_a_list_of_answers():
    with pytest.raises(ValueError, match="script"):
        ScriptedEngine("text")


def test_the_budget_cuts_and_says_length():
    completion = generate(ScriptedEngine([[1, 2, 3, 4, 5]]))
    assert (completion.token_ids, completion.finish_reason) == ([1, 2, 3, 4], "length")
    assert len(completion.log_probs) == len(completion.versions) == 4


def test_the_budget_is_clipped_to_the_context_that_remains():
    engine = ScriptedEngine([[1, 2, 3]], max_model_len=4)
    assert generate(engine, [9, 9]).token_ids == [1, 2]
    with pytest.raises(ValueError, match="prompt_ids has 4 tokens"):
        generate(engine, [9] * 4)


def test_stop_tokens_stay_and_end_the_completion():
    engine = ScriptedEngine([[1, 7, 3]], stop_token_ids=[7])
    completion = generate(engine)
    assert (completion.token_ids, completion.finish_reason) == ([1, 7], "stop")
    assert generate(engine, sampling=SAMPLING.with_changes(ignore_eos=True)).token_ids == [1, 7, 3]
    assert generate(engine, sampling=SAMPLING.with_changes(stop_token_ids=(1,))).token_ids == [1]


def test_a_stop_string_that_ends_inside_a_token_keeps_the_token():
    engine = ScriptedEngine([[1, 2, 3]], decode=lambda ids: "".join({1: "ab", 2: "cEN", 3: "Dx"}[i] for i in ids))
    completion = generate(engine, sampling=SAMPLING.with_changes(stop=("END",)))
    assert (completion.token_ids, completion.stop_string) == ([1, 2, 3], "END")


def test_log_probs_may_be_computed():
    engine = ScriptedEngine([[1, 2]], log_prob=lambda ids: [-float(i) for i in ids])
    assert generate(engine).log_probs == [-1.0, -2.0]


def test_abort_returns_the_tokens_that_were_due():
    async def run():
        engine = ScriptedEngine([list(range(100))], latency_s=1.0)
        task = asyncio.create_task(engine.generate([1], SamplingConfig(max_new_tokens=100), request_id="a"))
        await asyncio.sleep(0.3)
        await engine.abort("a")
        return await task, engine.num_in_flight

    completion, num_in_flight = asyncio.run(run())
    assert completion.finish_reason == "abort"
    assert 10 < len(completion.token_ids) < 60
    assert num_in_flight == 0


def test_a_version_set_in_flight_is_that_of_later_tokens_only():
    async def run():
        engine = ScriptedEngine([list(range(10))], latency_s=0.2)
        task = asyncio.create_task(engine.generate([1], SamplingConfig(max_new_tokens=10)))
        await asyncio.sleep(0.1)
        engine.policy_version = 1
        return (await task).versions

    versions = asyncio.run(run())
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


def test_faults_on_command():
    engine = ScriptedEngine([[1]])
    engine.fail_next(2)
    for _ in range(2):
        with pytest.raises(EngineError):
            generate(engine)
    assert generate(engine).token_ids == [1]


def test_shutdown_fails_requests_in_flight_and_later_ones():
    async def run():
        engine = ScriptedEngine([[1]], latency_s=5.0)
        task = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0.01)
        engine.shutdown()
        engine.shutdown()
        with pytest.raises(EngineError):
            await task
        with pytest.raises(EngineError):
            await engine.generate([1], SAMPLING)

    asyncio.run(run())


def test_a_request_id_in_flight_is_refused():
    async def run():
        engine = ScriptedEngine([[1]], latency_s=0.05)
        task = asyncio.create_task(engine.generate([1], SAMPLING, request_id="same"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="same"):
            await engine.generate([1], SAMPLING, request_id="same")
        await task
        await engine.generate([1], SAMPLING, request_id="same")

    asyncio.run(run())


def test_requests_are_recorded():
    engine = ScriptedEngine([[1]])
    generate(engine, [3, 4], routing_key="group")
    assert engine.requests == [([3, 4], SAMPLING, "group")]

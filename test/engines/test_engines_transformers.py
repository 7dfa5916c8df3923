"""TransformersEngine: what it samples has the log-prob that one plain forward pass gives."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading

import pytest
import torch
from warm_processes import run_warm

from llmrl.engines import Engine, EngineError, SamplingConfig, TransformersEngine
from llmrl.engines.transformers.decoding import DecodingBatch

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [1, 2, 3]]
SAMPLING = SamplingConfig(max_new_tokens=12, ignore_eos=True)


def make_model(seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=30,
    )
    return LlamaForCausalLM(config).eval()


class LetterTokenizer:
    """Token 0 is `a`, token 1 is `b`, and so on."""

    def decode(self, token_ids):
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


@pytest.fixture
def engine():
    with TransformersEngine(make_model(), tokenizer=LetterTokenizer()) as engine:
        yield engine


def generate_all(engine, prompts=PROMPTS, sampling=SAMPLING):
    async def run():
        return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))

    return asyncio.run(run())


def reference_logits(model, prompt_ids, completion):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *completion.token_ids]])).logits[0]
    return logits[len(prompt_ids) - 1 : -1].float()


def chosen(logits, completion):
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_log_probs_are_those_of_a_plain_forward_pass_whatever_the_padding(engine, temperature):
    assert isinstance(engine, Engine)
    model = make_model()
    for prompt_ids, one in zip(
        PROMPTS, generate_all(engine, sampling=SAMPLING.with_changes(temperature=temperature)), strict=True
    ):
        assert len(one.token_ids) == len(one.log_probs) == len(one.versions) == 12
        expected = chosen(reference_logits(model, prompt_ids, one) / (temperature or 1.0), one)
        assert torch.allclose(torch.tensor(one.log_probs), expected, atol=1e-4)


def test_log_probs_are_those_of_the_narrowed_distribution(engine):
    model = make_model()
    for prompt_ids, one in zip(PROMPTS, generate_all(engine, sampling=SAMPLING.with_changes(top_k=3)), strict=True):
        logits = reference_logits(model, prompt_ids, one)
        narrowed = logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf)
        assert torch.allclose(torch.tensor(one.log_probs), chosen(narrowed, one), atol=1e-4)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}):
        assert generate_all(engine, sampling=SAMPLING.with_changes(**narrow))[0].log_probs == [0.0] * 12


def test_a_repetition_penalty_counts_the_prompt_and_not_the_padding(engine):
    model, sampling = make_model(), SAMPLING.with_changes(repetition_penalty=1.5, max_new_tokens=1)
    for prompt_ids, one in zip(PROMPTS, generate_all(engine, sampling=sampling), strict=True):
        logits = reference_logits(model, prompt_ids, one)
        for token_id in set(prompt_ids):
            value = logits[0, token_id]
            logits[0, token_id] = value / 1.5 if value > 0 else value * 1.5
        assert torch.allclose(torch.tensor(one.log_probs), chosen(logits, one), atol=1e-4)


def test_samples_follow_the_distribution():
    with TransformersEngine(make_model(), max_num_seqs=512) as engine:
        completions = generate_all(engine, [[1, 2, 3]] * 2000, SAMPLING.with_changes(max_new_tokens=1))
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in completions]), minlength=31) / 2000
    expected = reference_logits(make_model(), [1, 2, 3], completions[0])[0].softmax(-1)
    assert (counts - expected).abs().max() < 0.05


def test_a_seed_repeats_beside_other_requests(engine):
    seeded = SAMPLING.with_changes(seed=5)

    async def run(num_others):
        others = [engine.generate([9, 9], SAMPLING) for _ in range(num_others)]
        return (await asyncio.gather(engine.generate([1], seeded), *others))[0].token_ids

    assert asyncio.run(run(0)) == asyncio.run(run(3))
    assert len({tuple(one.token_ids) for one in generate_all(engine, [[1]] * 4)}) == 4


def test_each_request_ends_in_its_own_way(engine):
    [whole] = generate_all(engine, [[1, 2]], SAMPLING.with_changes(temperature=0.0))
    end, greedy = whole.token_ids[3], SAMPLING.with_changes(temperature=0.0)
    position = whole.token_ids.index(end) + 1
    word = LetterTokenizer().decode(whole.token_ids[2:4])

    async def run():
        return await asyncio.gather(
            engine.generate([1, 2], greedy.with_changes(stop_token_ids=(end,))),
            engine.generate([1, 2], greedy.with_changes(max_new_tokens=2)),
            engine.generate([1, 2], greedy.with_changes(stop=(word,))),
            engine.generate([1] * 62, greedy),
        )

    stopped, short, worded, clipped = asyncio.run(run())
    assert (stopped.token_ids, stopped.finish_reason) == (whole.token_ids[:position], "stop")
    assert (short.token_ids, short.finish_reason) == (whole.token_ids[:2], "length")
    assert (worded.stop_string, worded.token_ids) == (word, whole.token_ids[: len(worded.token_ids)])
    assert (len(clipped.token_ids), clipped.finish_reason) == (2, "length")


def test_the_models_own_end_token_ends_unless_it_is_to_be_ignored():
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[30] += 100 * model.model(torch.tensor([[1]])).last_hidden_state[0, 0]
    with TransformersEngine(model) as engine:
        [ended] = generate_all(engine, [[1]], SAMPLING.with_changes(ignore_eos=False))
        [ignored] = generate_all(engine, [[1]])
    assert (ended.token_ids, ended.finish_reason) == ([30], "stop")
    assert len(ignored.token_ids) == 12


def test_new_weights_hold_from_the_next_token_on_and_each_token_says_which(engine, monkeypatch):
    model, new = make_model(), make_model(seed=1)
    sample, num_sampled = DecodingBatch.sample, itertools.count(1)
    is_tenth, is_loaded = threading.Event(), threading.Event()

    def held_sample(batch):
        if next(num_sampled) == 10:
            is_tenth.set()
            assert is_loaded.wait(240)
        sample(batch)

    monkeypatch.setattr(DecodingBatch, "sample", held_sample)

    async def run():
        task = asyncio.create_task(engine.generate([1, 2], SAMPLING.with_changes(max_new_tokens=40)))
        assert await asyncio.to_thread(is_tenth.wait, 240)
        assert await asyncio.to_thread(engine.load_weights, new.state_dict()) == 1
        is_loaded.set()
        return await task

    completion = asyncio.run(run())
    num_old = 10
    assert completion.versions == [0] * num_old + [1] * (40 - num_old)
    old = chosen(reference_logits(model, [1, 2], completion), completion)
    assert torch.allclose(torch.tensor(completion.log_probs)[:num_old], old[:num_old], atol=1e-4)
    [after] = generate_all(engine, [[1, 2]])
    assert after.versions == [1] * 12
    assert torch.allclose(torch.tensor(after.log_probs), chosen(reference_logits(new, [1, 2], after), after), atol=1e-4)
    with pytest.raises(RuntimeError):
        engine.load_weights({"nonsense": torch.zeros(1)})
    assert engine.policy_version == 1


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "type"])
def test_weights_that_are_refused_leave_those_of_before(fault):
    """torch copies what fits and says afterwards what did not: a mixture, under the version of before."""
    engine, other = TransformersEngine(make_model(0)), make_model(1)
    before = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
    weights = dict(other.state_dict())
    if fault == "missing":
        del weights["model.norm.weight"]
    elif fault == "unknown":
        weights["model.extra.weight"] = torch.zeros(3)
    elif fault == "shape":
        weights["model.norm.weight"] = torch.zeros(3)
    else:
        weights["model.norm.weight"] = [0.0] * 32
    with pytest.raises(RuntimeError, match=r"model\.(norm|extra)\.weight"):
        engine.load_weights(weights)
    assert engine.policy_version == 0
    assert all(torch.equal(weight, before[name]) for name, weight in engine.model.state_dict().items())
    assert engine.load_weights(other.state_dict()) == 1
    assert torch.equal(engine.model.lm_head.weight, other.lm_head.weight)


def test_requests_are_aborted_and_cancelled_alone():
    model = make_model()
    forward, num_calls, may_go_on = model.forward, [0], threading.Event()

    def held_forward(*arguments, **options):
        num_calls[0] += 1
        assert num_calls[0] < 4 or may_go_on.wait(240)
        return forward(*arguments, **options)

    model.forward = held_forward

    async def run():
        with TransformersEngine(model, max_num_seqs=3) as engine:
            long = SAMPLING.with_changes(max_new_tokens=50)
            tasks = [asyncio.create_task(engine.generate([1], long, request_id=name)) for name in "abcde"]
            while num_calls[0] < 4:
                await asyncio.sleep(0.01)
            with pytest.raises(ValueError, match="in flight"):
                await engine.generate([1], long, request_id="a")
            await engine.abort("a")
            tasks[1].cancel()
            await engine.abort("d")  # it waits for a place
            assert (await tasks[3]).token_ids == []
            await engine.abort("never seen")
            may_go_on.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            return results, engine.num_in_flight

    (aborted, cancelled, whole, waiting, later), num_in_flight = asyncio.run(run())
    assert aborted.finish_reason == waiting.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) == len(aborted.log_probs) < 50
    assert isinstance(cancelled, asyncio.CancelledError)
    assert len(whole.token_ids) == len(later.token_ids) == 50
    assert num_in_flight == 0


def test_shutdown_fails_what_is_in_flight_and_leaves_no_thread():
    model = make_model()
    forward, is_computing, may_go_on = model.forward, threading.Event(), threading.Event()

    def held_forward(*arguments, **options):
        is_computing.set()
        assert may_go_on.wait(240)
        return forward(*arguments, **options)

    model.forward = held_forward
    others = set(threading.enumerate())
    engine = TransformersEngine(model, max_num_seqs=1)

    async def run():
        sampling = SAMPLING.with_changes(max_new_tokens=50)
        tasks = [asyncio.create_task(engine.generate([1], sampling)) for _ in range(3)]
        assert await asyncio.to_thread(is_computing.wait, 240)
        ending = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        while engine.is_alive:
            await asyncio.sleep(0.001)
        may_go_on.set()
        await ending
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(result) for result in asyncio.run(run())] == [EngineError] * 3
    engine.shutdown()
    assert not engine.is_alive
    with pytest.raises(EngineError, match="shut down"):
        generate_all(engine)
    assert "llmrl-transformers-engine" not in {thread.name for thread in set(threading.enumerate()) - others}


def test_a_model_that_fails_fails_its_requests_only():
    model = make_model()
    forward, num_calls = model.forward, [0]

    def fail_once(*arguments, **options):
        num_calls[0] += 1
        if num_calls[0] == 2:
            raise RuntimeError("out of memory")
        return forward(*arguments, **options)

    model.forward = fail_once
    with TransformersEngine(model) as engine:
        with pytest.raises(EngineError, match="out of memory"):
            generate_all(engine, [[1]])
        assert len(generate_all(engine, [[1]])[0].token_ids) == 12


@pytest.mark.parametrize(
    ("prompt_ids", "message"), [([], "empty"), ([31], "vocabulary"), ([-1], "vocabulary"), ([1] * 64, "64")]
)
def test_prompts_that_cannot_be_served_are_refused(engine, prompt_ids, message):
    with pytest.raises(ValueError, match=message):
        generate_all(engine, [prompt_ids])


def test_arguments_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="max_num_seqs"):
        TransformersEngine(make_model(), max_num_seqs=0)
    for limit in (0, 1, 65, 12.5, "16"):
        with pytest.raises(ValueError, match=f"max_model_len must be .* 2 to the model's 64 positions, got {limit!r}"):
            TransformersEngine(make_model(), max_model_len=limit)
    with TransformersEngine(make_model()) as engine, pytest.raises(ValueError, match="tokenizer="):
        generate_all(engine, [[1]], SAMPLING.with_changes(stop=("x",)))


LEAVING = """
import asyncio, sys, threading
from transformers import LlamaConfig, LlamaForCausalLM
from llmrl.engines import SamplingConfig, TransformersEngine

sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
engine = TransformersEngine(LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes)), max_model_len=2000)
sampling = SamplingConfig(max_new_tokens=1900, ignore_eos=True)
threading.excepthook = lambda _: None
threading.Thread(target=lambda: asyncio.run(engine.generate([1, 2, 3], sampling)), daemon=True).start()
while not engine._in_flight:
    pass
sys.exit(7)
"""


def test_a_program_that_ends_while_the_engine_computes_ends_as_it_says(own_programs):
    assert run_warm([sys.executable, "-c", LEAVING]).returncode == 7

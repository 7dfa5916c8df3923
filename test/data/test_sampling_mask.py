"""Sampling masks: engines say what top-k, top-p and min-p kept, and it stays with its tokens."""

import pickle
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from truncated_sampling import CUTS, make_model, sampled

from llmrl.collectors.completing import Completer
from llmrl.data.sampling_mask import SamplingMask, read_sampling_masks
from llmrl.engines import Completion, EngineError, SamplingConfig, TransformersEngine
from llmrl.engines.completion_checks import check_completion
from llmrl.engines.server.messages import completion_request, read_response
from llmrl.engines.vllm.requests import num_reported, read_completion
from llmrl.policies import vLLMWrapper
from llmrl.rendering import Conversation
from llmrl.rendering.turn import TurnNode
from llmrl.testing import ScriptedEngine


def kept_by_hand(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The ids that are kept of float64 logits [vocab_size], by the definitions of the three."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        order = order[:top_k]
    probabilities = np.exp(scaled[order] - scaled.max())
    probabilities /= probabilities.sum()
    if top_p < 1:
        before = np.cumsum(probabilities) - probabilities
        order = order[before < top_p]
        probabilities = probabilities[: len(order)] / probabilities[: len(order)].sum()
    return {int(token) for token, p in zip(order, probabilities, strict=True) if p >= min_p * probabilities[0]}


# Engines


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_transformers_engine_says_what_was_kept(cut, temperature):
    model = make_model()
    engine = TransformersEngine(model)
    sampling = SamplingConfig(max_new_tokens=12, ignore_eos=True, temperature=temperature, **cut)
    [completion] = sampled(engine, [[1, 2, 3]], sampling)
    [greedy] = sampled(engine, [[1, 2, 3]], sampling.with_changes(temperature=0.0))
    [plain] = sampled(engine, [[1, 2, 3]], SamplingConfig(max_new_tokens=2))
    with pytest.raises(ValueError, match="TransformersEngine does not"):
        sampled(engine, [[1, 2, 3]], SamplingConfig(grammar="{}"))
    [untold] = sampled(engine, [[1, 2, 3]], sampling.with_changes(replay=False))
    engine.shutdown()
    assert greedy.sampling_mask is plain.sampling_mask is untold.sampling_mask is None
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, *completion.token_ids]])).logits[0]
    assert len(completion.sampling_mask) == 12
    for place, kept in enumerate(completion.sampling_mask):
        expected = kept_by_hand(logits[2 + place].double().numpy(), temperature=temperature, **cut)
        assert set(kept) == expected


def flat_log_probs(*positions):
    from vllm.logprobs import FlatLogprobs

    flat = FlatLogprobs()
    for entries in positions:
        flat.start_indices.append(len(flat.logprobs))
        for token_id, log_prob in entries:
            flat.token_ids.append(token_id)
            flat.logprobs.append(log_prob)
        flat.end_indices.append(len(flat.logprobs))
    return flat


def vllm_output(num_tokens, **columns):
    from vllm.outputs import CompletionOutput, RequestOutput

    token_ids = list(range(1, num_tokens + 1))
    sample = CompletionOutput(0, "", token_ids, None, finish_reason="stop", **columns)
    sample.weight_versions = [SimpleNamespace(version="3", start=0, end=num_tokens)]  # vLLM 0.31 has no such field
    return RequestOutput("id", None, [9], None, [sample], True)


def test_vllm_is_asked_for_as_many_ids_as_top_k_keeps_and_ties(takes_long):
    config = SimpleNamespace(return_sampling_mask=False, get_vocab_size=lambda: 49152)
    assert num_reported(SamplingConfig(), config) == 0
    assert num_reported(SamplingConfig(top_k=20), config) == 38
    assert num_reported(SamplingConfig(top_k=20, replay=False), config) == 0
    assert num_reported(SamplingConfig(top_k=20, temperature=0), config) == 0
    assert num_reported(SamplingConfig(top_k=49000), config) == 49152
    for unbounded in ({"top_p": 0.95}, {"min_p": 0.1}):
        with pytest.raises(ValueError, match="add top_k=200"):
            num_reported(SamplingConfig(**unbounded), config)
        assert num_reported(SamplingConfig(**unbounded, replay=False), config) == 0
    config.return_sampling_mask = True
    assert num_reported(SamplingConfig(top_k=20), config) == 0


def test_what_vllm_kept_are_the_reported_ids_with_a_log_prob(takes_long):
    from vllm.outputs import SamplingMask as ReportedMask

    cut = -float("inf")
    reported = flat_log_probs([(1, -0.7), (5, -0.6), (1, -0.7), (8, cut)], [(2, -0.1), (2, -0.1), (7, cut), (3, cut)])
    completion = read_completion(vllm_output(2, logprobs=reported), 50)
    assert [sorted(kept) for kept in completion.sampling_mask] == [[1, 5], [2]]
    assert completion.log_probs == [-0.7, -0.1]
    all_kept = flat_log_probs([(1, -0.7), (5, -0.6), (1, -0.7)])
    with pytest.raises(EngineError, match="tie at top_k"):
        read_completion(vllm_output(1, logprobs=all_kept), 50)
    assert sorted(read_completion(vllm_output(1, logprobs=all_kept), 2).sampling_mask[0]) == [1, 5]
    own = vllm_output(1, logprobs=flat_log_probs([(1, -0.7)]), sampling_mask=ReportedMask([[1, 4, 6]]))
    assert list(read_completion(own, 50).sampling_mask[0]) == [1, 4, 6]
    assert read_completion(vllm_output(1, logprobs=flat_log_probs([(1, -0.7)])), 50).sampling_mask is None


def test_what_a_server_kept_are_its_top_logprobs_that_are_not_cut():
    sampling = SamplingConfig(top_k=3, top_p=0.9)
    assert completion_request("m", [1], sampling, 8)["logprobs"] == 4
    assert completion_request("m", [1], sampling.with_changes(replay=False), 8)["logprobs"] == 1
    with pytest.raises(ValueError, match="add top_k=19"):
        completion_request("m", [1], SamplingConfig(top_p=0.9), 8)

    def response(*top):
        columns = {"tokens": ["token_id:7"], "token_logprobs": [-0.5], "top_logprobs": list(top)}
        return {"choices": [{"finish_reason": "stop", "logprobs": columns}]}

    def read(*top):
        return read_response(response(*top), version=0, server="http://host", budget=4, top_k=3)

    good = {"token_id:7": -0.5, "token_id:2": -0.9, "token_id:3": -9999.0, "token_id:4": -9999.0}
    assert [list(kept) for kept in read(good).sampling_mask] == [[7, 2]]
    for wrong in ([], [None], [[7]], [{"token_id:2": -0.1}], [{"seven": -0.1}], [good, good]):
        with pytest.raises(EngineError):
            read(*wrong)
    with pytest.raises(EngineError, match="may tie"):
        read({"token_id:7": -0.5, "token_id:2": -0.9, "token_id:3": -1.0, "token_id:4": -1.0})


@pytest.mark.parametrize(
    "mask",
    [
        None,
        [array("i", [7])],
        [array("i", [7]), array("i", [])],
        [array("i", [7]), array("i", [9])],
        [array("i", [7]), array("i", [8, 8])],
        [array("i", [7]), array("i", [8, 50])],
        [array("i", [7]), array("i", [8, -1])],
        [array("i", [7]), array("i", [~8])],
        [array("i", [7]), array("i", [~9, ~9])],
        [array("i", [7]), array("i", [~9, 8])],
        [array("i", [7]), array("i", [~50])],
        [array("i", [7]), array("l", [8])],
        [array("i", [7]), [8]],
        (array("i", [7]), array("i", [8])),
    ],
)
def test_masks_that_could_not_be_replayed_are_refused_at_the_border(mask):
    def check(mask):
        completion = Completion([7, 8], [-0.1, -0.2], [0, 0], "stop", sampling_mask=mask)
        check_completion(completion, budget=8, vocab_size=50, needs_sampling_mask=True)

    check([array("i", [7, 3]), array("i", [8])])
    check([array("i", [~3, ~8]), array("i", [~7])])
    with pytest.raises(EngineError, match=r"sampling_mask|did not report"):
        check(mask)


def test_a_repetition_penalty_is_refused_where_rows_are_made():
    policy = vLLMWrapper(ScriptedEngine([[1]]), input_mode="tokens", generate_kwargs={"repetition_penalty": 1.1})
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.1"):
        Completer(policy, num_retries=0)
    policy.sampling = policy.sampling.with_changes(replay=False)
    Completer(policy, num_retries=0)


def test_a_way_of_sampling_that_an_engine_cannot_tell_of_is_refused_with_the_policy(vllm_engine):
    with pytest.raises(ValueError, match="add top_k=200"):
        vLLMWrapper(vllm_engine, input_mode="tokens", generate_kwargs={"top_p": 0.9})


# Columns, turns, rows

KEPT = st.none() | st.lists(st.integers(0, 90), min_size=1, max_size=4, unique=True).map(lambda ids: array("i", ids))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 4), st.lists(KEPT, min_size=1, max_size=5), st.integers(0, 9)), min_size=1))
def test_each_token_keeps_its_mask_through_rewritten_and_pickled_conversations(turns):
    conversation, expected, next_id = Conversation.start(None), {}, 100
    for num_context, masks, num_back in turns:
        held = [] if conversation.node is None else conversation.prompt_ids
        context = list(range(next_id, next_id + num_context))
        ids = list(range(next_id + num_context, next_id + num_context + len(masks)))
        next_id = ids[-1] + 1
        conversation = conversation.with_prompt_ids(held[: max(0, len(held) - num_back)] + context)
        conversation = conversation.with_completion(
            ids, log_probs=[-1.0] * len(ids), versions=[0] * len(ids), sampling_mask=masks
        )
        expected |= dict(zip(ids, masks, strict=True))
        if num_back == 1:
            conversation = pickle.loads(pickle.dumps(conversation))
    seen = set()
    for row in conversation.reconcile().rows:
        columns = row.columns
        for token_id, is_trained, kept in zip(columns.token_ids, columns.loss_mask, columns.sampling_mask, strict=True):
            assert kept == (expected[token_id] if is_trained else None)
            seen |= {token_id} if is_trained else set()
    assert seen <= expected.keys()


def test_a_turn_has_its_mask():
    node = TurnNode(None, 0, [1], [2, 3], [-0.1, -0.2], [0, 0], sampling_mask=[array("i", [2, 9]), None])
    assert node.sampling_mask == [array("i", [2, 9]), None]
    with pytest.raises(ValueError, match="sampling_mask must have one value"):
        TurnNode(None, 0, [1], [2, 3], [-0.1, -0.2], [0, 0], sampling_mask=[None])


@given(st.lists(KEPT, max_size=8), st.data())
def test_a_choice_of_tokens_has_the_masks_of_these(kept, data):
    mask = SamplingMask.of(kept)
    places = data.draw(st.lists(st.integers(0, len(kept) - 1))) if kept else []
    chosen = mask.chosen(torch.tensor(places, dtype=torch.int64))
    parts = chosen.token_ids.split(chosen.counts.tolist())
    assert [list(part) for part in parts] == [list(kept[place] or ()) for place in places]


def test_masks_of_rows_that_were_cut_or_padded_are_refused():
    def row(counts, num_ids):
        entry = {"token_ids": torch.zeros(num_ids, dtype=torch.int32), "counts": torch.tensor(counts)}
        return TensorDict({"sampling_mask": entry})

    assert read_sampling_masks(lazy_stack([TensorDict({"a": torch.zeros(1)})]), [3]) is None
    mixed = lazy_stack([TensorDict({}), row([0, 2], 2)])
    assert read_sampling_masks(mixed, [1, 2]).counts.tolist() == [0, 0, 2]
    with pytest.raises(ValueError, match="neither cut nor padded"):
        read_sampling_masks(lazy_stack([row([0, 2], 2)]), [3])
    with pytest.raises(ValueError, match="add up to 2"):
        read_sampling_masks(lazy_stack([row([0, 2], 3)]), [2])

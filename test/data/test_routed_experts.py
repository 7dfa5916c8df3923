"""The experts that an engine tells, on their way to a row: each token has those of the request that computed it."""

import asyncio
import base64
import io
import pickle
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mixtures import VOCAB, by_hand, make_model, make_row
from tensordict import lazy_stack

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.collectors.completing import _joined
from llmrl.data.routed_experts import routed_experts_entry
from llmrl.engines import Completion, EngineError, SamplingConfig, TransformersEngine
from llmrl.engines.completion_checks import check_routed_experts
from llmrl.engines.server.messages import read_generated, read_response
from llmrl.engines.vllm.requests import read_completion
from llmrl.envs import DatasetChatEnv
from llmrl.objectives import GRPOLoss
from llmrl.objectives.scoring import log_probs_of
from llmrl.rendering import Conversation
from llmrl.rendering.rows import reconcile
from llmrl.trainer import TransformersWrapper, train_step

SAMPLING = SamplingConfig(max_new_tokens=6, ignore_eos=True)


def chosen_by_hand(model, ids):
    """The experts of each token, `[num_tokens, num_layers, top_k]`, by the routers written out."""
    chosen = []
    _, forced = by_hand(model, torch.tensor(ids), None)
    for layer in forced.model.layers:
        route = layer.mlp.gate.forward

        def told(hidden, route=route):
            output = route(hidden)
            chosen.append(output[2])
            return output

        layer.mlp.gate.forward = told
    forced(input_ids=torch.tensor(ids)[None])
    return torch.stack(chosen, 1)


def asked(engine, prompts):
    async def all_of_them():
        return await asyncio.gather(*(engine.generate(prompt, SAMPLING) for prompt in prompts))

    return asyncio.run(all_of_them())


def as_sets(experts):
    return np.sort(np.asarray(experts), -1).tolist()


def test_the_transformers_engine_tells_the_experts_of_prompt_and_completion():
    model = make_model()
    prompts = [list(range(1, 2 + length)) for length in range(5)]  # padded to one length
    with TransformersEngine(model) as engine:
        completions = asked(engine, prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        check_routed_experts(completion, len(prompt))
        ids = [*prompt, *completion.token_ids[:-1]]
        assert completion.routed_experts.dtype == np.int16
        assert as_sets(completion.routed_experts) == as_sets(chosen_by_hand(model, ids))


def test_rows_of_two_turns_are_trained_with_the_engines_experts_whatever_the_trainers_routers_would_do():
    engine_model, trained = make_model(), make_model()
    rows = []
    with TransformersEngine(engine_model) as engine:
        for start in range(4):
            conversation = Conversation.start(None).with_prompt_ids([1, 2, 3 + start])
            for _ in range(2):
                (completion,) = asked(engine, [conversation.prompt_ids])
                conversation = conversation.with_completion(
                    completion.token_ids,
                    log_probs=completion.log_probs,
                    versions=completion.versions,
                    routed_experts=completion.routed_experts,
                ).with_prompt_ids([*conversation.prompt_ids, *completion.token_ids, 4])
            (row,) = conversation.reconcile().rows
            columns = row.columns
            entry = routed_experts_entry(columns.routed_experts)["routed_experts"]
            ids = torch.tensor(columns.token_ids)
            assert as_sets(entry[:-1]) == as_sets(chosen_by_hand(engine_model, columns.token_ids)[:-1])
            assert (entry[-1] == -1).all()
            made = make_row(ids, torch.tensor(columns.loss_mask), entry)
            made["log_probs", "full"] = torch.tensor(columns.log_probs)
            rows.append(made)
    policy = TransformersWrapper(engine_model, generate=False)
    report = train_step(GRPOLoss(policy), lazy_stack(rows), torch.optim.SGD(engine_model.parameters(), lr=0.0))
    assert report.measurements["router_difference"] == 0
    assert report.measurements["log_prob_difference_max"] < 1e-4
    # Other routers: the ids are the engine's, the weights their own.
    with torch.no_grad():
        for layer in trained.model.layers:
            layer.mlp.gate.weight.add_(torch.randn(layer.mlp.gate.weight.shape))
    policy = TransformersWrapper(trained, generate=False)
    ours = log_probs_of(policy, lazy_stack(rows))
    report = train_step(GRPOLoss(policy), lazy_stack(rows), torch.optim.SGD(trained.parameters(), lr=0.0))
    assert report.measurements["router_difference"] > 0.1
    for row, values in zip(rows, ours, strict=True):
        expected, _ = by_hand(trained, row["tokens", "full"], row["routed_experts"])
        mask = row["masks", "all_assistant_mask"]
        torch.testing.assert_close(values[mask], expected[mask], rtol=1e-4, atol=2e-5)


def test_each_token_of_any_row_has_the_experts_of_the_request_that_computed_it_first():
    """Appended, realigned and forked prompts, branches, pickled turns; ids of tokens never come again."""
    for seed in range(300):
        draw = random.Random(seed)
        next_id, expected = 1, {}
        conversations = [Conversation.start(None, fork_threshold_tokens=draw.choice([0, 3, 50]))]
        for request in range(1, draw.randint(2, 8)):
            before = draw.choice(conversations)
            held = before.prompt_ids
            num_kept = draw.choice([len(held), len(held), draw.randint(0, len(held))])
            new = list(range(next_id, next_id + draw.randint(1, 3)))
            sampled = list(range(new[-1] + 1, new[-1] + 1 + draw.randint(1, 4)))
            next_id = sampled[-1] + 1
            prompted = before.with_prompt_ids(held[:num_kept] + new)
            prompt = prompted.prompt_ids
            is_told = draw.random() < 0.8 or request == 1
            told = np.asarray([[[request, place]] for place in range(len(prompt) + len(sampled) - 1)], dtype=np.int16)
            after = prompted.with_completion(
                sampled,
                log_probs=[-1.0] * len(sampled),
                versions=[0] * len(sampled),
                routed_experts=told if is_told else None,
            )
            if is_told:
                whole = [*prompt, *sampled]
                for place in range(1, len(whole)):
                    expected.setdefault(whole[place], []).append((request, place - 1))
            else:
                for token in (*new, *sampled):
                    expected.setdefault(token, []).append(None)
            conversations.append(after)
        tips = [one.node for one in conversations[1:]]
        for nodes in ([tips[-1]], tips, pickle.loads(pickle.dumps(tips))):
            for row in reconcile(nodes).rows:
                ids, column = row.columns.token_ids, row.columns.routed_experts
                assert column[0] is None
                for token, experts in zip(ids[1:], column[1:], strict=True):
                    possible = expected[token]
                    if possible[0] is None:  # its own request did not tell: unknown, or told by a later one
                        assert experts is None or tuple(experts[0].tolist()) in possible
                    else:
                        assert experts is not None and tuple(experts[0].tolist()) == possible[0]


def test_a_batch_of_a_collector_has_them(tokenizer):
    model = make_model(vocab_size=len(tokenizer))
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=SAMPLING)
    env = DatasetChatEnv([{"query": "Name three animals."}, {"query": "What is two plus three?"}], repeats=2)
    with LLMCollector(env, policy, groups_per_batch=2, limits=RolloutLimits(max_turns=1)) as collector:
        batch = collector.next()
    assert len(batch) == 4
    for row in batch.unbind(0):
        expected = chosen_by_hand(model, row["tokens", "full"].tolist())
        assert as_sets(row["routed_experts"][:-1]) == as_sets(expected[:-1])
        row["advantage"] = torch.randn(1, 1)
    trained = TransformersWrapper(model, generate=False)
    report = train_step(GRPOLoss(trained), batch, torch.optim.SGD(model.parameters(), lr=0.0))
    assert report.measurements["router_difference"] == 0
    policy.engine.shutdown()


def test_parts_of_a_completion_are_joined_each_with_the_experts_of_who_computed_it_first():
    def part(request, num_before, ids):
        told = np.asarray([[[request, place]] for place in range(num_before + len(ids) - 1)], dtype=np.int16)
        return Completion(ids, [-1.0] * len(ids), [0] * len(ids), "abort", routed_experts=told)

    parts = [part(1, 3, [5, 6]), Completion([], [], [], "abort"), part(2, 5, [7]), part(3, 6, [8, 9])]
    joined = _joined(parts)
    check_routed_experts(joined, 3)
    assert joined.routed_experts[:, 0].tolist() == [[1, p] for p in range(4)] + [[2, 4]] + [[3, 5], [3, 6]]
    parts[2] = replace(parts[2], routed_experts=None)
    assert _joined(parts).routed_experts is None


@pytest.mark.parametrize(
    "told",
    [
        np.zeros((3, 2, 2), dtype=np.int16),
        np.zeros((4, 4), dtype=np.int16),
        np.zeros((4, 2, 2), dtype=np.int64),
        np.full((4, 2, 2), -1, dtype=np.int16),
        [[[1, 2]]] * 4,
    ],
)
def test_experts_of_other_tokens_are_refused(told):
    with pytest.raises(EngineError, match=r"of shape \[4, num_layers, top_k\]"):
        check_routed_experts(Completion([5, 6], [-1.0] * 2, [0] * 2, "stop", routed_experts=told), 3)


@pytest.mark.parametrize("read", [read_generated, partial(read_response, version=0)])
def test_what_a_server_tells_is_read(read):
    def choice(told):
        return {
            "finish_reason": "stop",
            "token_ids": [5, 6],
            "logprobs": {"content": [{"logprob": -1.0}] * 2, "token_logprobs": [-1.0] * 2},
            "weight_versions": [{"version": "0", "start": 0, "end": 2}],
            "routed_experts": told,
        }

    experts, written = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2), io.BytesIO()
    np.save(written, experts, allow_pickle=False)
    told = base64.b64encode(written.getvalue()).decode()
    completion = read({"choices": [choice(told)]}, server="it", budget=4)
    check_routed_experts(completion, 3)
    assert completion.routed_experts.tolist() == experts.tolist()
    assert read({"choices": [choice(None)]}, server="it", budget=4).routed_experts is None
    for broken in ("", "!", told[:40], 7, base64.b64encode(pickle.dumps([1])).decode()):
        with pytest.raises(EngineError, match="no array"):
            read({"choices": [choice(broken)]}, server="it", budget=4)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_what_vllm_tells_is_read(dtype):
    told = np.arange(4 * 2 * 2).reshape(4, 2, 2)
    logprobs = SimpleNamespace(logprobs=[-1.0, -2.0], start_indices=[0, 1])
    sample = SimpleNamespace(
        token_ids=[5, 6], finish_reason="stop", stop_reason=None, logprobs=logprobs, weight_versions=None,
        sampling_mask=None, routed_experts=told.astype(dtype),
    )  # fmt: skip
    completion = read_completion(SimpleNamespace(outputs=[sample], num_cached_tokens=0), VOCAB, version=0)
    check_routed_experts(completion, 3)
    assert completion.routed_experts.tolist() == told.tolist()

"""Sampling replay: with what truncation kept, the ratio is 1 on-policy, and gradients are those of the equations."""

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from truncated_sampling import CUTS, VOCAB, make_model, sampled

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import TokenColumns
from llmrl.data.sampling_mask import SamplingMask, sampling_mask_entry
from llmrl.engines import SamplingConfig, TransformersEngine
from llmrl.envs import DatasetChatEnv
from llmrl.objectives import GRPOLoss
from llmrl.objectives.scoring import log_probs_of
from llmrl.policies import vLLMWrapper
from llmrl.trainer import TransformersWrapper, train_step
from llmrl.trainer.head.log_probs import LogitTransform
from llmrl.trainer.head.truncated import kept_logits, truncated_log_probs
from llmrl.trainer.scoring import write_log_probs


def row_of(turns):
    """A training row of (context, completion) pairs."""
    columns = TokenColumns()
    for context, completion in turns:
        columns.append_context(context)
        columns.append_completion(
            completion.token_ids,
            log_probs=completion.log_probs,
            versions=completion.versions,
            sampling_mask=completion.sampling_mask,
        )
    row = TensorDict(
        {
            "tokens": {"full": torch.tensor(columns.token_ids)},
            "masks": {"all_assistant_mask": torch.tensor(columns.loss_mask)},
            "log_probs": {"full": torch.tensor(columns.log_probs)},
            "policy_versions": {"full": torch.tensor(columns.versions)},
            "advantage": torch.randn(1, 1),
        }
    )
    for key, entry in sampling_mask_entry(columns.sampling_mask).items():
        row.set(key, entry)
    return row


def two_turns(model, sampling, num_rows=6):
    engine = TransformersEngine(model)
    prompts = [[1, 2, 3 + row] for row in range(num_rows)]
    first = sampled(engine, prompts, sampling)
    followed = [[*prompt, *one.token_ids, 4] for prompt, one in zip(prompts, first, strict=True)]
    second = sampled(engine, followed, sampling)
    engine.shutdown()
    return [row_of([(p, a), ([4], b)]) for p, a, b in zip(prompts, first, second, strict=True)]


def differences(policy, rows):
    """|log p of the trainer - log p of the sampler| of every trained token."""
    theirs = torch.cat([row["log_probs", "full"] for row in rows])
    is_trained = torch.cat([row["masks", "all_assistant_mask"] for row in rows])
    ours = torch.cat(log_probs_of(policy, lazy_stack(rows)))
    return (ours - theirs).abs()[is_trained]


# The head


def by_equations(hidden, weight, bias, targets, positions, masks, temperature):
    """Log-probs and entropies in float64, one token after the other."""
    log_probs, entropies = [], []
    for target, position, kept in zip(targets, positions, masks, strict=True):
        logits = (hidden[position] @ weight.T + bias) / temperature
        ids = list(range(weight.shape[0])) if kept is None else list(kept)
        log_p = logits[ids].log_softmax(-1)
        log_probs.append(log_p[ids.index(target)])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def removed_of(kept):
    """The same mask as a list of the removed ids."""
    return kept and array("i", [~one for one in range(VOCAB) if one not in kept] or kept)


@settings(max_examples=40)
@given(st.data())
def test_truncated_log_probs_and_entropies_have_the_values_and_gradients_of_the_equations(data):
    num_positions, width = data.draw(st.integers(1, 6)), 5
    positions = sorted(data.draw(st.lists(st.integers(0, num_positions - 1), min_size=1, max_size=9)))
    targets = [data.draw(st.integers(0, VOCAB - 1)) for _ in positions]
    others = st.none() | st.sets(st.integers(0, VOCAB - 1), max_size=6)
    drawn = [data.draw(others) for _ in positions]
    masks = [None if ids is None else array("i", ids | {t}) for ids, t in zip(drawn, targets, strict=True)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(2).requires_grad_()

    hidden, weight, bias = leaf(num_positions, width), leaf(VOCAB, width), leaf(VOCAB)
    got = truncated_log_probs(
        hidden,
        weight,
        torch.tensor(targets),
        sampling_mask=SamplingMask.of([one if data.draw(st.booleans()) else removed_of(one) for one in masks]),
        positions=torch.tensor(positions),
        bias=bias,
        transform=LogitTransform(temperature=0.7),
        chunk_size=2,
        return_entropy=True,
    )
    expected = by_equations(hidden, weight, bias, targets, positions, masks, 0.7)
    shares = torch.randn(2, len(targets), generator=generator, dtype=torch.float64)
    gradients = []
    for values in (got, expected):
        total = (values[0] * shares[0] + values[1] * shares[1]).sum()
        gradients.append(torch.autograd.grad(total, (hidden, weight, bias)))
    for ours, theirs in zip((*got, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_mask_of_removed_ids_leaves_all_others():
    mask = SamplingMask.of([array("i", [~0, ~2]), None, array("i", [1])])
    is_kept = kept_logits(torch.zeros(3, 4), mask) == 0
    assert is_kept.int().tolist() == [[0, 1, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0]]


@pytest.mark.parametrize("ids", [[1, 2], [~0, ~1]])
def test_a_mask_without_the_token_that_was_sampled_is_refused(ids):
    mask = SamplingMask.of([array("i", ids)])
    with pytest.raises(ValueError, match="keep each sampled token once"):
        truncated_log_probs(
            torch.zeros(1, 3), torch.eye(3), torch.tensor([0]), sampling_mask=mask, positions=torch.tensor([0])
        )


# On-policy, the ratio is 1


@pytest.mark.parametrize("cut", CUTS)
def test_the_ratio_is_one_on_policy_over_two_turns(cut):
    model = make_model()
    sampling = SamplingConfig(max_new_tokens=10, ignore_eos=True, temperature=0.8, **cut)
    rows = two_turns(model, sampling)
    policy = TransformersWrapper(model, generate=False, generate_kwargs=sampling)
    assert differences(policy, rows).max() < 1e-4
    assert differences(policy, [row.exclude("sampling_mask") for row in rows]).mean() > 0.02

    batch = lazy_stack(rows)
    output = GRPOLoss(actor_network=policy)(batch)
    assert abs(float(output.ESS) - 1) < 1e-4 and float(output.kl_approx.abs()) < 1e-4


def test_gradients_and_old_log_probs_are_those_of_what_was_kept():
    model = make_model()
    sampling = SamplingConfig(max_new_tokens=6, ignore_eos=True, top_k=7)
    rows = two_turns(model, sampling, num_rows=4)
    batch = lazy_stack(rows)
    policy = TransformersWrapper(model, generate=False, generate_kwargs=sampling)
    write_log_probs(policy, batch, ("old_log_probs", "full"))
    for row in rows:
        is_trained = row["masks", "all_assistant_mask"]
        torch.testing.assert_close(
            row["old_log_probs", "full"][is_trained], row["log_probs", "full"][is_trained], rtol=0, atol=1e-4
        )
    model.zero_grad()
    GRPOLoss(actor_network=policy)(batch).loss_objective.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    # The policy gradient of the truncated distributions, token after token.
    eager, loss, num_tokens = make_model(), 0.0, 0
    for row in rows:
        logits, ids = eager(row["tokens", "full"][None]).logits[0], row["tokens", "full"]
        masks = row["sampling_mask", "token_ids"].split(row["sampling_mask", "counts"].tolist())
        for place in row["masks", "all_assistant_mask"].nonzero()[:, 0].tolist():
            kept = masks[place].long()
            log_p = logits[place - 1, kept].log_softmax(-1)[(kept == ids[place]).nonzero()[0, 0]]
            loss = loss - (log_p - log_p.detach()).exp() * row["advantage"].squeeze()
            num_tokens += 1
    (loss / num_tokens).backward()
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=2e-5)


def test_a_distribution_for_torchrls_losses_gives_nothing_to_what_was_cut():
    model = make_model()
    sampling = SamplingConfig(max_new_tokens=5, ignore_eos=True, top_k=4)
    rows = two_turns(model, sampling, num_rows=3)
    policy = TransformersWrapper(model, generate=False, generate_kwargs=sampling)
    probabilities = policy.get_dist(lazy_stack(rows)).logits.softmax(-1)
    for row, table in zip(rows, probabilities, strict=True):
        length = len(row["tokens", "full"])
        num_kept = (table[-length:] > 1e-9).sum(-1)
        is_trained = row["masks", "all_assistant_mask"]
        assert (num_kept[is_trained] == 4).all() and (num_kept[~is_trained] == VOCAB).all()


def test_rows_of_both_kinds_train_together():
    model = make_model()
    cut, whole = SamplingConfig(max_new_tokens=5, ignore_eos=True, top_k=4), SamplingConfig(max_new_tokens=5)
    batch = lazy_stack([*two_turns(model, cut, num_rows=2), *two_turns(model, whole, num_rows=2)])
    policy = TransformersWrapper(model, generate=False)
    assert differences(policy, list(batch.unbind(0))).max() < 1e-4
    report = train_step(GRPOLoss(actor_network=policy), batch, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert not report.is_skipped


# On real vLLM


@pytest.mark.parametrize("cut", [{"top_k": 20}, {"top_p": 0.9, "top_k": 100}, {"min_p": 0.1, "top_k": 100}])
def test_the_ratio_is_one_on_policy_on_vllm(shallow_engine, tokenizer, shallow_model, cut):
    sampling = {"max_new_tokens": 24, "temperature": 1.0, **cut}
    env = DatasetChatEnv([{"query": "Name three animals."}, {"query": "What is two plus three?"}], repeats=2)
    policy = vLLMWrapper(shallow_engine, tokenizer=tokenizer, generate_kwargs=sampling)
    scorer = TransformersWrapper(shallow_model, generate=False, generate_kwargs=sampling)
    with LLMCollector(env, policy, groups_per_batch=2, limits=RolloutLimits(max_turns=1)) as collector:
        batch = collector.next()
    rows = list(batch.unbind(0))
    assert differences(scorer, rows).mean() < 1e-3
    assert differences(scorer, [row.exclude("sampling_mask") for row in rows]).mean() > 0.01

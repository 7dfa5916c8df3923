"""Streams of loss: each against equations in float64, one row after the other, whatever shares its forward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from loss_batches import flat, near_policy, plain_log_probs, ragged_batch, tiny_model
from tensordict import lazy_stack

from llmrl.objectives import (
    DistillationLoss,
    GRPOLoss,
    SFTLoss,
    StreamsLoss,
    observed_tokens,
    trained_tokens,
    write_loss_weights,
)
from llmrl.trainer import TransformersWrapper, train_step

REF = ("next", "ref_log_probs", "full")


def halves(row):
    """Weights that are neither 0 nor 1."""
    return trained_tokens(row) * torch.linspace(-0.5, 2.0, len(row["tokens", "full"]))


def mixed_batch():
    """Rollouts in three streams, and between them demonstrations, which have neither advantage nor log-probs."""
    rollouts = write_loss_weights(
        ragged_batch(0), policy=trained_tokens, observations=observed_tokens, kl=halves
    ).unbind(0)
    demonstrations = [row.select("tokens", "masks", "rollout").clone() for row in ragged_batch(1, num_rows=3).unbind(0)]
    for row in demonstrations:
        row["rollout"].pop("rollout_id")
    demonstrations = write_loss_weights(lazy_stack(demonstrations), demonstrations=trained_tokens).unbind(0)
    return lazy_stack([*rollouts[:2], *demonstrations, *rollouts[2:]])


COEFFS = {"observations": 0.05, "demonstrations": 0.5, "kl": 0.1}


def make_streams(policy, names=("policy", "observations", "demonstrations", "kl"), **coeffs):
    kl = DistillationLoss(kl_estimator="k3", reduction="token_mean")
    kl.set_keys(teacher_log_prob=REF)
    streams = {
        "policy": GRPOLoss(clip_epsilon=0.2, aggregation="token_mean"),
        "observations": SFTLoss(reduction="token_mean"),
        "demonstrations": SFTLoss(),
        "kl": kl,
    }
    return StreamsLoss(policy, streams={name: streams[name] for name in names}, coeffs={**COEFFS, **coeffs})


def expected_streams(model, batch):
    """The equations, token by token."""
    parts = {"policy": [], "observations": [], "demonstrations": [], "kl": []}
    for row in batch.unbind(0):
        log_probs, mask = plain_log_probs(model, row), row["masks", "all_assistant_mask"].tolist()
        if row.get("advantage", None) is None:
            tokens = [-log_probs[place] for place in range(1, len(mask)) if mask[place]]
            parts["demonstrations"].append(torch.stack(tokens).mean())
            continue
        first = mask.index(True)
        weights = torch.linspace(-0.5, 2.0, len(mask))
        for place in range(1, len(mask)):
            if mask[place]:
                ratio = (log_probs[place] - float(row["log_probs", "full"][place])).exp()
                advantage = row["advantage"].double().item()
                parts["policy"].append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
                difference = float(row[REF][place]) - log_probs[place]
                if float(weights[place]):
                    parts["kl"].append(float(weights[place]) * (difference.exp() - 1 - difference))
            elif place > first:
                parts["observations"].append(-log_probs[place])
    return {name: torch.stack(values).mean() for name, values in parts.items()}


@pytest.fixture
def reference():
    model = copy.deepcopy(tiny_model()).double().eval()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("token_budget", [8, 40, 8192])
def test_each_stream_has_its_denominator_whatever_the_micro_batches(reference, token_budget):
    batch, policy = mixed_batch(), TransformersWrapper(tiny_model(), generate=False)
    expected = expected_streams(reference, batch)
    total = expected["policy"] + sum(coeff * expected[name] for name, coeff in COEFFS.items())
    total.backward()
    before = {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    report = train_step(make_streams(policy), batch, optimizer, token_budget=token_budget, max_grad_norm=None)
    assert (report.num_micro_batches > 4) == (token_budget == 8)
    assert report.loss == pytest.approx(float(total.detach()), rel=1e-4)
    measured = report.measurements
    assert measured["loss_objective"] == pytest.approx(float(expected["policy"].detach()), rel=1e-4)
    for name, term in (("observations", "loss_sft"), ("demonstrations", "loss_sft"), ("kl", "loss_distill")):
        value = COEFFS[name] * float(expected[name].detach())
        assert measured[f"{name}_{term}"] == pytest.approx(value, rel=1e-4)
    assert measured["observations_num_tokens"] == sum(int(observed_tokens(row).sum()) for row in ragged_batch(0))
    for name, weight in reference.named_parameters():
        moved = before[name] - policy.model.get_parameter(name)
        torch.testing.assert_close(moved.double(), weight.grad, rtol=1e-3, atol=1e-5)


def test_a_stream_is_what_its_loss_is_alone(reference):
    rollouts = ragged_batch(0)
    policy = near_policy(rollouts)
    alone = GRPOLoss(policy, entropy_coeff=0.01, kl_to_ref_coeff=0.1)(rollouts)
    alone.total_loss().backward()
    gradient, policy.log_probs.grad = policy.log_probs.grad, None
    write_loss_weights(rollouts, policy=trained_tokens)
    streams = StreamsLoss(policy, streams={"policy": GRPOLoss(entropy_coeff=0.01, kl_to_ref_coeff=0.1)})
    output = streams(rollouts)
    output.total_loss().backward()
    torch.testing.assert_close(policy.log_probs.grad, gradient)
    num_tokens = sum(float(row["masks", "all_assistant_mask"].sum()) for row in rollouts.unbind(0))
    assert output.measurements() == pytest.approx(alone.measurements() | {"policy_num_tokens": num_tokens})


def test_ranks_add_up():
    batch, policy = mixed_batch(), TransformersWrapper(tiny_model(), generate=False, token_budget=16)
    loss = make_streams(policy)
    inputs, micro = loss.prepare(batch), []
    for rank in range(3):
        found = list(loss.micro_losses(inputs, batch, rank=rank, num_ranks=3))
        assert not any(one.total().detach() for one in found if one.is_repeated)
        assert all(one.to("meta").sequence_index.is_meta for one in found)
        micro += [one.detached().to("cpu") for one in found if not one.is_repeated]
    expected = loss(batch).measurements()
    assert loss.collect(micro).measurements() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_version_being_trained_is_that_of_each_stream():
    batch = write_loss_weights(ragged_batch(0), policy=trained_tokens, observations=observed_tokens)
    streams = {"observations": SFTLoss(), "policy": GRPOLoss(max_staleness=2)}
    loss = StreamsLoss(near_policy(batch), streams=streams)
    assert loss.policy_version is None
    loss.policy_version = 7
    versions = flat(batch, "policy_versions", "full")[flat(batch, "masks", "all_assistant_mask")].float()
    assert loss.policy_version == 7
    assert loss(batch).measurements()["policy_staleness"] == pytest.approx((7 - versions).mean().item())


def test_rows_without_signal_leave_their_stream_alone():
    batch = mixed_batch()
    for row in batch.unbind(0):
        if row.get("advantage", None) is not None:
            row["advantage"] = torch.zeros(1, 1)
    policy = TransformersWrapper(tiny_model(), generate=False)
    loss, optimizer = make_streams(policy), torch.optim.SGD(policy.model.parameters(), lr=0.1)
    before = loss(batch).measurements()
    report = train_step(loss, batch, optimizer)
    assert report.measurements["policy_num_tokens"] == 0 and not report.is_skipped
    for name in ("observations_loss_sft", "demonstrations_loss_sft", "kl_loss_distill"):
        assert report.measurements[name] == pytest.approx(before[name], rel=1e-5)
    only = StreamsLoss(policy, streams={"policy": GRPOLoss()})
    assert train_step(only, batch, optimizer).skip_reason == "no_signal"
    unnamed = StreamsLoss(policy, streams={"unweighted": SFTLoss()})
    assert train_step(unnamed, batch, optimizer).skip_reason == "no_trained_tokens"


def test_what_a_row_lacks_for_its_stream_is_an_error():
    batch = write_loss_weights(ragged_batch(0), policy=trained_tokens)
    batch[1].pop("advantage")
    with pytest.raises(KeyError, match="advantage"):
        StreamsLoss(near_policy(batch), streams={"policy": GRPOLoss()}).prepare(batch)
    for weigh in (lambda row: torch.ones(2), lambda row: trained_tokens(row) * torch.inf):
        with pytest.raises(ValueError, match="weights of 'policy' must be"):
            write_loss_weights(ragged_batch(0), policy=weigh)


def one_loss_twice():
    loss = SFTLoss()
    return {"a": loss, "b": loss}


@pytest.mark.parametrize(
    ("streams", "coeffs", "message"),
    [
        ({}, None, "at least one loss"),
        (one_loss_twice(), None, "each an object of its own"),
        ({"a": SFTLoss()}, {"b": 1.0}, r"coeffs names \['b'\], which are no streams; streams are \['a'\]"),
        ({"a": SFTLoss(near_policy(ragged_batch()))}, None, "'a' has a policy of its own"),
        ({"a": SFTLoss(masking_strategy="generic")}, None, "'a' must have masking_strategy='rlhf'"),
        ({"a": SFTLoss(reduction="none")}, None, "'a' must be one number"),
        ({"a": DistillationLoss(teacher=object())}, None, "'a' compares whole distributions"),
    ],
)
def test_streams_that_make_no_sense_are_refused(streams, coeffs, message):
    with pytest.raises(ValueError, match=message):
        StreamsLoss(streams=streams, coeffs=coeffs)

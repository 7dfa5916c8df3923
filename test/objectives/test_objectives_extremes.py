"""Losses where log-ratios are extreme, columns are broken and dtypes are narrow: never NaN, never in silence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import Table, flat, near_policy, ragged_batch, tiny_model
from tensordict import TensorDictBase

from llmrl.objectives import (
    DAPO,
    CISPOLoss,
    DistillationLoss,
    DrGRPOLoss,
    GRPOLoss,
    ImportanceBound,
    LLMLoss,
    RLOOLoss,
    SFTLoss,
    kl_estimate,
)
from llmrl.trainer import TransformersWrapper, train_step


def bounded(value: float) -> float:
    return max(-20.0, min(20.0, value))


def extreme_policy(batch: TensorDictBase, gap: float) -> tuple[Table, int]:
    """A policy near the sampler but for the first trained token, which lies `gap` nats off; and its place."""
    policy = near_policy(batch)
    place = int(flat(batch, "masks", "all_assistant_mask").nonzero()[0])
    with torch.no_grad():
        policy.log_probs[place] = flat(batch, "log_probs", "full")[place] + gap
    return policy, place


def is_teacher(policy: Table, **arguments: Any) -> DistillationLoss:
    loss = DistillationLoss(policy, **arguments)
    loss.set_keys(teacher_log_prob=("next", "ref_log_probs", "full"))
    return loss


@pytest.mark.parametrize("gap", [-300.0, -100.0, -21.0, -19.0, 19.0, 21.0, 100.0, 300.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_ratio_beyond_float32_is_clamped_before_its_exponential_and_counted(gap: float, sign: float) -> None:
    batch = ragged_batch()
    for row in batch.unbind(0):
        row["advantage"] = torch.full((1, 1), sign)
    policy, place = extreme_policy(batch, gap)
    output = GRPOLoss(policy)(batch)
    mask, sampled = flat(batch, "masks", "all_assistant_mask"), flat(batch, "log_probs", "full")
    expected = 0.0
    for current, old in zip(policy.log_probs[mask].tolist(), sampled[mask].tolist(), strict=True):
        ratio = math.exp(bounded(current - old))
        expected -= min(ratio * sign, max(0.8, min(1.2, ratio)) * sign) / int(mask.sum())
    assert float(output.loss_objective) == pytest.approx(expected, rel=1e-5)
    assert float(output.num_clamped_tokens) == (abs(gap) > 20)
    (gradient,) = torch.autograd.grad(output.total_loss(), policy.log_probs)
    assert gradient.isfinite().all() and (gradient[mask] != 0).any()
    is_flat = abs(gap) > 20 or (gap > 0) == (sign > 0)
    assert (float(gradient[place]) == 0.0) == is_flat


@pytest.mark.parametrize("gap", [-300.0, -25.0, -1.0, 1.0, 19.0, 25.0, 300.0])
def test_k3_is_clamped_above_and_draws_the_policy_back_below(gap: float) -> None:
    """The reference finds the token `gap` nats more likely than the policy does."""
    log_prob = torch.tensor([-1.0], requires_grad=True)
    divergence = kl_estimate(log_prob, torch.tensor([-1.0 + gap]), "k3")
    within = min(gap, 20.0)
    assert float(divergence) == pytest.approx(math.exp(within) - 1 - within, rel=1e-5)
    (gradient,) = torch.autograd.grad(divergence, log_prob)
    assert float(gradient) == pytest.approx(1 - math.exp(gap) if gap <= 20 else 0.0, rel=1e-5)


CLAMPING: dict[str, Callable[[Table], LLMLoss]] = {
    "grpo": GRPOLoss,
    "dual_clip": lambda p: GRPOLoss(p, dual_clip=3.0),
    "dapo": DAPO,
    "dr_grpo": lambda p: DrGRPOLoss(p, fixed_length=9),
    "cispo": CISPOLoss,
    "cispo_unbounded": lambda p: CISPOLoss(p, clip_epsilon=(1.0, math.inf)),
    "unclipped": lambda p: GRPOLoss(p, clip_epsilon=(1.0, math.inf)),
    "importance": lambda p: GRPOLoss(p, importance_cap=math.inf),
    "importance_sequence": lambda p: GRPOLoss(p, importance_cap=ImportanceBound(2.0, level="sequence")),
    "importance_mask": lambda p: GRPOLoss(p, importance_cap=ImportanceBound(2.0, floor=0.5, mode="mask")),
    "rloo": lambda p: RLOOLoss(p, importance_cap=2.0),
    "kl_to_inference": lambda p: RLOOLoss(p, kl_to_inference_coeff=0.1),
    "kl_to_ref": lambda p: GRPOLoss(p, kl_to_ref_coeff=0.1),
    "sft_with_kl": lambda p: SFTLoss(p, kl_to_ref_coeff=0.1),
    "distillation": is_teacher,
    "forward_distillation": lambda p: is_teacher(p, kl_direction="forward"),
}


@pytest.mark.parametrize("gap", [-500.0, 500.0])
@pytest.mark.parametrize("name", CLAMPING)
def test_one_extreme_token_leaves_every_loss_and_gradient_finite_and_is_counted(name: str, gap: float) -> None:
    batch = ragged_batch(2)
    policy, _ = extreme_policy(batch, gap)
    output = CLAMPING[name](policy)(batch)
    assert all(math.isfinite(value) for value in output.measurements().values()), output.measurements()
    assert float(output.num_clamped_tokens) == 1 or "sequence" in name
    (gradient,) = torch.autograd.grad(output.total_loss(), policy.log_probs)
    assert gradient.isfinite().all() and gradient.any()


def test_a_step_is_taken_though_the_sampler_found_a_token_impossible() -> None:
    policy = TransformersWrapper(tiny_model(), generate=False)
    batch = ragged_batch()
    batch[0]["log_probs", "full"][1] = -150.0
    batch[0]["advantage"] = -torch.ones(1, 1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for loss in (GRPOLoss(policy), GRPOLoss(policy, importance_cap=2.0), GRPOLoss(policy, kl_to_inference_coeff=0.1)):
        report = train_step(loss, batch, optimizer)
        assert not report.is_skipped and report.measurements["num_clamped_tokens"] == 1
        assert all(math.isfinite(value) for value in report.to_metrics().values())


BROKEN: dict[str, tuple[Callable[[Any], LLMLoss], tuple[str, ...]]] = {
    "sample_log_probs": (GRPOLoss, ("log_probs", "full")),
    "advantage": (GRPOLoss, ("advantage",)),
    "old_log_probs": (lambda p: GRPOLoss(p, importance_cap=2.0), ("old_log_probs", "full")),
    "ref_log_probs": (lambda p: SFTLoss(p, kl_to_ref_coeff=0.1), ("next", "ref_log_probs", "full")),
    "teacher_log_probs": (is_teacher, ("next", "ref_log_probs", "full")),
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", BROKEN)
def test_a_column_that_is_not_finite_skips_the_step_and_is_named(column: str, value: float) -> None:
    make, key = BROKEN[column]
    policy = TransformersWrapper(tiny_model(), generate=False)
    batch = ragged_batch()
    for row in batch.unbind(0):
        row["old_log_probs"] = row["log_probs"].clone()
    batch[3][key].view(-1)[-1 if key == ("advantage",) else 1] = value
    before = [p.detach().clone() for p in policy.parameters()]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match=rf"step is skipped\. The batch's {column} .* in rows 3\."):
        report = train_step(make(policy), batch, optimizer)
    assert report.is_skipped and report.skip_reason == f"non_finite_{column}"
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True)) and not optimizer.state
    batch[3][key].view(-1)[-1 if key == ("advantage",) else 1] = -0.5
    assert not train_step(make(policy), batch, optimizer).is_skipped


def test_what_is_not_finite_outside_the_trained_tokens_does_no_harm() -> None:
    batch = ragged_batch()
    expected = GRPOLoss(near_policy(batch), importance_cap=2.0)(batch).measurements()
    policy = near_policy(batch)
    for row in batch.unbind(0):
        row["log_probs", "full"][~row["masks", "all_assistant_mask"]] = math.nan
    assert GRPOLoss(policy, importance_cap=2.0)(batch).measurements() == pytest.approx(expected)


def test_tokens_left_out_of_the_objective_may_be_impossible_for_the_policy() -> None:
    batch = ragged_batch()
    policy, place = extreme_policy(batch, 0.0)
    with torch.no_grad():
        policy.log_probs[place] = -math.inf
    for loss in (GRPOLoss(policy, kl_mask_threshold=1.0), CISPOLoss(policy, kl_mask_threshold=1.0)):
        objective = loss(batch).loss_objective
        (gradient,) = torch.autograd.grad(objective, policy.log_probs)
        assert objective.isfinite() and gradient.isfinite().all() and gradient[place] == 0


def cast(batch: TensorDictBase, dtype: torch.dtype) -> TensorDictBase:
    for row in batch.unbind(0):
        for key in (("log_probs", "full"), ("next", "ref_log_probs", "full"), ("advantage",)):
            row[key] = row[key].to(dtype)
    return batch


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(CLAMPING)),
    st.sampled_from(["token_mean", "sequence_mean", "group_mean"]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.lists(st.floats(-3e4, 3e4, width=16), min_size=1, max_size=5),
    st.integers(0, 50),
)
def test_no_loss_of_finite_columns_is_ever_nan(
    name: str, aggregation: Any, policy_dtype: torch.dtype, column_dtype: torch.dtype, gaps: list[float], seed: int
) -> None:
    batch = cast(ragged_batch(seed), column_dtype)
    policy = near_policy(batch)
    places = flat(batch, "masks", "all_assistant_mask").nonzero()[:, 0][: len(gaps)]
    with torch.no_grad():
        policy.log_probs[places] = torch.tensor(gaps)[: len(places)].to(policy.log_probs.dtype)
    policy = Table(policy.log_probs.detach().to(policy_dtype))
    loss = CLAMPING[name](policy)
    if isinstance(loss, GRPOLoss):
        loss.aggregation, loss.fixed_length = aggregation, None
    output = loss(batch)
    measured = output.measurements()
    measured.pop("entropy")  # of the table: squares, which overflow in float16
    assert all(math.isfinite(value) for value in measured.values()), measured
    (gradient,) = torch.autograd.grad(output.total_loss(), policy.log_probs)
    assert not gradient.isnan().any()

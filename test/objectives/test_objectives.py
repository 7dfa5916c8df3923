"""Losses against independent float64 implementations from the papers, and against TorchRL's."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from loss_batches import VOCAB_SIZE, Table, near_policy, ragged_batch, tiny_model
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from llmrl.objectives import (
    DAPO,
    CISPOLoss,
    DistillationLoss,
    GRPOLoss,
    SFTLoss,
    aggregation_weights,
    clipped_surrogate,
    effective_sample_size,
    kl_estimate,
    sequence_log_ratio,
)
from llmrl.trainer import train_step, write_log_probs
from llmrl.trainer.transformers_wrapper import TransformersWrapper


def _paper_loss(
    batch: TensorDictBase,
    log_probs: torch.Tensor,
    *,
    epsilon: tuple[float, float],
    aggregation: str,
    is_cispo: bool = False,
    ref_coeff: float = 0.0,
    fixed_length: int = 7,
) -> torch.Tensor:
    """Token by token in float64, from the equations, with Python's own sums."""
    start, tokens = 0, {}
    for row in batch.unbind(0):
        sampled, mask = row["log_probs", "full"].double(), row["masks", "all_assistant_mask"]
        reference = row["next", "ref_log_probs", "full"].double()
        advantage = row["advantage"].double().item()
        for place in range(1, len(mask)):
            if not mask[place]:
                continue
            current = log_probs[start + place]
            ratio = torch.exp(current - sampled[place])
            low, high = 1 - epsilon[0], 1 + epsilon[1]
            if is_cispo:
                objective = min(max(ratio.item(), low), high) * advantage * current
            else:
                clipped = torch.clamp(ratio, low, high)
                objective = torch.min(ratio * advantage, clipped * advantage)
            gap = reference[place] - current
            objective = objective - ref_coeff * (torch.exp(gap) - gap - 1)
            tokens.setdefault(row["rollout", "rollout_id"], []).append(objective)
        start += len(mask)
    sequences = list(tokens.values())
    if aggregation == "token_mean":
        return -sum(sum(s) for s in sequences) / sum(len(s) for s in sequences)
    if aggregation == "fixed_length":
        return -sum(sum(s) / fixed_length for s in sequences) / len(sequences)
    return -sum(sum(s) / len(s) for s in sequences) / len(sequences)


@pytest.mark.parametrize(
    ("aggregation", "epsilon", "is_cispo"),
    list(
        product(
            ["token_mean", "sequence_mean", "prompt_mean", "fixed_length"], [(0.2, 0.2), (0.1, 0.28)], [False, True]
        )
    ),
)
def test_values_and_gradients_are_those_of_the_papers(
    aggregation: Any, epsilon: tuple[float, float], is_cispo: bool
) -> None:
    for seed in range(3):
        batch = ragged_batch(seed)
        policy = near_policy(batch)
        loss_type = CISPOLoss if is_cispo else GRPOLoss
        fixed_length = 7 if aggregation == "fixed_length" else None
        options = {"aggregation": aggregation, "fixed_length": fixed_length, "kl_to_ref_coeff": 0.3}
        loss = loss_type(policy, clip_epsilon=epsilon, **options)
        output = loss(batch)
        exact = policy.log_probs.detach().double().requires_grad_()
        expected = _paper_loss(batch, exact, epsilon=epsilon, aggregation=aggregation, is_cispo=is_cispo, ref_coeff=0.3)
        assert float(output.total_loss()) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
        (gradient,) = torch.autograd.grad(output.total_loss(), policy.log_probs)
        (wanted,) = torch.autograd.grad(expected, exact)
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-6)


def test_measurements_are_means_over_trained_tokens_only() -> None:
    batch = ragged_batch()
    policy = near_policy(batch)
    output = GRPOLoss(policy, entropy_bonus=True, entropy_coeff=0.5, kl_to_inference_coeff=0.1)(batch)
    mask = torch.cat([row["masks", "all_assistant_mask"] for row in batch.unbind(0)])
    sampled = torch.cat([row["log_probs", "full"] for row in batch.unbind(0)])[mask].double()
    gap = policy.log_probs.detach()[mask].double() - sampled
    weight = gap.exp()
    expected = {
        "kl_approx": -gap.mean(),
        "log_prob_difference_mean": gap.abs().mean(),
        "log_prob_difference_max": gap.abs().max(),
        "clip_fraction": ((weight < 0.8) | (weight > 1.2)).double().mean(),
        "ESS": weight.sum() ** 2 / (weight**2).sum() / len(weight),
        "kl_to_inference": ((-gap).exp() - 1 + gap).mean(),
        "entropy": policy.entropies[mask].mean(),
        "loss_entropy": -0.5 * policy.entropies[mask].mean(),
    }
    for name, value in expected.items():
        assert float(output.get(name)) == pytest.approx(float(value), rel=1e-4), name
    assert set(GRPOLoss(policy).out_keys) == {
        name for name, value in GRPOLoss(policy)(batch).to_dict().items() if value is not None
    }


def test_longer_prompts_change_neither_loss_nor_measurements() -> None:
    batch = ragged_batch()
    longer = []
    for row in batch.unbind(0):
        row = row.clone()
        for key, value in (
            (("tokens", "full"), 3),
            (("masks", "all_assistant_mask"), False),
            (("masks", "all_attention_mask"), True),
            (("log_probs", "full"), 0.0),
            (("next", "ref_log_probs", "full"), -9.0),
        ):
            column = row.get(key)
            row.set(key, torch.cat([torch.full((20,), value, dtype=column.dtype), column]))
        longer.append(row)
    policy = near_policy(batch)
    table = [
        torch.cat([torch.full((20,), -5.0), part])
        for part in policy.log_probs.detach().split([len(row["tokens", "full"]) for row in batch.unbind(0)])
    ]
    arguments: dict[str, Any] = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.2}
    short = GRPOLoss(policy, **arguments)(batch).measurements()
    long = GRPOLoss(Table(torch.cat(table)), **arguments)(lazy_stack(longer, 0)).measurements()
    assert short == pytest.approx(long, rel=1e-5)


def test_aggregation_none_gives_one_loss_a_trained_token_in_the_order_of_the_rows() -> None:
    batch = ragged_batch()
    policy = near_policy(batch)
    losses = GRPOLoss(policy, aggregation="none")(batch).loss_objective
    mean = GRPOLoss(policy)(batch).loss_objective
    assert losses.shape == (int(sum(row["masks", "all_assistant_mask"].sum() for row in batch.unbind(0))),)
    torch.testing.assert_close(losses.mean(), mean)


def test_sequence_ratio_is_that_of_gspo_in_value_and_gradient() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.2, -1.7, -0.6], dtype=torch.float64)
    advantage = torch.tensor([0.7, 0.7, -0.4], dtype=torch.float64)
    index = torch.tensor([0, 0, 1])
    ratio = sequence_log_ratio(log_probs, old, index)
    weights = aggregation_weights(index, 2, "sequence_mean").double()
    (gradient,) = torch.autograd.grad((clipped_surrogate(ratio, advantage, 1.0, 9.0) * weights).sum(), log_probs)
    first = ((log_probs[:2] - old[:2]).mean()).exp() * 0.7
    second = (log_probs[2] - old[2]).exp() * -0.4
    (wanted,) = torch.autograd.grad(-(first + second) / 2, log_probs)
    torch.testing.assert_close(gradient, wanted)


def test_without_old_log_probs_an_importance_cap_makes_the_ratio_one_and_truncates_the_mismatch() -> None:
    batch = ragged_batch()
    policy = near_policy(batch)
    output = GRPOLoss(policy, importance_cap=1.1)(batch)
    assert float(output.ratio) == 1.0 and float(output.clip_fraction) == 0.0
    mask = torch.cat([row["masks", "all_assistant_mask"] for row in batch.unbind(0)])
    sampled = torch.cat([row["log_probs", "full"] for row in batch.unbind(0)])
    advantage = torch.cat([row["advantage"].reshape(1).expand(len(row["tokens", "full"])) for row in batch.unbind(0)])
    unbounded = (policy.log_probs.detach() - sampled).double().exp()
    kept = unbounded[mask]
    assert float(output.ESS) == pytest.approx(float(kept.sum() ** 2 / kept.square().sum() / len(kept)))
    assert float(output.importance_clip_fraction) == pytest.approx(float((kept > 1.1).double().mean()))
    weight = unbounded.clamp(max=1.1)
    assert float(output.importance_weight) == pytest.approx(float(weight[mask].mean()))
    assert float(output.loss_objective) == pytest.approx(float(-(weight * advantage)[mask].mean()), rel=1e-5)


def test_old_log_probs_are_what_the_ratio_is_to_when_the_batch_has_them() -> None:
    batch = ragged_batch()
    policy = near_policy(batch)
    for row, old in zip(
        batch.unbind(0),
        policy.log_probs.detach().split([len(row["tokens", "full"]) for row in batch.unbind(0)]),
        strict=True,
    ):
        row.set(("old_log_probs", "full"), old)
    output = GRPOLoss(policy)(batch)
    assert float(output.ESS) == pytest.approx(1.0)
    assert float(output.log_prob_difference_mean) > 0.01


def test_several_updates_of_a_batch_take_their_ratio_to_log_probs_that_are_stored_once() -> None:
    policy, batch = _tiny_policy(), ragged_batch(num_rows=6)
    write_log_probs(policy, batch, ("old_log_probs", "full"))
    loss = GRPOLoss(policy, importance_cap=2.0)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.3)
    first, second = (train_step(loss, batch, optimizer) for _ in range(2))
    assert first.measurements["ratio"] == pytest.approx(1.0, abs=1e-5) and first.measurements["clip_fraction"] == 0
    # In float64, from the log-probs that the second update was made at.
    terms, ratios, gaps = [], [], []
    for row, current in zip(batch.unbind(0), second.log_probs, strict=True):
        for place in row["masks", "all_assistant_mask"].nonzero()[:, 0].tolist():
            old, sampled = row["old_log_probs", "full"][place].item(), row["log_probs", "full"][place].item()
            ratio, advantage = math.exp(current[place].item() - old), row["advantage"].item()
            objective = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            terms.append(-min(math.exp(old - sampled), 2.0) * objective)
            ratios.append(ratio)
            gaps.append(abs(old - sampled))
    assert second.loss == pytest.approx(sum(terms) / len(terms), rel=1e-4)
    assert second.measurements["ratio"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)
    num_clipped = sum(not 0.8 <= ratio <= 1.2 for ratio in ratios)
    assert num_clipped > 0 and second.measurements["clip_fraction"] == pytest.approx(num_clipped / len(ratios))
    # The mismatch is the engine's, whatever the update did.
    for report in (first, second):
        assert report.measurements["log_prob_difference_mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)


@pytest.mark.parametrize("name", ["grpo", "sft", "distillation"])
def test_entropy_is_measured_whether_or_not_it_is_a_term_of_the_loss(name: str) -> None:
    batch, policy = ragged_batch(num_rows=8), _tiny_policy()
    for row in batch.unbind(0):
        row["next", "teacher_log_probs"] = row["next", "ref_log_probs"].clone()
    loss = {"grpo": GRPOLoss, "sft": SFTLoss, "distillation": DistillationLoss}[name](policy)
    entropies = []
    for row in batch.unbind(0):
        log_p = policy.model(row["tokens", "full"][None]).logits[0].detach().double().log_softmax(-1)
        places = row["masks", "all_assistant_mask"].nonzero()[:, 0]
        entropies += (-(log_p.exp() * log_p).sum(-1))[places - 1].tolist()
    report = train_step(loss, batch, torch.optim.SGD(policy.parameters(), lr=0.0), token_budget=24)
    assert report.num_micro_batches > 1
    assert report.measurements["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    assert "entropy" in loss.out_keys and "loss_entropy" not in report.measurements
    # Where the policy has none to give, none is asked for.
    policy.head_kernel = "liger"
    assert not loss.measures_entropy and "entropy" not in loss.out_keys
    assert GRPOLoss(policy, entropy_bonus=True).measures_entropy
    assert GRPOLoss(policy, entropy_coeff=1e-4).entropy_bonus and not GRPOLoss(policy).entropy_bonus


def test_kl_estimators_agree_for_near_distributions_and_k3_is_never_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, other = (0.1 * torch.randn(7, generator=generator) for _ in range(2))
    p, q = policy.double().softmax(0), other.double().softmax(0)
    exact = float((p * (p / q).log()).sum())
    for name in ("k1", "k3"):
        assert float((p * kl_estimate(p.log(), q.log(), name)).sum()) == pytest.approx(exact, rel=1e-6)
    assert float((p * kl_estimate(p.log(), q.log(), "k2")).sum()) == pytest.approx(exact, rel=0.1)
    assert (kl_estimate(p.log(), q.log(), "k3") >= 0).all()
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(p, q, "k4")  # type: ignore[arg-type]


def test_effective_sample_size_of_equal_and_of_dominating_weights() -> None:
    assert float(effective_sample_size(torch.full((5,), 3.0))) == pytest.approx(1.0)
    assert float(effective_sample_size(torch.tensor([50.0, 0.0, 0.0, 0.0]))) == pytest.approx(0.25)
    assert math.isnan(float(effective_sample_size(torch.zeros(0))))


@pytest.mark.parametrize("loss_type", [GRPOLoss, DAPO, CISPOLoss])
def test_a_misspelt_keyword_names_the_nearest(loss_type: type[GRPOLoss]) -> None:
    with pytest.raises(TypeError, match=r"no argument 'clip_epsilom'; did you mean 'clip_epsilon'"):
        loss_type(None, clip_epsilom=0.1)
    with pytest.raises(TypeError, match="use aggregation"):
        loss_type(None, reduction="mean")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"aggregation": "token_sum"}, "aggregation"),
        ({"aggregation": "fixed_length"}, "fixed_length"),
        ({"clip_epsilon": -0.1}, "clip_epsilon"),
        ({"masking_strategy": "all"}, "masking_strategy"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
    ],
)
def test_values_out_of_range_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GRPOLoss(None, **arguments)


def test_keys_can_be_renamed_and_missing_ones_are_named() -> None:
    batch = ragged_batch()
    loss = GRPOLoss(near_policy(batch))
    expected = float(loss(batch).loss_objective)
    for row in batch.unbind(0):
        row.set("my_advantage", row.pop("advantage"))
    with pytest.raises(KeyError, match="advantage"):
        loss(batch)
    loss.set_keys(advantage="my_advantage")
    assert float(loss(batch).loss_objective) == expected
    assert "my_advantage" in loss.in_keys


def test_misaligned_or_broken_columns_are_named() -> None:
    batch = ragged_batch()
    loss = GRPOLoss(near_policy(batch))
    broken = batch.clone()
    broken[0].set(("log_probs", "full"), torch.zeros(2))
    with pytest.raises(ValueError, match="one entry per token"):
        loss(broken)
    broken = batch.clone()
    broken[0]["log_probs", "full"][1] = math.nan
    with pytest.raises(ValueError, match="sample_log_probs are not finite"):
        loss(broken)


def _tiny_policy(**arguments: Any) -> TransformersWrapper:
    return TransformersWrapper(tiny_model(), generate=False, **arguments)


def _gradients(policy: TransformersWrapper, loss: GRPOLoss, batch: TensorDictBase) -> list[torch.Tensor]:
    policy.zero_grad()
    loss(batch).total_loss().backward()
    return [p.grad.clone() for p in policy.parameters() if p.grad is not None]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_forking_a_conversation_into_rows_changes_no_gradient(aggregation: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, VOCAB_SIZE, (12,), generator=generator)
    mask = torch.tensor([0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    sampled = -torch.rand(12, generator=generator) * mask

    def row(rollout_id: str, end: int, trained: torch.Tensor, advantage: float) -> TensorDict:
        return TensorDict(
            {
                "tokens": {"full": ids[:end]},
                "masks": {"all_assistant_mask": trained[:end]},
                "log_probs": {"full": sampled[:end] * trained[:end]},
                "advantage": torch.tensor([[advantage]]),
                "rollout": {"rollout_id": NonTensorData(rollout_id)},
            }
        )

    other = row("b", 7, mask, -0.5)
    whole = lazy_stack([row("a", 12, mask, 1.0), other], 0)
    first, second = mask.clone(), mask.clone()
    first[5:], second[:5] = False, False
    forked = lazy_stack([row("a", 5, first, 1.0), other.clone(), row("a", 12, second, 1.0)], 0)
    policy = _tiny_policy()
    # Far outside the bounds clipped tokens would have no gradient to compare.
    loss = GRPOLoss(policy, aggregation=aggregation, clip_epsilon=(1.0, 1e4))
    for a, b in zip(_gradients(policy, loss, whole), _gradients(policy, loss, forked), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert max(float(g.abs().max()) for g in _gradients(policy, loss, whole)) > 1e-3


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_micro_batches_make_the_same_step_as_one_batch(aggregation: Any) -> None:
    batch = ragged_batch(num_rows=12)
    states, reports = [], []
    options = {"aggregation": aggregation, "fixed_length": 8 if aggregation == "fixed_length" else None}
    for token_budget in (10_000, 24):
        policy = _tiny_policy()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        loss = GRPOLoss(policy, **options, entropy_bonus=True, clip_epsilon=(1.0, 1e4))
        reports.append(train_step(loss, batch, optimizer, token_budget=token_budget, max_grad_norm=0.01))
        states.append([p.detach().clone() for p in policy.parameters()])
    assert reports[0].num_micro_batches == 1 < reports[1].num_micro_batches
    assert reports[0].grad_norm > 0.01
    for a, b in zip(*states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    assert reports[0].measurements == pytest.approx(reports[1].measurements, rel=1e-4)
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-5)


def test_a_step_raises_the_log_probs_of_what_was_good() -> None:
    policy = _tiny_policy(autocast_dtype=torch.bfloat16)
    batch = ragged_batch(num_rows=4)
    scored = policy(batch.clone())
    for row, now in zip(batch.unbind(0), scored.unbind(0), strict=True):
        row["log_probs", "full"] = now["log_probs", "full"].detach()
        row["advantage"] = torch.ones(1, 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    loss = GRPOLoss(policy)
    first = train_step(loss, batch, optimizer)
    second = train_step(loss, batch, optimizer)
    assert first.measurements["ESS"] == pytest.approx(1.0, abs=1e-4)
    assert first.measurements["log_prob_difference_max"] < 0.05
    assert second.measurements["kl_approx"] < -0.1
    assert first.num_trained_tokens == int(sum(row["masks", "all_assistant_mask"].sum() for row in batch.unbind(0)))
    assert all(math.isfinite(value) for value in first.to_metrics().values())


def test_a_step_reports_the_log_probs_that_it_was_taken_at() -> None:
    policy, batch = _tiny_policy(), ragged_batch(num_rows=8)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with torch.no_grad():
        expected = policy(batch.clone())
    report = train_step(GRPOLoss(policy), batch, optimizer, token_budget=24)
    assert report.num_micro_batches > 1 and len(report.log_probs) == batch.shape[0]
    for row, log_probs in zip(expected.unbind(0), report.log_probs, strict=True):
        mask = row["masks", "all_assistant_mask"]
        torch.testing.assert_close(log_probs[mask], row["log_probs", "full"][mask], atol=1e-5, rtol=1e-5)
        assert log_probs[~mask].isnan().all()
    assert "log_probs" not in report.to_metrics()


def test_a_kl_of_coefficient_zero_needs_no_reference():
    loss = GRPOLoss(kl_to_ref_coeff=0.0)
    assert ("next", "ref_log_probs", "full") not in loss.in_keys
    assert ("next", "ref_log_probs", "full") in GRPOLoss(kl_to_ref_coeff=0.1).in_keys


def test_a_step_that_is_not_finite_is_skipped_and_says_so() -> None:
    policy = _tiny_policy()
    batch = ragged_batch()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in policy.parameters()]
    hook = policy.model.model.norm.register_forward_hook(lambda module, inputs, output: output * math.inf)
    report = train_step(GRPOLoss(policy), batch, optimizer)
    hook.remove()
    assert report.is_skipped and report.skip_reason == "non_finite_loss"
    hook = policy.model.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
    report = train_step(GRPOLoss(policy), batch, optimizer)
    hook.remove()
    assert report.is_skipped and report.skip_reason == "non_finite_gradient"
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert not optimizer.state
    assert not train_step(GRPOLoss(policy), batch, optimizer).is_skipped


@pytest.mark.parametrize("norm", [0.0, -0.1, math.nan])
def test_a_gradient_norm_that_would_train_nothing_or_ascend_is_refused(norm: float) -> None:
    batch = ragged_batch()
    policy = near_policy(batch)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    before = policy.log_probs.detach().clone()
    with pytest.raises(ValueError, match="max_grad_norm must be a positive number"):
        train_step(GRPOLoss(policy), batch, optimizer, max_grad_norm=norm)
    assert torch.equal(policy.log_probs, before)


@pytest.mark.parametrize(
    "wrong", [{"kl_to_ref_coeff": -0.1}, {"kl_to_inference_coeff": math.nan}, {"kl_mask_threshold": -1.0},
              {"entropy_coeff": math.inf}],
)  # fmt: skip
def test_coefficients_that_would_ascend_or_leave_everything_out_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a finite number of at least 0"):
        GRPOLoss(None, **wrong)


def test_old_log_probs_in_some_rows_are_refused_by_the_rows_without() -> None:
    batch = ragged_batch()
    for index in (0, 2, 3, 5):
        row = batch[index]
        row["old_log_probs", "full"] = row["log_probs", "full"].clone()
    policy = near_policy(batch)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"some rows of the batch have .*old_log_probs.*, and rows 1, 4 do not"):
        train_step(GRPOLoss(policy), batch, optimizer)


def test_a_batch_without_trained_tokens_is_skipped_and_says_so() -> None:
    policy = _tiny_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    empty = train_step(GRPOLoss(policy), TensorDict({}, batch_size=[0]), optimizer)
    assert (empty.is_skipped, empty.skip_reason) == (True, "no_trained_tokens")
    batch = ragged_batch()
    for row in batch.unbind(0):
        row["masks", "all_assistant_mask"] = torch.zeros_like(row["masks", "all_assistant_mask"])
    assert train_step(GRPOLoss(policy), batch, optimizer).skip_reason == "no_trained_tokens"

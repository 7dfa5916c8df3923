"""Every loss against the equation of its paper, token by token in float64, in value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loss_batches import Table, flat, near_policy, ragged_batch
from tensordict import TensorDictBase

from llmrl.data.ragged import has_entry
from llmrl.objectives import (
    CISPOLoss,
    DistillationLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    ImportanceBound,
    LLMLoss,
    RLOOLoss,
    SFTLoss,
    aggregation_weights,
    importance_weights,
)


class Token:
    """One trained token as the papers see it: plain numbers, and its current log-prob with its graph."""

    def __init__(self, row: TensorDictBase, row_number: int, place: int, current: torch.Tensor) -> None:
        def at(*key: str) -> float:
            return row[key][place].item()

        self.current = current
        self.sampled = at("log_probs", "full")
        self.reference = at("next", "ref_log_probs", "full")
        self.old = at("old_log_probs", "full") if has_entry(row, "old_log_probs") else self.sampled
        self.version = at("policy_versions", "full")
        self.advantage = row["advantage"].item()
        self.row, self.rollout, self.group = row_number, row["rollout", "rollout_id"], row["rollout", "group_id"]


def tokens_of(batch: TensorDictBase, log_probs: torch.Tensor) -> list[Token]:
    """The trained tokens in order."""
    tokens, start = [], 0
    for number, row in enumerate(batch.unbind(0)):
        mask = row["masks", "all_assistant_mask"]
        tokens += [Token(row, number, p, log_probs[start + p]) for p in range(1, len(mask)) if mask[p]]
        start += len(mask)
    return tokens


def by(tokens: list[Token], name: str) -> list[list[Token]]:
    """Tokens by row, rollout or group."""
    groups: dict[Any, list[Token]] = {}
    for token in tokens:
        groups.setdefault(getattr(token, name), []).append(token)
    return list(groups.values())


def clip(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.clamp(value, low, high)


def grpo_objective(token: Token, low: float = 0.8, high: float = 1.2, dual: float | None = None) -> torch.Tensor:
    ratio = torch.exp(token.current - token.old)
    objective = torch.min(ratio * token.advantage, clip(ratio, low, high) * token.advantage)
    if dual is not None and token.advantage < 0:
        objective = torch.max(objective, torch.tensor(dual * token.advantage))
    return objective


def mean_over_sequences(tokens: list[Token], objective: Callable[[Token], torch.Tensor]) -> torch.Tensor:
    sequences = by(tokens, "rollout")
    return sum(sum(objective(t) for t in s) / len(s) for s in sequences) / len(sequences)


def grpo(tokens: list[Token]) -> torch.Tensor:
    """arXiv:2402.03300, equation 3, with the KL of equation 4."""

    def objective(token: Token) -> torch.Tensor:
        gap = token.reference - token.current
        return grpo_objective(token) - 0.3 * (torch.exp(gap) - gap - 1)

    return -mean_over_sequences(tokens, objective)


def dr_grpo(tokens: list[Token]) -> torch.Tensor:
    """arXiv:2503.20783, listing 1."""
    return -sum(grpo_objective(t) for t in tokens) / (len(by(tokens, "rollout")) * 7)


def dual_clip(tokens: list[Token]) -> torch.Tensor:
    """arXiv:1912.09729, equation 5."""
    return -sum(grpo_objective(t, dual=1.5) for t in tokens) / len(tokens)


def prompt_average(tokens: list[Token]) -> torch.Tensor:
    """arXiv:2510.13786, section 3.2."""
    groups = by(tokens, "group")
    return -sum(sum(grpo_objective(t) for t in g) / len(g) for g in groups) / len(groups)


def gspo(tokens: list[Token]) -> torch.Tensor:
    """arXiv:2507.18071, equations 5 and 7: one ratio per row, its length-normalized likelihood ratio."""
    total = torch.zeros((), dtype=torch.float64)
    rollouts = by(tokens, "rollout")
    for rollout in rollouts:
        for row in by(rollout, "row"):
            ratio = torch.exp(sum(t.current - t.old for t in row) / len(row))
            advantage = row[0].advantage
            clipped = torch.clamp(ratio, 1 - 0.1, 1 + 0.15)
            total = total + torch.min(ratio * advantage, clipped * advantage) * len(row) / len(rollout)
    return -total / len(rollouts)


def rloo(tokens: list[Token]) -> torch.Tensor:
    """arXiv:2402.14740, equation 7: the sequence is the action."""
    rollouts = by(tokens, "rollout")
    return -sum(t.advantage * t.current for t in tokens) / len(rollouts)


def cispo(tokens: list[Token]) -> torch.Tensor:
    """arXiv:2506.13585, equations 4 and 5."""

    def objective(token: Token) -> torch.Tensor:
        weight = min(math.exp(token.current.item() - token.old), 1.1)
        return weight * token.advantage * token.current

    return -sum(objective(t) for t in tokens) / len(tokens)


def decoupled(tokens: list[Token]) -> torch.Tensor:
    """arXiv:2505.24298, equation 5, the behaviour weight truncated."""

    def weight(token: Token) -> float:
        return min(math.exp(token.old - token.sampled), 1.2)

    return -sum(weight(t) * grpo_objective(t) for t in tokens) / len(tokens)


def masked(tokens: list[Token]) -> torch.Tensor:
    """IcePop: the weight within the band, nothing outside."""

    def weight(token: Token) -> float:
        value = math.exp(token.old - token.sampled)
        return value if 0.8 <= value <= 1.2 else 0.0

    return -sum(weight(t) * grpo_objective(t) for t in tokens) / len(tokens)


def masked_sequences(tokens: list[Token]) -> torch.Tensor:
    """The same by the geometric mean of each row."""
    total = torch.zeros((), dtype=torch.float64)
    for row in by(tokens, "row"):
        value = math.exp(sum(t.old - t.sampled for t in row) / len(row))
        if 0.9 <= value <= 1.1:
            total = total + value * sum(grpo_objective(t) for t in row)
    return -total / len(tokens)


def fresh_only(tokens: list[Token]) -> torch.Tensor:
    """Tokens of the newest version and the one before."""
    newest = max(t.version for t in tokens)
    return -sum(grpo_objective(t) for t in tokens if newest - t.version <= 1) / len(tokens)


def fresh_only_with_kl(tokens: list[Token]) -> torch.Tensor:
    """What is left out of the objective is not left out of the KL."""
    return fresh_only(tokens) + 0.2 * sum((t.reference - t.current) ** 2 / 2 for t in tokens) / len(tokens)


def sft(tokens: list[Token]) -> torch.Tensor:
    return -mean_over_sequences(tokens, lambda t: t.current)


def sft_token_mean(tokens: list[Token]) -> torch.Tensor:
    return -sum(t.current for t in tokens) / len(tokens)


def distillation_token_mean(tokens: list[Token]) -> torch.Tensor:
    return sum((t.reference - t.current) ** 2 / 2 for t in tokens) / len(tokens)


def sft_sum_with_kl(tokens: list[Token]) -> torch.Tensor:
    penalty = sum(torch.exp(t.reference - t.current) - 1 - (t.reference - t.current) for t in tokens)
    return -sum(t.current for t in tokens) + 0.2 * penalty / len(tokens)


def minor_sft(tokens: list[Token]) -> torch.Tensor:
    """arXiv:2408.10642, equation 8, length-normalized; rows of one rollout share it by their lengths."""
    rollouts = by(tokens, "rollout")
    total = torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        for row in by(rollout, "row"):
            margin = sum(t.current - t.reference for t in row) / len(row)
            total = total - torch.log(1 / (1 + torch.exp(-0.5 * margin))) * len(row) / len(rollout)
    return total / len(rollouts)


def reverse_distillation(tokens: list[Token]) -> torch.Tensor:
    return mean_over_sequences(tokens, lambda t: (t.reference - t.current) ** 2 / 2)


def forward_distillation(tokens: list[Token]) -> torch.Tensor:
    """k3 with the roles exchanged."""

    def divergence(token: Token) -> torch.Tensor:
        gap = token.current - token.reference
        return torch.exp(gap) - 1 - gap

    return mean_over_sequences(tokens, divergence)


CASES: dict[str, tuple[Callable[[Table], LLMLoss], Callable[[list[Token]], torch.Tensor]]] = {
    "grpo": (lambda p: GRPOLoss(p, aggregation="sequence_mean", kl_to_ref_coeff=0.3), grpo),
    "dr_grpo": (lambda p: DrGRPOLoss(p, fixed_length=7), dr_grpo),
    "dual_clip": (lambda p: GRPOLoss(p, dual_clip=1.5), dual_clip),
    "group_mean": (lambda p: GRPOLoss(p, aggregation="group_mean"), prompt_average),
    "gspo": (lambda p: GSPOLoss(p, clip_epsilon=(0.1, 0.15)), gspo),
    "rloo": (RLOOLoss, rloo),
    "cispo": (lambda p: CISPOLoss(p, clip_epsilon=(1.0, 0.1)), cispo),
    "fresh_only": (lambda p: GRPOLoss(p, max_staleness=1), fresh_only),
    "fresh_only_with_kl": (
        lambda p: GRPOLoss(p, max_staleness=1, kl_to_ref_coeff=0.2, kl_estimator="k2"),
        fresh_only_with_kl,
    ),
    "sft": (SFTLoss, sft),
    "sft_token_mean": (lambda p: SFTLoss(p, reduction="token_mean"), sft_token_mean),
    "distillation_token_mean": (
        lambda p: teacher_is_reference(p, kl_estimator="k2", reduction="token_mean"),
        distillation_token_mean,
    ),
    "sft_sum_with_kl": (
        lambda p: SFTLoss(p, reduction="sum", normalize_by_seq_length=False, kl_to_ref_coeff=0.2),
        sft_sum_with_kl,
    ),
    "minor_sft": (lambda p: SFTLoss(p, loss_function="minor_sft", beta=0.5), minor_sft),
    "reverse_distillation": (lambda p: teacher_is_reference(p, kl_estimator="k2"), reverse_distillation),
    "forward_distillation": (lambda p: teacher_is_reference(p, kl_direction="forward"), forward_distillation),
}
CASES_WITH_OLD: dict[str, tuple[Callable[[Table], LLMLoss], Callable[[list[Token]], torch.Tensor]]] = {
    "decoupled": (lambda p: GRPOLoss(p, importance_cap=1.2), decoupled),
    "masked": (lambda p: GRPOLoss(p, importance_cap=ImportanceBound(1.2, floor=0.8, mode="mask")), masked),
    "masked_sequences": (
        lambda p: GRPOLoss(p, importance_cap=ImportanceBound(1.1, floor=0.9, mode="mask", level="geometric")),
        masked_sequences,
    ),
}


def teacher_is_reference(policy: Table, **arguments: Any) -> DistillationLoss:
    loss = DistillationLoss(policy, **arguments)
    loss.set_keys(teacher_log_prob=("next", "ref_log_probs", "full"))
    return loss


def with_old_log_probs(batch: TensorDictBase) -> TensorDictBase:
    generator = torch.Generator().manual_seed(5)
    for row in batch.unbind(0):
        sampled = row["log_probs", "full"]
        row["old_log_probs", "full"] = sampled + 0.2 * torch.randn(sampled.shape, generator=generator)
    return batch


@pytest.mark.parametrize("name", [*CASES, *CASES_WITH_OLD])
def test_values_and_gradients_are_those_of_the_equations(name: str) -> None:
    for seed in range(3):
        batch = ragged_batch(seed, num_rows=8)
        make, paper = (CASES | CASES_WITH_OLD)[name]
        if name in CASES_WITH_OLD:
            batch = with_old_log_probs(batch)
        policy = near_policy(batch)
        output = make(policy)(batch)
        exact = policy.log_probs.detach().double().requires_grad_()
        expected = paper(tokens_of(batch, exact))
        total = output.total_loss()
        assert total.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        (gradient,) = torch.autograd.grad(total, policy.log_probs)
        (wanted,) = torch.autograd.grad(expected, exact)
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-6)
        assert wanted.abs().max() > 1e-3


def test_fields_of_every_output_are_those_it_promises() -> None:
    batch = with_old_log_probs(ragged_batch())
    for make, _ in (CASES | CASES_WITH_OLD).values():
        loss = make(near_policy(batch))
        assert set(loss.out_keys) == {name for name, value in loss(batch).to_dict().items() if value is not None}
        for key in loss.in_keys:
            assert batch.get(key, as_list=True) is not None


def test_a_dual_clip_bounds_what_a_bad_token_can_weigh() -> None:
    batch = ragged_batch()
    policy = near_policy(batch, spread=3.0)
    for row in batch.unbind(0):
        row["advantage"] = -torch.ones(1, 1)
    assert GRPOLoss(policy, aggregation="none")(batch).loss_objective.max() > 3
    assert GRPOLoss(policy, aggregation="none", dual_clip=3.0)(batch).loss_objective.max().item() == pytest.approx(3.0)


def test_infinite_ratios_of_tokens_that_are_left_out_do_no_harm() -> None:
    batch = ragged_batch()
    policy = near_policy(batch)
    place = int(flat(batch, "masks", "all_assistant_mask").nonzero()[0])
    with torch.no_grad():
        policy.log_probs[place] = 200.0
    loss = GRPOLoss(policy, kl_mask_threshold=1.0)
    output = loss(batch)
    assert output.masked_fraction > 0 and output.loss_objective.isfinite()
    (gradient,) = torch.autograd.grad(output.total_loss(), policy.log_probs)
    assert gradient.isfinite().all() and gradient[place] == 0


def test_cispo_bounds_weights_from_above_alone_by_default() -> None:
    batch = ragged_batch()
    policy = near_policy(batch, spread=2.0)
    sampled, mask = flat(batch, "log_probs", "full"), flat(batch, "masks", "all_assistant_mask")
    advantages = torch.cat([row["advantage"].reshape(1).expand(len(row["tokens", "full"])) for row in batch.unbind(0)])
    weights = (policy.log_probs.detach() - sampled).double().exp()
    assert (weights[mask] < 0.1).any() and (weights[mask] > 5).any()
    (gradient,) = torch.autograd.grad(CISPOLoss(policy)(batch).loss_objective, policy.log_probs)
    torch.testing.assert_close(gradient[mask].double(), -(weights.clamp(max=5) * advantages)[mask] / mask.sum())


def test_staleness_is_counted_from_the_version_being_trained() -> None:
    batch = ragged_batch()
    loss = GRPOLoss(near_policy(batch), max_staleness=2)
    versions = flat(batch, "policy_versions", "full")[flat(batch, "masks", "all_assistant_mask")].float()
    assert loss(batch).staleness.item() == pytest.approx((versions.max() - versions).mean().item())
    loss.policy_version = 7
    output = loss(batch)
    assert output.staleness.item() == pytest.approx((7 - versions).mean().item())
    assert output.masked_fraction.item() == pytest.approx((7 - versions > 2).float().mean().item())


def test_importance_weights_at_each_level() -> None:
    old, sampler = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([-0.2, 0.4, 0.1])
    index = torch.tensor([4, 4, 9])
    for level, logs in (("token", [0.2, -0.4, -0.1]), ("sequence", [-0.2, -0.2, -0.1]), ("geometric", [-0.1] * 3)):
        weights = importance_weights(old, sampler, index, cap=1.1, level=level)
        torch.testing.assert_close(weights, torch.tensor(logs).exp().clamp(max=1.1))


def test_aggregations_weigh_a_batch_to_one_but_for_sums() -> None:
    index = torch.tensor([0, 0, 1, 1, 1, 2])
    for name in ("token_mean", "sequence_mean", "prompt_mean", "group_mean"):
        weights = aggregation_weights(index, 3, name, group_of_sequence=torch.tensor([0, 0, 1]))
        assert weights.sum().item() == pytest.approx(1.0), name
    assert aggregation_weights(index, 3, "sequence_sum").sum().item() == pytest.approx(2.0)


def test_ids_that_are_tensors_of_one_number_name_the_same_sequences() -> None:
    batch = ragged_batch()
    policy = near_policy(batch)
    losses = [GRPOLoss(policy, aggregation=name)(batch).loss_objective for name in ("sequence_mean", "group_mean")]
    for key in (("rollout", "rollout_id"), ("rollout", "group_id")):
        for row in batch.unbind(0):
            row.set(key, torch.tensor([int(row[key])]))
    for name, expected in zip(("sequence_mean", "group_mean"), losses, strict=True):
        torch.testing.assert_close(GRPOLoss(policy, aggregation=name)(batch).loss_objective, expected)


def test_losses_are_left_per_sequence_when_asked() -> None:
    batch = ragged_batch(1)
    policy = near_policy(batch)
    per_sequence = SFTLoss(policy, reduction="none")(batch).loss_sft
    assert per_sequence.shape == (5,)  # of six rows, two are of one rollout
    torch.testing.assert_close(per_sequence.mean(), SFTLoss(policy)(batch).loss_sft)


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: GRPOLoss(dual_clp=2.0), TypeError, "did you mean 'dual_clip'"),
        (lambda: GSPOLoss(agregation="token_mean"), TypeError, "did you mean 'aggregation'"),
        (lambda: DrGRPOLoss(fixed_length=3, max_stalenes=1), TypeError, "did you mean 'max_staleness'"),
        (lambda: RLOOLoss(clip_epsilon=0.2), TypeError, "no ratio to clip"),
        (lambda: SFTLoss(normalise_by_seq_length=True), TypeError, "did you mean 'normalize_by_seq_length'"),
        (lambda: SFTLoss(device="cpu"), TypeError, "works on the policy's device"),
        (lambda: DistillationLoss(kl_directoin="reverse"), TypeError, "did you mean 'kl_direction'"),
        (lambda: DistillationLoss(kl_estimator="k1"), ValueError, "kl_estimator"),
        (lambda: DistillationLoss(kl_direction="sideways"), ValueError, "kl_direction"),
        (lambda: SFTLoss(reduction="max"), ValueError, "reduction"),
        (lambda: SFTLoss(reduction="token_mean", loss_function="minor_sft"), ValueError, "token_mean"),
        (lambda: GRPOLoss(dual_clip=0.5), ValueError, "dual_clip"),
        (lambda: CISPOLoss(dual_clip=1.5), TypeError, "CISPOLoss has no argument 'dual_clip': use clip_epsilon"),
        (lambda: GRPOLoss(fixed_length=1000), ValueError, "fixed_length=1000 has no effect with aggregation='token_"),
        (lambda: GSPOLoss(fixed_length=8), ValueError, "has no effect with aggregation='sequence_mean'"),
        (lambda: GRPOLoss(max_staleness=-1), ValueError, "max_staleness"),
        (lambda: GRPOLoss(importance_cap=0.0), ValueError, "floor < cap"),
        (lambda: ImportanceBound(2.0, floor=0.5), ValueError, "use mode 'mask'"),
        (lambda: ImportanceBound(1.0, floor=2.0, mode="mask"), ValueError, "floor < cap"),
        (lambda: ImportanceBound(1.0, level="word"), ValueError, "level"),  # type: ignore[arg-type]
    ],
)
def test_arguments_are_known_or_refused(make: Callable[[], Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        make()

"""Methods that are a function, each against its paper's equation: MaxRL's advantage, DPPO's mask, length penalties."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from loss_batches import flat, near_policy, ragged_batch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from llmrl.objectives import (
    DPPOLoss,
    LengthPenalty,
    MCAdvantage,
    group_advantages,
    group_relative_length,
    soft_overlong,
)


def rewarded_rows(rewards, lengths=None, num_in_group=4, rows_of=None):
    rows = []
    for index, reward in enumerate(rewards):
        for part in range(1 if rows_of is None else rows_of[index]):
            length = 3 if lengths is None else lengths[index] if part == 0 else 2
            mask = torch.cat([torch.zeros(2), torch.ones(length)]).bool()
            rows.append(
                TensorDict({
                    "next": {"reward": torch.full((1, 1), float(reward))},
                    "masks": {"all_assistant_mask": mask},
                    "rollout": {
                        "rollout_id": NonTensorData(str(index)), "group_id": NonTensorData(str(index // num_in_group)),
                    },
                })
            )  # fmt: skip
    return lazy_stack(rows)


@pytest.mark.parametrize("num_right", [1, 2, 7])
def test_maxrl_averages_the_scores_of_right_answers_less_those_of_all(num_right):
    """With K of N right its gradient is sum_right(S) / K - sum(S) / N, S being the gradients of log-probs."""
    num = 8
    rewards = [1.0] * num_right + [0.0] * (num - num_right)
    scores = torch.randn(num, dtype=torch.float64, generator=torch.Generator().manual_seed(num_right))
    advantages = torch.tensor(group_advantages(rewards, "relative"), dtype=torch.float64)
    expected = scores[:num_right].sum() / num_right - scores.sum() / num
    torch.testing.assert_close((advantages * scores).sum() / num, expected)
    batch = MCAdvantage(normalization="relative")(rewarded_rows(rewards, num_in_group=num))
    torch.testing.assert_close(flat(batch, "advantage").flatten().double(), advantages, rtol=1e-6, atol=1e-6)


def test_maxrl_compares_turns_and_refuses_negative_rewards():
    assert group_advantages([0.0, 0.0], "relative") == group_advantages([3.0], "relative") * 2 == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"rewards from 0 on, got -1\.0; shift them"):
        group_advantages([1.0, -1.0], "relative")
    rows = rewarded_rows([0.0, 0.0])
    for row, turns in zip(rows.unbind(0), ([1.0, 3.0], [1.0, 1.0]), strict=True):
        row["turns"] = TensorDict({
            "reward": torch.tensor(turns), "start": torch.tensor([2, 4]),
            "token_reward": torch.tensor([0.0, 0.0, 0.0, turns[0], turns[1]]),
        })  # fmt: skip
    batch = MCAdvantage(normalization="relative", gamma=0.5)(rows)
    returns = torch.tensor([[2.5, 3.0], [1.5, 1.0]], dtype=torch.float64)
    means = returns.mean(0)
    expected = (returns - means) / means
    # Of what came before a token of its turn, it has not the merit: here nothing, each turn's comes at its last token.
    for row, turns in zip(batch.unbind(0), expected.tolist(), strict=True):
        of_tokens = torch.tensor([0.0, 0.0, turns[0], turns[0], turns[1]])
        torch.testing.assert_close(row["advantage"].flatten(), of_tokens)


def is_kept(new, old, advantage, bound, divergence):
    """The paper's mask, of one token."""
    pi, mu = math.exp(new), math.exp(old)
    kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    measured, ratio = {"tv": abs(mu - pi), "kl": kl}[divergence], pi / mu
    return not (measured > bound and ((advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)))


@pytest.mark.parametrize(("divergence", "bound"), [("tv", 0.1), ("kl", 0.02)])
def test_dppo_leaves_out_what_would_leave_its_region(divergence, bound):
    batch = ragged_batch(3, num_rows=12)
    policy = near_policy(batch, spread=0.5)
    with torch.no_grad():
        policy.log_probs.clamp_(max=-1e-3)
    for row in batch.unbind(0):
        row["log_probs", "full"] = row["log_probs", "full"].clamp(max=-1e-3)
    output = DPPOLoss(policy, max_divergence=bound, divergence=divergence)(batch)
    output.total_loss().backward()
    mask = flat(batch, "masks", "all_assistant_mask")
    advantages = torch.cat([row["advantage"].flatten().expand(len(row["tokens", "full"])) for row in batch.unbind(0)])
    columns = (policy.log_probs.detach(), flat(batch, "log_probs", "full"), advantages)
    expected, gradient, num_left_out = 0.0, torch.zeros(len(mask), dtype=torch.float64), 0
    for place in mask.nonzero().flatten().tolist():
        new, old, advantage = (float(column[place].double()) for column in columns)
        kept = is_kept(new, old, advantage, bound, divergence)
        term = -kept * math.exp(new - old) * advantage / int(mask.sum())
        expected, gradient[place], num_left_out = expected + term, term, num_left_out + (not kept)
    assert 0 < num_left_out < int(mask.sum())
    assert float(output.loss_objective.detach()) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(policy.log_probs.grad.double(), gradient, rtol=1e-4, atol=1e-7)
    assert float(output.clip_fraction) == pytest.approx(num_left_out / int(mask.sum()))


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_dppo_keeps_its_region_around_the_sampler_with_importance_weights_and_old_log_probs(cap, has_old):
    """The scripts' default cap, and what `minibatches` writes before several updates."""
    batch = ragged_batch(3, num_rows=12)
    policy = near_policy(batch, spread=0.5)
    policy.log_probs = torch.nn.Parameter(policy.log_probs.detach().double().clamp(max=-1e-3))
    for row in batch.unbind(0):
        row["log_probs", "full"] = row["log_probs", "full"].double().clamp(max=-1e-3)
        if has_old:
            row["old_log_probs", "full"] = (row["log_probs", "full"] + 0.4).clamp(max=-1e-3)
    output = DPPOLoss(policy, max_divergence=0.1, importance_cap=cap)(batch)
    output.total_loss().backward()
    mask = flat(batch, "masks", "all_assistant_mask")
    advantages = torch.cat([row["advantage"].flatten().expand(len(row["tokens", "full"])) for row in batch.unbind(0)])
    new, sampled = policy.log_probs.detach(), flat(batch, "log_probs", "full")
    old = flat(batch, "old_log_probs", "full") if has_old else new
    gradient, num_left_out, num_capped = torch.zeros(len(mask), dtype=torch.float64), 0, 0
    for place in mask.nonzero().flatten().tolist():
        pi, own, mu, advantage = (float(column[place].double()) for column in (new, old, sampled, advantages))
        kept = is_kept(pi, mu, advantage, 0.1, "tv")
        ratio = math.exp(pi - mu) if cap is None else math.exp(pi - own) * min(math.exp(own - mu), cap)
        gradient[place] = -kept * ratio * advantage / int(mask.sum())
        num_left_out += not kept
        num_capped += cap is not None and math.exp(own - mu) > cap
    assert 0 < num_left_out < int(mask.sum()) and (num_capped > 0) == (cap is not None and not has_old)
    assert float(output.loss_objective.detach()) == pytest.approx(float(gradient.sum()), rel=1e-6)
    torch.testing.assert_close(policy.log_probs.grad, gradient, rtol=1e-6, atol=1e-9)
    assert float(output.clip_fraction) == pytest.approx(num_left_out / int(mask.sum()))


def test_dppo_bears_certain_and_impossible_tokens_and_refuses_a_clip():
    batch = ragged_batch(3, num_rows=12)
    for extreme in (0.0, -1e4):
        for divergence in ("tv", "kl"):
            policy = near_policy(batch)
            with torch.no_grad():
                policy.log_probs.fill_(extreme)
            loss = DPPOLoss(policy, divergence=divergence)(batch).total_loss()
            loss.backward()
            assert loss.isfinite() and policy.log_probs.grad.isfinite().all()
    for wrong, error in (({"clip_epsilon": 0.2}, TypeError), ({"max_divergence": 0.0}, ValueError),
                         ({"divergence": "js"}, ValueError)):  # fmt: skip
        with pytest.raises(error, match=next(iter(wrong))):
            DPPOLoss(None, **wrong)


def overlong(length, max_length, cache_length):
    """Equation 13 of DAPO."""
    if length <= max_length - cache_length:
        return 0.0
    if length <= max_length:
        return ((max_length - cache_length) - length) / cache_length
    return -1.0


def kimi(lengths, rewards):
    """Section 2.3.3 of Kimi k1.5."""
    low, high = min(lengths), max(lengths)
    values = []
    for length, reward in zip(lengths, rewards, strict=True):
        value = 0.0 if high == low else 0.5 - (length - low) / (high - low)
        values.append(value if reward == 1 else min(0, value))
    return values


def test_lengths_against_a_budget_and_against_a_group_are_the_papers():
    chance = random.Random(0)
    for _ in range(200):
        max_length = chance.randint(1, 50)
        cache_length = chance.randint(1, max_length)
        lengths = [chance.randint(0, 60) for _ in range(chance.randint(1, 6))]
        rewards = [float(chance.randint(0, 1)) for _ in lengths]
        expected = [overlong(length, max_length, cache_length) for length in lengths]
        assert soft_overlong(lengths, max_length=max_length, cache_length=cache_length) == pytest.approx(expected)
        assert group_relative_length(lengths, rewards) == pytest.approx(kimi(lengths, rewards))
    for cache_length in (0, 21):
        with pytest.raises(ValueError, match=f"cache_length must be from 1 to max_length=20, got {cache_length}"):
            soft_overlong([1], max_length=20, cache_length=cache_length)
    assert group_relative_length([], []) == []


def test_a_penalty_is_of_whole_rollouts_within_their_group_and_once():
    rewards, lengths, rows_of = [1, 0, 1, 1, 0, 1], [4, 9, 12, 4, 6, 2], [1, 1, 2, 1, 3, 1]
    totals = [length + 2 * (num - 1) for length, num in zip(lengths, rows_of, strict=True)]
    batch = rewarded_rows(rewards, lengths, num_in_group=3, rows_of=rows_of)
    penalize = LengthPenalty(group_relative_length, 0.2)
    penalize(penalize(batch))
    expected = kimi(totals[:3], rewards[:3]) + kimi(totals[3:], rewards[3:])
    for row in batch.unbind(0):
        index = int(row["rollout", "rollout_id"])
        assert float(row["next", "reward"]) == pytest.approx(rewards[index] + 0.2 * expected[index])
        assert float(row["length_penalty"]) == pytest.approx(0.2 * expected[index])
    overlong_batch = LengthPenalty(partial(soft_overlong, max_length=10, cache_length=4))(
        rewarded_rows(rewards, lengths, num_in_group=3)
    )
    found = [float(row["next", "reward"]) for row in overlong_batch.unbind(0)]
    assert found == pytest.approx([r + overlong(n, 10, 4) for r, n in zip(rewards, lengths, strict=True)])
    # Dense rewards are changed at their last token, unscored rollouts not at all.
    dense = rewarded_rows([1.0, 1.0], [2, 4])
    dense[0]["next", "reward"] = torch.tensor([[0.25], [0.75]])
    dense[1]["rollout", "is_scored"] = torch.tensor(False)
    LengthPenalty(lambda lengths, rewards: [10.0 * len(lengths)] * len(lengths))(dense)
    assert dense[0]["next", "reward"].flatten().tolist() == [0.25, 10.75]
    assert float(dense[1]["next", "reward"]) == 1.0


def test_what_penalizes_wrongly_is_refused():
    with pytest.raises(ValueError, match="must return 2 numbers, one per rollout"):
        LengthPenalty(lambda lengths, rewards: [0.0])(rewarded_rows([1.0, 0.0]))
    turns = lazy_stack([TensorDict({
        "next": {"reward": torch.ones(1, 1), "done": torch.ones(1, dtype=torch.bool)}, "query": NonTensorData("a"),
        "masks": {"all_assistant_mask": torch.ones(2, dtype=torch.bool)},
    })])  # fmt: skip
    with pytest.raises(ValueError, match="these rows are turns"):
        LengthPenalty(group_relative_length)(turns)
    buffer = ReplayBuffer(storage=LazyStackStorage(4))
    buffer.append_transform(MCAdvantage(2))
    buffer.append_transform(LengthPenalty(group_relative_length))
    with pytest.raises(ValueError, match=r"LengthPenalty needs complete groups.*postproc"):
        buffer.extend(rewarded_rows([1.0, 0.0]))

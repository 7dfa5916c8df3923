"""What training must not depend on, and what its report must show."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import VOCAB_SIZE, plain_gradients, ragged_batch, tiny_model
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from llmrl.objectives import GRPOLoss
from llmrl.trainer import TransformersWrapper, train_step, write_log_probs

POLICY = TransformersWrapper(tiny_model(), generate=False, bin_length=24, token_budget=48)


def _row(ids: torch.Tensor, mask: torch.Tensor, sampled: torch.Tensor, rollout: int, end: int) -> TensorDict:
    return TensorDict(
        {
            "tokens": {"full": ids[:end]},
            "masks": {"all_assistant_mask": mask[:end]},
            "log_probs": {"full": (sampled * mask)[:end]},
            "advantage": torch.tensor([[1.0 - 0.7 * rollout]]),
            "rollout": {"rollout_id": NonTensorData(str(rollout))},
        }
    )


@st.composite
def _conversations(draw: st.DrawFn) -> tuple[TensorDictBase, TensorDictBase]:
    """Conversations of several trained turns: one row each, and forked into a row at any of their turns' ends."""
    whole: list[TensorDict] = []
    forked: list[TensorDict] = []
    for rollout in range(draw(st.integers(1, 3))):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        turns = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4))
        mask = torch.cat([torch.arange(context + answer) >= context for context, answer in turns])
        ids = torch.randint(0, VOCAB_SIZE, mask.shape, generator=generator)
        sampled = -4 * torch.rand(mask.shape, generator=generator)
        ends = torch.tensor([sum(turn) for turn in turns]).cumsum(0).tolist()
        whole.append(_row(ids, mask, sampled, rollout, ends[-1]))
        cuts = [end for end in ends[:-1] if draw(st.booleans())] + ends[-1:]
        place = torch.arange(len(mask))
        for start, end in zip([0, *cuts], cuts, strict=False):
            forked.append(_row(ids, mask & (place >= start), sampled, rollout, end))
    order = draw(st.permutations(range(len(forked))))
    return lazy_stack(whole, 0), lazy_stack([forked[index] for index in order], 0)


def _gradients(loss: GRPOLoss, batch: TensorDictBase) -> list[torch.Tensor]:
    POLICY.zero_grad()
    loss(batch).total_loss().backward()
    return [p.grad.clone() for p in POLICY.parameters() if p.grad is not None]


@pytest.mark.slow
@settings(max_examples=40)
@given(_conversations(), st.sampled_from(["token_mean", "sequence_mean"]))
def test_forking_conversations_into_rows_changes_no_gradient(batches: tuple, aggregation: str) -> None:
    whole, forked = batches
    # Far outside the bounds clipped tokens would have no gradient to compare.
    loss = GRPOLoss(POLICY, aggregation=aggregation, clip_epsilon=(1.0, 1e6))
    for a, b in zip(_gradients(loss, whole), _gradients(loss, forked), strict=True):
        assert (a - b).norm() <= 1e-4 * a.norm() + 1e-6


def test_a_stale_output_head_is_visible_in_the_report_of_the_next_step() -> None:
    """An engine that keeps the old output head after an update of tied embeddings samples from another policy."""
    trained = tiny_model(is_tied=True)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
    policy = TransformersWrapper(trained, generate=False)
    loss = GRPOLoss(policy, clip_epsilon=(1.0, 1e6))
    old_head = trained.lm_head.weight.detach().clone()
    batch = ragged_batch(num_rows=12)
    write_log_probs(policy, batch, ("log_probs", "full"))
    first = train_step(loss, batch, optimizer)
    assert first.measurements["log_prob_difference_max"] < 1e-4
    assert first.measurements["ESS"] == pytest.approx(1.0, abs=1e-4)

    def next_step(is_head_stale: bool) -> dict[str, float]:
        served = copy.deepcopy(trained)
        if is_head_stale:
            served.lm_head.weight = torch.nn.Parameter(old_head)
        sampled = write_log_probs(
            TransformersWrapper(served, generate=False), ragged_batch(7, num_rows=12), ("log_probs", "full")
        )
        return loss(sampled).measurements()

    healthy, stale = next_step(False), next_step(True)
    assert healthy["log_prob_difference_max"] < 1e-4 and healthy["ESS"] > 0.999
    assert stale["log_prob_difference_mean"] > 0.1
    assert stale["log_prob_difference_max"] > 0.5
    assert stale["ESS"] < 0.97


def test_a_rank_that_runs_out_repeats_a_micro_batch_that_counts_nothing() -> None:
    loss = GRPOLoss(POLICY, clip_epsilon=(1.0, 1e6))
    batch = ragged_batch(num_rows=12)
    inputs = loss.prepare(batch)
    everything = list(loss.micro_losses(inputs, batch))
    num_ranks = len(everything) + 1
    shares = [list(loss.micro_losses(inputs, batch, rank=rank, num_ranks=num_ranks)) for rank in range(num_ranks)]
    assert len(everything) > 1 and {len(share) for share in shares} == {1}
    assert [share[0].is_repeated for share in shares] == [False] * len(everything) + [True]
    total = sum(float(share[0].total().detach()) for share in shares)
    assert total == pytest.approx(sum(float(micro.total().detach()) for micro in everything), rel=1e-5)
    POLICY.zero_grad()
    shares[-1][0].total().backward()
    assert all(p.grad is None or not p.grad.any() for p in POLICY.parameters())


def test_rows_without_advantage_cost_no_compute_and_change_no_gradient() -> None:
    batch = ragged_batch(4, num_rows=8)
    idle = (0, 3, 4)
    for index in idle:
        batch[index]["advantage"] = torch.zeros(1, 1)
    model = tiny_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = plain_gradients(model, batch)  # the mean over all trained tokens, those of idle rows too
    num_computed: list[int] = []
    loss = GRPOLoss(TransformersWrapper(model, generate=False), clip_epsilon=(0.999, 1e6))
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda module, inputs, output: num_computed.append(inputs[0].numel()))
    report = train_step(loss, batch, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=None)
    for name, gradient in expected.items():
        change = before[name] - model.get_parameter(name).detach()
        torch.testing.assert_close(change.double(), gradient, rtol=1e-3, atol=1e-6)
    busy = [row for index, row in enumerate(batch.unbind(0)) if index not in idle]
    assert 0 < sum(num_computed) <= sum(len(row["tokens", "full"]) for row in busy)
    assert report.num_trained_tokens == sum(int(row["masks", "all_assistant_mask"].sum()) for row in busy)
    assert all(report.log_probs[index].isnan().all() for index in idle)
    # Where the loss has another term, every row is in it.
    for row in batch.unbind(0):
        row["advantage"] = torch.zeros(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert train_step(loss, batch, optimizer).skip_reason == "no_signal"
    regularized = GRPOLoss(TransformersWrapper(model, generate=False), kl_to_inference_coeff=0.1)
    assert train_step(regularized, batch, optimizer).grad_norm > 0

"""Columns of rows, written into batches of every form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import tiny_model
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule

from llmrl.data.ragged import write_column
from llmrl.objectives import GRPOLoss, KLPenalty
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine
from llmrl.trainer import TransformersWrapper, write_log_probs
from llmrl.transforms import RetrieveLogProb

FORMS = ("single", "dense", "lazy", "dense of two dimensions", "lazy of two dimensions", "lazy along the second")


def row(place, length=4):
    ids = torch.arange(1, length + 1) + place
    mask = torch.arange(length) > 0
    return TensorDict(
        {
            "tokens": {"full": ids},
            "masks": {"all_assistant_mask": mask},
            "log_probs": {"full": torch.zeros(length)},
            "reference": {"full": -torch.ones(length) * (place + 1)},
            "rollout": {"rollout_id": str(place)},
            "next": {"reward": torch.full((1, 1), float(place))},
        }
    )


def batch_of(form):
    """Six rows, or one, and the way to each in the order of the batch's elements."""
    rows = [row(place) for place in range(6)]
    if form == "single":
        return rows[0], [()]
    if form in ("dense", "lazy"):
        return (torch.stack if form == "dense" else lazy_stack)(rows), [(place,) for place in range(6)]
    ways = [(first, second) for first in range(2) for second in range(3)]
    if form == "dense of two dimensions":
        return torch.stack([torch.stack(rows[:3]), torch.stack(rows[3:])]), ways
    if form == "lazy of two dimensions":
        return lazy_stack([lazy_stack(rows[:3]), lazy_stack(rows[3:])]), ways
    return lazy_stack([torch.stack([rows[place], rows[3 + place]]) for place in range(3)], 1), ways


@pytest.mark.parametrize("form", FORMS)
def test_whatever_writes_into_a_batch_writes_it_all(form):
    """Each row has what it has alone."""
    policy = TransformersWrapper(tiny_model(), generate=False)
    alone = [policy(row(place))["log_probs", "full"] for place in range(6)]
    batch, ways = batch_of(form)
    assert policy(batch) is batch
    assert write_log_probs(policy, batch, ("old_log_probs", "full")) is batch
    scorer = RetrieveLogProb(policy, log_probs_full_key=("ref_log_probs", "full"))
    scorer.forward(batch)
    penalty = KLPenalty(coeff=0.5, other_log_prob_key=("reference", "full"))
    penalty(batch)
    for place, way in enumerate(ways):
        element = batch[way] if way else batch
        for key in (("log_probs", "full"), ("old_log_probs", "full"), ("next", "ref_log_probs", "full")):
            torch.testing.assert_close(element[key], alone[place].detach(), rtol=1e-5, atol=1e-6, msg=str((form, key)))
        sampled = alone[place].detach()[1:].double()
        expected = place - 0.5 * (sampled + (place + 1)).sum()
        torch.testing.assert_close(
            element["next", "reward"].double().squeeze(), expected.double(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("form", FORMS)
def test_a_plain_policys_loss_is_that_of_its_rows(form):
    policy = TensorDictModule(lambda ids: -ids.float() / 4, [("tokens", "full")], [("log_probs", "full")])
    batch, ways = batch_of(form)
    batch["advantage"] = torch.ones(*batch.batch_size, 1, 1)
    expected = [torch.exp(-row(place)["tokens", "full"][1:] / 4).mean() for place in range(len(ways))]
    torch.testing.assert_close(GRPOLoss(policy)(batch).loss_objective, -torch.stack(expected).mean())


def test_a_policy_says_what_it_lacks(renderer):
    policy = LLMWrapperBase(ScriptedEngine(["a"], encode=renderer.encode), renderer=renderer)
    with pytest.raises(ValueError, match=r"Expected \(.history., .prompt.\) key .* the tensordict has \[.query.\]"):
        policy(TensorDict(query="Hi"))


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), is_left=st.booleans(), extra=st.integers(0, 2))
@settings(max_examples=50, deadline=None)
def test_padded_batches_have_columns_where_their_tokens_are(lengths, is_left, extra):
    width = max(lengths) + extra
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for place, length in enumerate(lengths):
        mask[place, slice(width - length, width) if is_left else slice(length)] = True
    batch = TensorDict({"masks": {"all_attention_mask": mask}}, batch_size=[len(lengths)])
    rows = [torch.rand(length) + 1 for length in lengths]
    write_column(batch, ("a", "full"), rows)
    for written, is_real, expected in zip(batch["a", "full"], mask, rows, strict=True):
        assert torch.equal(written[is_real], expected) and not written[~is_real].any()


def test_rows_of_several_lengths_need_a_place():
    batch = TensorDict({"a": torch.ones(2)}, batch_size=[2])
    with pytest.raises(ValueError, match=r"to_lazystack\(0\)"):
        write_column(batch, "b", [torch.ones(1), torch.ones(2)])
    lazy = batch.to_lazystack(0)
    write_column(lazy, ("b", "full"), [torch.ones(1), torch.ones(2)])
    assert lazy[1]["b", "full"].shape == (2,)

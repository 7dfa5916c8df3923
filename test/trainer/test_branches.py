"""Layers with a state over packed rows: what rows share is computed once, and handed to each of them."""

import pytest
import torch
from causal_types import VOCAB_SIZE, compare

from llmrl.trainer.packing.branches import SHORTEST_SEGMENT, Branches
from llmrl.trainer.packing.packed_rows import pack_rows


def nested_rows():
    """Two groups: branches of branches, a row that is another's beginning, twins, one that shares little."""
    generator = torch.Generator().manual_seed(5)

    def ids(num):
        return torch.randint(5, VOCAB_SIZE, (num,), generator=generator)

    prompt, turn, other = ids(2 * SHORTEST_SEGMENT + 3), ids(SHORTEST_SEGMENT + 5), ids(SHORTEST_SEGMENT + 1)
    rows = [
        torch.cat([prompt, ids(9)]),
        torch.cat([prompt, turn, ids(7)]),
        torch.cat([prompt, turn, ids(4)]),
        torch.cat([prompt, turn]),
        torch.cat([prompt[:20], ids(6)]),
        torch.cat([other, ids(12)]),
        torch.cat([other, ids(3)]),
        ids(5),
    ]
    rows.append(rows[1].clone())
    weights = [torch.randn(len(row), generator=generator) for row in rows]
    for weight in weights:
        weight[:3] = 0
    return rows, weights


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "mamba2", "granitemoehybrid"])
def test_states_at_branches_are_handed_on_with_their_gradients(model_type, takes_long):
    result = compare(model_type, rows_and_weights=nested_rows())
    assert result.outcome == "packed" and result.is_exact, result


def test_gradient_checkpointing_computes_them_again(takes_long):
    result = compare("lfm2", rows_and_weights=nested_rows(), is_checkpointing=True)
    assert result.outcome == "packed" and result.is_exact, result


def test_every_token_is_given_once_after_what_it_continues():
    rows, weights = nested_rows()
    for packed in pack_rows(rows, [weight != 0 for weight in weights], token_budget=120):
        branches = Branches.of(packed)
        given = torch.cat([step.positions.flatten()[step.own] for step in branches.steps])
        assert given.sort().values.tolist() == packed.token_positions.unique().tolist()
        assert all(step.parent is None or step.parent < place for place, step in enumerate(branches.steps))


def test_padding_of_rows_of_many_lengths_is_bounded():
    lengths = [3 + 17 * index % 997 for index in range(64)]
    rows = [torch.full((length,), index) for index, length in enumerate(lengths)]
    (packed,) = pack_rows(rows, [torch.arange(len(row)) > 0 for row in rows], token_budget=1 << 20)
    num_computed = sum(step.positions.numel() for step in Branches.of(packed).steps)
    assert num_computed <= 4 / 3 * sum(length - 1 for length in lengths)


def test_padding_of_one_row_a_bin_is_bounded_too():
    lengths = [3 + 17 * index % 997 for index in range(64)]
    rows = [torch.full((length,), index) for index, length in enumerate(lengths)]
    masks = [torch.arange(len(row)) > 0 for row in rows]
    micro_batches = pack_rows(rows, masks, token_budget=1 << 20, one_row_per_bin=True)
    assert sum(packed.num_packed_tokens for packed in micro_batches) <= 4 / 3 * sum(length - 1 for length in lengths)
    assert len(micro_batches) < 20  # of lengths from 2 to 996, each at most 4/3 of the next


def test_segments_of_several_prompts_are_computed_together():
    prompts = [torch.full((40 + index,), index) for index in range(3)]
    rows = [torch.cat([prompt, torch.tensor([10 + sample, 1])]) for prompt in prompts for sample in range(4)]
    (packed,) = pack_rows(rows, [torch.arange(len(row)) > 39 for row in rows])
    branches = Branches.of(packed)
    assert [tuple(step.positions.shape) for step in branches.steps] == [(3, 32), (12, 11)]

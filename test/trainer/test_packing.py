"""Packing: what is laid out, who sees whom, and what predicts what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrl.trainer.packing.bins import Bin, Piece, arrange
from llmrl.trainer.packing.packed_rows import PackedRows, pack_rows


@st.composite
def _batches(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[torch.Tensor], int, int]:
    """Rows over three tokens, so that prefixes collide often, with masks and budgets."""
    rows = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12))
    masks = [draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))) for row in rows]
    bin_length, token_budget = draw(st.integers(1, 30)), draw(st.integers(1, 60))
    return [torch.tensor(row) for row in rows], [torch.tensor(mask) for mask in masks], bin_length, token_budget


def _wanted(rows: list[torch.Tensor], masks: list[torch.Tensor]) -> set[tuple[int, int, int]]:
    return {
        (row, place, int(rows[row][place]))
        for row, mask in enumerate(masks)
        for place in range(1, len(mask))
        if mask[place]
    }


def _paths(packed: PackedRows) -> dict[int, list[int]]:
    """Flat positions of each row's computed tokens."""
    return dict(
        zip(
            packed.rows.tolist(),
            (path.tolist() for path in packed.token_positions.split(packed.row_lengths.tolist())),
            strict=True,
        )
    )


def test_three_rows_are_laid_out_as_the_module_shows():
    rows = [torch.tensor(ids) for ids in ([1, 2, 3, 7], [1, 2, 4, 5, 8], [6, 9])]
    masks = [torch.tensor(mask) for mask in ([0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 1])]
    (packed,) = pack_rows(rows, [mask.bool() for mask in masks])
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 2, 3, 0]]
    assert packed.subtree_end.tolist() == [[5, 5, 3, 5, 5, 6]]
    assert (packed.predictors.tolist(), packed.targets.tolist()) == ([2, 3, 4, 5], [7, 5, 8, 9])


@settings(max_examples=150)
@given(_batches())
def test_every_row_that_has_a_scored_token_is_computed_up_to_the_last_one(batch: tuple) -> None:
    rows, masks, bin_length, token_budget = batch
    computed = {}
    for packed in pack_rows(rows, masks, bin_length=bin_length, token_budget=token_budget):
        computed |= {row: packed.input_ids.flatten()[path].tolist() for row, path in _paths(packed).items()}
    last = {row: place for row, place, _ in sorted(_wanted(rows, masks))}
    assert computed == {row: rows[row][:place].tolist() for row, place in last.items()}


@settings(max_examples=150)
@given(_batches())
def test_every_scored_token_is_scored_once_from_its_own_path(batch: tuple) -> None:
    rows, masks, bin_length, token_budget = batch
    seen = []
    for packed in pack_rows(rows, masks, bin_length=bin_length, token_budget=token_budget):
        paths = _paths(packed)
        for predictor, target, row, place in zip(
            packed.predictors.tolist(),
            packed.targets.tolist(),
            packed.row_index.tolist(),
            packed.token_index.tolist(),
            strict=True,
        ):
            seen.append((row, place, target))
            assert paths[row][place - 1] == predictor
        assert packed.predictors.tolist() == sorted(packed.predictors.tolist())
    assert len(seen) == len(set(seen))
    assert set(seen) == _wanted(rows, masks)


@pytest.mark.slow
@settings(max_examples=150)
@given(_batches(), st.one_of(st.none(), st.integers(1, 5)))
def test_the_mask_allows_exactly_the_ancestors_on_the_path(batch: tuple, window: int | None) -> None:
    rows, masks, bin_length, token_budget = batch
    for packed in pack_rows(rows, masks, bin_length=bin_length, token_budget=token_budget):
        num_bins, length = packed.input_ids.shape
        expected = torch.zeros(num_bins, 1, length, length, dtype=torch.bool)
        computed = torch.zeros(num_bins * length, dtype=torch.bool)
        for path in _paths(packed).values():
            computed[path] = True
            for depth, query in enumerate(path):
                start = 0 if window is None else max(0, depth + 1 - window)
                for key in path[start : depth + 1]:
                    assert query // length == key // length
                    expected[query // length, 0, query % length, key % length] = True
        mask = packed.attention_mask(window=window)
        assert torch.equal(mask.flatten(0, 2)[computed], expected.flatten(0, 2)[computed])
        # Padding sees itself: a softmax over nothing would be NaN.
        assert torch.equal(mask.flatten(0, 2)[~computed].sum(-1), torch.ones(int((~computed).sum())))


@settings(max_examples=100)
@given(_batches())
def test_positions_are_depths_and_shared_prefixes_are_laid_out_once(batch: tuple) -> None:
    rows, masks, _, _ = batch
    for packed in pack_rows(rows, masks, bin_length=1000, token_budget=1000):
        prefixes: dict[int, tuple[int, ...]] = {}
        for row, path in _paths(packed).items():
            assert packed.position_ids.flatten()[path].tolist() == list(range(len(path)))
            for depth, position in enumerate(path):
                prefix = tuple(rows[row][: depth + 1].tolist())
                assert prefixes.setdefault(position, prefix) == prefix
        assert len(set(prefixes.values())) == len(prefixes)


@settings(max_examples=100)
@given(_batches())
def test_micro_batches_keep_to_the_budget_unless_one_row_alone_exceeds_it(batch: tuple) -> None:
    rows, masks, bin_length, token_budget = batch
    for packed in pack_rows(rows, masks, bin_length=bin_length, token_budget=token_budget):
        num_bins, length = packed.input_ids.shape
        assert (
            packed.num_packed_tokens <= token_budget
            or (num_bins == 1 and packed.rows.shape[0] == 1)
            or (num_bins == 1 and length == int(packed.row_lengths.max()))
        )


def test_unshared_packing_lays_every_row_out_by_itself() -> None:
    row, mask = torch.tensor([1, 2, 3]), torch.tensor([False, False, True])
    (shared,) = pack_rows([row] * 4, [mask] * 4)
    (unshared,) = pack_rows([row] * 4, [mask] * 4, share_prefixes=False)
    assert (shared.num_packed_tokens, unshared.num_packed_tokens) == (2, 8)
    assert len(shared.targets) == len(unshared.targets) == 4


def test_a_padding_id_that_is_the_end_of_turn_id_is_an_ordinary_token() -> None:
    end = 2
    (packed,) = pack_rows([torch.tensor([end, 5, end])], [torch.tensor([False, True, True])])
    assert packed.targets.tolist() == [5, end]
    assert packed.input_ids.tolist() == [[end, 5]]


def test_bins_are_balanced() -> None:
    rows = [torch.full((50,), value) for value in range(9)]
    masks = [torch.ones(50, dtype=torch.bool)] * 9
    (packed,) = pack_rows(rows, masks, bin_length=200)
    assert packed.input_ids.shape == (3, 3 * 49)


def _num_distinct(rows: list[torch.Tensor], masks: list[torch.Tensor]) -> int:
    """Prefixes that some scored token needs, each once, by the plain loop."""
    prefixes = set()
    for row, mask in zip(rows, masks, strict=True):
        for end in range(1, int(mask.nonzero()[-1]) + 1):
            prefixes.add(hash(tuple(row[:end].tolist())))
    return len(prefixes)


def _group(generator: torch.Generator, num_prompt: int, num_completion: int, num_samples: int) -> tuple:
    prompt = torch.randint(0, 50_000, (num_prompt,), generator=generator)
    completions = torch.randint(0, 50_000, (num_samples, num_completion), generator=generator)
    rows = [torch.cat([prompt, completion]) for completion in completions]
    return rows, [torch.arange(len(row)) >= num_prompt for row in rows]


@pytest.mark.parametrize("shape", [(100, 50), (200, 300), (1500, 500), (4000, 200)])
def test_a_groups_prompt_is_computed_once_whatever_its_length(shape: tuple[int, int]) -> None:
    rows, masks = _group(torch.Generator().manual_seed(0), *shape, 16)
    num_distinct = shape[0] + 16 * (shape[1] - 1)
    packed = pack_rows(rows, masks, token_budget=16_384)
    assert num_distinct <= sum(micro.num_packed_tokens for micro in packed) <= 1.1 * num_distinct
    # A budget that the group exceeds is met by repeating the prompt once a micro-batch, not once per row.
    packed = pack_rows(rows, masks, token_budget=max(num_distinct // 2, shape[0] + shape[1]) + shape[0])
    assert len(packed) <= 3
    num_computed = sum(micro.num_packed_tokens for micro in packed)
    assert num_computed <= 1.1 * (num_distinct + (len(packed) - 1) * shape[0])


def test_where_attention_is_dear_bins_are_shorter_than_where_only_tokens_count() -> None:
    rows, masks = _group(torch.Generator().manual_seed(0), 150, 150, 16)
    lengths = []
    for attention_length in (100.0, 1000.0, 10_000.0, float("inf")):
        packed = pack_rows(rows, masks, attention_length=attention_length)
        lengths.append(max(micro.input_ids.shape[1] for micro in packed))
        # No bin length is cheaper by this measure: each is tried.
        costs = []
        for bin_length in (None, 299, 598, 1196, 2392, 2534):
            tried = pack_rows(rows, masks, bin_length=bin_length, attention_length=attention_length)
            sizes = [(micro.num_packed_tokens, micro.input_ids.shape[1]) for micro in tried]
            costs.append(sum(tokens * (1 + length / attention_length) for tokens, length in sizes))
        assert costs[0] <= 1.01 * min(costs)
    assert lengths == sorted(lengths) and lengths[0] < 600 and lengths[-1] == 150 + 16 * 149


def test_bins_are_filled_as_well_as_rows_allow() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(130, 231, (300,), generator=generator).tolist()
    rows = [torch.randint(0, 50_000, (length,), generator=generator) for length in lengths]
    masks = [torch.ones(length, dtype=torch.bool) for length in lengths]
    groups = [_group(generator, 45, int(n), 8) for n in torch.randint(3, 14, (16,), generator=generator)]
    parts = [rows, [row for group in groups for row in group[0]]]
    mask_parts = [masks, [mask for group in groups for mask in group[1]]]
    for rows, masks in zip(parts, mask_parts, strict=True):
        packed = pack_rows(rows, masks, bin_length=256)
        assert sum(micro.num_packed_tokens for micro in packed) <= 1.05 * _num_distinct(rows, masks)


@pytest.mark.parametrize("num_samples", [1, 16])
def test_the_work_of_packing_grows_with_the_rows_and_not_with_their_square(num_samples, monkeypatch) -> None:
    """Counted, not timed: how often a piece is put into a bin."""
    num_put = [0]
    add = Bin.add

    def counted(held: Bin, piece: Piece) -> None:
        num_put[0] += 1
        add(held, piece)

    monkeypatch.setattr(Bin, "add", counted)
    counts = []
    for num_rows in (64, 256, 1024):
        num_put[0] = 0
        # 130 to 230 tokens, in groups with a prompt that is half of them.
        lengths = [130 + 37 * (index // num_samples) % 101 for index in range(num_rows)]
        shared = [lengths[index] // 2 if index % num_samples else 0 for index in range(num_rows)]
        arrange(lengths, shared, token_budget=8192, attention_length=3000.0)
        counts.append(num_put[0])
    assert counts[2] <= 5 * counts[1] <= 25 * counts[0] and counts[2] < 100 * 1024


@pytest.mark.parametrize(
    ("rows", "masks", "arguments", "named"),
    [
        ([[1]], [], {}, "one entry per row"),
        ([[]], [[]], {}, "not empty"),
        ([[1, 2]], [[True]], {}, "shape of its row"),
        ([[1]], [[True]], {"token_budget": 0}, "token_budget"),
        ([[1]], [[True]], {"bin_length": 0}, "bin_length"),
        ([[1]], [[True]], {"attention_length": 0.0}, "attention_length"),
    ],
)
def test_bad_arguments_are_named(rows: list, masks: list, arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        pack_rows(
            [torch.tensor(row, dtype=torch.int64) for row in rows],
            [torch.tensor(mask, dtype=torch.bool) for mask in masks],
            **arguments,
        )


def test_nothing_to_score_gives_no_micro_batch() -> None:
    assert pack_rows([], []) == []
    assert pack_rows([torch.tensor([1, 2])], [torch.tensor([True, False])]) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bool])
def test_ids_that_are_no_whole_numbers_are_refused(dtype: torch.dtype) -> None:
    """A batch that is converted as a whole has rounded ids: 9690 is 9688 in float16."""
    with pytest.raises(TypeError, match=r"token_ids\[1\] must be whole numbers"):
        pack_rows([torch.tensor([1, 2]), torch.tensor([1, 9690]).to(dtype)], [torch.tensor([True, True])] * 2)

"""Packing of ragged rows without padding, with shared prefixes computed once.

A causal decoder gives a token the same hidden state in every row that has the same tokens before it. Rows with a
common prefix (samples of one prompt, branches of one conversation) are therefore laid out as token tries. Nodes are
numbered in preorder, so that the attention mask is two comparisons: node `i` attends to node `j` if
and only if `j <= i < subtree_end[j]`, which means that `j` is on the path from the root to `i`.

Three rows, with scored tokens in brackets, make two tries in one bin:

    rows            1 2 3 [7]     1 2 4 [5] [8]     6 [9]

    tries           1 - 2 - 3             6
                        |
                        4 - 5

    node            0  1  2  3  4  5
    input_ids       1  2  3  4  5  6      7, 8 and 9 predict nothing and are not computed
    position_ids    0  1  2  2  3  0      depth in the trie, which is the position in the row
    subtree_end     5  5  3  5  5  6      node 3 attends to 0, 1 and itself; the subtree of 2 ends at 3

    predictors      2  3  4  5            the last node before each scored token
    targets         7  5  8  9
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from llmrl._utils.arguments import check_least, check_positive
from llmrl.data.routed_experts import unknown_experts
from llmrl.data.sampling_mask import SamplingMask
from llmrl.trainer.packing.bins import MicroBatch, arrange

_SHORTEST_SHARE = 0.75
DEFAULT_TOKEN_BUDGET = 8192


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A micro-batch: bins of equal length with token tries. Position `p` is `input_ids.flatten()[p]`.

    At least one token is scored.
    """

    input_ids: torch.Tensor
    """[num_bins, bin_length] int64."""
    position_ids: torch.Tensor
    """[num_bins, bin_length] int64: position of the token in its own row."""
    subtree_end: torch.Tensor
    """[num_bins, bin_length] int64: one past the last node of the bin that attends to this node."""
    predictors: torch.Tensor
    """[num_scored] int64: flat position that predicts the scored token; ascending."""
    targets: torch.Tensor
    """[num_scored] int64: id of the scored token."""
    row_index: torch.Tensor
    """[num_scored] int64: row of the scored token, in the order given to `pack_rows`."""
    token_index: torch.Tensor
    """[num_scored] int64: index of the scored token within its row."""
    rows: torch.Tensor
    """[num_rows] int64: indices of the rows in this micro-batch, in the order of `token_positions`."""
    row_lengths: torch.Tensor
    """[num_rows] int64: number of computed tokens of each row; those after its last predictor are not computed."""
    token_positions: torch.Tensor
    """[num_row_tokens] int64: flat positions of the rows' computed tokens, row after row."""
    sequence_bounds: torch.Tensor | None = None
    """[num_sequences + 1] int32: flat bounds of independent sequences, each with plain causal attention; None if rows
    branch."""
    longest_sequence: int = 0
    """Largest number of tokens between two bounds; 0 without bounds."""
    sampling_mask: SamplingMask | None = None
    """Ids kept by truncation at the scored tokens; None if no token was sampled from a truncated distribution."""
    routed_experts: torch.Tensor | None = None
    """[num_bins * bin_length, num_layers, top_k] int16: experts at each position, -1 if the router chooses; None if the
    router always chooses."""

    @property
    def num_packed_tokens(self) -> int:
        """Number of computed tokens, including padding."""
        return self.input_ids.numel()

    def attention_mask(self, *, window: int | None = None) -> torch.Tensor:
        """Return the mask, [num_bins, 1, num_queries, num_keys] bool; `window` counts the query's own token."""
        index = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        mask = (index[:, None] >= index[None, :]) & (index[:, None] < self.subtree_end[:, None, :])
        if window is not None:
            mask &= self.position_ids[:, :, None] - self.position_ids[:, None, :] < window
        return mask[:, None]

    def to(self, device: torch.device | str) -> PackedRows:
        """Return a copy on `device`."""
        parts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if hasattr(part, "to")})


def pack_rows(
    token_ids: Sequence[torch.Tensor],
    scored_masks: Sequence[torch.Tensor],
    *,
    token_budget: int = DEFAULT_TOKEN_BUDGET,
    bin_length: int | None = None,
    attention_length: float = math.inf,
    share_prefixes: bool = True,
    one_row_per_bin: bool = False,
    routed_experts: Sequence[torch.Tensor] | None = None,
) -> list[PackedRows]:
    """Lay out ragged rows as micro-batches of at most `token_budget` computed tokens.

    A row longer than the budget gets a micro-batch of its own. The first token of a row is never scored. Tokens after
    a row's last predictor are not computed, and rows without scored tokens are left out.

    Args:
        token_ids: `[num_tokens]` int64 per row.
        scored_masks: `[num_tokens]` bool per row.
        token_budget: number of computed tokens per micro-batch, including padding.
        bin_length: number of tokens per bin; longer rows get a longer bin. Longer bins share more,
            but their attention costs more; None chooses the cheapest of several lengths.
        attention_length: bin length at which attention costs as much as the rest of the model.
        share_prefixes: whether to share prefixes; False lays out every row separately, for comparison.
        one_row_per_bin: whether each bin has one row, which needs no mask; for models that are not exact otherwise.
            Rows of similar length are padded together, by at most a third of their tokens.
        routed_experts: `[num_tokens, num_layers, top_k]` int16 per row; tokens with different experts are not shared.

    Raises ValueError if the two lists differ in length, a row is empty, or a budget is not positive,
    and TypeError if ids are not whole numbers.

    Example:
        >>> a, b = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
        >>> scored = torch.tensor([False, False, True])
        >>> (packed,) = pack_rows([a, b], [scored, scored])
        >>> packed.input_ids.tolist(), packed.position_ids.tolist()
        ([[1, 2]], [[0, 1]])
        >>> packed.predictors.tolist(), packed.targets.tolist()
        ([1, 1], [3, 4])
        >>> apart = pack_rows([a, b[1:]], [scored, scored[1:]])[0]
        >>> apart.input_ids.tolist(), apart.sequence_bounds.tolist()
        ([[1, 2, 2]], [0, 2, 3])
    """
    _check(token_ids, scored_masks, token_budget, bin_length, attention_length)
    if not token_ids:
        return []
    shortest_share = 0.0
    if one_row_per_bin:
        # With a bin length of 1, every row fills a bin of its own.
        bin_length = 1
        share_prefixes = False
        shortest_share = _SHORTEST_SHARE
    whole = [np.ascontiguousarray(ids.detach().cpu().numpy(), dtype=np.int64) for ids in token_ids]
    scored = [mask.detach().cpu().numpy().astype(bool) for mask in scored_masks]
    for mask in scored:
        mask[0] = False
    num_computed = [int(np.flatnonzero(mask).max(initial=0)) for mask in scored]
    order = [index for index, num in enumerate(num_computed) if num]
    if not order:
        return []
    rows = [row[:num] for row, num in zip(whole, num_computed, strict=True)]
    alike = rows
    experts = None
    if routed_experts is not None:
        experts = [one[:num].cpu().numpy() for one, num in zip(routed_experts, num_computed, strict=True)]
        alike = _numbered(rows, experts)
    # Any total order of tokens groups shared prefixes; the order of raw bytes is the cheapest.
    order.sort(key=[row.tobytes() for row in alike].__getitem__)
    # A sorted row shares the most with its neighbour, so one number per row describes all tries.
    #     1 2 3   1 2 4 5   6    ->   shared = [0, 2, 0]
    shared = [0] * len(order)
    if share_prefixes:
        for place in range(1, len(order)):
            shared[place] = shared_length(alike[order[place - 1]], alike[order[place]])
    lengths = [len(rows[index]) for index in order]
    micro_batches = arrange(
        lengths,
        shared,
        token_budget=token_budget,
        bin_length=bin_length,
        attention_length=attention_length,
        shortest_share=shortest_share,
    )
    packed = [_packed(*_lay_out(bins, order, shared, rows), whole, scored) for bins in micro_batches]
    if experts is not None:
        packed = [_with_experts(one, experts) for one in packed]
    return [one.to(token_ids[0].device) for one in packed]


def _check(
    token_ids: Sequence[torch.Tensor],
    scored_masks: Sequence[torch.Tensor],
    token_budget: int,
    bin_length: int | None,
    attention_length: float,
) -> None:
    if len(token_ids) != len(scored_masks):
        raise ValueError(
            f"token_ids and scored_masks must have one entry per row, got {len(token_ids)} and {len(scored_masks)}."
        )
    check_least(1, token_budget=token_budget, bin_length=bin_length)
    check_positive(attention_length=attention_length)
    for index, (ids, mask) in enumerate(zip(token_ids, scored_masks, strict=True)):
        if ids.ndim != 1 or not ids.numel():
            raise ValueError(f"token_ids[{index}] must be [num_tokens] and not empty, got shape {tuple(ids.shape)}.")
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise TypeError(
                f"token_ids[{index}] must be whole numbers, got {ids.dtype}, which rounds large ids: "
                "convert the columns of a batch that need another type, not the whole batch."
            )
        if ids.shape != mask.shape:
            raise ValueError(
                f"scored_masks[{index}] must have the shape of its row, {tuple(ids.shape)}, got {tuple(mask.shape)}."
            )


def shared_length(left: np.ndarray, right: np.ndarray) -> int:
    """Return the length of the common prefix of two arrays, neither of them empty."""
    num = min(len(left), len(right))
    differs = left[:num] != right[:num]
    first = int(differs.argmax())
    return first if differs[first] else num


def _numbered(rows: list[np.ndarray], experts: list[np.ndarray]) -> list[np.ndarray]:
    """Return a number per token; tokens with the same id and experts have the same number."""
    ids = np.concatenate(rows)[:, None].view(np.int16)
    told = np.concatenate([ids, np.concatenate(experts).reshape(len(ids), -1)], 1)
    _, numbers = np.unique(told.view(np.dtype((np.void, told.strides[0]))).ravel(), return_inverse=True)
    return np.split(numbers, np.cumsum([len(row) for row in rows])[:-1])


def _with_experts(packed: PackedRows, experts: list[np.ndarray]) -> PackedRows:
    told = torch.from_numpy(np.concatenate([experts[row] for row in packed.rows.tolist()]))
    column = unknown_experts(packed.num_packed_tokens, told.shape[1:])
    column[packed.token_positions] = told
    return replace(packed, routed_experts=column)


def _lay_out(
    bins: MicroBatch, order: list[int], shared: list[int], rows: list[np.ndarray]
) -> tuple[dict[str, np.ndarray], list[int], list[np.ndarray]]:
    """Return the columns of the nodes, the indices of the rows in these bins, and the nodes of each of these rows."""
    # Sorted rows write a trie depth first without building it. `path` holds the nodes of the current row. The next
    # row shares the first `num_shared` nodes of `path`; the subtrees of the other nodes end here.
    #     path of 1 2 3: [0, 1, 2];   1 2 4 5 shares 2:   subtree_end[2] = 3,   path: [0, 1, 3, 4]
    length = bins[0].num_nodes
    size = len(bins) * length
    input_ids = np.zeros(size, dtype=np.int64)
    position_ids = np.zeros(size, dtype=np.int64)
    # Padding attends only to itself, which avoids an empty softmax, and no other token attends to it.
    subtree_end = np.tile(np.arange(1, length + 1), len(bins))
    depths = np.arange(max(len(row) for row in rows))
    held: list[int] = []
    paths: list[np.ndarray] = []
    for bin_index, held_bin in enumerate(bins):
        base = node = bin_index * length
        for piece in held_bin.pieces:
            path = depths[:0]
            for place in range(piece.start, piece.end):
                index = order[place]
                row = rows[index]
                num_shared = 0 if place == piece.start else shared[place]
                subtree_end[path[num_shared:]] = node - base
                num_new = len(row) - num_shared
                input_ids[node : node + num_new] = row[num_shared:]
                position_ids[node : node + num_new] = depths[num_shared : len(row)]
                path = np.concatenate([path[:num_shared], np.arange(node, node + num_new)])
                node += num_new
                held.append(index)
                paths.append(path)
            subtree_end[path] = node - base
    nodes = {"input_ids": input_ids, "position_ids": position_ids, "subtree_end": subtree_end}
    return {name: column.reshape(len(bins), length) for name, column in nodes.items()}, held, paths


def _packed(
    nodes: dict[str, np.ndarray],
    held: list[int],
    paths: list[np.ndarray],
    whole: list[np.ndarray],
    scored: list[np.ndarray],
) -> PackedRows:
    # A shared node predicts for each row that passes through it, so predictors may repeat. All arrays run over the
    # rows' computed tokens, row after row, until `places` picks the predictors, sorted by position.
    lengths = np.asarray([len(path) for path in paths])
    positions = np.concatenate(paths)
    starts = np.cumsum(lengths) - lengths
    computed = list(zip(held, lengths.tolist(), strict=True))
    # A computed token is a predictor if the row's next token is scored.
    places = np.flatnonzero(np.concatenate([scored[index][1 : num + 1] for index, num in computed]))
    next_ids = np.concatenate([whole[index][1 : num + 1] for index, num in computed])
    places = places[np.argsort(positions[places], kind="stable")]
    row_of_place = np.repeat(np.asarray(held), lengths)
    columns = nodes | {
        "predictors": positions[places],
        "targets": next_ids[places],
        "row_index": row_of_place[places],
        "token_index": places + 1 - np.repeat(starts, lengths)[places],
        "rows": np.asarray(held, dtype=np.int64),
        "row_lengths": lengths,
        "token_positions": positions,
    }
    longest = 0
    bounds = _sequence_bounds(nodes["position_ids"].ravel(), positions)
    if bounds is not None:
        columns["sequence_bounds"] = bounds
        longest = int(np.diff(bounds).max())
    tensors: dict[str, Any] = {name: torch.from_numpy(column) for name, column in columns.items()}
    return PackedRows(**tensors, longest_sequence=longest)


def _sequence_bounds(depth: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
    """Return `PackedRows.sequence_bounds`; computed on the host to avoid a device synchronisation."""
    if ((depth[1:] != depth[:-1] + 1) & (depth[1:] != 0)).any():
        return None
    is_padding = np.ones(len(depth), dtype=bool)
    is_padding[positions] = False
    is_first = depth == 0
    is_first[1:] &= ~(is_padding[1:] & is_padding[:-1])  # a run of padding is one sequence
    return np.append(np.flatnonzero(is_first), len(depth)).astype(np.int32)

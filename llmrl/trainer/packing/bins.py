"""Assignment of rows to micro-batches, in O(n log n).

Tries are cut into pieces, pieces fill bins, and bins fill micro-batches:

    rows, sorted     a b | c | d e f g            `|` where nothing is shared: three tries
    pieces           a b | c | d e | f g          a trie over the limit is cut; its second piece repeats `f`'s prefix
    bins             [a b, c] [d e] [f g]         of at most `bin_length` nodes; attention stays within a bin
    micro-batches    [[a b, c], [d e]] [[f g]]    of at most `token_budget` nodes, bins padded to the longest
"""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

SHORT_BIN_LENGTH = 256
"""Minimum bin length; at this length, attention is cheap compared with the rest of any model."""
_FULL = 1.01
"""Ratio of computed to distinct tokens below which the search stops."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `end` of the sorted order, as one trie."""

    start: int
    end: int
    num_nodes: int


@dataclass(slots=True)
class Bin:
    """Pieces computed as one sequence."""

    pieces: list[Piece] = field(default_factory=list)
    num_nodes: int = 0

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        self.pieces.append(piece)
        self.num_nodes += piece.num_nodes


MicroBatch = list[Bin]
"""List of bins, the longest first."""


def arrange(
    lengths: Sequence[int],
    shared: Sequence[int],
    *,
    token_budget: int,
    bin_length: int | None = None,
    attention_length: float = math.inf,
    shortest_share: float = 0.0,
) -> list[MicroBatch]:
    """Return the cheapest micro-batches found; the cost counts computed tokens, padding and attention in each bin.

    Args:
        lengths: number of tokens of each row; rows are sorted by their tokens.
        shared: number of tokens that each row shares with the previous one.
        token_budget: number of computed tokens per micro-batch; a longer row is a micro-batch of its own.
        bin_length: number of tokens per bin; None tries several, up to the largest trie, and uses the cheapest.
        attention_length: bin length at which attention costs as much as the rest of the model.
        shortest_share: minimum length of a micro-batch's shortest bin, as a fraction of its longest.

    Example:
        >>> [[[piece]]] = [[b.pieces for b in bins] for bins in arrange([5, 5, 5], [0, 4, 4], token_budget=100)]
        >>> piece
        Piece(start=0, end=3, num_nodes=7)
    """
    best: list[MicroBatch] = []
    lowest = math.inf
    tries = _Tries(lengths, shared)
    if bin_length is not None:
        candidates = [min(bin_length, token_budget)]
    else:
        candidates = _candidates(tries, token_budget)
        if math.isinf(attention_length):  # attention costs nothing: use the longest
            candidates = candidates[-1:]
    for length in candidates:
        is_full = False
        for bins in _fillings(tries, length):
            micro_batches = _split_evenly(bins, token_budget, shortest_share)
            sizes = [(len(held) * held[0].num_nodes, held[0].num_nodes) for held in micro_batches]
            cost = sum(num_tokens * (1 + longest / attention_length) for num_tokens, longest in sizes)
            if cost < lowest:
                best = micro_batches
                lowest = cost
            if is_full := sum(num_tokens for num_tokens, _ in sizes) <= _FULL * tries.num_nodes:
                break
        if is_full:  # longer bins would share no more
            break
    return best


def _candidates(tries: _Tries, token_budget: int) -> list[int]:
    """Return bin lengths from that of the longest row to that of the largest trie, each twice the previous one."""
    lengths = [min(max(SHORT_BIN_LENGTH, tries.longest_row), token_budget)]
    longest = min(max(lengths[0], tries.largest), token_budget)
    while 2 * lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return sorted({*lengths, longest})


class _Tries:
    """Sorted rows as tries, divided where neighbours share nothing."""

    def __init__(self, lengths: Sequence[int], shared: Sequence[int]) -> None:
        num_rows = len(lengths)
        self.longest_row = max(lengths)
        self._shares = np.append(np.asarray(shared), 0)
        self._totals = np.concatenate([[0], np.cumsum(np.asarray(lengths) - self._shares[:-1])])
        # A cut before a row costs its shared tokens, which the next piece repeats. The best cut maximises the number
        # of nodes before it minus those repeated. For the rows 1 2 3, 1 2 4 5 and 1 2 4 5 6:
        #     lengths  3  4  5        totals  0  3  5  6    (before each row, and at the end)
        #     shared   0  2  4        gains   0  1  1  6
        self._gains = self._totals - self._shares
        self.num_nodes = int(self._totals[-1])
        roots = [*np.flatnonzero(self._shares[:num_rows] == 0).tolist(), num_rows]
        self._wholes = [Piece(a, b, int(self._totals[b] - self._totals[a])) for a, b in pairwise(roots)]
        self.largest = max(piece.num_nodes for piece in self._wholes)

    def cut(self, limit: int) -> list[Piece]:
        """Cut into pieces of at most `limit` nodes, or of one row, with large pieces and few repeated nodes."""
        pieces: list[Piece] = []
        for whole in self._wholes:
            if whole.num_nodes <= limit:
                pieces.append(whole)
                continue
            start = whole.start
            while start < whole.end:
                before = self._totals[start] - self._shares[start]
                last = int(np.searchsorted(self._totals, before + limit, side="right")) - 1
                last = min(max(last, start + 1), whole.end)
                end = start + 1 + int(self._gains[start + 1 : last + 1].argmax())
                pieces.append(Piece(start, end, int(self._totals[end] - before)))
                start = end
        return pieces


def _fillings(tries: _Tries, bin_length: int) -> Iterator[list[Bin]]:
    """Yield ways to fill bins: a binary search for the smallest limit on pieces that does not need more bins.

    Smaller pieces fill bins more evenly and need less padding.
    """
    low = max(1, bin_length // 2)
    high = bin_length
    grain = bin_length // 32
    limit = bin_length
    most = math.inf
    while True:
        fewest = math.inf
        for bins in _fill_bins(tries.cut(limit), bin_length):
            fewest = min(fewest, len(bins))
            yield bins
        if limit == bin_length:
            most = fewest
        elif fewest <= most:
            high = limit
        else:
            low = limit + 1
        if high - low <= grain:
            return
        limit = (low + high) // 2


def _fill_bins(pieces: list[Piece], bin_length: int) -> Iterator[list[Bin]]:
    """Yield bins filled by best fit, and evenly filled ones of similar number; a longer piece gets its own bin."""
    pieces = sorted(pieces, key=lambda piece: -piece.num_nodes)
    num_long = sum(piece.num_nodes > bin_length for piece in pieces)
    long_bins = _fill_evenly(pieces[:num_long], num_long)
    short = pieces[num_long:]
    by_best_fit = _best_fit(short, bin_length)
    yield long_bins + by_best_fit
    lower_bound = -(-sum(piece.num_nodes for piece in short) // bin_length)
    for num_bins in sorted({lower_bound, len(by_best_fit), len(by_best_fit) + 1}):
        even = _fill_evenly(short, num_bins)
        if all(held.num_nodes <= bin_length for held in even):
            yield long_bins + even


def _best_fit(pieces: list[Piece], bin_length: int) -> list[Bin]:
    """Put each piece, longest first, into the fullest bin with room for it (at most 11/9 of the optimal number)."""
    bins: list[Bin] = []
    free: list[tuple[int, int]] = []  # sorted pairs of free nodes and bin index
    for piece in pieces:
        place = bisect_left(free, (piece.num_nodes, -1))
        if place == len(free):
            left = bin_length
            index = len(bins)
            bins.append(Bin())
        else:
            left, index = free.pop(place)
        bins[index].add(piece)
        insort(free, (left - piece.num_nodes, index))
    return bins


def _fill_evenly(pieces: list[Piece], num_bins: int) -> list[Bin]:
    bins = [Bin() for _ in range(num_bins)]
    loads = [(0, index) for index in range(num_bins)]
    for piece in pieces:
        load, index = loads[0]
        heapq.heapreplace(loads, (load + piece.num_nodes, index))
        bins[index].add(piece)
    return [held for held in bins if held.pieces]


def _split_evenly(bins: list[Bin], token_budget: int, shortest_share: float) -> list[MicroBatch]:
    """Split bins into as few micro-batches as the budget allows, of similar size, with bins of similar length."""
    bins = sorted(bins, key=lambda held: -held.num_nodes)
    lengths = [held.num_nodes for held in bins]
    best = _ends(lengths, token_budget, shortest_share)
    low = 1
    high = token_budget
    while low < high:
        middle = (low + high) // 2
        ends = _ends(lengths, middle, shortest_share)
        if len(ends) <= len(best):
            best = ends
            high = middle
        else:
            low = middle + 1
    return [bins[start:end] for start, end in pairwise([0, *best])]


def _ends(lengths: list[int], token_budget: int, shortest_share: float) -> list[int]:
    """Return the end of each micro-batch of bins, longest bin first, so that each fits the budget with padding."""
    ends: list[int] = []
    start = 0
    while start < len(lengths):
        num_alike = bisect_right(lengths, -shortest_share * lengths[start], key=operator.neg)
        start = min(start + max(1, token_budget // lengths[start]), num_alike)
        ends.append(start)
    return ends

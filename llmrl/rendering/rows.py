"""The training rows of turns: one, or several where history was rewritten, or where conversations branch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmrl.data import TokenColumns
from llmrl.rendering.turn import TurnNode


@dataclass(frozen=True, slots=True)
class Row:
    """One training row of a rollout."""

    columns: TokenColumns
    """Token ids, loss mask, log-probs and versions, [num_tokens] each."""
    row_index: int
    """Place among the rows of the rollout that are kept."""
    turn_span: tuple[int, int]
    """First turn and one past the last turn with completions in this row."""
    turn_starts: dict[int, int]
    """Of each turn in this row, by its place in the rollout (of a tree, in the order of its rows): where its completion
    begins."""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The rows of a rollout and how they came about."""

    rows: list[Row]
    """Rows with something to train, in order."""
    counts: dict[str, int]
    """`num_clean_turns`, `num_realigned_turns`, `num_forked_turns` (the first turn is none of them),
    `num_realigned_tokens` (sampled tokens that a realign turned into context) and `num_dropped_rows` (rows left
    without a token to train)."""


def reconcile(leaves: Sequence[TurnNode]) -> Reconciliation:
    """Return the training rows of a tree of turns, given by its leaves: path after path, each token trained once.

    A turn that several leaves share is trained by the first row that holds it; later rows hold it as context. Where
    the first row lost the tail of an answer to a realign, a later row that still holds the tail trains it.

    Example:
        >>> root = TurnNode(None, 0, [1], [2], [-0.1], [0])
        >>> leaves = [TurnNode(root, 2, [9], [token], [-0.2], [0]) for token in (3, 4)]
        >>> for row in reconcile(leaves).rows:
        ...     print(row.columns.token_ids, row.columns.loss_mask)
        [1, 2, 9, 3] [False, True, False, True]
        [1, 2, 9, 4] [False, False, False, True]
    """
    num_trained: dict[int, int] = {}
    places: dict[int, int] = {}
    rows: list[Row] = []
    counts: Counter[str] = Counter(num_dropped_rows=0)
    counts.update(count_turns(leaves))
    for leaf in leaves:
        first_turn = 0
        for turns in turns_by_row(leaf):
            columns = _columns_of(turns)
            starts = {}
            for turn, num_left in turns:
                num_before = num_trained.get(id(turn), 0)
                start = turn.num_kept_tokens + turn.num_context_tokens
                starts[places.setdefault(id(turn), len(places))] = start
                columns.mark_context(start, start + min(num_before, num_left))
                num_trained[id(turn)] = max(num_before, num_left)
            span = (first_turn, first_turn + len(turns))
            first_turn = span[1]
            if any(columns.loss_mask):
                rows.append(Row(columns, len(rows), span, starts))
            else:
                counts["num_dropped_rows"] += 1
    return Reconciliation(rows, dict(counts))


def count_turns(leaves: Sequence[TurnNode]) -> dict[str, int]:
    """Return how the rows of a tree came about: the counts of its reconciliation, without making its rows."""
    counts = {"num_clean_turns": 0, "num_realigned_turns": 0, "num_forked_turns": 0, "num_realigned_tokens": 0}
    seen: set[int] = set()
    for leaf in leaves:
        for turn in leaf.ancestors():
            if id(turn) in seen:
                break
            seen.add(id(turn))
            if turn.parent is not None:
                counts[f"num_{turn.kind}_turns"] += 1
            if turn.parent is not None and turn.kind == "realigned":
                counts["num_realigned_tokens"] += turn.parent.num_tokens - turn.num_kept_tokens
    return counts


def open_row(leaf: TurnNode) -> TokenColumns:
    """Return the row that the next turn meets."""
    *_, turns = turns_by_row(leaf)
    return _columns_of(turns)


def _columns_of(turns: Sequence[tuple[TurnNode, int]]) -> TokenColumns:
    first = turns[0][0]
    columns = TokenColumns() if first.parent is None else first.parent.prefix(first.num_kept_tokens)
    columns.mark_context(0, len(columns))
    for turn, num_left in turns:
        columns.extend(turn.columns(num_left))
    return columns


def turns_by_row(leaf: TurnNode) -> Iterator[list[tuple[TurnNode, int]]]:
    """Yield for each row of a path its turns, each with the number of its sampled tokens that a realign left there."""
    row: list[tuple[TurnNode, int]] = []
    for turn in leaf.path():
        if turn.kind == "forked":
            yield row
            row = []
        elif turn.kind == "realigned":
            last, _ = row[-1]
            row[-1] = (last, turn.num_kept_tokens - last.num_kept_tokens - last.num_context_tokens)
        row.append((turn, turn.num_completion_tokens))
    yield row

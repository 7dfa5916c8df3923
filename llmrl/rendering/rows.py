"""Training rows of turns; rewritten histories and branches create several rows."""

from __future__ import annotations

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
    """Index among the kept rows of the rollout."""
    turn_span: tuple[int, int]
    """Index of the first turn with a completion in this row, and one past that of the last turn."""
    turn_starts: dict[int, int]
    """Position of each completion's first token in this row, by turn index in the rollout (in row order for a tree)."""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Rows of a rollout and counts of their origins."""

    rows: list[Row]
    """Rows that have trained tokens, in order."""
    counts: dict[str, int]
    """`num_clean_turns`, `num_realigned_turns`, `num_forked_turns` (all without the first turn), `num_realigned_tokens`
    (sampled tokens that a realign turned into context) and `num_dropped_rows` (rows without trained tokens).
    """


def reconcile(leaves: Sequence[TurnNode]) -> Reconciliation:
    """Return the training rows of a tree of turns, given its leaves; each sampled token is trained once.

    A turn that several leaves share is trained in the first row that contains it and is context in later rows. If a
    realign removed the end of an answer from the first row, it is trained in a later row that still contains it.

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
    counts = {"num_dropped_rows": 0, **count_turns(leaves)}
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
    return Reconciliation(rows, counts)


def count_turns(leaves: Sequence[TurnNode]) -> dict[str, int]:
    """Return the counts of a tree's reconciliation without building rows."""
    counts = {"num_clean_turns": 0, "num_realigned_turns": 0, "num_forked_turns": 0, "num_realigned_tokens": 0}
    seen: set[int] = set()
    for leaf in leaves:
        for turn in leaf.ancestors():
            if id(turn) in seen:
                break
            seen.add(id(turn))
            if turn.parent is None:
                continue
            counts[f"num_{turn.kind}_turns"] += 1
            if turn.kind == "realigned":
                counts["num_realigned_tokens"] += turn.parent.num_tokens - turn.num_kept_tokens
    return counts


def open_row(leaf: TurnNode) -> TokenColumns:
    """Return the row that the next turn continues."""
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
    """Yield the turns of each row of a path, each with the number of its sampled tokens that remain after a realign."""
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

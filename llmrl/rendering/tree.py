"""Turns as a tree: branches share their prefix, every token is stored once and trained once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmrl.data import TokenColumns
from llmrl.rendering.reconciler import DEFAULT_FORK_THRESHOLD_TOKENS, Reconciliation, Row, RowBuilder


class TurnNode:
    """One turn, stored as what it adds to its parent; immutable.

    Its prompt is the first `num_kept_tokens` of its parent's tokens, then `context_ids`. Branches are nodes with the
    same parent: best-of-n from the middle, sub-agents, compaction (which keeps little), siblings of one prompt.

    Raises:
        ValueError: when log-probs or versions are missing or not one a completion token, or when more tokens are
            kept than the parent has.

    Example:
        >>> root = TurnNode(None, 0, [1, 2], [3], [-0.1], [0])
        >>> left, right = (TurnNode(root, 3, [9], [token], [-0.2], [0]) for token in (4, 5))
        >>> left.token_ids(), right.token_ids()
        ([1, 2, 3, 9, 4], [1, 2, 3, 9, 5])
    """

    __slots__ = ("_columns", "_start", "num_completion_tokens", "num_context_tokens", "num_kept_tokens", "parent")

    def __init__(
        self,
        parent: TurnNode | None,
        num_kept_tokens: int,
        context_ids: Sequence[int],
        completion_ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        columns = TokenColumns()
        columns.append_context(context_ids)
        columns.append_completion(completion_ids, log_probs=log_probs, versions=versions)
        self._set(parent, num_kept_tokens, columns, 0, len(context_ids), len(completion_ids))

    def _set(
        self,
        parent: TurnNode | None,
        num_kept_tokens: int,
        columns: TokenColumns,
        start: int,
        num_context_tokens: int,
        num_completion_tokens: int,
    ) -> None:
        num_parent_tokens = 0 if parent is None else parent.num_tokens
        if not 0 <= num_kept_tokens <= num_parent_tokens:
            raise ValueError(f"num_kept_tokens must lie in 0..{num_parent_tokens}, got {num_kept_tokens}.")
        self.parent, self.num_kept_tokens = parent, num_kept_tokens
        self.num_context_tokens, self.num_completion_tokens = num_context_tokens, num_completion_tokens
        self._columns, self._start = columns, start

    @classmethod
    def over(
        cls,
        parent: TurnNode | None,
        num_kept_tokens: int,
        columns: TokenColumns,
        *,
        start: int,
        num_completion_tokens: int,
    ) -> TurnNode:
        """A node whose tokens are `columns[start:]`, which may grow but not change: nothing is copied."""
        node = cls.__new__(cls)
        node._set(
            parent, num_kept_tokens, columns, start, len(columns) - start - num_completion_tokens, num_completion_tokens
        )
        return node

    def own(self) -> None:
        """Let go of columns that others share, keeping a copy of this turn's tokens alone; nothing else changes."""
        stop = self._start + self.num_context_tokens + self.num_completion_tokens
        self._columns, self._start = self._columns.copy(stop, start=self._start), 0

    def shares(self, columns: TokenColumns) -> bool:
        """Whether this turn's tokens lie in `columns`."""
        return self._columns is columns

    @property
    def num_tokens(self) -> int:
        """Prompt and completion."""
        return self.num_kept_tokens + self.num_context_tokens + self.num_completion_tokens

    @property
    def context_ids(self) -> list[int]:
        """[num_context_tokens] what the prompt adds to what it keeps."""
        return self._columns.token_ids[self._start : self._start + self.num_context_tokens]

    @property
    def completion_ids(self) -> list[int]:
        """[num_completion_tokens] what was sampled."""
        return self._columns.token_ids[self._completion_slice]

    @property
    def log_probs(self) -> list[float]:
        """[num_completion_tokens] the sampler's log-probs."""
        return self._columns.log_probs[self._completion_slice]

    @property
    def versions(self) -> list[int]:
        """[num_completion_tokens] policy versions."""
        return self._columns.versions[self._completion_slice]

    @property
    def _completion_slice(self) -> slice:
        start = self._start + self.num_context_tokens
        return slice(start, start + self.num_completion_tokens)

    def path(self) -> list[TurnNode]:
        """The turns from the root to this one."""
        nodes = list(self.ancestors())
        nodes.reverse()
        return nodes

    def ancestors(self) -> Iterator[TurnNode]:
        """This turn, its parent, and so on to the root."""
        node: TurnNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def token_ids(self) -> list[int]:
        """Prompt and completion, [num_tokens], put together on demand."""
        pieces: list[list[int]] = []
        num_wanted = self.num_tokens
        for node in self.ancestors():
            own = (node.context_ids + node.completion_ids)[: max(0, num_wanted - node.num_kept_tokens)]
            pieces.append(own)
            num_wanted = min(num_wanted, node.num_kept_tokens)
        return [token for piece in reversed(pieces) for token in piece]

    def __reduce__(self) -> tuple[object, ...]:
        # Flat, because a chain of parents pickled one inside the other meets the recursion limit.
        return (_rebuild_path, ([node.record() for node in self.path()],))

    def record(self) -> tuple[int, list[int], list[int], list[float], list[int]]:
        """What the turn adds to its parent, as the arguments after `parent`."""
        return self.num_kept_tokens, self.context_ids, self.completion_ids, self.log_probs, self.versions


def _rebuild_path(records: Sequence[tuple[int, list[int], list[int], list[float], list[int]]]) -> TurnNode:
    node: TurnNode | None = None
    for record in records:
        node = TurnNode(node, *record)
    assert node is not None
    return node


def reconcile_tree(
    leaves: Sequence[TurnNode], *, fork_threshold_tokens: int = DEFAULT_FORK_THRESHOLD_TOKENS
) -> Reconciliation:
    """The training rows of a tree, given by its leaves: one path after the other, each token trained once.

    A turn that several leaves share is trained by the first row that holds it; later rows hold it as context. Where
    the first row lost the tail of an answer to a realign, a later row that still holds the tail trains it.

    Example:
        >>> root = TurnNode(None, 0, [1], [2], [-0.1], [0])
        >>> leaves = [TurnNode(root, 2, [9], [token], [-0.2], [0]) for token in (3, 4)]
        >>> for row in reconcile_tree(leaves).rows:
        ...     print(row.columns.token_ids, row.columns.loss_mask)
        [1, 2, 9, 3] [False, True, False, True]
        [1, 2, 9, 4] [False, False, False, True]
    """
    num_trained: dict[int, int] = {}
    rows: list[Row] = []
    counts: dict[str, int] = {}
    for leaf in leaves:
        path = leaf.path()
        builder = RowBuilder(fork_threshold_tokens=fork_threshold_tokens)
        for node in path:
            kept, context_ids, completion_ids, log_probs, versions = node.record()
            builder.add_turn(kept, context_ids, completion_ids, log_probs=log_probs, versions=versions)
        for columns, segments in zip(builder.rows, builder.segments, strict=True):
            for segment in segments:
                key = id(path[segment.turn_index])
                num_before = min(num_trained.get(key, 0), segment.length)
                columns.mark_context(segment.start, segment.start + num_before)
                num_trained[key] = max(num_trained.get(key, 0), segment.length)
        finished = builder.finish()
        num_before_leaf = len(rows)
        rows.extend(Row(row.columns, num_before_leaf + row.row_index, row.turn_span) for row in finished.rows)
        for name, count in finished.counts.items():
            counts[name] = counts.get(name, 0) + count
    return Reconciliation(rows, counts)

"""Turns as a tree in which branches share their prefix."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from llmrl._utils.arguments import check_choice
from llmrl.data import TokenColumns
from llmrl.data.columns import check_per_token
from llmrl.rendering.reconciler import DEFAULT_FORK_THRESHOLD_TOKENS, ReconciliationKind, classify

if TYPE_CHECKING:
    import numpy as np
    import torch

Column = Literal["token_ids", "loss_mask", "log_probs", "versions"]
COLUMNS: tuple[Column, ...] = get_args(Column)

_MIN_CAPACITY = 256


class TokenBuffer:
    """Append-only columns that successive values of a conversation share; each value uses a prefix of them."""

    __slots__ = ("_mirrors", "columns")

    def __init__(self, columns: TokenColumns) -> None:
        self.columns = columns
        self._mirrors: dict[Column, tuple[torch.Tensor, int]] = {}

    def tensor_view(self, column: Column, length: int) -> torch.Tensor:
        """Return the first `length` entries of a column as a view; raise ValueError for an unknown column."""
        import torch

        check_choice(COLUMNS, column=column)
        values = getattr(self.columns, column)
        dtypes = {"loss_mask": torch.bool, "log_probs": torch.float32}
        buffer, num_written = self._mirrors.get(column, (None, 0))
        if buffer is None or buffer.shape[0] < length:
            # The size doubles, so older buffers that views still use take at most as much memory as the new buffer.
            capacity = max(_MIN_CAPACITY, 2 * length)
            larger = torch.empty(capacity, dtype=dtypes.get(column, torch.int64))
            if buffer is not None:
                larger[:num_written] = buffer[:num_written]
            buffer = larger
        if num_written < length:
            buffer[num_written:length] = torch.tensor(values[num_written:length], dtype=buffer.dtype)
            num_written = length
        self._mirrors[column] = (buffer, num_written)
        return buffer[:length]


class TurnNode:
    """One turn, stored as its difference from its parent; immutable.

    Its prompt is the first `num_kept_tokens` of its parent's tokens, then `context_ids`. Nodes with the same parent
    are branches. Raises ValueError if columns differ in length, or `num_kept_tokens` is too large.

    Example:
        >>> root = TurnNode(None, 0, [1, 2], [3], [-0.1], [0])
        >>> left, right = (TurnNode(root, 3, [9], [token], [-0.2], [0]) for token in (4, 5))
        >>> left.token_ids(), right.token_ids()
        ([1, 2, 3, 9, 4], [1, 2, 3, 9, 5])
    """

    __slots__ = (
        "_start", "fork_threshold_tokens", "num_completion_tokens", "num_context_tokens", "num_kept_tokens", "parent",
        "stored_columns",
    )  # fmt: skip

    def __init__(
        self,
        parent: TurnNode | None,
        num_kept_tokens: int,
        context_ids: Sequence[int],
        completion_ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int],
        fork_threshold_tokens: int = DEFAULT_FORK_THRESHOLD_TOKENS,
        sampling_mask: Sequence[array[int] | None] | None = None,
        routed_experts: Sequence[np.ndarray | None] | None = None,
    ) -> None:
        columns = TokenColumns()
        columns.append_context(context_ids)
        columns.append_completion(completion_ids, log_probs=log_probs, versions=versions, sampling_mask=sampling_mask)
        if routed_experts is not None:  # one entry per context and completion token
            check_per_token(columns.token_ids, routed_experts=routed_experts)
            columns.routed_experts = list(routed_experts)
        self._set(parent, num_kept_tokens, columns, 0, len(completion_ids), fork_threshold_tokens)

    def _set(
        self,
        parent: TurnNode | None,
        num_kept_tokens: int,
        columns: TokenColumns,
        start: int,
        num_completion_tokens: int,
        fork_threshold_tokens: int,
    ) -> None:
        num_parent_tokens = 0 if parent is None else parent.num_tokens
        if not 0 <= num_kept_tokens <= num_parent_tokens:
            raise ValueError(f"num_kept_tokens must lie in 0..{num_parent_tokens}, got {num_kept_tokens}.")
        self.parent = parent
        self.num_kept_tokens = num_kept_tokens
        self.num_context_tokens = len(columns) - start - num_completion_tokens
        self.num_completion_tokens = num_completion_tokens
        self.fork_threshold_tokens = fork_threshold_tokens
        self.stored_columns = columns
        self._start = start

    @classmethod
    def over(
        cls,
        parent: TurnNode | None,
        num_kept_tokens: int,
        columns: TokenColumns,
        *,
        num_completion_tokens: int,
        fork_threshold_tokens: int,
    ) -> TurnNode:
        """Return a node that reads its tokens from the end of `columns` without copying."""
        node = cls.__new__(cls)
        node._set(parent, num_kept_tokens, columns, num_kept_tokens, num_completion_tokens, fork_threshold_tokens)
        return node

    def own(self) -> None:
        """Replace shared columns with a copy of this turn's tokens."""
        self.stored_columns = self.columns()
        self._start = 0

    @property
    def kind(self) -> ReconciliationKind | None:
        """Effect of the turn's prompt on the parent's row; None for the first turn."""
        if self.parent is None:
            return None
        held = self.parent.num_tokens
        answer = self.parent.num_completion_tokens
        return classify(held, self.num_kept_tokens, answer, fork_threshold_tokens=self.fork_threshold_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in prompt and completion."""
        return self.num_kept_tokens + self.num_context_tokens + self.num_completion_tokens

    def columns(self, num_completion_tokens: int | None = None) -> TokenColumns:
        """Return a copy of the turn's context and its completion, or the completion's first tokens."""
        if num_completion_tokens is None:
            num_completion_tokens = self.num_completion_tokens
        end = self._start + self.num_context_tokens + num_completion_tokens
        return self.stored_columns.copy(end, start=self._start)

    @property
    def context_ids(self) -> list[int]:
        """`[num_context_tokens]`: tokens of the prompt after the kept ones."""
        return self.stored_columns.token_ids[self._start : self._start + self.num_context_tokens]

    @property
    def completion_ids(self) -> list[int]:
        """`[num_completion_tokens]`: sampled ids."""
        return self.stored_columns.token_ids[self._completion_slice]

    @property
    def log_probs(self) -> list[float]:
        """`[num_completion_tokens]`: the sampler's log-probs."""
        return self.stored_columns.log_probs[self._completion_slice]

    @property
    def versions(self) -> list[int]:
        """`[num_completion_tokens]`: policy versions."""
        return self.stored_columns.versions[self._completion_slice]

    @property
    def sampling_mask(self) -> list[array[int] | None]:
        """`[num_completion_tokens]`: ids that truncation kept for each sampled token; None if it kept all."""
        return self.stored_columns.sampling_mask[self._completion_slice]

    @property
    def _completion_slice(self) -> slice:
        start = self._start + self.num_context_tokens
        return slice(start, start + self.num_completion_tokens)

    def path(self) -> list[TurnNode]:
        """Return the turns from the root to this one."""
        return list(self.ancestors())[::-1]

    def ancestors(self) -> Iterator[TurnNode]:
        """Yield this turn and its ancestors up to the root."""
        node: TurnNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def token_ids(self) -> list[int]:
        """Return prompt and completion, `[num_tokens]`."""
        return self.prefix(self.num_tokens).token_ids

    def prefix(self, num_tokens: int) -> TokenColumns:
        """Return the first `num_tokens` tokens of the path."""
        pieces: list[TokenColumns] = []
        for node in self.ancestors():
            pieces.append(node.columns().copy(max(0, num_tokens - node.num_kept_tokens)))
            num_tokens = min(num_tokens, node.num_kept_tokens)
        whole = TokenColumns()
        for piece in reversed(pieces):
            whole.extend(piece)
        return whole

    def __reduce__(self) -> tuple[object, ...]:
        # A flat list: pickling nested parents would exceed the recursion limit.
        records = [
            (n.num_kept_tokens, n.context_ids, n.completion_ids, n.log_probs, n.versions, n.fork_threshold_tokens,
             n.sampling_mask, n.columns().routed_experts)
            for n in self.path()
        ]  # fmt: skip
        return _rebuild_path, (records,)


_Record = tuple[
    int, list[int], list[int], list[float], list[int], int, "list[array[int] | None]", "list[np.ndarray | None]"
]


def _rebuild_path(records: Sequence[_Record]) -> TurnNode:
    node: TurnNode | None = None
    for record in records:
        node = TurnNode(node, *record)
    assert node is not None
    return node

"""From turns to training rows: append where the history was kept, realign or fork where it was rewritten.

Pure Python over integer lists: neither a tokenizer nor tensors are needed to test it to the bottom.

Named invariant, checked after every turn, `held_is_prompt_and_completion`: the row being built holds exactly the
prompt that the engine was given and the completion that it sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmrl.data import TokenColumns
from llmrl.rendering.turn import Turn

DEFAULT_FORK_THRESHOLD_TOKENS = 64
# A realign is for a wobble at the end of an answer: where it would take more than this of one, the row forks.
_MAX_REALIGNED_SHARE = 0.5

ReconciliationKind = Literal["clean", "realigned", "forked"]


@dataclass(frozen=True, slots=True)
class Row:
    """One training row of a rollout."""

    columns: TokenColumns
    """Token ids, loss mask, log-probs and versions, [num_tokens] each."""
    row_index: int
    """Place among the rows of the rollout that are kept."""
    turn_span: tuple[int, int]
    """First turn and one past the last turn whose completions this row holds."""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The rows of a rollout and how they came about."""

    rows: list[Row]
    """Rows with something to train, in order."""
    counts: dict[str, int]
    """`num_clean_turns`, `num_realigned_turns`, `num_forked_turns` (the first turn is none of them),
    `num_realigned_tokens` (sampled tokens that a realign turned into context) and `num_dropped_rows` (rows left
    without a token to train)."""

    @property
    def is_trainable(self) -> bool:
        """Whether any row is left; a rollout without one leaves the baseline too."""
        return bool(self.rows)


def reconcile(turns: Sequence[Turn], *, fork_threshold_tokens: int = DEFAULT_FORK_THRESHOLD_TOKENS) -> Reconciliation:
    """Build the training rows of one rollout from what the engine was given and what it sampled, turn by turn.

    For each turn, k is the number of tokens that its prompt shares with the row held so far, and drift what the row
    holds beyond k.

    - clean, drift 0: the rest of the prompt is appended as context;
    - realign, k within the last answer, drift below the threshold and at most half of that answer: the tail is
      overwritten as context; what stands before k keeps its mask and log-probs;
    - fork, otherwise: a new row that holds the new prompt as context, and the row before keeps all that it trains.

    Args:
        turns: in order.
        fork_threshold_tokens: drift from which a rewritten last answer forks instead of losing its tail.

    Raises:
        ValueError: when the threshold is negative.

    Example:
        >>> first = Turn((1, 2), (3, 4), (-0.1, -0.2), (0, 0))
        >>> second = Turn((1, 2, 3, 4, 9), (5,), (-0.3,), (0,))
        >>> result = reconcile([first, second])
        >>> result.rows[0].columns.token_ids, result.rows[0].columns.loss_mask
        ([1, 2, 3, 4, 9, 5], [False, False, True, True, False, True])
        >>> result.counts["num_clean_turns"], result.counts["num_forked_turns"]
        (1, 0)
    """
    builder = RowBuilder(fork_threshold_tokens=fork_threshold_tokens)
    for turn in turns:
        prompt_ids = list(turn.prompt_ids)
        num_kept = common_prefix_length(builder.held.token_ids, prompt_ids)
        builder.add_turn(
            num_kept, prompt_ids[num_kept:], turn.completion_ids, log_probs=turn.log_probs, versions=turn.versions
        )
        held = builder.held.token_ids
        num_prompt = len(prompt_ids)
        if held[:num_prompt] != prompt_ids or held[num_prompt:] != list(turn.completion_ids):
            raise AssertionError("held_is_prompt_and_completion is broken: the row is not what the engine saw.")
    return builder.finish()


def classify(num_held: int, num_kept: int, num_answer: int, *, fork_threshold_tokens: int) -> ReconciliationKind:
    """What a prompt that keeps the first `num_kept` of `num_held` tokens means for the row.

    `num_answer` is the length of the answer at the end of the held tokens.

    Example:
        >>> classify(10, 10, 4, fork_threshold_tokens=3), classify(10, 8, 4, fork_threshold_tokens=3)
        ('clean', 'realigned')
        >>> classify(10, 7, 8, fork_threshold_tokens=3), classify(10, 7, 4, fork_threshold_tokens=99)
        ('forked', 'forked')
    """
    drift = num_held - num_kept
    if drift == 0:
        return "clean"
    is_wobble = drift <= _MAX_REALIGNED_SHARE * num_answer
    return "realigned" if is_wobble and drift < fork_threshold_tokens else "forked"


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix, by comparing slices at C speed.

    Example:
        >>> common_prefix_length([1, 2, 3, 4], [1, 2, 9])
        2
    """
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high - 1:  # left[:low] agrees, left[:high] does not
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True)
class _Segment:
    """Where the sampled tokens of a turn lie in a row, as far as the row still trains them."""

    turn_index: int
    start: int
    length: int


class RowBuilder:
    """Builds rows turn by turn, from how much of the held row each turn keeps.

    Raises:
        ValueError: when the threshold is negative.
    """

    def __init__(self, *, fork_threshold_tokens: int = DEFAULT_FORK_THRESHOLD_TOKENS) -> None:
        if fork_threshold_tokens < 0:
            raise ValueError(f"fork_threshold_tokens must be at least 0 (0 always forks), got {fork_threshold_tokens}.")
        self.fork_threshold_tokens = fork_threshold_tokens
        self.rows: list[TokenColumns] = []
        self.segments: list[list[_Segment]] = []
        self.num_turns = 0
        self.counts = {
            "num_clean_turns": 0,
            "num_realigned_turns": 0,
            "num_forked_turns": 0,
            "num_realigned_tokens": 0,
            "num_dropped_rows": 0,
        }

    @property
    def held(self) -> TokenColumns:
        """The row that the next turn meets; empty before the first."""
        return self.rows[-1] if self.rows else TokenColumns()

    def add_turn(
        self,
        num_kept: int,
        context_ids: Sequence[int],
        completion_ids: Sequence[int],
        *,
        log_probs: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        """Add a turn whose prompt is the first `num_kept` held tokens and then `context_ids`.

        Raises:
            ValueError: when log-probs or versions are missing or not one a sampled token.
        """
        if not self.rows:
            self.rows.append(TokenColumns())
            self.segments.append([])
        else:
            self._meet(num_kept)
        held = self.held
        held.append_context(context_ids)
        self.segments[-1].append(_Segment(self.num_turns, len(held), len(completion_ids)))
        held.append_completion(completion_ids, log_probs=log_probs, versions=versions)
        self.num_turns += 1

    def _meet(self, num_kept: int) -> None:
        held, last = self.held, self.segments[-1][-1]
        kind = classify(len(held), num_kept, last.length, fork_threshold_tokens=self.fork_threshold_tokens)
        self.counts[f"num_{kind}_turns"] += 1
        if kind == "realigned":
            self.counts["num_realigned_tokens"] += sum(held.loss_mask[num_kept:])
            held.cut(num_kept)
            last.length = num_kept - last.start
        elif kind == "forked":
            row = TokenColumns()
            row.append_context(held.token_ids[:num_kept])
            self.rows.append(row)
            self.segments.append([])

    def finish(self) -> Reconciliation:
        """The rows that train something; those that do not are dropped and counted."""
        rows: list[Row] = []
        for columns, segments in zip(self.rows, self.segments, strict=True):
            if any(columns.loss_mask):
                span = (segments[0].turn_index, segments[-1].turn_index + 1)
                rows.append(Row(columns, len(rows), span))
        counts = {**self.counts, "num_dropped_rows": len(self.rows) - len(rows)}
        return Reconciliation(rows, counts)

"""What a prompt means for the row that is being built: append, realign or fork. Pure Python over integers.

For each turn, k is the number of tokens that its prompt shares with the row so far, and drift what the row holds
beyond k.

- clean, drift 0: the rest of the prompt is appended as context;
- realign, k within the last answer, drift below the threshold and at most half of that answer: the tail is overwritten
  as context; what stands before k keeps its mask and log-probs;
- fork, otherwise: a new row that holds the new prompt as context, and the row before keeps all that it trains.

Named invariant, after every turn, `held_is_prompt_and_completion`: the row being built holds exactly the prompt that
the engine was given and the completion that it sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

DEFAULT_FORK_THRESHOLD_TOKENS = 64
# A realign is for a wobble at the end of an answer: where it would take more than this of one, the row forks.
_MAX_REALIGNED_SHARE = 0.5

ReconciliationKind = Literal["clean", "realigned", "forked"]


def classify(num_held: int, num_kept: int, num_answer: int, *, fork_threshold_tokens: int) -> ReconciliationKind:
    """Say what a prompt that keeps the first `num_kept` of `num_held` tokens means for the row.

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
    """Return the length of the common prefix, by comparing slices at C speed.

    Example:
        >>> common_prefix_length([1, 2, 3, 4], [1, 2, 9])
        2
    """
    low = 0
    high = min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high - 1:  # left[:low] agrees, left[:high] does not
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low

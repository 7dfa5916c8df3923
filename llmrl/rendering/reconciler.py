"""Effect of a prompt on the current training row: append, realign or fork.

For each turn, k is the number of leading tokens that prompt and row share, and drift the number of row tokens after k.

- clean (drift 0): the rest of the prompt is appended as context.
- realign (drift below the threshold and at most half of the last answer): the row's tokens after k
  are replaced by context; tokens before k keep their mask and log-probs.
- fork (otherwise): the prompt starts a new row as context, and the previous row keeps all its trained tokens.

Invariant `held_is_prompt_and_completion`: after each turn the row is exactly the engine's prompt and completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

DEFAULT_FORK_THRESHOLD_TOKENS = 64
# A realign may replace at most this fraction of an answer; otherwise the row forks.
_MAX_REALIGNED_SHARE = 0.5

ReconciliationKind = Literal["clean", "realigned", "forked"]


def classify(num_held: int, num_kept: int, num_answer: int, *, fork_threshold_tokens: int) -> ReconciliationKind:
    """Return the effect of a prompt that keeps `num_kept` of `num_held` tokens after an answer of `num_answer` tokens.

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
    """Return the length of the common prefix, by a binary search that compares slices at C speed.

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

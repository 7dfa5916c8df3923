"""Detection of stop strings that span several parts of a completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from llmrl.engines.base import Completion

# Replacement character, to which tokenizers decode an incomplete character.
_UNFINISHED = "\ufffd"


class StopStringWatch:
    """Detector of stop strings that begin in one part of a completion and end in another.

    If a part ends with the beginning of a stop string, tokens are requested one at a time until the match completes or
    fails, so no token is sampled after a stop string. `decode` turns token ids into text.

    Example:
        >>> watch = StopStringWatch(["END"], lambda ids: "".join(map(chr, ids)))
        >>> watch.judge(Completion([*b"the EN"], [-1.0] * 6, [0] * 6, "abort"), []).finish_reason
        'abort'
        >>> watch.num_wanted(9), watch.judge(Completion([*b"D"], [-1.0], [1], "length"), [*b"the EN"]).stop_string
        (1, 'END')
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[list[int]], str] | None) -> None:
        self._stop = stop
        self._decode = decode
        self._text = ""
        self._num_left = 0

    def num_wanted(self, num_left: int) -> int:
        """Return how many of the `num_left` remaining tokens to request next."""
        self._num_left = num_left
        beginnings = (stop[:length] for stop in self._stop for length in range(1, len(stop)))
        return 1 if self._text.endswith((_UNFINISHED, *beginnings)) else num_left

    def judge(self, part: Completion, sampled: list[int]) -> Completion:
        """Return `part`, which follows `sampled`, with its finish reason: `abort` if the completion continues."""
        is_whole = not sampled and part.finish_reason != "abort"
        if not self._stop or is_whole:
            return part
        assert self._decode is not None
        # A stop string may begin in the text of earlier parts, but does not end there.
        num_read = len(self._text.rstrip(_UNFINISHED))
        self._text = self._decode([*sampled, *part.token_ids])
        for stop in self._stop:
            if stop in self._text[max(0, num_read - len(stop) + 1) :]:
                return replace(part, finish_reason="stop", stop_string=stop)
        # The length limit of a part that was requested token by token is not that of the completion.
        is_cut = part.finish_reason == "length" and len(part.token_ids) < self._num_left
        return replace(part, finish_reason="abort") if is_cut else part

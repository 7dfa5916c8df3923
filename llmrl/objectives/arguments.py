"""Refusing keyword arguments that are not known, helpfully."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_EXPLAINED = {
    "samples_mc_entropy": "the entropy is exact here, no samples are needed",
    "reduction": "use aggregation",
    "gamma": "there is no value function and nothing is discounted",
    "clip_value": "there is no value function",
    "ref_log_prob_padding_side": "rows are ragged, nothing is padded",
    "ref_log_prob_padding_value": "rows are ragged, nothing is padded",
    "tokenizer": "rows carry token ids and masks, nothing is tokenized",
    "tokenizer_kwargs": "rows carry token ids and masks, nothing is tokenized",
    "assistant_only": "use masking_strategy, 'rlhf' or 'generic'",
    "device": "the loss works on the policy's device",
}
"""Keywords of TorchRL's losses that have no meaning here."""


def refuse_unknown(owner: str, given: Mapping[str, object], known: Iterable[str]) -> None:
    """Raise for the first keyword in `given`.

    Raises:
        TypeError: naming the keyword, and the nearest known one or why there is none.

    Example:
        >>> refuse_unknown("GRPOLoss", {"clip_epsilom": 0.2}, ["clip_epsilon"])
        Traceback (most recent call last):
        ...
        TypeError: GRPOLoss has no argument 'clip_epsilom'; did you mean 'clip_epsilon'?
    """
    for name in given:
        if name in _EXPLAINED:
            raise TypeError(f"{owner} has no argument {name!r}: {_EXPLAINED[name]}.")
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {known}."
        raise TypeError(f"{owner} has no argument {name!r}; {hint}")

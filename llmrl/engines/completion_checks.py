"""Checks of completions, applied to the results of every engine."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any, get_args

from llmrl.engines.base import Completion, EngineError, FinishReason

_LARGEST_ID = 2**32 - 1
"""Largest id of any tokenizer."""
_LARGEST_VERSION = 2**63 - 1
IMPOSSIBLE_LOG_PROB = -9999.0
"""Log-prob of an excluded token, as vLLM's server writes it, because JSON has no infinity."""
LARGEST_LOG_PROB = 1e-3
"""Tolerance for rounding above 0."""
_SMALLEST_LOG_PROB = -3e38
"""About the lowest float32."""


def check_completion(
    completion: Completion, *, budget: int, vocab_size: int | None, needs_sampling_mask: bool = False
) -> None:
    """Raise EngineError if a completion cannot be trained on or used in a later prompt.

    Args:
        completion: completion of any engine.
        budget: requested maximum number of tokens.
        vocab_size: number of token ids; None if unknown.
        needs_sampling_mask: whether a sampling mask was requested.

    Example:
        >>> check_completion(Completion([7], [900.0], [0], "stop"), budget=8, vocab_size=None)
        Traceback (most recent call last):
        llmrl.engines.base.EngineError: The engine returned log_probs[0] = 900.0; a finite number up to 0 is expected.
    """
    if not isinstance(completion, Completion):
        raise EngineError(f"The engine returned a {type(completion).__name__}; a Completion is expected.")
    token_ids = completion.token_ids
    _check_column("token_ids", token_ids, int, None)
    num_tokens = len(token_ids)
    if num_tokens > budget:
        raise EngineError(f"The engine returned {num_tokens} tokens; at most {budget} were requested.")
    _check_column("log_probs", completion.log_probs, float, num_tokens)
    _check_column("versions", completion.versions, int, num_tokens)
    if completion.finish_reason not in get_args(FinishReason):
        raise EngineError(
            f"The engine returned finish_reason = {completion.finish_reason!r}; one of {get_args(FinishReason)} is "
            "expected."
        )
    if completion.stop_string is not None and not isinstance(completion.stop_string, str):
        raise EngineError(f"The engine returned stop_string = {completion.stop_string!r}; str or None is expected.")
    if not num_tokens:
        return
    last = _LARGEST_ID if vocab_size is None else vocab_size - 1
    if needs_sampling_mask or completion.sampling_mask is not None:
        _check_sampling_mask(completion, last)
    if min(token_ids) < 0 or max(token_ids) > last:
        raise _wrong_value("token_ids", token_ids, lambda value: 0 <= value <= last, f"an id of 0 to {last}")
    # A sum is finite only if all terms are; this is one fast pass.
    log_probs = completion.log_probs
    if not (sum(log_probs) > _SMALLEST_LOG_PROB and max(log_probs) <= LARGEST_LOG_PROB):
        raise _wrong_value(
            "log_probs",
            log_probs,
            lambda value: math.isfinite(value) and _SMALLEST_LOG_PROB / num_tokens < value <= LARGEST_LOG_PROB,
            "a finite number up to 0",
        )
    versions = completion.versions
    if min(versions) < 0 or max(versions) > _LARGEST_VERSION:
        raise _wrong_value("versions", versions, lambda value: 0 <= value <= _LARGEST_VERSION, "a number in [0, 2**63)")


def check_routed_experts(completion: Completion, num_prompt_tokens: int) -> None:
    """Raise EngineError if the type or shape of the routed experts does not match the completion."""
    experts = completion.routed_experts
    if experts is None or not completion.token_ids:
        return
    num_computed = num_prompt_tokens + len(completion.token_ids) - 1
    shape = tuple(getattr(experts, "shape", ()))
    if len(shape) != 3 or shape[0] != num_computed or str(experts.dtype) != "int16" or (experts < 0).any():
        raise EngineError(
            f"The engine returned routed_experts of shape {list(shape)}, {getattr(experts, 'dtype', type(experts))}; "
            f"non-negative int16 of shape [{num_computed}, num_layers, top_k] is expected, for all tokens but the last."
        )


def _check_sampling_mask(completion: Completion, last: int) -> None:
    """Raise EngineError unless each token has a mask entry of distinct ids, up to `last`, that keeps the token."""
    mask = completion.sampling_mask
    if mask is None:
        raise EngineError(
            "The engine did not report which tokens top_k, top_p, min_p or a grammar kept, so the trainer cannot "
            "reproduce the distribution: sample with a temperature only, or set replay=False, and train with "
            "importance ratios that are not 1 on-policy."
        )
    _check_column("sampling_mask", mask, array, len(completion.token_ids))
    for index, (token_id, kept) in enumerate(zip(completion.token_ids, mask, strict=True)):
        is_listed = len(kept) > 0 and kept[0] < 0  # the removed ids, each as ~id
        ids = {~one for one in kept} if is_listed else set(kept)
        if (
            kept.typecode != "i"
            or (token_id in ids) == is_listed
            or len(ids) < len(kept)
            or min(ids) < 0
            or max(ids) > last
        ):
            raise EngineError(
                f"The engine returned sampling_mask[{index}] = {kept!r:.100}; an array('i') of different ids of 0 to "
                f"{last} is expected, either the kept ids, including the sampled {token_id}, or ~id of the removed ids."
            )


def _check_column(name: str, column: Any, kind: type, num_tokens: int | None) -> None:
    """Raise EngineError unless a column is a list of exactly this type: bool and NumPy numbers are refused."""
    if type(column) is not list:
        raise EngineError(f"The engine returned {name} as {type(column).__name__}; a list is expected.")
    if num_tokens is not None and len(column) != num_tokens:
        raise EngineError(
            f"The engine returned {name} of length {len(column)}; {num_tokens} are expected, one per token."
        )
    if not {*map(type, column)} <= {kind}:
        index, value = next((index, value) for index, value in enumerate(column) if type(value) is not kind)
        raise EngineError(
            f"The engine returned {name}[{index}] = {value!r:.100}, a {type(value).__name__}; "
            f"{kind.__name__} is expected."
        )


def _wrong_value(name: str, column: list[Any], is_right: Callable[[Any], bool], expected: str) -> EngineError:
    index, value = next((index, value) for index, value in enumerate(column) if not is_right(value))
    return EngineError(f"The engine returned {name}[{index}] = {value!r:.100}; {expected} is expected.")

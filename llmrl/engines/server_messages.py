"""What goes to an OpenAI-compatible server and what comes back, exact or refused."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Any

from llmrl.engines.base import Completion, EngineError, SamplingConfig
from llmrl.engines.border import check_completion

_CUT = -9999.0
"""What vLLM's server writes for minus infinity, which JSON has not."""
_TOKEN_ID = re.compile(r"token_id:([0-9]{1,10})")


def is_plain(sampling: SamplingConfig) -> bool:
    """Return whether the distribution sampled from is the model's own.

    Example:
        >>> is_plain(SamplingConfig()), is_plain(SamplingConfig(top_k=5))
        (True, False)
    """
    return (
        sampling.temperature in (0.0, 1.0)
        and sampling.top_p == 1.0
        and sampling.top_k == 0
        and sampling.min_p == 0.0
        and sampling.repetition_penalty == 1.0
    )


def check_sampling(sampling: SamplingConfig) -> None:
    """Refuse truncation of which a server cannot say what it kept.

    Raises:
        ValueError: for top-p or min-p without top-k.
    """
    if sampling.needs_sampling_mask and not sampling.top_k:
        raise ValueError(
            "a server names the tokens that top_p and min_p kept only where top_k bounds their number: add top_k=19, "
            "or what the server's --max-logprobs allows, less one; or say replay=False, and train with importance "
            "ratios that are not 1 on-policy."
        )


def completion_request(model: str, prompt_ids: list[int], sampling: SamplingConfig, budget: int) -> dict[str, object]:
    """Return the body of a `/v1/completions` request, which says every parameter: a default would be a silent one."""
    check_sampling(sampling)
    return {
        "model": model,
        "prompt": prompt_ids,
        "max_tokens": budget,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "logprobs": sampling.top_k + 1 if sampling.needs_sampling_mask else 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def read_response(
    response: object,
    *,
    version: int,
    server: str,
    budget: int,
    vocab_size: int | None = None,
    top_k: int | None = None,
) -> Completion:
    """Read the server's answer, refusing one without an id and a log-prob for each token.

    Args:
        response: the answer's JSON.
        version: of the tokens.
        server: as errors name it.
        budget: tokens that were asked for.
        vocab_size: number of token ids, where it is known.
        top_k: of the request, where it asked for what truncation kept.

    Raises:
        EngineError: when ids or log-probs are missing, short, or none that a model can have given.

    Example:
        >>> choice = {"finish_reason": "stop", "logprobs": {"tokens": ["token_id:7"], "token_logprobs": [-0.5]}}
        >>> completion = read_response({"choices": [choice]}, version=3, server="http://host", budget=1)
        >>> completion.token_ids, completion.log_probs, completion.versions
        ([7], [-0.5], [3])
    """
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineError(f"{server} answered without one choice: {str(response)[:200]}")
    [choice] = choices
    columns = choice.get("logprobs") or {}
    if not isinstance(columns, dict):
        raise EngineError(f"{server} returned logprobs as {type(columns).__name__}; an object is expected.")
    token_ids = choice.get("token_ids")
    if token_ids is None:
        token_ids = _ids_of(columns.get("tokens"), server)
    finish_reason, stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
    if finish_reason not in ("stop", "length", "abort"):
        raise EngineError(f"{server} ended the request with {finish_reason!r}; try again.")
    if not token_ids and finish_reason != "abort":
        raise EngineError(f"{server} ended with {finish_reason!r} and no token; what was sampled is not all there.")
    log_probs = columns.get("token_logprobs") or []
    if isinstance(log_probs, list):  # JSON may write a whole number without a point
        log_probs = [float(value) if type(value) is int and abs(value) < 2**53 else value for value in log_probs]
    num_tokens = len(token_ids) if isinstance(token_ids, list) else 0
    stop_string = stop_reason if isinstance(stop_reason, str) else None
    mask = None if top_k is None or not num_tokens else _sampling_mask(columns.get("top_logprobs"), top_k, server)
    completion = Completion(token_ids, log_probs, [version] * num_tokens, finish_reason, stop_string, mask)
    try:
        check_completion(completion, budget=budget, vocab_size=vocab_size)
    except EngineError as error:
        raise EngineError(f"{server} gave a wrong answer. {error}") from None
    return completion


def _sampling_mask(reported: object, top_k: int, server: str) -> list[array[int]]:
    """Return the ids that are reported with a log-prob, of `top_k` and one that were asked for.

    Raises:
        EngineError: when they are not all there, or all were kept, so that others may have been, too.
    """
    mask = []
    for entries in _list(reported):
        if not isinstance(entries, dict):
            raise EngineError(f"{server} returned top_logprobs of a token as {entries!r:.100}; an object is expected.")
        kept = [token for token, value in entries.items() if isinstance(value, (int, float)) and value > _CUT]
        if len(kept) > top_k:
            raise EngineError(
                f"{server} kept {len(kept)} tokens, and others may tie with the last: take another top_k."
            )
        mask.append(array("i", _ids_of(kept, server)))
    return mask


def _ids_of(tokens: object, server: str) -> list[int]:
    """Return the ids of tokens that are written as `token_id:7`."""
    written = [_TOKEN_ID.fullmatch(token) if isinstance(token, str) else None for token in _list(tokens)]
    found = [match[1] for match in written if match is not None]
    if not found or len(found) < len(written):
        raise EngineError(
            f"{server} returned text without token ids; it must know return_token_ids or "
            "return_tokens_as_token_ids (vLLM does), since text cannot be turned back into what was sampled."
        )
    return [int(digits) for digits in found]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def read_models(response: object, server: str) -> dict[str, Mapping[str, object]]:
    """Return the models that a server says it serves, by id.

    Raises:
        EngineError: when that is no list of models.
    """
    entries = _list(response.get("data") if isinstance(response, dict) else None)
    models: dict[str, Mapping[str, object]] = {
        entry["id"]: entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    }
    if not models or len(models) < len(entries):
        raise EngineError(f"{server}/v1/models did not list models: {str(response)[:200]}")
    return models

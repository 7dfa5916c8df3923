"""Messages to and from an OpenAI-compatible server, or vLLM's route for token ids."""

from __future__ import annotations

import base64
import io
import re
from array import array
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from llmrl.engines.base import Completion, EngineError, SamplingConfig
from llmrl.engines.completion_checks import IMPOSSIBLE_LOG_PROB, check_completion

JsonObject: TypeAlias = dict[str, Any]

_TOKEN_ID = re.compile(r"token_id:([0-9]{1,10})")


def is_plain(sampling: SamplingConfig) -> bool:
    """Return whether tokens are sampled from the model's own distribution, or greedily.

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
    """Raise ValueError for top-p or min-p without top-k, for which a server cannot report the kept ids."""
    if sampling.needs_sampling_mask and not sampling.top_k:
        raise ValueError(
            "a server reports the tokens that top_p and min_p kept only if top_k bounds their number: add top_k=19 "
            "(one less than the server's --max-logprobs), or set replay=False, and train with importance ratios "
            "that are not 1 on-policy."
        )


def completion_request(model: str, prompt_ids: list[int], sampling: SamplingConfig, budget: int) -> dict[str, object]:
    """Return the body of a `/v1/completions` request, with no parameter left to a default."""
    return {
        "model": model,
        "prompt": prompt_ids,
        **_parameters(sampling, budget),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def generate_request(
    model: str, prompt_ids: list[int], sampling: SamplingConfig, budget: int, request_id: str
) -> dict[str, object]:
    """Return the body of a request to vLLM's `/inference/v1/generate`, with text only for stop strings."""
    parameters = {**_parameters(sampling, budget), "detokenize": bool(sampling.stop)}
    return {"model": model, "token_ids": prompt_ids, "sampling_params": parameters, "request_id": request_id}


def _parameters(sampling: SamplingConfig, budget: int) -> dict[str, object]:
    check_sampling(sampling)
    return {
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
    """Read the server's answer. Raises EngineError if a token lacks its id or log-prob, or a value is invalid.

    Args:
        response: JSON of the answer.
        version: version of the weights that sampled the tokens.
        server: name of the server in errors.
        budget: requested maximum number of tokens.
        vocab_size: number of token ids; None if unknown.
        top_k: top-k of the request, if it asked for a sampling mask.

    Example:
        >>> choice = {"finish_reason": "stop", "logprobs": {"tokens": ["token_id:7"], "token_logprobs": [-0.5]}}
        >>> completion = read_response({"choices": [choice]}, version=3, server="http://host", budget=1)
        >>> completion.token_ids, completion.log_probs, completion.versions
        ([7], [-0.5], [3])
    """
    choice, columns = _only_choice(response, server)
    token_ids = choice.get("token_ids")
    if token_ids is None:
        token_ids = _ids_of(columns.get("tokens"), server)
    num_tokens = len(_list(token_ids))
    mask = None
    if top_k is not None and num_tokens:
        reported = []
        for entries in _list(columns.get("top_logprobs")):
            if not isinstance(entries, dict):
                raise EngineError(
                    f"{server} returned top_logprobs of a token as {entries!r:.100}; an object is expected."
                )
            kept = [token for token, value in entries.items() if _is_kept(value)]
            reported.append(_ids_of(kept, server))
        mask = _sampling_mask(reported, top_k, server)
    log_probs = columns.get("token_logprobs") or []
    return _completion(choice, token_ids, log_probs, [version] * num_tokens, mask, server, budget, vocab_size)


def likeliest_distance(response: object, server: str) -> float:
    """Return the gap between the first token's two largest log-probs. Raises EngineError if one is missing.

    Example:
        >>> logprobs = {"top_logprobs": [{"a": -3.0, "b": -1.0, "c": -9999.0}]}
        >>> likeliest_distance({"choices": [{"logprobs": logprobs}]}, "http://host")
        2.0
    """
    _, columns = _only_choice(response, server)
    reported = _list(columns.get("top_logprobs"))[:1]
    values = [value for entries in reported if isinstance(entries, dict) for value in entries.values()]
    likeliest = sorted((float(value) for value in values if _is_kept(value)), reverse=True)
    if len(likeliest) < 2:
        raise EngineError(f"{server} does not report the likeliest tokens (top_logprobs): {str(reported)[:200]}")
    return likeliest[0] - likeliest[1]


class LostWeightsError(EngineError):
    """Raised if the server no longer has the weights it was sent, because it was restarted."""


def read_generated(
    response: object, *, server: str, budget: int, vocab_size: int | None = None, top_k: int | None = None
) -> Completion:
    """Read the answer of vLLM's `/inference/v1/generate`, which contains the version of each token.

    Arguments are those of `read_response`. Raises LostWeightsError if tokens were sampled from
    weights without a version, and EngineError if ids, log-probs or versions are missing or invalid.

    Example:
        >>> choice = {"finish_reason": "length", "token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}}
        >>> choice["weight_versions"] = [{"version": "3", "start": 0, "end": 1}]
        >>> read_generated({"choices": [choice]}, server="http://host", budget=1).versions
        [3]
    """
    try:
        return _read_generated(response, server, budget, vocab_size, top_k)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"{server} returned an invalid answer: {type(error).__name__} {error}") from error


def _read_generated(
    response: object, server: str, budget: int, vocab_size: int | None, top_k: int | None
) -> Completion:
    choice, columns = _only_choice(response, server)
    token_ids = choice.get("token_ids") or []
    content = _list(columns.get("content"))
    mask = None
    if top_k is not None and token_ids:
        if choice.get("sampling_mask") is not None:  # vLLM was started with its own sampling mask
            mask = [array("i", ids) for ids in choice["sampling_mask"]]
        else:
            reported = [_list(entry_of(entry, "top_logprobs")) for entry in content]
            kept = [[one["token_id"] for one in entries if _is_kept(one["logprob"])] for entries in reported]
            mask = _sampling_mask(kept, top_k, server)
    versions: list[int] = []
    for span in _list(choice.get("weight_versions")):
        label = str(span["version"])
        num_tokens = span["end"] - len(versions)
        if not label.isdecimal():
            raise LostWeightsError(f"{server} was restarted and lacks the current weights: {label!r}.")
        if span["start"] != len(versions) or num_tokens < 1:
            raise EngineError(f"{server} returned versions with gaps: {choice['weight_versions']!r:.200}")
        versions += [int(label)] * num_tokens
    log_probs: list[Any] = [entry_of(entry, "logprob") for entry in content]
    return _completion(choice, token_ids, log_probs, versions, mask, server, budget, vocab_size)


def _only_choice(response: object, server: str) -> tuple[JsonObject, JsonObject]:
    choices = entry_of(response, "choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineError(f"{server} returned an answer without exactly one choice: {str(response)[:200]}")
    [choice] = choices
    columns = choice.get("logprobs") or {}
    if not isinstance(columns, dict):
        raise EngineError(f"{server} returned logprobs as {type(columns).__name__}; an object is expected.")
    return choice, columns


def _completion(
    choice: JsonObject,
    token_ids: list[int],
    log_probs: list[float],
    versions: list[int],
    mask: list[array[int]] | None,
    server: str,
    budget: int,
    vocab_size: int | None,
) -> Completion:
    finish_reason = choice.get("finish_reason")
    stop_reason = choice.get("stop_reason")
    if finish_reason not in ("stop", "length", "abort"):
        raise EngineError(f"{server} ended the request with {finish_reason!r}; try again.")
    if not token_ids and finish_reason != "abort":
        raise EngineError(f"{server} ended with {finish_reason!r} and no token: sampled tokens are missing.")
    if type(log_probs) is list:  # JSON may write a whole number without a decimal point
        log_probs = [float(value) if type(value) is int and abs(value) < 2**53 else value for value in log_probs]
    stop_string = stop_reason if isinstance(stop_reason, str) else None
    experts = _routed_experts(choice, server)
    completion = Completion(token_ids, log_probs, versions, finish_reason, stop_string, mask, experts)
    try:
        check_completion(completion, budget=budget, vocab_size=vocab_size)
    except EngineError as error:
        raise EngineError(f"{server} returned an invalid answer. {error}") from None
    return completion


def _is_kept(log_prob: object) -> bool:
    return isinstance(log_prob, (int, float)) and log_prob > IMPOSSIBLE_LOG_PROB


def _routed_experts(choice: JsonObject, server: str) -> np.ndarray | None:
    """Return the routed experts, which vLLM reports with `--enable-return-routed-experts`."""
    told = choice.get("routed_experts")
    if told is None:
        return None
    try:
        return np.load(io.BytesIO(base64.b64decode(told)), allow_pickle=False).astype(np.int16)
    except (TypeError, ValueError, EOFError) as error:
        raise EngineError(f"{server} returned routed_experts that are no array in NumPy's format: {error}") from None


def _sampling_mask(kept_ids: list[list[int]], top_k: int, server: str) -> list[array[int]]:
    """Return the reported ids of each token. Raises EngineError if more than `top_k` were kept."""
    for ids in kept_ids:
        if len(ids) > top_k:
            raise EngineError(
                f"{server} kept {len(ids)} tokens for top_k={top_k}, and more may tie with the last one: choose "
                "another top_k."
            )
    return [array("i", ids) for ids in kept_ids]


def _ids_of(tokens: object, server: str) -> list[int]:
    written = [_TOKEN_ID.fullmatch(str(token)) for token in _list(tokens)]
    found = [match[1] for match in written if match is not None]
    if not found or len(found) < len(written):
        raise EngineError(
            f"{server} returned text without token ids; the server must support return_token_ids or "
            "return_tokens_as_token_ids (vLLM does), since text does not determine the sampled ids."
        )
    return [int(digits) for digits in found]


def entry_of(answer: object, name: str) -> Any:
    """Return an entry of a JSON object; None if it has no such entry, or is no object."""
    return answer.get(name) if isinstance(answer, dict) else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def read_models(response: object, server: str) -> dict[str, Mapping[str, object]]:
    """Return the server's models by id. Raises EngineError if the answer is not a list of models."""
    entries = _list(entry_of(response, "data"))
    models: dict[str, Mapping[str, object]] = {
        entry["id"]: entry for entry in entries if isinstance(entry_of(entry, "id"), str)
    }
    if not models or len(models) < len(entries):
        raise EngineError(f"{server}/v1/models did not list models: {str(response)[:200]}")
    return models

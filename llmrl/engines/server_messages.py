"""What goes to an OpenAI-compatible server and what comes back, exact or refused."""

from __future__ import annotations

from typing import Any, cast

from llmrl.engines.base import Completion, EngineError, FinishReason, SamplingConfig

_TOKEN_ID = "token_id:"


def is_plain(sampling: SamplingConfig) -> bool:
    """Whether the distribution sampled from is the model's own.

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


def completion_request(model: str, prompt_ids: list[int], sampling: SamplingConfig, budget: int) -> dict[str, object]:
    """Body of a `/v1/completions` request. Every parameter is said: a server's own defaults would be silent ones."""
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
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def read_response(response: Any, version: int, server: str) -> Completion:
    """Read the server's answer, refusing one without an id and a log-prob for each token.

    Raises:
        EngineError: when ids or log-probs are missing or short.

    Example:
        >>> choice = {"finish_reason": "stop", "logprobs": {"tokens": ["token_id:7"], "token_logprobs": [-0.5]}}
        >>> read_response({"choices": [choice]}, 3, "http://host")
        Completion(token_ids=[7], log_probs=[-0.5], versions=[3], finish_reason='stop', stop_string=None, metrics={})
    """
    choices = response.get("choices") if isinstance(response, dict) else None
    if not choices:
        raise EngineError(f"{server} answered without choices: {str(response)[:200]}")
    [choice] = choices
    columns = choice.get("logprobs") or {}
    token_ids = choice.get("token_ids")
    if token_ids is None:
        tokens = columns.get("tokens") or []
        if not tokens or not all(token.startswith(_TOKEN_ID) for token in tokens):
            raise EngineError(
                f"{server} returned text without token ids; it must know return_token_ids or "
                "return_tokens_as_token_ids (vLLM does), since text cannot be turned back into what was sampled."
            )
        token_ids = [int(token.removeprefix(_TOKEN_ID)) for token in tokens]
    log_probs = columns.get("token_logprobs") or []
    if len(log_probs) != len(token_ids) or any(value is None for value in log_probs):
        raise EngineError(f"{server} returned {len(token_ids)} tokens with {len(log_probs)} log-probs; one a token.")
    finish_reason, stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
    if finish_reason not in ("stop", "length", "abort"):
        raise EngineError(f"{server} ended the request with {finish_reason!r}; try again.")
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        versions=[version] * len(token_ids),
        finish_reason=cast(FinishReason, finish_reason),
        stop_string=stop_reason if isinstance(stop_reason, str) else None,
    )

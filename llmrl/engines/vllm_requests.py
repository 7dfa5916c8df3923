"""One request to vLLM and its answer, exact or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, TypeVar, cast

from llmrl.engines.base import Completion, EngineError, FinishReason, SamplingConfig

T = TypeVar("T")

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from llmrl.engines.vllm_private import AsyncLLM


def sampling_params(sampling: SamplingConfig, budget: int) -> SamplingParams:
    """Return vLLM's parameters for one completion of at most `budget` tokens.

    Raises:
        ValueError: for a value that vLLM does not take, such as a temperature above 2.
    """
    from vllm import SamplingParams

    from llmrl.engines.vllm_private import RequestOutputKind, VLLMClientError

    try:
        return SamplingParams(
            max_tokens=budget,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            logprobs=0,
            flat_logprobs=True,
            # Text is needed only to find stop strings.
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except VLLMClientError as error:
        raise ValueError(f"vLLM refused the request: {error}") from error


async def generate_one(llm: AsyncLLM, prompt_ids: list[int], params: SamplingParams, request_id: str) -> Completion:
    """Await one request to its end; runs on the engine's own loop.

    Raises:
        ValueError: when vLLM refuses the request.
        EngineError: when the engine died or answered with less than a completion.
    """
    from llmrl.engines.vllm_private import EngineDeadError, EngineGenerateError, VLLMClientError

    final: RequestOutput | None = None
    try:
        prompt = {"type": "token", "prompt_token_ids": prompt_ids}
        async for output in llm.generate(prompt, params, request_id):
            final = output
    except EngineDeadError as error:
        raise EngineError("The vLLM engine died or was shut down; its own log says why. Start a new one.") from error
    except VLLMClientError as error:
        raise ValueError(f"vLLM refused the request: {error}") from error
    except EngineGenerateError as error:
        raise EngineError(f"vLLM could not serve the request: {error.__cause__ or error}") from error
    if final is None or not final.finished:
        raise EngineError("vLLM ended the request without an answer; try again.")
    return read_completion(final)


def read_completion(output: RequestOutput) -> Completion:
    """Read vLLM's answer, refusing one without a log-prob and a version for each token.

    Raises:
        EngineError: when log-probs or versions are missing or short, or vLLM reports an error.
    """
    sample = output.outputs[0]
    token_ids = list(sample.token_ids)
    if sample.finish_reason not in ("stop", "length", "abort"):
        raise EngineError(f"vLLM ended the request with {sample.finish_reason!r}; try again.")
    log_probs = list(getattr(sample.logprobs, "logprobs", ()))
    if len(log_probs) != len(token_ids):
        raise EngineError(
            f"vLLM returned {len(token_ids)} tokens with {len(log_probs)} log-probs; one per token is needed."
        )
    versions: list[int] = []
    for span in sample.weight_versions or ():
        versions.extend([0 if span.version == "default" else int(span.version)] * (span.end - span.start))
    if len(versions) != len(token_ids):
        raise EngineError(
            f"vLLM returned {len(token_ids)} tokens with {len(versions)} versions; one per token is needed."
        )
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        versions=versions,
        finish_reason=cast(FinishReason, sample.finish_reason),
        stop_string=sample.stop_reason if isinstance(sample.stop_reason, str) else None,
        metrics={"num_cached_tokens": float(output.num_cached_tokens or 0)},
    )


async def unless_it_dies(llm: AsyncLLM, coroutine: Coroutine[object, object, T]) -> T:
    """Await an answer of the engine's process; vLLM would wait for it for ever when that dies meanwhile."""
    task = asyncio.ensure_future(coroutine)
    while not (await asyncio.wait({task}, timeout=0.2))[0]:
        if llm.errored:
            task.cancel()
            raise EngineError("The vLLM engine died; its own log says why. Start a new one.")
    return task.result()

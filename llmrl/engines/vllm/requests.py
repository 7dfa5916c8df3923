"""Requests to vLLM and checks of its answers."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from llmrl.engines.base import Completion, EngineError, FinishReason, SamplingConfig
from llmrl.engines.scores import TokenScores, read_scores
from llmrl.engines.token_stream import TokenStream

T = TypeVar("T")

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput, SamplingParams

    from llmrl.engines.vllm.private import AsyncLLM, ModelConfig
    from llmrl.engines.vllm.updates import WholeWeights


def num_reported(sampling: SamplingConfig, config: ModelConfig) -> int:
    """Return the number of likeliest ids to request from vLLM, from which the kept ids are derived.

    The number is 0 if vLLM reports the kept ids (`return_sampling_mask`), or `Grammars` derives
    them. It exceeds top-k, because vLLM keeps all ids that tie with the last, which are many in
    bfloat16. Raises ValueError for top-p or min-p without top-k, which keep any number of ids.
    """
    if not sampling.needs_sampling_mask or config.return_sampling_mask or is_cut_by_grammar_alone(sampling):
        return 0
    if not sampling.top_k:
        raise ValueError(
            f"top_p={sampling.top_p:g} and min_p={sampling.min_p:g} may keep any number of tokens, and vLLM reports "
            "the kept tokens, which the trainer needs, only if top_k bounds their number: add top_k=200, for example, "
            "or set replay=False, and train with importance ratios that are not 1 on-policy."
        )
    return min(config.get_vocab_size(), sampling.top_k + sampling.top_k // 8 + 16)


def is_cut_by_grammar_alone(sampling: SamplingConfig) -> bool:
    """Return whether a sampling mask is needed for a grammar alone, without top-k, top-p and min-p."""
    is_needed = sampling.grammar is not None and sampling.needs_sampling_mask
    return is_needed and not sampling.with_changes(grammar=None).is_truncated


def sampling_params(
    sampling: SamplingConfig, budget: int, *, num_log_probs: int = 0, is_streamed: bool = False
) -> SamplingParams:
    """Return vLLM's parameters for a completion of `budget` tokens, each with `num_log_probs` likeliest ids.

    Raises ValueError if vLLM does not support a value, such as a temperature above 2, or a seed on CPU.
    """
    from vllm import SamplingParams

    from llmrl.engines.vllm.private import RequestOutputKind, StructuredOutputsParams, VLLMClientError, current_platform

    if sampling.seed is not None and sampling.temperature > 0 and current_platform.is_cpu():
        # vLLM rewinds the generator if a prompt is computed in parts, which fails on CPU.
        raise ValueError(
            f"seed={sampling.seed}: vLLM's engine on CPU dies at a request with its own seed if the prompt is not "
            "computed in one step; give the engine a seed, AsyncVLLM.from_pretrained(seed=...)."
        )
    kinds = RequestOutputKind
    grammar = None if sampling.grammar is None else StructuredOutputsParams(structural_tag=sampling.grammar)
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
            logprobs=num_log_probs,
            flat_logprobs=True,
            # Text is needed only for stop strings.
            detokenize=bool(sampling.stop),
            # The last output of a streamed request is the only output of a request that is not streamed.
            output_kind=kinds.CUMULATIVE if is_streamed else kinds.FINAL_ONLY,
            structured_outputs=grammar,
        )
    except VLLMClientError as error:
        raise ValueError(f"vLLM refused the request: {error}") from error


def scoring_params(top_k: int) -> SamplingParams:
    """Return vLLM's parameters for the scores of a prompt's tokens; vLLM samples at least one token."""
    from vllm import SamplingParams

    from llmrl.engines.vllm.private import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=top_k,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def generate_one(
    llm: AsyncLLM,
    prompt_ids: list[int],
    params: SamplingParams,
    request_id: str,
    weights: WholeWeights,
    stream: TokenStream | None = None,
) -> Completion:
    """Await one completion on the engine's own loop. Raises as `answer_of` and `read_completion` do."""
    final, version = await answer_of(llm, prompt_ids, params, request_id, weights, stream)
    return read_completion(final, llm.vllm_config.model_config.get_vocab_size(), version=version)


async def answer_of(
    llm: AsyncLLM,
    prompt_ids: list[int],
    params: SamplingParams,
    request_id: str,
    weights: WholeWeights,
    stream: TokenStream | None = None,
) -> tuple[RequestOutput, int | None]:
    """Await one request on the engine's own loop; also return its weights' version, if vLLM does not report it.

    Raises ValueError if vLLM refuses the request, and EngineError if the engine died or did not finish it.
    """
    from llmrl.engines.vllm.private import EngineDeadError, EngineGenerateError, VLLMClientError

    final: RequestOutput | None = None
    is_aborted = False
    try:
        prompt = {"type": "token", "prompt_token_ids": prompt_ids}
        with weights.in_use() as (adapter, version):
            async for output in llm.generate(prompt, params, request_id, lora_request=adapter):
                final = output
                if stream is None or output.finished:
                    continue
                stream.report(list(output.outputs[0].token_ids))
                if stream.is_stopped and not is_aborted:
                    is_aborted = True
                    await llm.abort(request_id)
    except EngineDeadError as error:
        raise EngineError("The vLLM engine died or was shut down; its own log says why. Start a new one.") from error
    except VLLMClientError as error:
        raise ValueError(f"vLLM refused the request: {error}") from error
    except EngineGenerateError as error:
        raise EngineError(f"vLLM could not serve the request: {error.__cause__ or error}") from error
    if final is None or not final.finished:
        raise EngineError("vLLM ended the request without an answer; try again.")
    return final, version


def read_completion(output: RequestOutput, vocab_size: int, *, version: int | None = None) -> Completion:
    """Read vLLM's answer. Raises EngineError if a token lacks its log-prob or version, or vLLM reports an error.

    `version` is the version of all tokens; None if vLLM reports versions.
    """
    sample = output.outputs[0]
    token_ids = list(sample.token_ids)
    if sample.finish_reason not in ("stop", "length", "abort"):
        raise EngineError(f"vLLM ended the request with {sample.finish_reason!r}; try again.")
    reported, starts = (list(getattr(sample.logprobs, name, ())) for name in ("logprobs", "start_indices"))
    log_probs = [reported[start] for start in starts]  # the sampled token's log-prob comes first
    if len(log_probs) != len(token_ids):
        raise EngineError(
            f"vLLM returned {len(token_ids)} tokens with {len(log_probs)} log-probs; one per token is needed."
        )
    if version is None:
        spans = sample.weight_versions or ()
        labels = [span.version for span in spans for _ in range(span.start, span.end)]
        versions = [0 if label == "default" else int(label) for label in labels]
    else:
        versions = [version] * len(token_ids)
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
        sampling_mask=_sampling_mask(sample, vocab_size),
        # vLLM reports them as uint8 or uint16, if the engine was started with `enable_return_routed_experts`.
        routed_experts=None if sample.routed_experts is None else sample.routed_experts.astype("int16"),
        metrics={"num_cached_tokens": float(output.num_cached_tokens or 0)},
    )


def read_prompt_scores(output: RequestOutput, token_ids: Sequence[int], top_k: int) -> TokenScores:
    """Read vLLM's answer to a request with `scoring_params`. Raises EngineError if a token lacks its log-prob."""
    flat: Any = output.prompt_logprobs
    shape = (len(token_ids) - 1, 1 + top_k)
    if flat is None or len(flat.logprobs) != shape[0] * shape[1]:
        raise EngineError("vLLM ended the request without the log-probs of its tokens; try again.")
    ids, log_probs = (torch.tensor(column).view(shape) for column in (flat.token_ids, flat.logprobs))
    return read_scores(token_ids, ids, log_probs, engine="vLLM")


def _sampling_mask(sample: CompletionOutput, vocab_size: int) -> list[array[int]] | None:
    """Return the kept ids; None if not requested. Raises EngineError if more ids may have been kept."""
    if sample.sampling_mask is not None:
        return [array("i", ids) for ids in sample.sampling_mask.token_ids]
    flat: Any = sample.logprobs
    if not sample.token_ids or flat is None or len(flat.logprobs) == len(sample.token_ids):
        return None
    mask = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        log_prob_of = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        kept = [token_id for token_id, log_prob in log_prob_of.items() if log_prob > -math.inf]
        if len(kept) == len(log_prob_of) < vocab_size:
            raise EngineError(
                f"vLLM kept all of the {len(kept)} likeliest tokens that were requested: more tokens tie at top_k "
                "than expected. Compute in float32, or use a smaller top_k."
            )
        mask.append(array("i", kept))
    return mask


async def unless_it_dies(llm: AsyncLLM, coroutine: Coroutine[object, object, T]) -> T:
    """Await an answer of the engine's process, or raise EngineError if the process dies meanwhile."""
    task = asyncio.ensure_future(coroutine)
    while not (await asyncio.wait({task}, timeout=0.2))[0]:
        if llm.errored:
            task.cancel()
            raise EngineError("The vLLM engine died; its own log says why. Start a new one.")
    return task.result()

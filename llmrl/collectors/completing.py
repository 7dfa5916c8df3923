"""Completions from an engine, with retried and resumed requests."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import uuid
from dataclasses import replace

import numpy as np

from llmrl._utils.failure import contained
from llmrl._utils.spans import span
from llmrl.engines import Completion, EngineError, SamplingConfig, completion_budget
from llmrl.engines.stop_strings import StopStringWatch
from llmrl.engines.token_stream import TokenStream, is_streaming
from llmrl.policies import LLMWrapperBase


class Completer:
    """Sends requests to a policy's engine until there is an answer, or `num_retries` retries in a row fail.

    If the policy has a seed, each request derives its own from it and the request's name, so the answers of a group
    differ. A failed request is repeated under a new id. A request that a weight update aborted continues after its
    last token (partial rollout), and each token keeps the version that sampled it; with a grammar, the answer is
    sampled anew. An abort without a new token counts as a failure, the first one of a new count if
    the weights were updated since the last attempt. Requests wait while `is_open` is cleared.

    Raises ValueError if the policy has stop strings but no renderer, or must replay a repetition penalty.
    """

    def __init__(self, policy: LLMWrapperBase, *, num_retries: int, is_open: asyncio.Event | None = None) -> None:
        if policy.sampling.stop and policy.renderer is None:
            raise ValueError(
                "the policy has stop strings but no renderer. A weight update may interrupt an answer within a stop "
                "string, which is only found in the decoded text: build the policy with tokenizer= or renderer=."
            )
        if policy.sampling.replay and policy.sampling.repetition_penalty != 1:
            raise ValueError(
                f"the policy samples with repetition_penalty={policy.sampling.repetition_penalty:g}, and the "
                "trainer cannot reproduce that distribution: leave it at 1; or set replay=False if nothing is "
                "trained, or if importance ratios other than 1 are acceptable on-policy."
            )
        self.policy = policy
        self._num_retries = num_retries
        self._is_open = is_open
        # Unique, since other collectors may play the same dataset on the same engine.
        self._request_prefix = uuid.uuid4().hex[:12]

    async def complete(
        self,
        prompt_ids: list[int],
        sampling: SamplingConfig,
        *,
        name: str,
        routing_key: str | None,
        parent: str = "",
        stream: TokenStream | None = None,
    ) -> Completion:
        """Generate one completion; `name` is unique among those in flight, `parent` is the parent span.

        `stream` receives the tokens as they are sampled, if the engine reports them. Raises EngineError if more than
        `num_retries` attempts in a row fail; if the last one was aborted, the finish reason is `abort` instead.
        """
        if sampling.seed is not None and sampling.seed == self.policy.sampling.seed:  # another seed is an agent's own
            sampling = sampling.with_changes(seed=_derived_seed(sampling.seed, name))
        with span("chat", parent=parent) as current:
            completion = await self._complete(prompt_ids, sampling, name, routing_key, stream)
            if current is not None:
                current.set_attributes(
                    {
                        "gen_ai.request.temperature": sampling.temperature,
                        "gen_ai.request.max_tokens": sampling.max_new_tokens,
                        "gen_ai.usage.input_tokens": len(prompt_ids),
                        "gen_ai.usage.output_tokens": len(completion.token_ids),
                        "gen_ai.response.finish_reasons": [completion.finish_reason],
                    }
                )
        return completion

    async def _complete(
        self,
        prompt_ids: list[int],
        sampling: SamplingConfig,
        name: str,
        routing_key: str | None,
        stream: TokenStream | None,
    ) -> Completion:
        renderer = self.policy.renderer
        engine = self.policy.engine
        if stream is not None and not is_streaming(engine):
            stream = None
        stop_strings = StopStringWatch(sampling.stop, None if renderer is None else renderer.decode)
        budget = completion_budget(len(prompt_ids), sampling, engine.max_model_len)
        parts: list[Completion] = []
        sampled: list[int] = []
        num_fruitless = 0
        version = engine.policy_version
        seed = sampling.seed
        for attempt in itertools.count():
            if self._is_open is not None:
                await self._is_open.wait()
            if sampled and sampling.grammar is not None:  # a grammar begins at an answer's first token
                sampled = []
                parts.clear()
                sampling = sampling.with_changes(max_new_tokens=budget, seed=_derived_seed(seed, attempt))
            if stream is not None:
                stream.before = sampled
            try:
                if sampled:
                    num_wanted = stop_strings.num_wanted(budget - len(sampled))
                    sampling = sampling.with_changes(max_new_tokens=num_wanted, seed=_derived_seed(seed, len(sampled)))
                part = await contained(
                    self.policy.complete(
                        [*prompt_ids, *sampled],
                        sampling,
                        request_id=f"{self._request_prefix}/{name}/{attempt}",
                        routing_key=routing_key,
                        stream=stream,
                    )
                )
            except EngineError:
                num_fruitless += 1
                if num_fruitless > self._num_retries:
                    raise
                continue
            part = stop_strings.judge(part, sampled)
            parts.append(part)
            sampled = [*sampled, *part.token_ids]  # a new list, since a stream has the old one
            if part.token_ids:
                num_fruitless = 0
            elif engine.policy_version != version:
                num_fruitless = 1
            else:
                num_fruitless += 1
            version = engine.policy_version
            if part.finish_reason != "abort" or num_fruitless > self._num_retries:
                break
            if stream is not None and stream.is_stopped:
                break
            if len(sampled) >= budget:
                parts[-1] = replace(part, finish_reason="length")
                break
        return parts[0] if len(parts) == 1 else _joined(parts)


def _derived_seed(seed: int | None, what: object) -> int | None:
    if seed is None:
        return None
    return int.from_bytes(hashlib.blake2b(f"{seed}/{what}".encode(), digest_size=4).digest()) >> 1


def _joined(parts: list[Completion]) -> Completion:
    """Join the parts of one completion; its finish reason is that of the last part."""
    sampled = [part for part in parts if part.token_ids]  # parts without tokens have no masks or experts
    masks = [part.sampling_mask for part in sampled if part.sampling_mask is not None]
    return replace(
        parts[-1],
        token_ids=[token for part in parts for token in part.token_ids],
        log_probs=[log_prob for part in parts for log_prob in part.log_probs],
        versions=[version for part in parts for version in part.versions],
        sampling_mask=[kept for mask in masks for kept in mask] if masks and len(masks) == len(sampled) else None,
        routed_experts=_joined_experts([part.routed_experts for part in sampled]),
    )


def _joined_experts(parts: list[np.ndarray | None]) -> np.ndarray | None:
    """Join the experts of parts, which begin with the prompt; a token keeps its first ones."""
    known: list[np.ndarray] = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    starts = [0, *(len(part) for part in known)]
    return np.concatenate([part[start:] for part, start in zip(known, starts, strict=False)])

"""A `vllm.LLM` that the caller has created, as an engine for a policy."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from llmrl.engines import Completion, EngineError, SamplingConfig
from llmrl.engines.base import check_request, completion_budget
from llmrl.engines.scores import TokenScores, check_scored
from llmrl.engines.vllm.requests import (
    num_reported,
    read_completion,
    read_prompt_scores,
    sampling_params,
    scoring_params,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM, RequestOutput, SamplingParams


# A `vllm.LLM` is not thread-safe: two concurrent calls end the process.
_LOCKS: WeakKeyDictionary[object, threading.Lock] = WeakKeyDictionary()


class _Request(NamedTuple):
    prompt_ids: list[int]
    params: SamplingParams
    answer: Future[RequestOutput]


class GivenLLM:
    """Engine over a `vllm.LLM`, which serves all waiting requests in one call, in a thread. Weights are not updated.

    Args:
        llm: the `vllm.LLM`, which the caller also ends.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.max_model_len: int = llm.model_config.max_model_len
        """Maximum number of tokens of prompt and completion together."""
        self.vocab_size: int = llm.model_config.get_vocab_size()
        self.policy_version = 0
        """Version of the weights; the caller may set it."""
        self._lock = _LOCKS.setdefault(llm, threading.Lock())
        self._waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmrl-given-llm")
        self.is_alive = True
        """Whether the engine serves requests."""

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        return self.llm.get_tokenizer()

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise ValueError if the engine cannot report the log-probs of the sampling distribution."""
        is_raw = self.llm.model_config.logprobs_mode != "processed_logprobs"
        is_changed = sampling.temperature not in (0, 1) or sampling.repetition_penalty != 1
        if is_raw and (is_changed or sampling.is_truncated):
            raise ValueError(
                "this vllm.LLM returns log-probs before temperature, penalties and truncation: create it with "
                "logprobs_mode='processed_logprobs', or use AsyncVLLM.from_pretrained, which does so."
            )
        needed = num_reported(sampling, self.llm.model_config)
        if 0 <= self.llm.model_config.max_logprobs < needed:  # -1 is no limit
            raise ValueError(
                f"top_k={sampling.top_k} needs {needed} log-probs per token, and this vllm.LLM reports at most "
                f"{self.llm.model_config.max_logprobs}: create it with max_logprobs={needed}, or use a smaller top_k."
            )
        sampling_params(sampling, 1)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """Sample one completion of `prompt_ids` (`[num_prompt_tokens]`); `request_id` and `routing_key` have no effect.

        Raises ValueError if there is no room for a token, and EngineError if vLLM fails or the engine was shut down.
        """
        check_request(request_id or "", prompt_ids, ())
        budget = completion_budget(len(prompt_ids), sampling, self.max_model_len)
        params = sampling_params(sampling, budget, num_log_probs=num_reported(sampling, self.llm.model_config))
        output = await self._answer(prompt_ids, params)
        return read_completion(output, self.vocab_size, version=self.policy_version)

    async def _answer(self, prompt_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        request = _Request(list(prompt_ids), params, Future())
        self._waiting.put(request)
        try:
            self._thread.submit(self._generate_waiting)
        except RuntimeError as error:
            raise EngineError("This engine was shut down; create another policy with the vllm.LLM.") from error
        return await asyncio.wrap_future(request.answer)

    def _generate_waiting(self) -> None:
        requests = [self._waiting.get() for _ in range(self._waiting.qsize())]
        requests = [request for request in requests if request.answer.set_running_or_notify_cancel()]
        if not requests:
            return
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        try:
            with self._lock:
                outputs = self.llm.generate(prompts, [request.params for request in requests], use_tqdm=False)
        except BaseException as error:  # vLLM's errors have no common class, and a panic in Rust is no Exception
            for request in requests:
                failure = EngineError(f"vLLM could not serve the request: {error}")
                failure.__cause__ = error
                request.answer.set_exception(failure)
            return
        for request, output in zip(requests, outputs, strict=True):
            request.answer.set_result(output)

    async def abort(self, request_id: str) -> None:
        """Do nothing, because a call of a `vllm.LLM` cannot be interrupted."""

    def shutdown(self) -> None:
        """End the thread, but not the `vllm.LLM`, which the caller owns. May be called twice."""
        self.is_alive = False
        self._thread.shutdown(wait=False)

    async def score(self, token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
        """Return token scores as `ScoresTokens.score` does."""
        check_scored(token_ids, top_k, self.max_model_len)
        self.check_sampling(SamplingConfig())
        output = await self._answer(token_ids, scoring_params(top_k))
        return read_prompt_scores(output, token_ids, top_k)

"""The part of `AsyncVLLM` that scores given tokens."""

from __future__ import annotations

import itertools
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from llmrl._utils.background_loop import BackgroundLoop
from llmrl.engines.base import EngineError
from llmrl.engines.scores import TokenScores, check_scored, read_scores
from llmrl.engines.vllm.requests import answer_of, scoring_params

if TYPE_CHECKING:
    from llmrl.engines.vllm.private import AsyncLLM
    from llmrl.engines.vllm.updates import WholeWeights

T = TypeVar("T")


class VLLMScores:
    """Requests to a vLLM engine, and its scores of given tokens."""

    max_model_len: int
    _llm: AsyncLLM
    _background: BackgroundLoop
    _updates: WholeWeights
    _watch: Any  # a `HangWatch`, of the whole engine
    _in_flight: set[str]
    _id_prefix: str
    _id_counter: itertools.count[int]
    _num_tokens: int

    def _check_alive(self, *, and_awake: bool = False) -> None:
        raise NotImplementedError

    async def score(self, token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
        """Return token scores as `ScoresTokens.score` does. Also raises EngineError if the engine sleeps.

        vLLM computes all tokens anew, since its prefix cache has no log-probs.
        """
        check_scored(token_ids, top_k, self.max_model_len)
        self._check_alive(and_awake=True)
        request_id = f"{self._id_prefix}-{next(self._id_counter)}"
        asked = answer_of(self._llm, list(token_ids), scoring_params(top_k), request_id, self._updates)
        flat: Any = (await self._serve(request_id, asked))[0].prompt_logprobs
        self._num_tokens += 1
        shape = (len(token_ids) - 1, 1 + top_k)
        if flat is None or len(flat.logprobs) != shape[0] * shape[1]:
            raise EngineError("vLLM ended the request without the log-probs of its tokens; try again.")
        ids, log_probs = (torch.tensor(column).view(shape) for column in (flat.token_ids, flat.logprobs))
        return read_scores(token_ids, ids, log_probs, engine="vLLM")

    async def _serve(self, request_id: str, request: Coroutine[None, None, T]) -> T:
        """Await a request on the engine's loop; it counts as in flight, and the engine is watched for hangs."""
        self._in_flight.add(request_id)
        self._watch.begin(self, self._background)
        try:
            return await self._background.wait(request)
        except RuntimeError as error:
            if self._watch.why:
                raise EngineError(self._watch.why) from error
            if isinstance(error, EngineError) or not self._background.is_closed:
                raise
            raise EngineError("The vLLM engine was shut down.") from error
        finally:
            self._in_flight.discard(request_id)

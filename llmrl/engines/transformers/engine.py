"""`TransformersEngine`: a transformers model in this process, for machines without vLLM."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from llmrl._utils.arguments import check_least
from llmrl._utils.model_parts import load_language_model, text_config
from llmrl.engines.base import Completion, EngineError, SamplingConfig, check_request, completion_budget, refuse_grammar
from llmrl.engines.scores import TokenScores, check_scored, read_scores
from llmrl.engines.transformers.decoding import DISTRIBUTION_FIELDS, DecodedSequence, DecodingBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GATHERING_S = 0.002
"""Seconds that a batch waits for concurrent requests."""


class TransformersEngine:
    """Engine that samples from a transformers model, in a thread of this process.

    Waiting requests are decoded in one batch until each has ended, and later requests wait for the
    next batch, so under load the engine is far slower than vLLM.

    Args:
        model: causal language model, or its name or folder (loaded in float32, with its tokenizer).
        tokenizer: tokenizer for stop strings, if `model` is not a name.
        max_model_len: maximum number of tokens of prompt and completion together; by default the model's.
        max_num_seqs: maximum number of requests decoded together.
        seed: seed of the sampler, for requests without their own.

    Raises ValueError if `max_num_seqs` is below 1, `max_model_len` is below 2 or above the model's
    limit, or is missing for a model without a limit.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> engine = TransformersEngine(LlamaForCausalLM(config))
        >>> completion = asyncio.run(engine.generate([1, 2], SamplingConfig(max_new_tokens=3, ignore_eos=True)))
        >>> len(completion.token_ids), completion.finish_reason
        (3, 'length')
    """

    def __init__(
        self,
        model: PreTrainedModel | str | os.PathLike[str],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        seed: int = 0,
    ) -> None:
        check_least(1, max_num_seqs=max_num_seqs)
        if isinstance(model, (str, os.PathLike)):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model) if tokenizer is None else tokenizer
            model = load_language_model(model, dtype=torch.float32)
        own_limit = getattr(text_config(model), "max_position_embeddings", None)
        limit = own_limit if max_model_len is None else max_model_len
        if limit is None:
            raise ValueError("max_model_len must be given: the model's config has no max_position_embeddings.")
        if type(limit) is not int or not 2 <= limit <= (own_limit or limit):
            most = "" if own_limit is None else f" to the model's {own_limit} positions"
            raise ValueError(f"max_model_len must be a whole number from 2{most}, got {limit!r}.")
        self.max_model_len: int = limit
        """Maximum number of tokens of prompt and completion together."""
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self.model = model.eval()
        """The model that generates."""
        self._tokenizer = tokenizer
        self._max_num_seqs = max_num_seqs
        eos = getattr(model.generation_config, "eos_token_id", None)
        eos = [eos] if isinstance(eos, int) else eos
        self._eos_token_ids = frozenset(eos or ())
        self._generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
        self._policy_version = 0
        self._in_flight: dict[str, _Request] = {}
        self._waiting: list[_Request] = []
        self._ids = itertools.count()
        # Held while the model computes, so that no token is sampled from partly loaded weights.
        self._weights_lock = threading.Lock()
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._is_shut_down = False

    @property
    def policy_version(self) -> int:
        """Version of the weights that a new request would use."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Set the version of the model's weights, after a change by the caller."""
        with self._weights_lock:
            self._policy_version = version

    @property
    def is_alive(self) -> bool:
        """Whether the engine serves requests."""
        return not self._is_shut_down

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight."""
        return len(self._in_flight)

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer, or None if the engine has none."""
        return self._tokenizer

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, version: int | None = None) -> int:
        """Copy weights, by the names of the `state_dict`, into the model between two tokens; return their version.

        One name is enough for tied weights. Requests in flight continue with the old key-value cache; each token has
        the version that sampled it. Raises RuntimeError, and keeps the weights, if names or shapes do not match.
        """
        with self._weights_lock:
            own = self.model.state_dict()
            # `named_parameters` names tied weights once, so weights that only `state_dict` names need not be given.
            missing = {name for name, _ in self.model.named_parameters()} - weights.keys()
            unknown = weights.keys() - own.keys()
            misshapen = {
                name
                for name, weight in weights.items()
                if not isinstance(weight, torch.Tensor) or (name in own and weight.shape != own[name].shape)
            }
            faults = {"missing": missing, "unknown": unknown, "not tensors of its shape": misshapen}
            found = [(fault, names) for fault, names in faults.items() if names]
            if found:  # `load_state_dict` would copy the other weights before it raises
                named = [f"{len(names)} {fault}, such as {sorted(names)[:3]}" for fault, names in found]
                raise RuntimeError(f"the weights do not match the engine's model: {'; '.join(named)}.")
            self.model.load_state_dict(dict(weights), strict=False)
            self._policy_version = self._policy_version + 1 if version is None else version
            return self._policy_version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """Sample one completion of `prompt_ids` ([num_prompt_tokens]); `routing_key` has no effect on one engine.

        Raises as `Engine.generate` does, and ValueError for unknown token ids, a grammar, or stop
        strings without a tokenizer.
        """
        request_id = f"transformers-{next(self._ids)}" if request_id is None else request_id
        prompt = list(prompt_ids)
        check_request(request_id, prompt, self._in_flight)
        refuse_grammar(self, sampling)
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise ValueError(f"prompt_ids has tokens outside the vocabulary of {self.vocab_size}.")
        if sampling.stop and self._tokenizer is None:
            raise ValueError("the request has stop strings, which need a tokenizer: pass tokenizer= to the engine.")
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= self._eos_token_ids
        generator = None
        if sampling.seed is not None:
            generator = torch.Generator(self._generator.device).manual_seed(sampling.seed)
        decode = None if self._tokenizer is None else self._tokenizer.decode
        budget = completion_budget(len(prompt), sampling, self.max_model_len)
        request = _Request(DecodedSequence(prompt, sampling, budget, stops, decode, generator))
        with self._lock:
            if self._is_shut_down:
                raise EngineError("The transformers engine was shut down.")
            self._in_flight[request_id] = request
            self._waiting.append(request)
            if self._worker is None:
                _COMPUTING.add(self)
                self._worker = threading.Thread(target=self._work, name="llmrl-transformers-engine", daemon=True)
                self._worker.start()
        try:
            return await asyncio.wrap_future(request.future)
        finally:
            del self._in_flight[request_id]

    async def score(self, token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
        """Return token scores as `ScoresTokens.score` does. Also raises ValueError for ids outside the vocabulary."""
        check_scored(token_ids, top_k, self.max_model_len)
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(f"token_ids has tokens outside the vocabulary of {self.vocab_size}.")
        return await asyncio.to_thread(self._score, list(token_ids), top_k)

    @torch.no_grad()
    def _score(self, token_ids: list[int], top_k: int) -> TokenScores:
        ids = torch.tensor(token_ids, device=self._generator.device)
        with self._weights_lock:
            if self._is_shut_down:
                raise EngineError("The transformers engine was shut down.")
            self.model.eval()
            try:
                logits = self.model(ids[None], use_cache=False).logits[0, :-1]
            except Exception as error:
                raise EngineError(f"The model failed: {error}") from error
        log_probs = logits.float().log_softmax(-1)
        top = log_probs.topk(min(top_k, log_probs.shape[1]))
        reported = torch.cat([log_probs.gather(1, ids[1:, None]), top.values], 1)
        return read_scores(
            token_ids, torch.cat([ids[1:, None], top.indices], 1).cpu(), reported.cpu(), engine="The model"
        )

    async def abort(self, request_id: str) -> None:
        """Abort a request; its `generate` returns the tokens so far. Unknown ids are ignored."""
        request = self._in_flight.get(request_id)
        if request is None:
            return
        request.is_aborted = True
        with self._lock:
            is_waiting = request in self._waiting
            if is_waiting:
                self._waiting.remove(request)
        if is_waiting:
            request.finish()

    def shutdown(self) -> None:
        """Shut down; requests raise EngineError, and the model remains usable. May be called twice."""
        with self._lock:
            self._is_shut_down = True
            worker = self._worker
        if worker is not None:
            worker.join()

    def __enter__(self) -> TransformersEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _work(self) -> None:
        """Decode batches until no request waits; then the thread ends."""
        while True:
            time.sleep(GATHERING_S)
            with self._lock:
                batch = self._next_batch()
                if not batch:
                    self._worker = None
                    return
            try:
                self._decode(batch)
                error = EngineError("The transformers engine was shut down.")
            except Exception as cause:
                error = EngineError(f"The model failed: {cause}")
                error.__cause__ = cause
            for request in batch:
                request.fail(error)

    def _next_batch(self) -> list[_Request]:
        """Return the oldest waiting request, and others with the same distribution."""
        batch: list[_Request] = []
        for request in self._waiting:
            if len(batch) < self._max_num_seqs and (not batch or request.distribution == batch[0].distribution):
                batch.append(request)
        self._waiting = [request for request in self._waiting if request not in batch]
        return batch

    def _decode(self, requests: list[_Request]) -> None:
        by_sequence = {id(request.sequence): request for request in requests}

        def goes_on(sequence: DecodedSequence) -> bool:
            request = by_sequence[id(sequence)]
            if sequence.finish_reason is not None or request.is_aborted:
                request.finish()
            return not request.future.done() and not self._is_shut_down

        sequences = [request.sequence for request in requests if goes_on(request.sequence)]
        if not sequences:
            return
        with self._weights_lock:
            version = self._policy_version
            self.model.eval()  # a trainer of the same model may have set training mode, for gradient checkpointing
            batch = DecodingBatch(self.model, sequences, version=version, generator=self._generator)
        while batch.sequences:
            batch.sample()
            with self._weights_lock:
                self.model.eval()
                batch.advance(goes_on, version=self._policy_version)


# A thread that is still inside torch at interpreter exit would abort the process.
_COMPUTING: weakref.WeakSet[TransformersEngine] = weakref.WeakSet()


@atexit.register
def _shut_down_all() -> None:
    for engine in list(_COMPUTING):
        engine.shutdown()


class _Request:
    """A sequence and its caller's future, which is cancelled with the caller."""

    def __init__(self, sequence: DecodedSequence) -> None:
        self.sequence = sequence
        self.distribution = tuple(getattr(sequence.sampling, name) for name in DISTRIBUTION_FIELDS)
        self.future: Future[Completion] = Future()
        self.is_aborted = False

    def finish(self) -> None:
        """Return the tokens so far to the caller."""
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_result(self.sequence.completion())

    def fail(self, error: EngineError) -> None:
        """Raise the error in the caller, if it still waits."""
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

"""`ScriptedEngine`: an engine with prepared completions, for tests, simulations and overhead measurements."""

from __future__ import annotations

import itertools
import math
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from llmrl.engines.base import (
    Completion,
    EngineError,
    FinishReason,
    PauseMode,
    SamplingConfig,
    check_request,
    completion_budget,
)
from llmrl.engines.token_stream import TokenStream
from llmrl.testing.scripted_flight import Flight

Answer = str | Sequence[int]
"""A completion as text (encoded with `encode`) or token ids."""
Script = Sequence[Answer] | Callable[[list[int]], Answer]


class ScriptedEngine:
    """An engine that returns completions from a list, which is repeated, or from a function of the prompt's token ids.

    Latencies follow the clock of the caller's event loop, which may have virtual time. Errors of a
    script function are raised by the request.

    Args:
        script: answers, or a function from the prompt's token ids to an answer.
        encode: converts text to token ids; required for text answers.
        decode: converts token ids to text; required for stop strings.
        log_prob: log-probability of every token, or a function from an answer's token ids to `[num_tokens]` values.
        latency_s: seconds per request, or a function from the prompt's and the answer's token ids to seconds.
        max_model_len: maximum length of prompt and completion in tokens.
        max_num_seqs: maximum number of concurrent requests, which must then share an event loop;
            further requests wait in order. There is no limit by default.
        stop_token_ids: tokens that end a completion, in addition to those of the request.
        record_requests: whether to keep all requests in `requests`.

    Example:
        >>> import asyncio
        >>> engine = ScriptedEngine([[1, 2, 3]])
        >>> asyncio.run(engine.generate([7], SamplingConfig(max_new_tokens=2))).token_ids
        [1, 2]
    """

    takes_grammars = True
    """Whether requests may have a grammar, which the script ignores."""
    streams_tokens = True
    """Whether a request's `stream` receives its tokens one by one during the latency."""

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        decode: Callable[[list[int]], str] | None = None,
        log_prob: float | Callable[[list[int]], Sequence[float]] = -1.0,
        latency_s: float | Callable[[list[int], list[int]], float] = 0.0,
        max_model_len: int = 8192,
        max_num_seqs: int | None = None,
        stop_token_ids: Sequence[int] = (),
        record_requests: bool = True,
    ) -> None:
        if not callable(script):
            if isinstance(script, str) or not script:
                raise ValueError(f"script must be a non-empty sequence of answers or a function, got {script!r}.")
            answers = itertools.cycle(script)
            self._answer: Callable[[list[int]], Answer] = lambda prompt_ids: next(answers)
        else:
            self._answer = script
        if max_num_seqs is not None and max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs!r}.")
        self.max_model_len = max_model_len
        self.vocab_size: int | None = None
        self.requests: list[tuple[list[int], SamplingConfig, str]] = []
        """Prompt ids, sampling and routing key ("" if None) of all requests so far."""
        self.busy_s = 0.0
        """Total service time of all requests in seconds, on their loop's clock."""
        self._encode = encode
        self._decode = decode
        self._log_prob = log_prob
        self._latency_s = latency_s
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_num_seqs = max_num_seqs or math.inf
        self._record_requests = record_requests
        self._policy_version = 0
        self._faults: list[BaseException] = []
        self._num_to_hang = 0
        self._in_flight: dict[str, Flight] = {}
        self._queue: OrderedDict[str, Flight] = OrderedDict()
        self._num_running = 0
        self._ids = itertools.count()
        self._num_tokens = 0
        self._is_paused = self._is_hanging = self._is_shut_down = False

    @property
    def policy_version(self) -> int:
        """Version of the weights for new requests."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Use the version for new requests and for the remaining tokens of requests in flight."""
        self._policy_version = version
        for flight in list(self._in_flight.values()):
            flight.add_version(version)

    @property
    def is_alive(self) -> bool:
        """Whether the engine serves requests."""
        return not self._is_shut_down

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight."""
        return len(self._in_flight)

    def fail_next(self, num_requests: int = 1, error: BaseException | None = None) -> None:
        """Make the next requests raise `error`; an `EngineError` by default."""
        self._faults.extend([error or EngineError("This request fails because of fail_next.")] * num_requests)

    def hang_next(self, num_requests: int = 1) -> None:
        """Make the next requests wait until they are aborted or cancelled."""
        self._num_to_hang += num_requests

    def hang(self) -> None:
        """Stop generating tokens until `shutdown`; the engine still reports that it is alive."""
        self._is_hanging = True
        for flight in list(self._in_flight.values()):
            flight.hold()

    async def progress(self) -> int | None:
        """Return a number that changes with every token, or None if the engine is idle or paused."""
        if self._is_paused or not self._in_flight:
            return None
        return self._num_tokens + sum(flight.num_done() for flight in self._in_flight.values())

    def pause(self, mode: PauseMode = "keep") -> None:
        """Pause. Requests in flight stay (`keep`), finish first (`wait`, from another thread) or end (`abort`)."""
        self._is_paused = True
        flights = list(self._in_flight.values())
        for flight in flights:
            if mode == "keep":
                flight.hold()
            elif mode == "abort":
                flight.abort()
        while mode == "wait" and not all(flight.is_done for flight in flights):
            time.sleep(0.001)

    def resume(self) -> None:
        """Continue after `pause`."""
        self._is_paused = False
        if not self._is_hanging:
            for flight in list(self._in_flight.values()):
                flight.release()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        stream: TokenStream | None = None,
    ) -> Completion:
        """Return the next answer, cut at the budget and at the first stop token or stop string.

        Raises:
            ValueError: if the prompt is too long, or the `request_id` is in flight.
            EngineError: after `shutdown`, or after `fail_next`.
        """
        if self._is_shut_down:
            raise EngineError("The scripted engine was shut down.")
        if request_id is None:
            request_id = f"scripted-{next(self._ids)}"
        prompt = list(prompt_ids)
        check_request(request_id, prompt, self._in_flight)
        budget = completion_budget(len(prompt), sampling, self.max_model_len)
        if self._record_requests:
            self.requests.append((prompt, sampling, routing_key or ""))
        if self._faults:
            raise self._faults.pop(0)
        token_ids, finish_reason, stop_string = self._cut(self._token_ids(self._answer(prompt)), sampling, budget)
        latency_s = self._latency_s(prompt, token_ids) if callable(self._latency_s) else self._latency_s
        if self._num_to_hang:
            self._num_to_hang -= 1
            latency_s = math.inf
        flight = Flight(latency_s, self._policy_version, len(token_ids))
        if stream is not None:
            flight.show(token_ids, stream)
        await self._fly(request_id, flight)
        self._num_tokens += flight.num_tokens
        if self._is_shut_down:
            raise EngineError("The scripted engine was shut down.")
        if flight.is_aborted:
            token_ids = token_ids[: flight.num_done()]
            finish_reason = "abort"
            stop_string = None
        mask = [array("i", [token_id]) for token_id in token_ids] if sampling.needs_sampling_mask else None
        log_prob = self._log_prob
        return Completion(
            token_ids=token_ids,
            log_probs=list(log_prob(token_ids)) if callable(log_prob) else [log_prob] * len(token_ids),
            versions=flight.versions(len(token_ids)),
            finish_reason=finish_reason,
            stop_string=stop_string,
            sampling_mask=mask,
        )

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns the tokens so far."""
        flight = self._in_flight.get(request_id)
        if flight is not None:
            flight.abort()

    def shutdown(self) -> None:
        """Shut down; all requests raise `EngineError`. May be called twice."""
        self._is_shut_down = True
        for flight in list(self._in_flight.values()):
            flight.abort()

    async def _fly(self, request_id: str, flight: Flight) -> None:
        """Wait until the request may start, then for its latency, and clean up."""
        self._in_flight[request_id] = flight
        if self._is_paused or self._is_hanging:
            flight.hold()
        if self._num_running < self._max_num_seqs:
            self._start(flight)
        else:
            self._queue[request_id] = flight
        try:
            await flight.wait()
        finally:
            del self._in_flight[request_id]
            if flight.is_started:
                self.busy_s += flight.elapsed_s
                self._num_running -= 1
                if self._queue:
                    self._start(self._queue.popitem(last=False)[1])
            else:
                del self._queue[request_id]

    def _start(self, flight: Flight) -> None:
        self._num_running += 1
        flight.start()

    def _token_ids(self, answer: Answer) -> list[int]:
        if not isinstance(answer, str):
            return list(answer)
        if self._encode is None:
            raise ValueError(f"the script returned text, {answer!r}; pass encode=, or return token ids.")
        return list(self._encode(answer))

    def _cut(
        self, token_ids: list[int], sampling: SamplingConfig, budget: int
    ) -> tuple[list[int], FinishReason, str | None]:
        stop_token_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= self._stop_token_ids
        finish_reason: FinishReason = "stop"  # the script has ended
        if len(token_ids) > budget:
            token_ids = token_ids[:budget]
            finish_reason = "length"
        end = next((index + 1 for index, token in enumerate(token_ids) if token in stop_token_ids), None)
        if end is not None:
            token_ids = token_ids[:end]
            finish_reason = "stop"
        if sampling.stop:
            if self._decode is None:
                raise ValueError("the request has stop strings; pass decode= to the ScriptedEngine.")
            for length in range(1, len(token_ids) + 1):
                text = self._decode(token_ids[:length])
                found = next((stop for stop in sampling.stop if stop in text), None)
                if found is not None:
                    return token_ids[:length], "stop", found
        return token_ids, finish_reason, None

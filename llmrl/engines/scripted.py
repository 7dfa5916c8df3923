"""`ScriptedEngine`: an engine whose completions are written down, for tests and for measuring overhead."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from llmrl.engines.base import Completion, EngineError, FinishReason, SamplingConfig, completion_budget

Answer = str | Sequence[int]
"""A completion as text (encoded with the engine's `encode`) or as token ids."""
Script = Sequence[Answer] | Callable[[list[int]], Answer]


class ScriptedEngine:
    """Completions from a list (in turn, again from the start at the end) or from a function of the prompt ids.

    Args:
        script: answers, or a function of the prompt's token ids.
        encode: text to token ids; needed where answers are text.
        log_prob: of every token, or a function of the answer's token ids to `[num_tokens]` values.
        latency_s: of a request, or a function of the prompt's and the answer's token ids to seconds.
        max_model_len: prompt and completion together, in tokens.
        stop_token_ids: tokens that end a completion, beside those of a request.
        decode: token ids to text; needed where requests have stop strings.

    Example:
        >>> engine = ScriptedEngine([[1, 2, 3]])
        >>> asyncio.run(engine.generate([7], SamplingConfig(max_new_tokens=2))).token_ids
        [1, 2]
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        decode: Callable[[list[int]], str] | None = None,
        log_prob: float | Callable[[list[int]], Sequence[float]] = -1.0,
        latency_s: float | Callable[[list[int], list[int]], float] = 0.0,
        max_model_len: int = 8192,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        if not callable(script):
            if isinstance(script, str) or not script:
                raise ValueError(f"script must be a non-empty sequence of answers or a function, got {script!r}.")
            answers = itertools.cycle(script)
            self._answer: Callable[[list[int]], Answer] = lambda prompt_ids: next(answers)
        else:
            self._answer = script
        self.max_model_len = max_model_len
        self.requests: list[tuple[list[int], SamplingConfig, str]] = []
        """Prompt ids, sampling and routing key ("" for none) of every request so far."""
        self._encode, self._decode, self._log_prob, self._latency_s = encode, decode, log_prob, latency_s
        self._stop_token_ids = frozenset(stop_token_ids)
        self._policy_version = 0
        self._faults: list[BaseException] = []
        self._in_flight: dict[str, _Flight] = {}
        self._ids = itertools.count()
        self._is_shut_down = False

    @property
    def policy_version(self) -> int:
        """Version that a request started now would have."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Tokens of requests in flight that are due later than now get the new version."""
        self._policy_version = version
        for flight in self._in_flight.values():
            flight.versions_since.append((time.perf_counter(), version))

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return not self._is_shut_down

    @property
    def num_in_flight(self) -> int:
        """Requests that have not returned yet."""
        return len(self._in_flight)

    def fail_next(self, num_requests: int = 1, error: BaseException | None = None) -> None:
        """Make the next requests raise `error`, an `EngineError` when not given."""
        self._faults.extend([error or EngineError("A fault was asked for.")] * num_requests)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """The next answer, cut to the budget and at the first stop token or stop string.

        Raises:
            ValueError: when the prompt leaves no room, or a `request_id` is in flight.
            EngineError: after `shutdown`, or on command.
        """
        if self._is_shut_down:
            raise EngineError("The scripted engine was shut down.")
        request_id = f"scripted-{next(self._ids)}" if request_id is None else request_id
        if request_id in self._in_flight:
            raise ValueError(f"request_id {request_id!r} is in flight already; ids must be unique.")
        prompt = list(prompt_ids)
        budget = completion_budget(len(prompt), sampling, self.max_model_len)
        self.requests.append((prompt, sampling, routing_key or ""))
        if self._faults:
            raise self._faults.pop(0)
        token_ids, finish_reason, stop_string = self._cut(self._token_ids(self._answer(prompt)), sampling, budget)
        latency_s = self._latency_s(prompt, token_ids) if callable(self._latency_s) else self._latency_s
        flight = _Flight(time.perf_counter(), latency_s, self._policy_version)
        self._in_flight[request_id] = flight
        try:
            if await flight.wait():
                num_done = flight.num_done(len(token_ids), time.perf_counter())
                token_ids, finish_reason, stop_string = token_ids[:num_done], "abort", None
        finally:
            del self._in_flight[request_id]
        if self._is_shut_down:
            raise EngineError("The scripted engine was shut down.")
        log_prob = self._log_prob
        return Completion(
            token_ids=token_ids,
            log_probs=list(log_prob(token_ids)) if callable(log_prob) else [log_prob] * len(token_ids),
            versions=flight.versions(len(token_ids)),
            finish_reason=finish_reason,
            stop_string=stop_string,
        )

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns the tokens that were due by now."""
        flight = self._in_flight.get(request_id)
        if flight is not None:
            flight.abort()

    def shutdown(self) -> None:
        """Requests in flight and later ones raise `EngineError`. May be called twice."""
        self._is_shut_down = True
        for flight in list(self._in_flight.values()):
            flight.abort()

    def _token_ids(self, answer: Answer) -> list[int]:
        if not isinstance(answer, str):
            return list(answer)
        if self._encode is None:
            raise ValueError(f"the script answered text, {answer!r}; give encode=, or answer token ids.")
        return list(self._encode(answer))

    def _cut(
        self, token_ids: list[int], sampling: SamplingConfig, budget: int
    ) -> tuple[list[int], FinishReason, str | None]:
        stop_token_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= self._stop_token_ids
        finish_reason: FinishReason = "stop"  # a script that ends has said what it wanted
        if len(token_ids) > budget:
            token_ids, finish_reason = token_ids[:budget], "length"
        end = next((index + 1 for index, token in enumerate(token_ids) if token in stop_token_ids), None)
        if end is not None:
            token_ids, finish_reason = token_ids[:end], "stop"
        if sampling.stop:
            if self._decode is None:
                raise ValueError("the request has stop strings; give the scripted engine decode=.")
            for length in range(1, len(token_ids) + 1):
                text = self._decode(token_ids[:length])
                found = next((stop for stop in sampling.stop if stop in text), None)
                if found is not None:
                    return token_ids[:length], "stop", found
        return token_ids, finish_reason, None


class _Flight:
    """One request: when it started, how long it takes, and which versions it saw since."""

    __slots__ = ("_future", "_latency_s", "_loop", "_start_s", "versions_since")

    def __init__(self, start_s: float, latency_s: float, version: int) -> None:
        self._start_s, self._latency_s = start_s, latency_s
        self.versions_since: list[tuple[float, int]] = [(start_s, version)]
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Any] | None = None

    async def wait(self) -> bool:
        """Wait for the latency; whether the request was aborted."""
        if self._latency_s <= 0:
            return False
        self._future = self._loop.create_future()
        try:
            await asyncio.wait_for(self._future, self._latency_s)
        except TimeoutError:
            return False
        return True

    def abort(self) -> None:
        """End the wait, from whichever thread."""

        def end() -> None:
            if self._future is not None and not self._future.done():
                self._future.set_result(None)

        self._loop.call_soon_threadsafe(end)

    def num_done(self, num_tokens: int, now_s: float) -> int:
        """Tokens due by `now_s`, were they sampled at a steady pace."""
        return min(num_tokens, int(num_tokens * (now_s - self._start_s) / self._latency_s))

    def versions(self, num_tokens: int) -> list[int]:
        """Version of each token: that of the weights when it was due."""
        if len(self.versions_since) == 1:
            return [self.versions_since[0][1]] * num_tokens
        versions = []
        for index in range(num_tokens):
            due_s = self._start_s + self._latency_s * (index + 1) / num_tokens
            versions.append([version for since_s, version in self.versions_since if since_s <= due_s][-1])
        return versions

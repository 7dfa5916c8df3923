"""A simulated engine with a key-value cache, on the event loop's clock: a model of vLLM's scheduler."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmrl.engines import Completion, SamplingConfig
from llmrl.engines.load import METRICS, EngineLoad

_MAX_EVEN_STEPS = 16


@dataclass(frozen=True, slots=True)
class StepCost:
    """Duration of one engine step: a fixed part for reading the weights, and parts that grow with the work."""

    fixed_s: float = 8e-3
    per_sequence_s: float = 3e-5
    per_prompt_token_s: float = 4e-5
    per_context_token_s: float = 2e-8
    """Seconds per token with keys and values that the step's sequences read."""


@dataclass(slots=True, eq=False)
class _Request:
    conversation: str
    num_prompt: int
    num_to_sample: int
    done: asyncio.Future[None]
    num_computed: int = 0
    num_sampled: int = 0
    num_cached: int = 0

    @property
    def num_needed(self) -> int:
        """Number of tokens with keys and values that sampling the next token needs."""
        return self.num_prompt + self.num_sampled


@dataclass(slots=True)
class SimulatedEngine:
    """Serves requests in steps: running sequences first, then waiting ones in chunks, as far as memory allows.

    When memory is full, cached contexts of conversations without a request are evicted, the oldest first; then the
    sequence that was started last is preempted and later computed again. Only the length of a prompt matters; its
    cached prefix is found by the `routing_key`. Each request samples `max_new_tokens` tokens.
    """

    num_memory_tokens: int
    cost: StepCost = field(default_factory=StepCost)
    num_step_tokens: int = 2048
    max_num_seqs: int = 256
    policy_version: int = 0
    num_preemptions: int = 0
    _running: list[_Request] = field(default_factory=list)
    _waiting: deque[_Request] = field(default_factory=deque)
    _cached: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _num_held: int = 0  # tokens of running sequences
    _num_cached: int = 0  # tokens of conversations without a request
    _load: EngineLoad = field(default_factory=EngineLoad)
    _stepping: asyncio.Task[None] | None = None

    def take_load(self, reader: str = METRICS) -> EngineLoad:
        """Return the load since the last call; there is only one reader."""
        load, self._load = self._load, EngineLoad()
        return load

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """Sample `max_new_tokens` tokens."""
        assert routing_key is not None
        done = asyncio.get_running_loop().create_future()
        request = _Request(routing_key, len(prompt_ids), sampling.max_new_tokens, done)
        self._waiting.append(request)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_while_busy())
        await done
        num = request.num_to_sample
        return Completion(
            token_ids=[7] * num,
            log_probs=[-1.0] * num,
            versions=[self.policy_version] * num,
            finish_reason="stop",
            metrics={"num_cached_tokens": float(request.num_cached)},
        )

    async def _step_while_busy(self) -> None:
        while self._running or self._waiting:
            seconds, ended = self._step()
            await asyncio.sleep(seconds)
            for request in ended:
                request.done.set_result(None)
            await asyncio.sleep(0)

    def _step(self) -> tuple[float, list[_Request]]:
        """Advance all sequences, by several tokens if possible; return the seconds and the completed requests."""
        num_steps = self._num_even_steps()
        budget, num_prompt_tokens, num_preempted, num_prompt, num_hit = self.num_step_tokens, 0, 0, 0, 0
        index = 0
        while index < len(self._running):
            request = self._running[index]
            num = min(budget, request.num_needed - request.num_computed + num_steps - 1)
            while not self._make_room(num):
                self._put_off(self._running.pop())
                num_preempted += 1
            if index < len(self._running):
                budget -= num if num_steps == 1 else 1
                num_prompt_tokens += num - num_steps
                request.num_computed += num
                self._num_held += num
            index += 1
        while self._waiting and not num_preempted and budget and len(self._running) < self.max_num_seqs:
            request = self._waiting[0]
            hit = min(self._cached.get(request.conversation, 0), request.num_needed - 1)
            num = min(budget, request.num_needed - hit)
            if self._num_held + hit + num > self.num_memory_tokens:
                break
            self._running.append(self._waiting.popleft())
            self._num_cached -= self._cached.pop(request.conversation, 0)
            self._num_held += hit
            self._make_room(num)
            self._num_held += num
            request.num_computed = hit + num
            num_prompt, num_hit = num_prompt + request.num_needed, num_hit + hit
            request.num_cached = hit if not request.num_sampled else request.num_cached
            budget -= num
            num_prompt_tokens += num
        ended = []
        for request in self._running:
            if request.num_computed >= request.num_needed:
                request.num_sampled += num_steps
                if request.num_sampled >= request.num_to_sample:
                    ended.append(request)
        for request in ended:
            self._running.remove(request)
            self._num_held -= request.num_computed
            self._cached[request.conversation] = request.num_computed
            self._num_cached += request.num_computed
        self.num_preemptions += num_preempted
        kv_use = self._num_held / self.num_memory_tokens
        self._load = self._load.joined(EngineLoad(kv_use, len(self._waiting), num_preempted, num_prompt, num_hit))
        cost = self.cost
        one_step_s = cost.fixed_s + cost.per_sequence_s * len(self._running) + cost.per_context_token_s * self._num_held
        return num_steps * one_step_s + cost.per_prompt_token_s * num_prompt_tokens, ended

    def _num_even_steps(self) -> int:
        """Return the number of steps that only sample: nothing waits or ends before, and memory suffices."""
        if self._waiting or not self._running:
            return 1
        num = _MAX_EVEN_STEPS
        for request in self._running:
            num = min(num, request.num_to_sample - request.num_sampled)
            if request.num_needed - request.num_computed != 1:
                return 1
        return max(1, min(num, (self.num_memory_tokens - self._num_held) // len(self._running)))

    def _make_room(self, num: int) -> bool:
        """Evict cached contexts until `num` tokens fit; return whether they fit."""
        while self._num_held + self._num_cached + num > self.num_memory_tokens and self._cached:
            self._num_cached -= self._cached.popitem(last=False)[1]
        return self._num_held + num <= self.num_memory_tokens

    def _put_off(self, request: _Request) -> None:
        self._num_held -= request.num_computed
        request.num_computed = 0
        self._waiting.appendleft(request)

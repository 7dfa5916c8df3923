"""The `Engine` protocol: an engine samples a completion, with log-probs and policy versions, from token ids."""

from __future__ import annotations

import math
import numbers
from array import array
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "wait", "abort"]
"""Treatment of requests in flight by a pause: keep them, wait until they have ended, or abort them."""
TransferInfo = dict[str, object]
"""Parameters of a weight transfer, with values of plain types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Sampling parameters; an engine honours or refuses each of them.

    Log-probs are those of the distribution after temperature, top-k, top-p and min-p, so on-policy importance ratios
    are 1. Raises TypeError if a field has the wrong type, and ValueError if it is out of range.
    """

    max_new_tokens: int = 256
    """Maximum number of sampled tokens; clipped to the remaining context."""
    temperature: float = 1.0
    """0 is greedy; otherwise at least 0.01, the minimum of vLLM."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Stop strings. The sampled ids are kept whole even if a stop string ends inside a token."""
    stop_token_ids: tuple[int, ...] = ()
    """End-of-turn tokens in addition to the model's own; a sampled one stays in the completion."""
    ignore_eos: bool = False
    grammar: str | None = None
    """Grammar of the answer: a structural tag of xgrammar, as JSON; see `TakesGrammars`."""
    replay: bool = True
    """Whether the trainer must be able to recompute the distribution. If true, the ids that top-k, top-p, min-p and
    a grammar keep are returned with each token (`Completion.sampling_mask`), and collectors refuse a repetition
    penalty. If false, the trainer uses the distribution before all of these, so importance ratios are not 1 on-policy.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._convert("a whole number", numbers.Integral, int, "max_new_tokens", "top_k")
        self._convert("a number", numbers.Real, float, "temperature", "top_p", "min_p", "repetition_penalty")
        if self.seed is not None:
            self._convert("a whole number or None", numbers.Integral, int, "seed")
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "non-negative"),
            (
                "temperature",
                self.temperature == 0 or 0.01 <= self.temperature < math.inf,
                "0 (greedy), or 0.01 or more",
            ),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "non-negative (0 keeps all)"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "positive"),
            ("seed", self.seed is None or 0 <= self.seed < 1 << 63, "in [0, 2**63)"),
            ("stop", all(isinstance(one, str) and one for one in self.stop), "non-empty strings"),
            (
                "stop_token_ids",
                all(isinstance(one, numbers.Integral) and one >= 0 for one in self.stop_token_ids),
                "non-negative token ids",
            ),
            ("grammar", not (self.grammar is not None and self.ignore_eos), "None if ignore_eos is true"),
        )
        for name, is_valid, expected in checks:
            if not is_valid:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}.")
        object.__setattr__(self, "stop_token_ids", tuple(map(int, self.stop_token_ids)))

    def _convert(self, expected: str, accepted: type, kind: Callable[[Any], float], *names: str) -> None:
        """Convert numbers, such as NumPy's, to Python's own, which a request to a server can hold."""
        for name in names:
            if not isinstance(value := getattr(self, name), accepted) or isinstance(value, bool):
                raise TypeError(f"{name} must be {expected}, got {value!r}.")
            object.__setattr__(self, name, kind(value))

    @property
    def is_truncated(self) -> bool:
        """Whether top-p, top-k, min-p or a grammar may exclude tokens."""
        is_cut = self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.grammar is not None
        return self.temperature > 0 and is_cut

    @property
    def needs_sampling_mask(self) -> bool:
        """Whether completions must include a sampling mask."""
        return self.replay and self.is_truncated

    def with_changes(self, **changes: Any) -> SamplingConfig:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def for_answers(self, num_answers: int) -> list[SamplingConfig]:
        """Return a copy for each of several answers; with one seed, all answers to a prompt would be equal.

        Example:
            >>> [one.seed for one in SamplingConfig(seed=7).for_answers(3)]
            [7, 8, 9]
        """
        if self.seed is None:
            return [self] * num_answers
        return [self.with_changes(seed=(self.seed + place) % (1 << 63)) for place in range(num_answers)]


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled completion."""

    token_ids: list[int]
    """[num_tokens] sampled tokens, including a stop token if one was sampled."""
    log_probs: list[float]
    """[num_tokens] log-prob of each sampled token under the distribution it was sampled from."""
    versions: list[int]
    """[num_tokens] policy version that sampled each token."""
    finish_reason: FinishReason
    """`stop` (end-of-turn token or stop string), `length` (budget or context is used up) or `abort`."""
    stop_string: str | None = None
    """The stop string that ended the completion, if one did."""
    sampling_mask: list[array[int]] | None = None
    """[num_tokens] `array("i")`: at each position the ids that truncation and a grammar kept, including the sampled id,
    or `~id` of each removed id; None if there is no truncation or `replay` is false."""
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """[num_prompt_tokens + num_tokens - 1, num_layers, top_k] int16: experts that processed each token of prompt and
    completion except the last; None if not reported."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Engine measurements for this request, such as `num_cached_tokens`."""

    def cut(self, num_tokens: int, num_prompt_tokens: int) -> Completion:
        """Return the first `num_tokens` tokens, as if the request had been aborted after them."""
        experts, mask = self.routed_experts, self.sampling_mask
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            log_probs=self.log_probs[:num_tokens],
            versions=self.versions[:num_tokens],
            finish_reason="abort",
            stop_string=None,
            sampling_mask=None if mask is None else mask[:num_tokens],
            routed_experts=None if experts is None else experts[: num_prompt_tokens + num_tokens - 1],
        )


class EngineError(RuntimeError):
    """Error of an engine that could not serve a request or a call; another engine may succeed."""


@runtime_checkable
class Engine(Protocol):
    """Protocol of an inference engine; `generate` may be called concurrently from any event loop."""

    max_model_len: int
    """Maximum number of tokens of prompt and completion together."""

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None if unknown."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that a new request would use."""

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Set the version from which updates are counted, when a run is resumed."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine can serve requests; cheap to call."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """Sample one completion of `prompt_ids` ([num_prompt_tokens]).

        `request_id` must be unique; requests with the same `routing_key` (such as a group id) go to one replica, to
        share its prefix cache. Cancelling the awaiting task aborts the request. Raises ValueError if the prompt leaves
        no room for a token, and EngineError if the engine died or refused the request.
        """

    async def abort(self, request_id: str) -> None:
        """Abort a request; its `generate` returns the tokens so far, with finish reason `abort`."""

    def shutdown(self) -> None:
        """Release processes, threads and memory. May be called twice."""


@runtime_checkable
class ReportsProgress(Protocol):
    """An engine that reports its progress, so that a hang can be detected."""

    async def progress(self) -> int | None:
        """Return a number that every new token changes; None if idle or paused. Raises EngineError if dead."""


@runtime_checkable
class ChecksSampling(Protocol):
    """An engine that can check sampling parameters before any request."""

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise ValueError, with an alternative, if the engine does not support these parameters."""


@runtime_checkable
class TakesGrammars(Protocol):
    """An engine that follows `SamplingConfig.grammar` and returns the ids that the grammar kept."""

    takes_grammars: bool
    """Whether the engine follows grammars; for several engines, whether all of them do."""


@runtime_checkable
class HasTokenizer(Protocol):
    """An engine that has its model's tokenizer."""

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""


@runtime_checkable
class UpdatableEngine(Engine, ReportsProgress, Protocol):
    """An engine that takes new weights while it runs.

    An update calls `pause`, `start_weight_update`, `update_weights`, `finish_weight_update`, `reset_prefix_cache` and
    `resume`. These methods block, and raise EngineError if the engine died or refuses the call.
    """

    model_dtype: torch.dtype
    """dtype of the engine's weights."""
    quantization: str | None
    """Quantisation of the engine's weights, or None."""
    num_workers: int
    """Number of worker processes that receive weights."""

    @property
    def weight_transfer_backend(self) -> str | None:
        """vLLM's weight-transfer backend, or None."""

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """Stop stepping; `clear_cache` also drops the key-value blocks, including those of kept requests."""

    def resume(self) -> None:
        """Continue after `pause`."""

    def reset_prefix_cache(self, *, reset_running_requests: bool = True) -> bool:
        """Drop cached key-value blocks; without `reset_running_requests`, keep those in use and return False."""

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Open the engine's side of a weight transfer."""

    def start_weight_update(self) -> None:
        """Prepare the paused engine for new weights."""

    def update_weights(self, update_info: TransferInfo | list[TransferInfo]) -> None:
        """Receive weights; the policy version does not change."""

    def finish_weight_update(self, weight_version: str | int | None = None) -> int:
        """Activate the received weights and return their version, by default the next one."""


def refuse_grammar(engine: object, sampling: SamplingConfig) -> None:
    """Raise ValueError if the parameters contain a grammar, which this engine does not follow."""
    if sampling.grammar is not None:
        raise ValueError(
            f"SamplingConfig.grammar needs an engine that reports which tokens the grammar kept, which "
            f"{type(engine).__name__} does not: sample from AsyncVLLM, or describe the form of the answer in a message."
        )


def check_supported(engine: object, sampling: SamplingConfig) -> None:
    """Raise ValueError, with an alternative, if the engine does not support these parameters."""
    if not (isinstance(engine, TakesGrammars) and engine.takes_grammars):
        refuse_grammar(engine, sampling)
    if isinstance(engine, ChecksSampling):
        engine.check_sampling(sampling)


def check_unique(request_id: str, in_flight: Container[str]) -> None:
    """Raise ValueError if the request's id is in flight."""
    if request_id in in_flight:
        raise ValueError(f"request_id {request_id!r} is in flight already; ids must be unique.")


def check_request(request_id: str, prompt_ids: Sequence[int], in_flight: Container[str]) -> None:
    """Raise ValueError if the request's id is in flight or its prompt is empty."""
    check_unique(request_id, in_flight)
    if not prompt_ids:
        raise ValueError("prompt_ids is empty; an engine needs at least one token to continue.")


def completion_budget(num_prompt_tokens: int, sampling: SamplingConfig, max_model_len: int) -> int:
    """Return the maximum number of tokens to sample. Raises ValueError if the context has no room for any.

    Example:
        >>> completion_budget(90, SamplingConfig(max_new_tokens=64), 100)
        10
    """
    remaining = max_model_len - num_prompt_tokens
    if remaining < 1:
        raise ValueError(
            f"prompt_ids has {num_prompt_tokens} tokens and the engine's context is {max_model_len}; "
            "shorten the prompt or raise max_model_len."
        )
    return min(sampling.max_new_tokens, remaining)

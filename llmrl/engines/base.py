"""What an engine is: token ids in; token ids, log-probs, policy versions and a finish reason out."""

from __future__ import annotations

import math
import numbers
from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "wait", "abort"]
"""What a pause does to requests in flight: they stay, are finished first, or end now."""
TransferInfo = dict[str, object]
"""What one end of a weight transfer tells the other, in plain types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How to sample: every field is honoured or refused by an engine, never dropped.

    Log-probs are those of the distribution that is actually sampled from (temperature, top-k, top-p and min-p
    applied), so that on-policy importance ratios are 1.

    Raises TypeError for a value of another type, naming the field, and ValueError for a value out of range, naming the
    field.

    Example:
        >>> SamplingConfig(max_new_tokens=8, temperature=0.7).temperature
        0.7
    """

    max_new_tokens: int = 256
    """Completion budget in tokens; clipped by the engine to the context that remains."""
    temperature: float = 1.0
    """0 is greedy; otherwise 0.01 or more, since vLLM samples at 0.01 where less is asked."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Stop strings. The sampled ids are kept whole even where a stop string ends inside a token."""
    stop_token_ids: tuple[int, ...] = ()
    """End-of-turn tokens beside the model's own; sampled stop tokens stay in the completion."""
    ignore_eos: bool = False
    replay: bool = True
    """Whether the trainer must be able to make the same distribution again. What top-k, top-p and min-p keep is then
    reported with each token (`Completion.sampling_mask`), by an engine that can, and a repetition penalty is refused by
    collectors. Where it is false they train on the distribution before truncation and penalty, with importance ratios
    that are not 1 on-policy."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._require("a whole number", numbers.Integral, "max_new_tokens", "top_k")
        self._require("a number", numbers.Real, "temperature", "top_p", "min_p", "repetition_penalty")
        if self.seed is not None:
            self._require("a whole number or None", numbers.Integral, "seed")
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
            ("stop", all(isinstance(one, str) and one for one in self.stop), "strings that are not empty"),
            (
                "stop_token_ids",
                all(isinstance(one, numbers.Integral) and one >= 0 for one in self.stop_token_ids),
                "ids of tokens",
            ),
        )
        for name, is_valid, expected in checks:
            if not is_valid:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}.")

    def _require(self, expected: str, kind: type, *names: str) -> None:
        for name in names:
            if not isinstance(value := getattr(self, name), kind) or isinstance(value, bool):
                raise TypeError(f"{name} must be {expected}, got {value!r}.")

    @property
    def is_truncated(self) -> bool:
        """Whether tokens that the model gives some probability are never sampled."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def needs_sampling_mask(self) -> bool:
        """Whether a completion is complete only with its sampling mask."""
        return self.replay and self.is_truncated

    def with_changes(self, **changes: Any) -> SamplingConfig:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one request."""

    token_ids: list[int]
    """[num_tokens] sampled tokens, the stop token included when one was sampled."""
    log_probs: list[float]
    """[num_tokens] log-prob of each sampled token under the distribution it was sampled from."""
    versions: list[int]
    """[num_tokens] policy version that sampled each token."""
    finish_reason: FinishReason
    """`stop` (end-of-turn token or stop string), `length` (budget or context used up) or `abort`."""
    stop_string: str | None = None
    """The stop string that ended the completion, if one did."""
    sampling_mask: list[array[int]] | None = None
    """[num_tokens] of `array("i")`: the ids that truncation kept where each token was sampled, the token's own among
    them; None where it was asked to keep all, or not to tell."""
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """[num_prompt_tokens + num_tokens - 1, num_layers, top_k] int16: the experts that a mixture computed each token
    with, from the prompt's first to the last but one; None where the engine does not tell."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Engine measurements for this request, such as `num_cached_tokens`."""


class EngineError(RuntimeError):
    """An engine could not serve a request; the request may be tried again elsewhere."""


@runtime_checkable
class Engine(Protocol):
    """The small protocol between policies and whatever generates.

    `generate` may be awaited from any event loop, with many requests in flight at once.
    """

    max_model_len: int
    """Prompt and completion together, in tokens."""

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None where the engine does not know it."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the weights that a request started now would use."""
        ...

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Count on from `version`: for a resumed run, before its weights are sent."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served; cheap, since it is asked before each."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """Sample one completion of `prompt_ids` ([num_prompt_tokens]).

        `request_id` must be unique when given; `routing_key` (a group or rollout id) keeps related requests on one
        replica for its prefix cache. Cancelling the awaiting task aborts the request.

        Raises ValueError if the prompt leaves no room for a single token, and EngineError if the engine died or
        refused.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what it has, with finish reason `abort`."""
        ...

    def shutdown(self) -> None:
        """Release processes, threads and memory. May be called twice."""
        ...


@runtime_checkable
class ReportsProgress(Protocol):
    """An engine of which one can tell whether it hangs."""

    async def progress(self) -> int | None:
        """Return a number that changes with every token that comes; None while none is due: idle, or paused.

        Raises EngineError if the engine died.
        """
        ...


@runtime_checkable
class ChecksSampling(Protocol):
    """An engine that can say beforehand what it would refuse whatever the prompt is."""

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Refuse a way of sampling.

        Raises ValueError if the engine does not support it; says what, and what to do instead.
        """
        ...


@runtime_checkable
class HasTokenizer(Protocol):
    """An engine that knows its model's tokenizer."""

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        ...


@runtime_checkable
class UpdatableEngine(Engine, ReportsProgress, Protocol):
    """An engine that takes new weights while it runs: what weight sync needs of one, beside requests.

    An update is `pause`, `start_weight_update`, `update_weights` (the weights are taken), `finish_weight_update` (they
    come into use), `reset_prefix_cache`, `resume`. All of these block, and raise `EngineError` when the engine refuses
    or died.
    """

    model_dtype: torch.dtype
    """dtype of the weights in the engine."""
    quantization: str | None
    """How the weights in the engine are quantised, `None` when they are not."""
    num_workers: int
    """Worker processes that take weights."""

    @property
    def weight_transfer_backend(self) -> str | None:
        """The vLLM backend that new weights come through, `None` when started without."""
        ...

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """Stop stepping; `clear_cache` also drops the key-value blocks, those of kept requests too."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def reset_prefix_cache(self, *, reset_running_requests: bool = True) -> bool:
        """Drop cached key-value blocks; without `reset_running_requests` those in use stay, and false is returned."""
        ...

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Open the engine's end of a weight transfer."""
        ...

    def start_weight_update(self) -> None:
        """Make the engine ready to take new weights; pause it first."""
        ...

    def update_weights(self, update_info: TransferInfo | list[TransferInfo]) -> None:
        """Take weights as the backend describes them; the version does not change."""
        ...

    def finish_weight_update(self, weight_version: str | int | None = None) -> int:
        """Put the taken weights to use and return their version: the next one, unless given."""
        ...


def check_request(request_id: str, prompt_ids: Sequence[int], in_flight: Container[str]) -> None:
    """Refuse a request that no engine can begin. Raises ValueError for an id that is in flight, or an empty prompt."""
    if request_id in in_flight:
        raise ValueError(f"request_id {request_id!r} is in flight already; ids must be unique.")
    if not prompt_ids:
        raise ValueError("prompt_ids is empty; an engine continues at least one token.")


def completion_budget(num_prompt_tokens: int, sampling: SamplingConfig, max_model_len: int) -> int:
    """Return how many tokens may be sampled: the asked budget, clipped to the context that remains.

    Raises ValueError if the prompt leaves no room.

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

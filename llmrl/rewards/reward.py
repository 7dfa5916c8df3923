"""`RewardFn` and what it scores: a settled conversation."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmrl.data import Message, RolloutStatus, StopReason, text_of


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """What a reward function may ask for, by parameter name: a conversation at its end."""

    messages: tuple[Message, ...]
    """The whole conversation."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The dataset's columns for this prompt; each is a parameter of its own."""
    status: RolloutStatus = RolloutStatus.COMPLETED
    reason: str = StopReason.NONE
    """What ended the rollout before its environment said done, if anything."""

    @property
    def completion(self) -> str:
        """Text of the policy's last message, empty when it never answered."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return text_of(message.get("content"))
        return ""

    def arguments(self) -> dict[str, Any]:
        """Everything by name; the record's own names win over columns of the same name."""
        own = {"messages": self.messages, "completion": self.completion, "status": self.status, "reason": self.reason}
        return {**self.columns, **own}


class UnknownRewardInput(TypeError):
    """A reward function reads something that neither the rollout nor the dataset has: its author's mistake."""


class RewardFn:
    """A reward function with a name and a weight.

    The function, plain or async, returns a number and declares by parameter name what it reads: `completion` (text of
    the last answer), `messages`, `status`, `reason`, or any column of the dataset.

    Args:
        function: the scoring function.
        name: defaults to the function's own; unique in a rubric.
        weight: non-negative; a rubric normalises weights by their sum.

    Raises:
        ValueError: for a negative weight or a nameless function.

    Example:
        >>> def exact(completion, answer):
        ...     return float(completion.strip() == answer)
        >>> from llmrl.data import run_sync
        >>> rollout = ScoredRollout(({"role": "assistant", "content": "15"},), {"answer": "15"})
        >>> run_sync(RewardFn(exact).score(rollout))
        1.0
    """

    def __init__(
        self, function: Callable[..., float | Awaitable[float]], *, name: str | None = None, weight: float = 1.0
    ) -> None:
        name = name or getattr(function, "__name__", None)
        if not name or name == "<lambda>":
            raise ValueError("name is needed for a reward function that has none of its own.")
        if not weight >= 0:
            raise ValueError(f"weight of {name!r} must be non-negative, got {weight!r}.")
        self.function, self.name, self.weight = function, name, weight
        # A function, or an object whose call is a coroutine.
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._required = [p.name for p in parameters if p.name in self._names and p.default is p.empty]

    async def score(self, rollout: ScoredRollout) -> float:
        """The raw score of one rollout.

        Raises:
            UnknownRewardInput: when the function reads something that neither the rollout nor the dataset has.
        """
        available = rollout.arguments()
        missing = [name for name in self._required if name not in available]
        if missing:
            raise UnknownRewardInput(
                f"reward function {self.name!r} reads {missing}, which is none of {sorted(available)}; "
                "name parameters after dataset columns, or after completion, messages, status, reason."
            )
        chosen = available if self._takes_all else {k: available[k] for k in self._names if k in available}
        result = self.function(**chosen)
        return float(await result if inspect.isawaitable(result) else result)

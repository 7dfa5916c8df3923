"""`RewardFn`, and `RewardInput`: a finished conversation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from llmrl._utils.asynchronous import awaited, is_async
from llmrl._utils.numbers import finite_number, location_of
from llmrl._utils.types import Row
from llmrl.data import Message, RolloutStatus, StopReason, text_of
from llmrl.data.message import copied


@dataclass(frozen=True, slots=True)
class RewardInput:
    """The possible inputs of a reward function, by parameter name."""

    messages: tuple[Message, ...]
    """The whole conversation."""
    columns: Row = field(default_factory=dict)
    """The dataset's columns for this prompt; each is a separate parameter."""
    status: RolloutStatus = RolloutStatus.COMPLETED
    reason: str = StopReason.NONE
    """Why the rollout ended, if its environment was not done."""
    tools: Row = field(default_factory=dict)
    """State of the conversation's tools by name; each is a separate parameter."""
    is_answered: bool = True
    """Whether the policy answered; otherwise all assistant messages are examples in the opening."""

    @property
    def completion(self) -> str:
        """Text of the policy's last message; empty if it never answered."""
        for message in reversed(self.messages if self.is_answered else ()):
            if message["role"] == "assistant":
                return text_of(message.get("content"))
        return ""

    def arguments(self) -> dict[str, object]:
        """Return all inputs by name; `ROLLOUT_INPUTS` override columns of the same name."""
        return {**self.columns, **self.tools, **{name: getattr(self, name) for name in ROLLOUT_INPUTS}}


ROLLOUT_INPUTS = ("completion", "messages", "status", "reason")
"""Inputs of reward functions that every rollout has."""


class UnknownRewardInput(TypeError):
    """A parameter of a reward function is neither an input of the rollout nor a column of the dataset."""


class RewardFn:
    """A reward function with a name and a weight.

    The plain or async function returns a finite number. Its parameter names declare its inputs: `completion` (text of
    the last answer), `messages`, `status`, `reason`, or any column of the dataset; missing values are None.

    Args:
        name: name, unique in a rubric; by default the function's.
        weight: non-negative weight, which a rubric normalises.

    Raises:
        TypeError: if the function has a positional-only parameter.
        ValueError: if the weight is negative or infinite, or if the function has no name.

    Example:
        >>> def exact(completion, answer):
        ...     return float(completion.strip() == answer)
        >>> from llmrl._utils.asynchronous import run_sync
        >>> rollout = RewardInput(({"role": "assistant", "content": "15"},), {"answer": "15"})
        >>> run_sync(RewardFn(exact).score(rollout))
        1.0
    """

    def __init__(
        self, function: Callable[..., float | Awaitable[float]], *, name: str | None = None, weight: float = 1.0
    ) -> None:
        if not callable(function):
            raise TypeError(
                f"a reward function must be callable, got {function!r:.80}; several are Rubric(f, g), not a list."
            )
        name = name or getattr(function, "__name__", None)
        if not name or name == "<lambda>":
            raise ValueError("name is needed for a reward function without a name of its own.")
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight of {name!r} must be non-negative and finite, got {weight!r}.")
        self.function = function
        self.name = name
        self.weight = weight
        self.is_async = is_async(function)
        parameters = inspect.signature(function).parameters.values()
        nameless = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if nameless:
            raise TypeError(f"reward function {name!r} takes {nameless} by position, but inputs are passed by name.")
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._required = [p.name for p in parameters if p.name in self._names and p.default is p.empty]

    def located(self, error: BaseException | None = None) -> str:
        """Return the function's name, file and line: those of its definition, or where an error was raised in it."""
        where = location_of(self.function, error)
        return f"reward function {self.name!r}" + (f" ({where})" if where else "")

    def check_inputs(self, available: Collection[str]) -> None:
        """Raise UnknownRewardInput if the function needs an input that is not available."""
        missing = [name for name in self._required if name not in available]
        if missing:
            raise UnknownRewardInput(
                f"{self.located()} reads {missing}, which is not among {sorted(available)}; "
                f"name parameters after dataset columns, or after {', '.join(ROLLOUT_INPUTS)}."
            )

    async def score(self, rollout: RewardInput) -> float:
        """Return the raw score of one rollout; raise TypeError or ValueError if it is not a finite number."""
        available = rollout.arguments()
        self.check_inputs(available)
        chosen = available if self._takes_all else {k: available[k] for k in self._names if k in available}
        given = {name: value if name in rollout.tools else copied(value) for name, value in chosen.items()}
        return finite_number(await awaited(self.function(**given)), f"the score of {self.name!r}")

"""Status of a rollout, and the rules that determine it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum


class RolloutStatus(IntEnum):
    """Status of a rollout; an integer, so it can be stored in a tensor."""

    ONGOING = 0
    """Still being played."""
    COMPLETED = 1
    """Ended by the environment."""
    TRUNCATED = 2
    """Cut by a limit: completion length, prompt length, number of turns, time."""
    ABORTED = 3
    """Ended from outside: shutdown, staleness, or an engine abort that was not continued."""
    ERROR = 4
    """A parse, environment, tool, reward or engine failure."""

    @property
    def is_settled(self) -> bool:
        """Whether the rollout has ended."""
        return self is not RolloutStatus.ONGOING

    @property
    def is_success(self) -> bool:
        """Whether the rollout was completed, or cut by a limit."""
        return self in (RolloutStatus.COMPLETED, RolloutStatus.TRUNCATED)


class StopReason(StrEnum):
    """Reason why a rollout ended before its environment was done; stored in addition to the status."""

    NONE = ""
    LENGTH = "length"
    PROMPT_TOO_LONG = "prompt_too_long"
    MAX_TURNS = "max_turns"
    TIMEOUT = "timeout"
    ENVIRONMENT_TRUNCATED = "environment_truncated"
    ABORTED = "aborted"
    ENVIRONMENT_ERROR = "environment_error"
    ENGINE_ERROR = "engine_error"


_STATUS_OF_REASON: Mapping[str, RolloutStatus] = {
    StopReason.NONE: RolloutStatus.ONGOING,
    StopReason.LENGTH: RolloutStatus.TRUNCATED,
    StopReason.PROMPT_TOO_LONG: RolloutStatus.TRUNCATED,
    StopReason.MAX_TURNS: RolloutStatus.TRUNCATED,
    StopReason.TIMEOUT: RolloutStatus.TRUNCATED,
    StopReason.ENVIRONMENT_TRUNCATED: RolloutStatus.TRUNCATED,
    StopReason.ABORTED: RolloutStatus.ABORTED,
    StopReason.ENVIRONMENT_ERROR: RolloutStatus.ERROR,
    StopReason.ENGINE_ERROR: RolloutStatus.ERROR,
}


def decide_status(*, is_terminated: bool, reason: str = StopReason.NONE) -> RolloutStatus:
    """Return the status of a rollout, given whether its environment terminated and its limit or failure, if any.

    A failure or an abort takes precedence, then termination, then a limit in the same turn. Raises
    ValueError if `reason` is not a `StopReason`.

    Example:
        >>> decide_status(is_terminated=True).name, decide_status(is_terminated=False, reason="max_turns").name
        ('COMPLETED', 'TRUNCATED')
    """
    status = _STATUS_OF_REASON.get(reason)
    if status is None:
        raise ValueError(f"reason must be one of {sorted(map(str, _STATUS_OF_REASON))}, got {reason!r}.")
    if status in (RolloutStatus.ABORTED, RolloutStatus.ERROR):
        return status
    return RolloutStatus.COMPLETED if is_terminated else status

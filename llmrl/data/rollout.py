"""Record of a rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from tensordict import TensorDictBase

from llmrl._utils.json_values import as_json
from llmrl._utils.types import JSON
from llmrl.data.message import Message
from llmrl.data.status import RolloutStatus, StopReason


@dataclass(slots=True, kw_only=True)
class Rollout:
    """Record of one rollout: one sample for one prompt. A failed rollout is a record with an error status."""

    rollout_id: str
    """Id, unique across retries, epochs and samplers."""
    group_id: str
    sample_index: int
    """Index in its group."""
    group_size: int
    env: str = ""
    """Name of its environment in a `MixedEnv`."""
    role: str = ""
    """Role of the policy in a game of several players."""
    columns: dict[str, object] = field(default_factory=dict)
    """The dataset's columns for the prompt."""
    conversation: Any = None
    """Exact token state (`llmrl.rendering.Conversation`); None if the rollout failed before its first prompt."""
    messages: tuple[Message, ...] = ()
    """The whole conversation, including the environment's last messages."""
    turns: list[dict[str, object]] = field(default_factory=list)
    """Tree of the requests of an agent that branched or called other agents (`TurnTree.to_records`)."""
    status: RolloutStatus = RolloutStatus.ONGOING
    reason: str = StopReason.NONE
    error: str = ""
    """Type and text of the exception, if the rollout failed."""
    traceback: str = ""
    """Traceback of the exception."""
    num_turns: int = 0
    num_completion_tokens: int = 0
    num_forks: int = 0
    """Number of training rows that were started because history was rewritten."""
    num_realigned_tokens: int = 0
    """Number of sampled tokens that are not trained on, because the end of their answer was edited."""
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    """Reward of each turn; a score at the end is added to the last turn."""
    turn_parents: list[int] = field(default_factory=list)
    """Index of each turn's previous turn, or -1; empty if all turns form one conversation."""
    token_rewards: dict[int, list[float]] = field(default_factory=dict)
    """Rewards of the answer's tokens by turn index, for turns with a dense reward."""
    breakdown: dict[str, float] = field(default_factory=dict)
    is_scored: bool = False
    tool_calls: dict[str, int] = field(default_factory=dict)
    """Number of tool calls by outcome (`llmrl.tools.session.OUTCOMES`)."""
    tool_states: dict[str, object] = field(default_factory=dict)
    """States of stateful tools by name, for rewards; they do not leave the process."""
    info: dict[str, object] = field(default_factory=dict)
    """Further information from its environment; later turns overwrite earlier ones."""
    steps: list[TensorDictBase] = field(default_factory=list)
    """One TensorDict per turn, stored only if a collector yields turns."""
    rows: list[TensorDictBase] = field(default_factory=list)
    """Training rows, if they are built before the batch to count tokens."""
    row_bytes: list[Any] = field(default_factory=list)
    """Training rows as bytes (`llmrl.collectors.rows.RowBytes`), if another process played the rollout."""
    seconds: float = 0.0

    def add_reward(self, reward: float) -> None:
        """Add a reward to the last turn.

        Example:
            >>> rollout = Rollout(rollout_id="a", group_id="g", sample_index=0, group_size=1, num_turns=2)
            >>> rollout.add_reward(0.5)
            >>> rollout.reward, rollout.turn_rewards
            (0.5, [0.0, 0.5])
        """
        self.reward += reward
        self.turn_rewards += [0.0] * (max(1, self.num_turns) - len(self.turn_rewards))
        self.turn_rewards[-1] += reward

    def to_record(self) -> dict[str, JSON]:
        """Return the fields for display, as JSON values."""
        record = {
            "rollout_id": self.rollout_id,
            "group_id": self.group_id,
            "env": self.env,
            "role": self.role,
            "sample_index": self.sample_index,
            "status": self.status.name.lower(),
            "reason": self.reason,
            "error": self.error,
            "traceback": self.traceback,
            "reward": self.reward,
            "is_scored": self.is_scored,
            "reward_breakdown": self.breakdown,
            "columns": self.columns,
            "tool_calls": self.tool_calls,
            "info": self.info,
            "num_turns": self.num_turns,
            "num_completion_tokens": self.num_completion_tokens,
            "seconds": round(self.seconds, 4),
            "messages": self.messages,
            "turns": self.turns,
        }
        return cast("dict[str, JSON]", as_json(record))

"""A rollout: one prompt, one sample, played to its end, whatever that was."""

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
    """Record of one rollout. It never disappears: a failed one is a record with an error status."""

    rollout_id: str
    """Unique across retries, epochs and samplers."""
    group_id: str
    sample_index: int
    """Place in its group."""
    group_size: int
    env: str = ""
    """Its environment's name, of a `MixedEnv`."""
    role: str = ""
    """Whom the policy plays, in a game of several players."""
    columns: dict[str, object] = field(default_factory=dict)
    """The dataset's columns for the prompt."""
    conversation: Any = None
    """The exact token state (`llmrl.rendering.Conversation`); None when it failed before its first prompt."""
    messages: tuple[Message, ...] = ()
    """The whole conversation, what the environment said last included."""
    turns: list[dict[str, object]] = field(default_factory=list)
    """Of an agent that branched or called others: the tree of its requests, see `TurnTree.to_records`."""
    status: RolloutStatus = RolloutStatus.ONGOING
    reason: str = StopReason.NONE
    error: str = ""
    """The exception's type and text, for an error."""
    traceback: str = ""
    """Where it was raised, as Python prints it."""
    num_turns: int = 0
    num_completion_tokens: int = 0
    num_forks: int = 0
    """Rows that begin anew because history was rewritten."""
    num_realigned_tokens: int = 0
    """Sampled tokens that are not trained, because the end of their answer was edited."""
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    """What of it came at each turn, a score at the last."""
    token_rewards: dict[int, list[float]] = field(default_factory=dict)
    """Reward of each token of the answer, by the number of the turn, for turns with a dense reward."""
    breakdown: dict[str, float] = field(default_factory=dict)
    is_scored: bool = False
    tool_calls: dict[str, int] = field(default_factory=dict)
    """Its calls by outcome, see `llmrl.tools.session.OUTCOMES`."""
    tool_states: dict[str, object] = field(default_factory=dict)
    """What its tools with a memory kept, by name, for rewards; it does not leave the process."""
    info: dict[str, object] = field(default_factory=dict)
    """What its environment said beside its messages, later turns' last."""
    steps: list[TensorDictBase] = field(default_factory=list)
    """One TensorDict a turn, kept only when a collector yields turns."""
    rows: list[TensorDictBase] = field(default_factory=list)
    """Its training rows, where they are made before the batch is: to count tokens."""
    row_bytes: list[Any] = field(default_factory=list)
    """What they are made of, where it was played in another process (`llmrl.collectors.rows.RowBytes`)."""
    seconds: float = 0.0

    def add_reward(self, reward: float) -> None:
        """Add what came at the turn that was played last.

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
        """Return what a reader wants to see, as JSON has it, whatever a model or an environment put into it.

        Example:
            >>> Rollout(rollout_id="a", group_id="g", sample_index=0, group_size=1).to_record()["status"]
            'ongoing'
        """
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

"""What a run that learns from others can be told: from their conversations. See `llmrl.runs.config`."""

from __future__ import annotations

from dataclasses import dataclass

from llmrl.runs.config import ScriptConfig


@dataclass(slots=True, kw_only=True)
class ConversationsConfig:
    """Conversations to learn from: rows with `messages`, and `tools` where there are some (`Demonstrations`)."""

    path: str
    """A file, folder or hub name; `collect.groups_per_batch` of them make a batch."""
    held_out: str | None = None
    """Others, whose loss is `eval/loss`; null: none."""


@dataclass(slots=True, kw_only=True)
class SFTConfig(ScriptConfig):
    """Of `sota-implementations/sft/sft.py`."""

    conversations: ConversationsConfig
    """What is learned."""
    algorithm: str = "sft"

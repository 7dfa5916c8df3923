"""Data types: messages, histories, token columns, statuses, rollouts and training rows."""

from llmrl.data.columns import CONTEXT_VERSION, TokenColumns
from llmrl.data.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from llmrl.data.history import History
from llmrl.data.message import MalformedToolCall, Message, ParsedCompletion, ToolSchema, check_messages, text_of
from llmrl.data.ragged import as_nested_tensor, as_padded_tensor
from llmrl.data.rollout import Rollout
from llmrl.data.status import RolloutStatus, StopReason, decide_status
from llmrl.data.templated_text import add_chat_template

__all__ = [
    "CONTEXT_VERSION",
    "ChatHistory",
    "History",
    "LogProbs",
    "MalformedToolCall",
    "Masks",
    "Message",
    "ParsedCompletion",
    "Rollout",
    "RolloutStatus",
    "StopReason",
    "Text",
    "TokenColumns",
    "Tokens",
    "ToolSchema",
    "add_chat_template",
    "as_nested_tensor",
    "as_padded_tensor",
    "check_messages",
    "decide_status",
    "text_of",
]

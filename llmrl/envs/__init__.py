"""Environments: conversations with a policy."""

from llmrl.envs.addition import AdditionEnv, addition_problems, make_addition_env
from llmrl.envs.chat import ChatEnv
from llmrl.envs.dataset import DatasetChatEnv, EndOfData, PromptSampler
from llmrl.envs.message_env import MessageChatEnv, MessageEnv, MessageStep

__all__ = [
    "AdditionEnv",
    "ChatEnv",
    "DatasetChatEnv",
    "EndOfData",
    "MessageChatEnv",
    "MessageEnv",
    "MessageStep",
    "PromptSampler",
    "addition_problems",
    "make_addition_env",
]

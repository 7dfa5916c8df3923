"""Environments: conversations with a policy."""

from llmrl.envs.addition import AdditionEnv, addition_problems, make_addition_env
from llmrl.envs.chat import ChatEnv
from llmrl.envs.dataset import DatasetChatEnv, EndOfData, PromptSampler

__all__ = [
    "AdditionEnv",
    "ChatEnv",
    "DatasetChatEnv",
    "EndOfData",
    "PromptSampler",
    "addition_problems",
    "make_addition_env",
]

"""Environments: conversations with a policy."""

from llmrl.envs.chat import ChatEnv
from llmrl.envs.dataset import DatasetChatEnv, EndOfData, PromptSampler

__all__ = ["ChatEnv", "DatasetChatEnv", "EndOfData", "PromptSampler"]

"""Policies: engines as TensorDict modules."""

from __future__ import annotations

from llmrl.policies.base import LLMWrapperBase, answered, sampling_from_kwargs
from llmrl.policies.vllm_wrapper import vLLMWrapper

__all__ = ["LLMWrapperBase", "answered", "sampling_from_kwargs", "vLLMWrapper"]

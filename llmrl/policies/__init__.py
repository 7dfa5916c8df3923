"""Policies: engines as TensorDict modules."""

from __future__ import annotations

from llmrl.policies.arguments import WrapperOptions
from llmrl.policies.base import LLMWrapperBase, answered
from llmrl.policies.sampling import sampling_from_kwargs
from llmrl.policies.vllm_wrapper import vLLMWrapper

__all__ = ["LLMWrapperBase", "WrapperOptions", "answered", "sampling_from_kwargs", "vLLMWrapper"]

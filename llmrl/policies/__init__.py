"""Policies: engines and models as TensorDict modules."""

from __future__ import annotations

from llmrl.policies.base import LLMWrapperBase, sampling_from_kwargs
from llmrl.policies.sharding import shard_model
from llmrl.policies.transformers_wrapper import TransformersWrapper
from llmrl.policies.vllm_wrapper import vLLMWrapper

__all__ = ["LLMWrapperBase", "TransformersWrapper", "sampling_from_kwargs", "shard_model", "vLLMWrapper"]

"""vLLM plugin that registers llmrl's weight-transfer backends in each of vLLM's processes."""

from __future__ import annotations


def register() -> None:
    """Register the workers' backends. May be called again."""
    from llmrl.engines.vllm.arguments import LLMRL_BACKEND, NCCL_BACKEND
    from llmrl.engines.vllm.private import register_weight_transfer

    register_weight_transfer(LLMRL_BACKEND, "llmrl.weight_sync.worker", "WorkerEngine")
    register_weight_transfer(NCCL_BACKEND, "llmrl.weight_sync.worker", "TimedNCCLEngine")

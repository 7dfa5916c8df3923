"""What vLLM calls in each of its processes, so that they know llmrl's weight-transfer backend."""

from __future__ import annotations


def register() -> None:
    """Register the workers' ends. May be called again."""
    from llmrl.engines.vllm.arguments import LLMRL_BACKEND, NCCL_BACKEND
    from llmrl.engines.vllm.private import register_weight_transfer

    register_weight_transfer(LLMRL_BACKEND, "llmrl.weight_sync.worker", "WorkerEngine")
    register_weight_transfer(NCCL_BACKEND, "llmrl.weight_sync.worker", "TimedNCCLEngine")

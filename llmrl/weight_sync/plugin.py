"""vLLM plugin, called in each of vLLM's processes: weight-transfer backends, and a stand-in for torchvision."""

from __future__ import annotations


def register() -> None:
    """Register the workers' backends, and let models with images be imported. May be called again."""
    from llmrl.engines.vllm.arguments import LLMRL_BACKEND, NCCL_BACKEND
    from llmrl.engines.vllm.image_stand_in import stand_in_for_torchvision
    from llmrl.engines.vllm.private import register_weight_transfer

    stand_in_for_torchvision()
    register_weight_transfer(LLMRL_BACKEND, "llmrl.weight_sync.worker", "WorkerEngine")
    register_weight_transfer(NCCL_BACKEND, "llmrl.weight_sync.worker", "TimedNCCLEngine")

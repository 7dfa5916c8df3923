"""vLLM plugin, called in each of vLLM's processes: weight-transfer backends, and changes to vLLM's CPU build."""

from __future__ import annotations


def register() -> None:
    """Register weight-transfer backends, stand in for torchvision, and replace CPU kernels. May be called again."""
    from llmrl.engines.vllm.arguments import LLMRL_BACKEND, NCCL_BACKEND
    from llmrl.engines.vllm.image_stand_in import stand_in_for_torchvision
    from llmrl.engines.vllm.private import compute_int8_by_one_dnn, register_weight_transfer, replace_cpu_kernels

    compute_int8_by_one_dnn()
    replace_cpu_kernels()
    stand_in_for_torchvision()
    register_weight_transfer(LLMRL_BACKEND, "llmrl.weight_sync.worker", "WorkerEngine")
    register_weight_transfer(NCCL_BACKEND, "llmrl.weight_sync.worker", "TimedNCCLEngine")

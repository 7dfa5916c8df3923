"""vLLM plugin, called in each of vLLM's processes: weight-transfer backends, and what llmrl changes in vLLM."""

from __future__ import annotations


def register() -> None:
    """Register the workers' backends, let models with images be imported, and replace CPU kernels; may be repeated."""
    from llmrl.engines.vllm.arguments import LLMRL_BACKEND, NCCL_BACKEND
    from llmrl.engines.vllm.image_stand_in import stand_in_for_torchvision
    from llmrl.engines.vllm.private import compute_int8_by_one_dnn, register_weight_transfer, replace_cpu_kernels

    compute_int8_by_one_dnn()
    replace_cpu_kernels()
    stand_in_for_torchvision()
    register_weight_transfer(LLMRL_BACKEND, "llmrl.weight_sync.worker", "WorkerEngine")
    register_weight_transfer(NCCL_BACKEND, "llmrl.weight_sync.worker", "TimedNCCLEngine")

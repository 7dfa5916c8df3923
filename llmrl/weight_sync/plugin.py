"""What vLLM calls in each of its processes, so that they know llmrl's weight-transfer backend."""

from __future__ import annotations


def register() -> None:
    """Register the backend on both sides, worker and trainer. May be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from llmrl.engines.vllm_args import SHARED_MEMORY_BACKEND

    for factory, module, name in (
        (WeightTransferEngineFactory, "llmrl.weight_sync.shared_memory_worker", "SharedMemoryWorkerEngine"),
        (WeightTransferTrainerFactory, "llmrl.weight_sync.shared_memory_trainer", "SharedMemoryTrainerEngine"),
    ):
        if SHARED_MEMORY_BACKEND not in factory._registry:
            factory.register_engine(SHARED_MEMORY_BACKEND, module, name)

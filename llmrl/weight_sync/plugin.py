"""What vLLM calls in each of its processes, so that they know llmrl's weight-transfer backends."""

from __future__ import annotations


def register() -> None:
    """Register the backends on both sides, worker and trainer. May be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from llmrl.engines.vllm_args import DOUBLE_BUFFER_BACKEND, GLOO_BACKEND, SHARED_MEMORY_BACKEND

    workers, trainers = WeightTransferEngineFactory, WeightTransferTrainerFactory
    for factory, backend, module, name in (
        (workers, SHARED_MEMORY_BACKEND, "memory_worker", "MemoryWorkerEngine"),
        (trainers, SHARED_MEMORY_BACKEND, "memory_trainer", "SharedMemoryTrainerEngine"),
        (workers, GLOO_BACKEND, "memory_worker", "MemoryWorkerEngine"),
        (trainers, GLOO_BACKEND, "memory_trainer", "GlooTrainerEngine"),
        (workers, DOUBLE_BUFFER_BACKEND, "double_buffer_worker", "DoubleBufferWorkerEngine"),
        (trainers, DOUBLE_BUFFER_BACKEND, "double_buffer_trainer", "DoubleBufferTrainerEngine"),
    ):
        if backend not in factory._registry:
            factory.register_engine(backend, f"llmrl.weight_sync.{module}", name)

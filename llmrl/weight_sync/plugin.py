"""What vLLM calls in each of its processes, so that they know llmrl's weight-transfer backend."""

from __future__ import annotations


def register() -> None:
    """Register one backend for workers, and for trainers each of its ways. May be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from llmrl.engines.vllm_args import LLMRL_BACKEND

    workers, trainers = WeightTransferEngineFactory, WeightTransferTrainerFactory
    for factory, backend, module, name in (
        (workers, LLMRL_BACKEND, "worker", "WorkerEngine"),
        (trainers, f"{LLMRL_BACKEND}_shared_memory", "memory_trainer", "SharedMemoryTrainerEngine"),
        (trainers, f"{LLMRL_BACKEND}_gloo", "memory_trainer", "GlooTrainerEngine"),
        (trainers, f"{LLMRL_BACKEND}_double_buffer", "double_buffer_trainer", "DoubleBufferTrainerEngine"),
    ):
        if backend not in factory._registry:
            factory.register_engine(backend, f"llmrl.weight_sync.{module}", name)

"""`VLLMCollectiveTransport`: the trainer's end of vLLM's weight-transfer plug-in point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmrl.engines.vllm_args import DOUBLE_BUFFER_BACKEND, SHARED_MEMORY_BACKEND

if TYPE_CHECKING:
    from llmrl.weight_sync.receiver import VLLMWeightReceiver
    from llmrl.weight_sync.scheme import VLLMWeightSyncScheme


class VLLMCollectiveTransport:
    """Builds vLLM's trainer engine for the receivers' backend and drives it.

    Raises:
        ValueError: for a backend that this scheme cannot drive.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, receiver: VLLMWeightReceiver, source: Any) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from llmrl.weight_sync.plugin import register

        register()
        self._trainer: Any = WeightTransferTrainerFactory.trainer_init(
            trainer_init_info(scheme, receiver.backend, receiver.num_workers), client=receiver, source=source
        )

    def stage(self) -> None:
        """Do what can be done while the engines still generate."""
        stage = getattr(self._trainer, "stage", None)
        if stage is not None:
            stage()

    def send(self) -> None:
        """Start, transfer and finish the update; the engines are paused."""
        self._trainer.send_weights()

    def restore(self, version: int) -> bool:
        """Undo a failed update; false when this backend cannot."""
        restore = getattr(self._trainer, "restore", None)
        return restore is not None and restore(version)

    def shutdown(self) -> None:
        """Release memory and communicators."""
        self._trainer.shutdown()


def trainer_init_info(scheme: VLLMWeightSyncScheme, backend: str, num_workers: int) -> Any:
    """vLLM's description of the trainer's end for `backend`.

    Raises:
        ValueError: for a backend that this scheme cannot drive.
    """
    from llmrl.weight_sync.scheme import VLLMDoubleBufferSyncScheme

    is_double_buffer = isinstance(scheme, VLLMDoubleBufferSyncScheme)
    if is_double_buffer != (backend == DOUBLE_BUFFER_BACKEND):
        raise ValueError(
            f"{type(scheme).__name__} does not fit an engine with the weight-transfer backend {backend!r}: "
            f"VLLMDoubleBufferSyncScheme and weight_transfer={DOUBLE_BUFFER_BACKEND!r} go together."
        )
    if isinstance(scheme, VLLMDoubleBufferSyncScheme):
        from llmrl.weight_sync.double_buffer_trainer import DoubleBufferTrainerInitInfo

        worker_folder = scheme.local_addr or scheme.remote_addr
        return DoubleBufferTrainerInitInfo(rank=scheme.rank, folder=scheme.remote_addr, worker_folder=worker_folder)
    if backend == SHARED_MEMORY_BACKEND:
        from llmrl.weight_sync.shared_memory_trainer import SharedMemoryTrainerInitInfo

        return SharedMemoryTrainerInitInfo(rank=scheme.rank, keep_previous=scheme.keep_previous)
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address, port = scheme.rendezvous()
        return NCCLTrainerInitInfo(
            master_address=address, master_port=port, world_size=1 + num_workers, rank=scheme.rank
        )
    raise ValueError(
        f"the engine's weight-transfer backend is {backend!r}; this scheme drives {SHARED_MEMORY_BACKEND!r} and 'nccl'."
    )

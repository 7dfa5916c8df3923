"""vLLM's end of the double buffer: runs inside its worker processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from llmrl.weight_sync.double_buffer import BufferPointer, DoubleBuffer
from llmrl.weight_sync.reloading_worker import ReloadingWorkerEngine


@dataclass
class DoubleBufferInitInfo(WeightTransferInitInfo):
    """Where this host sees the folder."""

    folder: str


@dataclass
class DoubleBufferUpdateInfo(WeightTransferUpdateInfo):
    """Which buffer to load; with `is_checkpoint`, the weights that the engine started with."""

    pointer: dict[str, Any] = field(default_factory=dict)
    is_checkpoint: bool = False


class DoubleBufferWorkerEngine(ReloadingWorkerEngine):
    """Loads weights from the buffer that it is told to, after checking that it is whole."""

    init_info_cls = DoubleBufferInitInfo
    update_info_cls = DoubleBufferUpdateInfo

    def init_transfer_engine(self, init_info: DoubleBufferInitInfo) -> None:
        """Look for the folder."""
        self._buffer = DoubleBuffer(init_info.folder)
        if not self._buffer.folder.is_dir():
            raise ValueError(f"the worker does not see the folder {init_info.folder}; give local_addr as it sees it.")

    def load(self, update_info: DoubleBufferUpdateInfo) -> None:
        """Load from the file."""
        self.model.load_weights(self._buffer.read(BufferPointer(**update_info.pointer)).items())

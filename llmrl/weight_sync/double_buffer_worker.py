"""vLLM's end of the double buffer: runs inside its worker processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from llmrl.weight_sync.double_buffer import BufferPointer, DoubleBuffer
from llmrl.weight_sync.packing import PackedLayout
from llmrl.weight_sync.reloading_worker import ReloadingUpdateInfo, ReloadingWorkerEngine


@dataclass
class DoubleBufferInitInfo(WeightTransferInitInfo):
    """Where this host sees the folder, and the layout of the weights that will come, when it is known."""

    folder: str
    layout: dict[str, list] | None = None


@dataclass
class DoubleBufferUpdateInfo(ReloadingUpdateInfo):
    """Which buffer to load."""

    pointer: dict[str, Any] = field(default_factory=dict)


class DoubleBufferWorkerEngine(ReloadingWorkerEngine):
    """Loads weights from the buffer that it is told to, after checking that it is whole."""

    init_info_cls = DoubleBufferInitInfo
    update_info_cls = DoubleBufferUpdateInfo

    def init_transfer_engine(self, init_info: DoubleBufferInitInfo) -> None:
        """Look for the folder.

        Raises:
            ValueError: when it is not there, or the model is another one.
        """
        self._buffer = DoubleBuffer(init_info.folder)
        if not self._buffer.folder.is_dir():
            raise ValueError(f"the worker does not see the folder {init_info.folder}; give local_addr as it sees it.")
        if init_info.layout is not None:
            self.plan_for(PackedLayout.from_plain(**init_info.layout))

    def take(self, update_info: DoubleBufferUpdateInfo) -> tuple[PackedLayout, torch.Tensor]:
        """Read the file."""
        weights = self._buffer.read(BufferPointer(**update_info.pointer))
        return weights.layout, weights.buffer

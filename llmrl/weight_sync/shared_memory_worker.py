"""vLLM's end of the shared-memory weight transfer: runs inside its worker processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from llmrl.weight_sync.packing import PackedLayout, read_tag
from llmrl.weight_sync.reloading_worker import ReloadingWorkerEngine
from llmrl.weight_sync.shared_memory import open_shared


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """A buffer to try: a worker on another host finds out now."""

    path: str
    num_bytes: int


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Where the new weights lie; with `is_checkpoint`, those that the engine started with."""

    path: str = ""
    num_bytes: int = 0
    tag: str = ""
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    is_checkpoint: bool = False


class SharedMemoryWorkerEngine(ReloadingWorkerEngine):
    """Loads weights straight from the trainer's memory."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Try the way to the trainer's memory."""
        try:
            open_shared(init_info.path, init_info.num_bytes)
        except OSError as error:
            raise ValueError(
                f"the worker cannot open the trainer's memory at {init_info.path}: {error}. Trainer and engine must "
                "run on one host as one user; across hosts, use a double buffer on a shared file system."
            ) from error

    def load(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load from the mapped buffer, checking before and after that it holds what was announced."""
        layout = PackedLayout.of(
            (name, getattr(torch, dtype_name), shape)
            for name, dtype_name, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            )
        )
        if layout.num_bytes != update_info.num_bytes:
            raise ValueError(f"{update_info.num_bytes} bytes announced, the layout says {layout.num_bytes}.")
        buffer = open_shared(update_info.path, update_info.num_bytes)
        if read_tag(buffer) != update_info.tag:
            raise ValueError(f"the buffer holds weights tagged {read_tag(buffer)!r}, not {update_info.tag!r}.")
        self.model.load_weights(layout.views(buffer))
        if read_tag(buffer) != update_info.tag:
            raise ValueError("the weights were overwritten while they were being loaded.")

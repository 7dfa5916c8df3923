"""vLLM's end of a transfer through memory, shared with the trainer or received from it: runs in its workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from llmrl.weight_sync.gloo import broadcast, close_group, open_group
from llmrl.weight_sync.packing import PackedLayout, read_tag
from llmrl.weight_sync.reloading_worker import ReloadingUpdateInfo, ReloadingWorkerEngine
from llmrl.weight_sync.shared_memory import UNREACHABLE, open_shared


@dataclass
class MemoryInitInfo(WeightTransferInitInfo):
    """The layout that updates will have, and the way: a buffer to try, or where to meet for broadcasts, or none yet."""

    layout: dict[str, list]
    path: str = ""
    num_bytes: int = 0
    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 1
    world_size: int = 0


@dataclass
class MemoryUpdateInfo(ReloadingUpdateInfo):
    """Which weights come; with a path they lie there, without one they are broadcast now."""

    path: str = ""
    num_bytes: int = 0
    tag: str = ""
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class MemoryWorkerEngine(ReloadingWorkerEngine):
    """Takes weights straight from the trainer's memory, or by broadcast into its own."""

    init_info_cls = MemoryInitInfo
    update_info_cls = MemoryUpdateInfo
    _group: Any = None
    _received: torch.Tensor | None = None
    _mapped: tuple[str, torch.Tensor] = ("", torch.empty(0))

    def init_transfer_engine(self, init_info: MemoryInitInfo) -> None:
        """Check that the weights will fit and try the way to the trainer.

        Raises:
            ValueError: when the model is another one, or the trainer's memory is not on this host.
        """
        self.plan_for(PackedLayout.from_plain(**init_info.layout))
        self.shutdown()
        if init_info.path:
            try:
                open_shared(init_info.path, init_info.num_bytes)
            except (OSError, ValueError) as error:
                raise ValueError(f"{UNREACHABLE} at {init_info.path}: {error}") from error
            return
        if not init_info.master_address:
            return
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._group = open_group(
            init_info.master_address, init_info.master_port, rank=rank, world_size=init_info.world_size
        )

    def take(self, update_info: MemoryUpdateInfo) -> tuple[PackedLayout, torch.Tensor]:
        """Map the trainer's buffer, or receive it, and check that it holds what was announced."""
        layout = PackedLayout.from_plain(update_info.names, update_info.dtype_names, update_info.shapes)
        if layout.num_bytes != update_info.num_bytes:
            raise ValueError(f"{update_info.num_bytes} bytes announced, the layout says {layout.num_bytes}.")
        buffer = self._map(update_info) if update_info.path else self._receive(update_info.num_bytes)
        if read_tag(buffer) != update_info.tag:
            raise ValueError(f"the buffer holds weights tagged {read_tag(buffer)!r}, not {update_info.tag!r}.")
        return layout, buffer

    def require_intact(self, update_info: MemoryUpdateInfo) -> None:
        """The trainer may have packed its next weights after giving up on this update."""
        if update_info.path and read_tag(open_shared(update_info.path, update_info.num_bytes)) != update_info.tag:
            raise ValueError("the weights were overwritten while they were being loaded.")

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            close_group(self._group)
        self._group = self._received = None
        self._mapped = ("", torch.empty(0))

    def _map(self, update_info: MemoryUpdateInfo) -> torch.Tensor:
        # Kept from update to update: entering 270 MB into the page table costs as much as copying a third of it. A
        # path may have come to name another buffer, which the tag shows.
        path, buffer = self._mapped
        if path != update_info.path or read_tag(buffer) != update_info.tag:
            buffer = open_shared(update_info.path, update_info.num_bytes)
            self._mapped = (update_info.path, buffer)
        return buffer

    def _receive(self, num_bytes: int) -> torch.Tensor:
        if self._group is None:
            raise ValueError("the trainer has opened no group; call init_weight_transfer_engine first.")
        if self._received is None or self._received.numel() != num_bytes:
            self._received = torch.empty(num_bytes, dtype=torch.uint8)
        broadcast(self._group, self._received)
        return self._received

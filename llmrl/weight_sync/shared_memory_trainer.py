"""The trainer's end of the shared-memory weight transfer."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from llmrl.engines.vllm_args import SHARED_MEMORY_BACKEND
from llmrl.weight_sync.packing import PackedLayout, write_tag
from llmrl.weight_sync.shared_memory import SharedBuffer


@dataclass
class SharedMemoryTrainerInitInfo(TrainerInitInfo):
    """`keep_previous` holds a second copy of the weights in memory, so that a failed update can be undone."""

    backend: ClassVar[str] = SHARED_MEMORY_BACKEND

    keep_previous: bool = True


class SharedMemoryTrainerEngine(TrainerWeightTransferEngine[SharedMemoryTrainerInitInfo]):
    """Packs the weights into memory that the workers map: one copy here, none on the way.

    `stage` may run while the engine still generates; `send_weights` then only makes it load.
    """

    init_info_cls = SharedMemoryTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, is_sender: bool, keep_previous: bool) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._keep_previous = keep_previous
        self._buffer: SharedBuffer | None = None
        self._staged: dict[str, Any] | None = None
        self._previous_buffer: SharedBuffer | None = None
        self._previous: dict[str, Any] | None = None

    @classmethod
    def trainer_init(cls, init_info: SharedMemoryTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Let every worker try the way to this process's memory."""
        if source is None:
            raise ValueError("the shared-memory transfer needs a WeightSource.")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, keep_previous=init_info.keep_previous)
        if engine.is_sender:
            probe = SharedBuffer(64)
            client.init_weight_transfer_engine({"path": probe.path, "num_bytes": probe.num_bytes})
            probe.close()
        return engine

    @torch.no_grad()
    def stage(self) -> None:
        """Copy the trainer's weights, cast to what the engine wants, to where the workers will read them."""
        metadata = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        layout = PackedLayout.of((meta.name, meta.dtype, meta.shape) for meta in metadata)
        if self._buffer is None or self._buffer.num_bytes != layout.num_bytes:
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = SharedBuffer(layout.num_bytes)
        buffer = self._buffer.tensor
        tag = uuid.uuid4().hex
        write_tag(buffer, "being written")
        weights = self.source.uncast() if hasattr(self.source, "uncast") else iter(self.source)
        for (name, view), (given_name, tensor) in zip(layout.views(buffer), weights, strict=True):
            if name != given_name or view.shape != tensor.shape:
                raise ValueError(f"the source announced {name!r} {tuple(view.shape)} and yielded {given_name!r}.")
            view.copy_(tensor)
        write_tag(buffer, tag)
        self._staged = {
            "path": self._buffer.path,
            "num_bytes": layout.num_bytes,
            "tag": tag,
            **layout.to_plain(),
        }

    def send_weights(self) -> None:
        """Make the engine load what was staged, staging now if nothing was."""
        if self._staged is None:
            self.stage()
        if not self.is_sender:
            return
        staged, self._staged = self._staged, None
        self.client.start_weight_update()
        self.client.update_weights(staged)
        self.client.finish_weight_update()
        if self._keep_previous:
            self._buffer, self._previous_buffer = self._previous_buffer, self._buffer
            self._previous = staged

    def restore(self, version: int) -> bool:
        """After a failed update, load the weights of before again; false when they are not held any more."""
        self._staged = None
        if self._previous is None and version != 0:
            return False
        self.client.start_weight_update()
        self.client.update_weights(self._previous or {"is_checkpoint": True})
        self.client.finish_weight_update(str(version))
        return True

    def shutdown(self) -> None:
        """Give the memory back."""
        for buffer in (self._buffer, self._previous_buffer):
            if buffer is not None:
                buffer.close()
        self._buffer = self._previous_buffer = self._staged = self._previous = None

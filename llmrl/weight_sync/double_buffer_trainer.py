"""The trainer's end of the double buffer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from llmrl.engines.vllm_args import LLMRL_BACKEND
from llmrl.weight_sync.double_buffer import BufferPointer, DoubleBuffer
from llmrl.weight_sync.packing import PackedLayout


@dataclass
class DoubleBufferTrainerInitInfo(TrainerInitInfo):
    """The folder as the workers see it."""

    backend: ClassVar[str] = f"{LLMRL_BACKEND}_double_buffer"

    worker_folder: str


class StagedFile(WeightSource):
    """A snapshot of a `WeightSource` in a double buffer's files: cast, written, and kept until the next but one."""

    def __init__(self, source: Any, folder: str) -> None:
        self._source = source
        self._buffer = DoubleBuffer(folder)
        self._before: BufferPointer | None = None
        self._held_before: BufferPointer | None = None
        self.pointer: BufferPointer | None = None

    @property
    def has_staged(self) -> bool:
        """Whether there are weights to send."""
        return self.pointer is not None

    def close(self) -> None:
        """The files stay."""

    def stage(self, version: int | None) -> None:
        """Write the weights, as they are now, into the buffer that is not current, and make it the current one."""
        self._buffer.folder.mkdir(parents=True, exist_ok=True)
        self._before, self._held_before, self.pointer = self._buffer.pointer(), self.pointer, None
        self.pointer = self._buffer.write(self._source, version)

    def rollback(self) -> None:
        """Make the buffer before the current one again: no engine took this one."""
        self._buffer.point_to(self._before)
        self.pointer = self._held_before

    @property
    def layout(self) -> PackedLayout:
        """Names, dtypes and shapes, for engines to check."""
        return PackedLayout.of((meta.name, meta.dtype, meta.shape) for meta in self._source.metadata())

    @property
    def folder(self) -> Path:
        """As the trainer sees it."""
        return self._buffer.folder

    def metadata(self) -> list[Any]:
        """Of the weights that are staged next."""
        return self._source.metadata()

    def __iter__(self) -> Any:
        return iter(self._buffer.read(self.pointer).tensors().items())


class DoubleBufferTrainerEngine(TrainerWeightTransferEngine[DoubleBufferTrainerInitInfo]):
    """Tells the workers which buffer to load."""

    init_info_cls = DoubleBufferTrainerInitInfo
    source: StagedFile
    _worker_folder: str

    @classmethod
    def trainer_init(cls, init_info: DoubleBufferTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Let every worker look for the folder."""
        if not isinstance(source, StagedFile):
            raise ValueError(f"the double buffer needs a StagedFile as its source, got {type(source).__name__}.")
        source.folder.mkdir(parents=True, exist_ok=True)
        client.init_weight_transfer_engine({"folder": init_info.worker_folder, "layout": source.layout.to_plain()})
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._worker_folder = init_info.worker_folder
        return engine

    def send_weights(self) -> None:
        """Make the workers load what is staged."""
        if self.source.pointer is None:
            raise RuntimeError("no weights are staged.")
        self.client.start_weight_update()
        self.client.update_weights({"folder": self._worker_folder, "pointer": asdict(self.source.pointer)})
        self.client.finish_weight_update()

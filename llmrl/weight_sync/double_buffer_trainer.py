"""The trainer's end of the double buffer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from llmrl.engines.vllm_args import DOUBLE_BUFFER_BACKEND
from llmrl.weight_sync.double_buffer import BufferPointer, DoubleBuffer


@dataclass
class DoubleBufferTrainerInitInfo(TrainerInitInfo):
    """The folder as the trainer sees it, and as the workers do."""

    backend: ClassVar[str] = DOUBLE_BUFFER_BACKEND

    folder: str
    worker_folder: str


class DoubleBufferTrainerEngine(TrainerWeightTransferEngine[DoubleBufferTrainerInitInfo]):
    """Writes the weights while the engines generate; `send_weights` makes them load."""

    init_info_cls = DoubleBufferTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, is_sender: bool, folder: str) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._buffer = DoubleBuffer(folder)
        self._staged: BufferPointer | None = None
        self._loaded: BufferPointer | None = None

    @classmethod
    def trainer_init(cls, init_info: DoubleBufferTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Make the folder and let every worker look for it."""
        if source is None:
            raise ValueError("the double buffer needs a WeightSource.")
        if init_info.is_sender:
            Path(init_info.folder).mkdir(parents=True, exist_ok=True)
            client.init_weight_transfer_engine({"folder": init_info.worker_folder})
        return cls(client=client, source=source, is_sender=init_info.is_sender, folder=init_info.folder)

    def stage(self) -> None:
        """Write the weights, cast to what the engine wants, into the buffer that is not current."""
        weights = {name: tensor.contiguous() for name, tensor in self.source if self.is_sender}
        if self.is_sender:
            self._staged = self._buffer.write(weights)

    def send_weights(self) -> None:
        """Make the engines load what was staged, staging now if nothing was."""
        if self._staged is None:
            self.stage()
        if not self.is_sender or self._staged is None:
            return
        staged, self._staged = self._staged, None
        self._send({"pointer": asdict(staged)})
        self.client.finish_weight_update()
        self._loaded = staged

    def restore(self, version: int) -> bool:
        """After a failed update, load the other buffer again; false when it does not hold those weights."""
        self._staged = None
        if self._loaded is None and version != 0:
            return False
        if self._loaded is not None:
            self._buffer.point_to(self._loaded)
        self._send({"pointer": asdict(self._loaded)} if self._loaded is not None else {"is_checkpoint": True})
        self.client.finish_weight_update(str(version))
        return True

    def shutdown(self) -> None:
        """The files stay."""

    def _send(self, update_info: dict[str, Any]) -> None:
        self.client.start_weight_update()
        self.client.update_weights(update_info)

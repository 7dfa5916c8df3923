"""`StreamChannel`: weights between GPUs, with vLLM's NCCL and CUDA IPC transfers."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

import torch

from llmrl._utils.threads import start_in_thread
from llmrl.engines.base import TransferInfo
from llmrl.engines.vllm.arguments import LLMRL_BACKEND
from llmrl.weight_sync.channels import Channel, Client, Connection
from llmrl.weight_sync.deadline import TimedCommunicator, TransferStalledError
from llmrl.weight_sync.source import ModelWeights

T = TypeVar("T")


class StreamChannel(Channel):
    """Channel that streams weights between GPUs with vLLM's own transfers; a partial update cannot be rolled back.

    Args:
        backend: `nccl`, a packed broadcast to all engines, or `ipc`, CUDA handles for engines on the trainer's devices.
        rendezvous: function that returns the address and port at which the NCCL group meets.
    """

    is_collective = True
    can_roll_back = False
    staged_version = None

    def __init__(self, source: ModelWeights, backend: str | None, rendezvous: Callable[[], tuple[str, int]]) -> None:
        if backend not in ("nccl", "ipc"):
            raise ValueError(
                f"the engine's weight-transfer backend is {backend!r}; VLLMWeightSyncScheme drives "
                f"{LLMRL_BACKEND!r}, 'nccl' and 'ipc', and VLLMDoubleBufferSyncScheme a server of 'files'."
            )
        self._source = source
        self._backend = backend
        self._rendezvous = rendezvous

    def stage(self, version: int | None) -> int:
        """Wait for the optimizer step, as vLLM reads on other streams; with `ipc`, free memory for the engine."""
        assert version is not None, "this channel needs an engine"
        if torch.accelerator.is_available():
            # Each thread starts with the first device as its current one, so the device is given.
            torch.accelerator.synchronize(self._source.device)
            if self._backend == "ipc":
                torch.accelerator.empty_cache()
        return version

    def roll_back(self) -> None:
        """Do nothing; no weights are held."""

    def close(self) -> None:
        """Do nothing; no weights are held."""

    def connect(self, client: Client) -> Connection:
        """Form one group of the trainer and all workers.

        Raises EngineError if an engine does not join, and ValueError without a GPU or for `ipc` on several ranks.
        """
        if not torch.accelerator.is_available():
            raise ValueError(
                f"the engine receives weights by {self._backend!r}, which moves them between GPUs, and this process "
                f"has none; train on a GPU, or start the engine with weight_transfer={LLMRL_BACKEND!r} and send "
                "through files (VLLMDoubleBufferSyncScheme)."
            )
        if self._backend == "nccl":
            return _TimedNCCL(client, self._source, *self._rendezvous())
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError("the 'ipc' backend takes weights from a trainer of one process; use 'nccl'.")
        device = self._source.device
        with torch.accelerator.device_index(device.index):
            return _OnDevice(device, self._open_ipc(client))

    def _open_ipc(self, client: Client) -> Connection:
        from llmrl.engines.vllm.private import (
            DEFAULT_PACKED_BUFFER_SIZE_BYTES,
            IPCTrainerInitInfo,
            IPCTrainerWeightTransferEngine,
        )

        # Size of the buffer that the workers map; it must hold the largest weight, such as a large embedding.
        sizes = [meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in self._source.metadata()]
        num_bytes = max([min(sum(sizes), DEFAULT_PACKED_BUFFER_SIZE_BYTES), *sizes])
        info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=num_bytes)
        pickling = _PicklingClient(client)
        return IPCTrainerWeightTransferEngine.trainer_init(info, client=pickling, source=self._source)


class _OnDevice:
    """Connection for use from any thread, which sets the trainer's device as the current one."""

    def __init__(self, device: torch.device, connection: Connection) -> None:
        self._device = device
        self._connection = connection

    def send_weights(self) -> None:
        with torch.accelerator.device_index(self._device.index):
            self._connection.send_weights()

    def shutdown(self) -> None:
        self._connection.shutdown()


class _TimedNCCL:
    """vLLM's trainer-side NCCL engine, with a timeout if a worker dies or hangs."""

    def __init__(self, client: Client, source: ModelWeights, address: str, port: int) -> None:
        from llmrl.engines.vllm.private import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        self._client = client
        self._device = source.device
        world_size = 1 + client.num_workers
        info = NCCLTrainerInitInfo(rank=0, master_address=address, master_port=port, world_size=world_size)
        self._workers_opened: Future[None] = Future()
        self._workers_updated: Future[None] | None = None

        def meet() -> NCCLTrainerWeightTransferEngine:
            with torch.accelerator.device_index(self._device.index):
                return NCCLTrainerWeightTransferEngine.trainer_init(info, client=self, source=source)

        # NCCL waits forever for missing workers, so this runs in a thread, which is abandoned if they fail.
        opened = start_in_thread(meet)
        wait([self._workers_opened, opened], return_when=FIRST_EXCEPTION)
        if self._workers_opened.done():
            self._workers_opened.result()
        self._engine = opened.result()
        self._group = TimedCommunicator(self._engine.model_update_group, client.timeout_seconds)
        self._engine.model_update_group = self._group

    def send_weights(self) -> None:
        self._workers_updated = None
        try:
            with torch.accelerator.device_index(self._device.index), self._group.watched():
                self._engine.send_weights()
        except TransferStalledError:
            if self._workers_updated is not None:
                self._workers_updated.result()  # prefer an engine's own error
            raise

    def shutdown(self) -> None:
        self._engine.shutdown()

    # Client interface for vLLM's engine.

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        info = {**init_info, "timeout_seconds": self._client.timeout_seconds}
        _run(self._workers_opened, lambda: self._client.init_weight_transfer_engine(info))

    def start_weight_update(self) -> None:
        self._client.start_weight_update()

    def update_weights(self, update_info: TransferInfo) -> None:
        self._workers_updated = Future()
        _run(self._workers_updated, lambda: self._client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | int | None = None) -> None:
        """Do nothing; the `EngineGroup` makes the engines load."""


class _PicklingClient:
    """Client that pickles CUDA handles, as only plain types can be sent to an engine's process."""

    def __init__(self, client: Client) -> None:
        self.init_weight_transfer_engine = client.init_weight_transfer_engine
        self.start_weight_update = client.start_weight_update
        self._client = client

    def update_weights(self, update_info: TransferInfo) -> None:
        update_info = dict(update_info)
        handles = pickle.dumps(update_info.pop("ipc_handles"))
        update_info["ipc_handles_pickled"] = base64.b64encode(handles).decode("ascii")
        self._client.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | int | None = None) -> None:
        """Do nothing; the `EngineGroup` makes the engines load."""


def _run(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
        raise

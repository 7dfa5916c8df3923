"""Transports: the trainer's end of vLLM's weight-transfer plug-in point."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from llmrl.engines.base import EngineError
from llmrl.engines.vllm_args import LLMRL_BACKEND
from llmrl.weight_sync.gloo import own_address
from llmrl.weight_sync.link import EngineLink, LinkGroup
from llmrl.weight_sync.shared_memory import UNREACHABLE

if TYPE_CHECKING:
    from llmrl.weight_sync.receiver import VLLMWeightReceiver
    from llmrl.weight_sync.scheme import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme

logger = logging.getLogger(__name__)


class WeightTransport(ABC):
    """Stages weights while engines generate, then lets each engine take them through a vLLM trainer engine."""

    supports_rollback = True
    """Whether engines keep their old weights until they are told to load."""

    def __init__(self, staged: Any) -> None:
        self.staged = staged
        self._trainers: dict[EngineLink, Any] = {}

    @abstractmethod
    def open_one(self, link: EngineLink) -> Any:
        """A vLLM trainer engine that reaches one engine."""

    def stage(self, version: int | None) -> None:
        """Do what can be done while the engines still generate."""
        self.staged.stage(version)

    def open(self, receiver: VLLMWeightReceiver, links: list[EngineLink]) -> None:
        """Reach the engines that were not reached yet.

        Raises:
            EngineError: when a worker cannot be reached, or its model is another one.
        """
        for link in self._trainers.keys() - links:
            self._trainers.pop(link).shutdown()

        def reach(link: EngineLink) -> None:
            self._trainers[link] = self.open_one(link)

        receiver.each([link for link in links if link not in self._trainers], reach)

    def send(self, receiver: VLLMWeightReceiver, links: list[EngineLink]) -> None:
        """Let the engines take the staged weights; they do not use them yet (where `supports_rollback`)."""
        try:
            receiver.each(links, lambda link: self._trainers[link].send_weights())
        except BaseException:
            self.close_all()  # a broadcast that broke leaves its group in an unknown state
            raise

    @property
    def can_catch_up(self) -> bool:
        """Whether the weights that the engines took last are held here."""
        return self.staged.has_staged

    def rollback(self) -> None:
        """The staged weights did not come into use."""
        self.staged.rollback()

    def close_all(self) -> None:
        """Give up what `open` opened."""
        while self._trainers:
            self._trainers.popitem()[1].shutdown()

    def shutdown(self) -> None:
        """Release memory and communicators."""
        self.close_all()
        self.staged.close()


class VLLMCollectiveTransport(WeightTransport):
    """Moves weights through memory or a network, by the way that the engines' backend has.

    - `llmrl`: the workers map what is staged, in the trainer's memory. Those on another host cannot; their engine gets
      the weights by broadcast, in a gloo group of its own: a replica that dies breaks no other's.
    - `nccl` (GPU): vLLM's packed broadcast to all engines at once; `ipc` (GPU): vLLM's CUDA handles, for engines on
      the trainer's own devices. Both stream into the model: half an update cannot be taken back.

    Raises:
        ValueError: for a backend that this scheme cannot drive, or one between GPUs in a trainer without one.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, backend: str | None, source: Any) -> None:
        from llmrl.weight_sync.staging import StagedWeights, StreamedWeights

        self._scheme, self._backend = scheme, backend
        self.supports_rollback = backend == LLMRL_BACKEND
        if not self.supports_rollback and backend not in ("nccl", "ipc"):
            raise ValueError(
                f"the engine's weight-transfer backend is {backend!r}; {type(scheme).__name__} drives "
                f"{LLMRL_BACKEND!r}, 'nccl' and 'ipc'."
            )
        super().__init__(StagedWeights(source) if self.supports_rollback else StreamedWeights(source))

    def open(self, receiver: VLLMWeightReceiver, links: list[EngineLink]) -> None:
        """Reach the engines; vLLM's own backends have one trainer engine for all, made anew when they change."""
        if self.supports_rollback:
            super().open(receiver, links)
        elif set(self._trainers) != set(links):
            self.close_all()
            trainer = self._open_group(LinkGroup(links, receiver.each))
            self._trainers = dict.fromkeys(links, trainer)

    def send(self, receiver: VLLMWeightReceiver, links: list[EngineLink]) -> None:
        """Let the engines take the staged weights."""
        if self.supports_rollback:
            super().send(receiver, links)
        else:
            self._trainers[links[0]].send_weights()

    def open_one(self, link: EngineLink) -> Any:
        """By shared memory where the workers see it, else by gloo."""
        from llmrl.weight_sync.memory_trainer import GlooTrainerInitInfo, SharedMemoryTrainerInitInfo

        try:
            return make_trainer(SharedMemoryTrainerInitInfo(rank=0), link, self.staged)
        except EngineError as error:
            if UNREACHABLE not in str(error):
                raise
            logger.info("an engine does not see this host's memory; its weights are broadcast: %s", error)
        address, port = self._scheme.rendezvous(own_address)
        world_size = 1 + link.num_workers
        info = GlooTrainerInitInfo(rank=0, master_address=address, master_port=port, world_size=world_size)
        return make_trainer(info, link, self.staged)

    def _open_group(self, group: LinkGroup) -> Any:
        if not torch.accelerator.is_available():
            raise ValueError(
                f"the engine takes weights by {self._backend!r}, which moves them between GPUs, and this process has "
                f"none; train on a GPU, or start the engine with weight_transfer={LLMRL_BACKEND!r} and send through "
                "files (VLLMDoubleBufferSyncScheme)."
            )
        if self._backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import (
                DEFAULT_PACKED_BUFFER_SIZE_BYTES,
                IPCTrainerInitInfo,
            )

            if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                raise ValueError("the 'ipc' backend takes weights from a trainer of one process; use 'nccl'.")
            # Of the buffer that the workers map. Each weight must fit, the embedding of a large vocabulary too.
            sizes = [meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in self.staged.metadata()]
            num_bytes = max([min(sum(sizes), DEFAULT_PACKED_BUFFER_SIZE_BYTES), *sizes])
            info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=num_bytes)
            return make_trainer(info, group, self.staged)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address, port = self._scheme.rendezvous(lambda: "127.0.0.1")
        world_size = 1 + group.num_workers
        info = NCCLTrainerInitInfo(rank=0, master_address=address, master_port=port, world_size=world_size)
        return make_trainer(info, group, self.staged)


class VLLMDoubleBufferTransport(WeightTransport):
    """Moves weights through two files of a folder, of which one is always whole.

    Raises:
        ValueError: for engines that were not started with this backend.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, backend: str | None, source: Any) -> None:
        from llmrl.weight_sync.double_buffer_trainer import StagedFile

        if backend not in (None, LLMRL_BACKEND):
            raise ValueError(
                f"{type(scheme).__name__} needs engines started with weight_transfer={LLMRL_BACKEND!r}; "
                f"theirs is {backend!r}."
            )
        super().__init__(StagedFile(source, scheme.remote_addr))
        self._worker_folder = scheme.local_addr or scheme.remote_addr

    def open_one(self, link: EngineLink) -> Any:
        """Let the workers look for the folder."""
        from llmrl.weight_sync.double_buffer_trainer import DoubleBufferTrainerInitInfo

        return make_trainer(DoubleBufferTrainerInitInfo(rank=0, worker_folder=self._worker_folder), link, self.staged)


def make_trainer(init_info: Any, client: EngineLink | LinkGroup, source: Any) -> Any:
    """vLLM's trainer engine for the backend that `init_info` is of."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from llmrl.weight_sync.plugin import register

    register()
    return WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)

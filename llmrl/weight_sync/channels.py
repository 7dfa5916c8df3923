"""Channels: transports of weights from the trainer to the engines' workers."""

from __future__ import annotations

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Protocol

import torch
from torch.distributed import ProcessGroupGloo

from llmrl._utils.threads import start_in_thread
from llmrl.engines.base import EngineError, TransferInfo
from llmrl.weight_sync.buffers import (
    HEADER_SIZE,
    TAG_PLACE,
    UNREACHABLE,
    PackedLayout,
    SharedBuffer,
    checksum_of,
    write_tag,
)
from llmrl.weight_sync.deltas import DeltaWriter
from llmrl.weight_sync.double_buffer import BufferPointer, DoubleBuffer
from llmrl.weight_sync.gloo import NOT_FOLLOWED, broadcast, open_group
from llmrl.weight_sync.source import ModelWeights

logger = logging.getLogger(__name__)

_MEETING_SECONDS = 10.0
"""Timeout to join a group after all workers have reported that they joined; a worker may have died since."""


class Client(Protocol):
    """Receiver of weights: one engine, or several engines with one group of workers."""

    timeout_seconds: float
    """Timeout of a streamed transfer without progress."""

    @property
    def num_workers(self) -> int:
        """Number of workers that take weights."""

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Open the workers' end."""

    def start_weight_update(self) -> None:
        """Start an update."""

    def update_weights(self, update_info: TransferInfo | list[TransferInfo]) -> None:
        """Let the workers take weights."""


class Connection(Protocol):
    """An open connection to one client; vLLM's trainer-side transfer engines implement it."""

    def send_weights(self) -> None:
        """Let the client's workers take the staged weights."""

    def shutdown(self) -> None:
        """Close the connection."""


class StagedConnection:
    """Connection that gives a client the channel's staged weights, or where they are, in one call.

    `staged` returns the arguments of `Client.update_weights`, and raises RuntimeError if no weights are staged.
    """

    def __init__(self, client: Client, staged: Callable[[], TransferInfo]) -> None:
        self._client = client
        self._staged = staged

    def send_weights(self) -> None:
        """Let the client's workers take the staged weights."""
        update_info = self._staged()
        self._client.start_weight_update()
        self._client.update_weights(update_info)

    def shutdown(self) -> None:
        """Do nothing; nothing is open."""


class Channel(ABC):
    """Transport that stages the trainer's weights while engines generate, and then transfers them."""

    is_collective = False
    """Whether all engines form one client, which is replaced if an engine is replaced."""
    can_roll_back = True
    """Whether engines keep their old weights until `EngineGroup.commit`."""

    @property
    @abstractmethod
    def staged_version(self) -> int | None:
        """Version of the weights staged for engines; None if no weights are staged."""

    @abstractmethod
    def stage(self, version: int | None) -> int:
        """Copy the current weights for sending; return their version, by default one that the channel counts."""

    @abstractmethod
    def roll_back(self) -> None:
        """Discard the staged weights, which no engine loaded."""

    @abstractmethod
    def connect(self, client: Client) -> Connection:
        """Connect to a client. Raises EngineError if a worker cannot be reached, or has another model."""

    @abstractmethod
    def close(self) -> None:
        """Release memory."""


class MemoryChannel(Channel):
    """Channel that packs weights into one flat buffer, which workers on this host map.

    The buffer is the trainer's only copy of the whole model. An engine on another host receives a
    broadcast in its own gloo group, so that the death of one replica does not affect the others.

    Args:
        rendezvous: function that returns the address and port at which such a group meets.
        anchor_every: see `VLLMWeightSyncScheme`; used only if an engine needs a broadcast.
    """

    def __init__(
        self, source: ModelWeights, rendezvous: Callable[[], tuple[str, int]], *, anchor_every: int = 1
    ) -> None:
        self._source = source
        self._rendezvous = rendezvous
        self._anchor_every = anchor_every
        self._shared: SharedBuffer | None = None
        self._layout: PackedLayout | None = None
        self._tag = ""
        self._version: int | None = None
        self._is_broadcast = False
        self._num_deltas = 0
        self.checksum: int | None = None
        """Checksum of the staged bytes, if deltas may follow."""
        self.delta: tuple[int, torch.Tensor] | None = None
        """Base checksum and bytes, [num_delta_bytes] uint8, of the staged delta."""

    @property
    def layout(self) -> PackedLayout:
        """Position of each weight."""
        if self._layout is None:
            self._layout = PackedLayout.of(self._source.metadata())
        return self._layout

    @property
    def staged_version(self) -> int | None:
        """Version of the packed weights."""
        return self._version if self._tag else None

    @torch.no_grad()
    def stage(self, version: int | None) -> int:
        """Cast and pack the weights. Raises ValueError if the source yields other weights than it announced."""
        assert version is not None, "this channel needs an engine"
        before = self._layout
        base = self.checksum if self._tag else None
        self._tag = ""  # nothing counts as staged until all is packed, because the source may fail halfway
        self._layout = None
        self.checksum = None
        self.delta = None
        layout = self.layout
        if self._shared is None or self._shared.num_bytes != layout.num_bytes:
            self.close()
            self._shared = SharedBuffer(layout.num_bytes)
        buffer = self._shared.tensor
        tag = uuid.uuid4().hex
        num_deltas = self._num_deltas
        self._num_deltas = 0
        if base is not None and before == layout and num_deltas + 1 < self._anchor_every:
            self._change(buffer, tag, version, base)
            self._num_deltas = 0 if self.delta is None else num_deltas + 1
        else:
            self._pack(buffer, tag)
        self._tag = tag
        self._version = version
        return version

    def _pack(self, buffer: torch.Tensor, tag: str) -> None:
        write_tag(buffer, tag)  # workers learn the tag only after the weights are packed
        views = self.layout.views(buffer)
        for given_name, tensor in self._source.uncast():
            name, view = next(views)
            if name != given_name or view.shape != tensor.shape:
                raise ValueError(f"the source announced {name!r} {tuple(view.shape)} and yielded {given_name!r}.")
            view.copy_(tensor)
        if self._is_broadcast and self._anchor_every > 1:
            self.checksum = checksum_of(buffer)

    def _change(self, buffer: torch.Tensor, tag: str, version: int, base: int) -> None:
        header = torch.empty(HEADER_SIZE, dtype=torch.uint8)
        writer = DeltaWriter(buffer, [TAG_PLACE, *self.layout.places])
        write_tag(header, tag)
        writer.put("", header)
        for name, tensor in self._source:
            writer.put(name, tensor)
        self.checksum = checksum_of(buffer)
        delta = writer.finish(version, base, self.checksum)
        if delta is not None:
            self.delta = base, torch.frombuffer(bytearray(delta), dtype=torch.uint8)

    def roll_back(self) -> None:
        """Discard the staged weights."""
        self._tag = ""

    def staged(self) -> tuple[SharedBuffer, TransferInfo]:
        """Return the staged buffer and its description for workers. Raises RuntimeError if no weights are staged."""
        if self._shared is None or not self._tag:
            raise RuntimeError("no weights are staged.")
        return self._shared, {"num_bytes": self.layout.num_bytes, "tag": self._tag, **self.layout.to_plain()}

    def _located(self) -> TransferInfo:
        shared, described = self.staged()
        return {"path": shared.path, **described}

    def connect(self, client: Client) -> Connection:
        """Connect by shared memory if the workers can map it, otherwise by gloo."""
        layout = self.layout.to_plain()
        probe = SharedBuffer(HEADER_SIZE)
        tag = uuid.uuid4().hex
        write_tag(probe.tensor, tag)
        try:
            client.init_weight_transfer_engine(
                {"layout": layout, "path": probe.path, "num_bytes": probe.num_bytes, "tag": tag}
            )
            return StagedConnection(client, self._located)
        except EngineError as error:
            if UNREACHABLE not in str(error):
                raise
            logger.info("an engine cannot map this host's memory, so its weights are broadcast: %s", error)
        finally:
            probe.close()
        client.init_weight_transfer_engine({"layout": layout})  # fails early if the engine has another model
        self._is_broadcast = True
        return _Broadcast(self, client, *self._rendezvous())

    def close(self) -> None:
        """Free the memory."""
        if self._shared is not None:
            self._shared.close()
        self._shared = None
        self._tag = ""


class _Broadcast:
    """Connection that broadcasts the staged weights, or their changes, to one client's workers."""

    def __init__(self, channel: MemoryChannel, client: Client, address: str, port: int) -> None:
        self._channel = channel
        self._client = client
        world_size = 1 + client.num_workers
        # `open_group` waits for the workers for minutes, so its thread is abandoned if the engine fails.
        opening = start_in_thread(open_group, address, port, rank=0, world_size=world_size)
        info = {"master_address": address, "master_port": port, "world_size": world_size}
        client.init_weight_transfer_engine(info)
        try:
            self._group: ProcessGroupGloo | None = opening.result(_MEETING_SECONDS)
        except TimeoutError as error:
            raise EngineError("the engine's workers joined the group and left it again.") from error
        self._held: int | None = None
        """Checksum of the weights that all workers hold."""

    def send_weights(self) -> None:
        shared, described = self._channel.staged()
        checksum = self._channel.checksum
        delta = self._channel.delta
        held = self._held
        self._held = None
        if checksum is not None:
            described["checksum"] = checksum
        if delta is None or delta[0] != held or not self._is_followed(delta[1], described):
            self._send(shared.tensor, described)
        self._held = checksum

    def _is_followed(self, delta: torch.Tensor, described: TransferInfo) -> bool:
        try:
            self._send(delta, {**described, "num_delta_bytes": len(delta)})
        except EngineError as error:
            if NOT_FOLLOWED not in str(error):
                raise
            logger.warning("an engine receives all weights, not a delta: %s", error)
            return False
        return True

    def _send(self, data: torch.Tensor, described: TransferInfo) -> None:
        group = self._group
        assert group is not None, "the connection is closed"
        self._client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(broadcast, group, data)
            try:
                self._client.update_weights(described)
            except BaseException as error:
                if NOT_FOLLOWED not in str(error):
                    self.shutdown()  # ends the broadcast too
                raise
            sending.result()

    def shutdown(self) -> None:
        """Leave the group; workers that wait for this process get an error."""
        if self._group is not None:
            self._group.shutdown()
        self._group = None


class FileChannel(Channel):
    """Channel that writes weights alternately into two files of a folder, of which one is always whole.

    Args:
        folder, worker_folder: the folder, as the trainer and as the engines' hosts see it.
        anchor_every: see `VLLMDoubleBufferSyncScheme`.
    """

    def __init__(self, source: ModelWeights, folder: str, worker_folder: str, *, anchor_every: int = 1) -> None:
        self._source = source
        self.worker_folder = worker_folder
        self._buffer = DoubleBuffer(folder, anchor_every=anchor_every)
        self._before: tuple[BufferPointer | None, BufferPointer | None] = None, None
        self.pointer: BufferPointer | None = None

    @property
    def staged_version(self) -> int | None:
        """Version of the current buffer, if this process wrote it."""
        return None if self.pointer is None else self.pointer.version

    def stage(self, version: int | None) -> int:
        """Write the weights into the other buffer, and make it the current one."""
        self._buffer.folder.mkdir(parents=True, exist_ok=True)
        self._before = (self._buffer.pointer(), self.pointer)
        self.pointer = None
        self.pointer = self._buffer.write(self._source, version)
        return self.pointer.version

    def roll_back(self) -> None:
        """Make the previous buffer the current one again."""
        current, self.pointer = self._before
        self._buffer.point_to(current)

    def _located(self) -> TransferInfo:
        if self.pointer is None:
            raise RuntimeError("no weights are staged.")
        return located_file(self.worker_folder, self.pointer)

    def connect(self, client: Client) -> Connection:
        """Check that every worker can access the folder."""
        self._buffer.folder.mkdir(parents=True, exist_ok=True)
        layout = PackedLayout.of(self._source.metadata()).to_plain()
        client.init_weight_transfer_engine({"folder": self.worker_folder, "layout": layout})
        return StagedConnection(client, self._located)

    def close(self) -> None:
        """Do nothing; the files stay."""


def located_file(folder: str, pointer: BufferPointer) -> TransferInfo:
    """Return the arguments of `Client.update_weights` for a file in `folder`, as the workers see it."""
    return {"folder": folder, "pointer": asdict(pointer)}

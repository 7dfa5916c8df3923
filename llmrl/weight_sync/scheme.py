"""Schemes that send new weights from a trainer to running vLLM engines, on CPU and on GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from llmrl._utils.arguments import KnownArguments, check_least
from llmrl.engines.base import EngineError, PauseMode, UpdatableEngine
from llmrl.engines.server.updates import FILES_BACKEND
from llmrl.engines.vllm.arguments import ADAPTER_BACKEND, LLMRL_BACKEND
from llmrl.weight_sync.adapters import AdapterChannel, AdapterWeights
from llmrl.weight_sync.channels import Channel, FileChannel, MemoryChannel, located_file
from llmrl.weight_sync.double_buffer import BufferPointer, DoubleBuffer
from llmrl.weight_sync.engine_group import EngineGroup, held_for
from llmrl.weight_sync.gloo import free_port, own_address
from llmrl.weight_sync.member import Member
from llmrl.weight_sync.source import ModelWeights
from llmrl.weight_sync.stream import StreamChannel
from llmrl.weight_sync.sync import WeightSync


@dataclass(kw_only=True)
class VLLMWeightSyncScheme(KnownArguments):
    """Weight sync by the engine's own backend (`AsyncVLLM.weight_transfer_backend`).

    On CPU it is llmrl's shared memory, into which weights are copied once while the engine generates, or gloo for an
    engine on another host. On GPU it is vLLM's NCCL, or CUDA IPC for an engine started with `weight_transfer="ipc"`.

    Args:
        master_address, master_port: address and port at which trainer and workers meet (NCCL, gloo); by default a free
            port of this host. With gloo, a fixed port serves only one engine.
        pause_mode: treatment of requests in flight: they continue with the new weights (`keep`),
            are finished first (`wait`), or end with the tokens so far (`abort`).
        reset_running_requests: whether to also drop the key-value blocks of kept requests; False is
            faster, but these requests continue from blocks of the old weights.
        rank: rank of this trainer process; rank 0 sends, the others only help to gather sharded weights.
        anchor_every: with gloo or files, number of updates of which the first sends all weights, and the others only
            the changes (in bfloat16 about 1 % of the bytes, without loss). Workers keep a copy of
            the weights; with files, the trainer does too. No effect with shared memory.
        lora: `merged` sends the weights with adapters added; `adapter` sends only the adapters, to engines started with
            `weight_transfer="adapters"`. Requests in flight then finish with their old adapter, without a pause; an
            update waits only if all of the engine's adapters (`max_loras`) are in use.
        gpus_per_replica, num_replicas, strategy, device: for compatibility with TorchRL; ignored.

    Raises ValueError if an option is invalid, or the backend does not support `anchor_every` above 1 or `lora`.

    Example:
        >>> sender = VLLMWeightSyncScheme().create_sender()
        >>> sender.register_model(model)                                        # doctest: +SKIP
        >>> sender.init_all_workers_group(get_model_metadata(model), engine)    # doctest: +SKIP
        >>> sender.update_weights()                                             # doctest: +SKIP
        1
    """

    master_address: str | None = None
    master_port: int | None = None
    pause_mode: PauseMode = "keep"
    reset_running_requests: bool = True
    rank: int = 0
    anchor_every: int = 1
    lora: Literal["merged", "adapter"] = "merged"
    gpus_per_replica: int | None = None
    num_replicas: int | None = None
    strategy: str | None = None
    device: object = None
    _needs_engine: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.pause_mode not in ("keep", "wait", "abort"):
            raise ValueError(f"pause_mode must be 'keep', 'wait' or 'abort', got {self.pause_mode!r}.")
        if self.lora not in ("merged", "adapter"):
            raise ValueError(f"lora must be 'merged' or 'adapter', got {self.lora!r}.")
        check_least(0, rank=self.rank)
        check_least(1, anchor_every=self.anchor_every)
        if self.anchor_every > 1 and self.lora == "adapter":
            raise ValueError(
                f"anchor_every={self.anchor_every} is for full weights, and lora='adapter' sends adapters only."
            )

    def create_sender(self) -> WeightSync:
        """Create the trainer's end."""
        return WeightSync(
            self._open_channel,
            pause_mode=self.pause_mode,
            reset_running_requests=self.reset_running_requests,
            rank=self.rank,
            needs_engine=self._needs_engine,
            make_source=AdapterWeights if self.lora == "adapter" else ModelWeights,
        )

    def _open_channel(self, source: ModelWeights, backend: str | None) -> Channel:
        if (backend == ADAPTER_BACKEND) != isinstance(source, AdapterWeights):
            raise ValueError(
                f"lora={self.lora!r} does not fit an engine with weight_transfer={backend!r}: adapters alone go from a "
                f"scheme with lora='adapter' to engines started with weight_transfer={ADAPTER_BACKEND!r}."
            )
        if isinstance(source, AdapterWeights):
            return AdapterChannel(source)
        if backend == LLMRL_BACKEND:
            return MemoryChannel(
                source,
                lambda: self._rendezvous(self.master_address or own_address()),
                anchor_every=self.anchor_every,
            )
        if self.anchor_every > 1:
            raise ValueError(
                f"anchor_every={self.anchor_every}: an engine with weight_transfer={backend!r} is sent all weights; "
                f"leave it at 1, or start the engine with weight_transfer={LLMRL_BACKEND!r}."
            )
        return StreamChannel(source, backend, lambda: self._rendezvous(self.master_address or "127.0.0.1"))

    def _rendezvous(self, address: str) -> tuple[str, int]:
        return address, free_port() if self.master_port is None else self.master_port


@dataclass(kw_only=True)
class VLLMDoubleBufferSyncScheme(VLLMWeightSyncScheme):
    """Weight sync through files: two buffers, of which one is always whole, and a pointer with a checksum.

    For engines on other hosts with a shared file system; on GPU, start them with `weight_transfer="llmrl"`. If the
    trainer cannot call the engine, give its sender no engine; it then only writes the files and returns their version,
    and a receiver on the engine's side reads them: `scheme.create_receiver(engine).poll_and_apply()`.

    Args:
        remote_addr: the folder, as the trainer sees it.
        local_addr: the same folder, as the engines' hosts see it; `remote_addr` by default.
    """

    remote_addr: str
    local_addr: str | None = None
    _needs_engine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora == "adapter":
            raise ValueError("lora='adapter' needs VLLMWeightSyncScheme: the files hold all of a model's weights.")

    def create_receiver(self, vllm_engine: UpdatableEngine | Sequence[UpdatableEngine]) -> DoubleBufferReader:
        """Create a reader for engines that the trainer cannot call; all of them get the same weights."""
        reset = self.reset_running_requests
        group = EngineGroup(vllm_engine, pause_mode=self.pause_mode, reset_running_requests=reset)
        return DoubleBufferReader(group, self._worker_folder)

    @property
    def _worker_folder(self) -> str:
        return self.remote_addr if self.local_addr is None else self.local_addr

    def _open_channel(self, source: ModelWeights, backend: str | None) -> Channel:
        if backend not in (None, LLMRL_BACKEND, FILES_BACKEND):
            raise ValueError(
                f"{type(self).__name__} needs engines started with weight_transfer={LLMRL_BACKEND!r}; "
                f"theirs is {backend!r}."
            )
        if backend == FILES_BACKEND and self.anchor_every > 1:
            raise ValueError(
                f"anchor_every={self.anchor_every}: a server without llmrl's backend reads whole files; leave it at 1, "
                f'or start the server with --weight-transfer-config \'{{"backend": "{LLMRL_BACKEND}"}}\'.'
            )
        return FileChannel(source, self.remote_addr, self._worker_folder, anchor_every=self.anchor_every)


class DoubleBufferReader:
    """Reader of a double buffer for engines that the trainer cannot call, including replicas that restart later."""

    def __init__(self, group: EngineGroup, folder: str) -> None:
        self._group = group
        self._folder = folder
        self._applied: BufferPointer | None = None
        self._lock = threading.RLock()
        group.call_before_serving(self._bring_up_to_date)

    def poll_and_apply(self) -> int | None:
        """Load the current buffer and return its version; `None` if it has not changed since the last call.

        Raises EngineError if the buffer is damaged or does not fit; the engines keep their weights.
        """
        with self._lock:
            try:
                pointer = DoubleBuffer(self._folder).pointer()
            except ValueError as error:
                raise EngineError(str(error)) from error
            if pointer is None or pointer == self._applied:
                return None
            self._apply(self._group.members(), pointer)
            self._applied = pointer
            return pointer.version

    def _bring_up_to_date(self, engine: UpdatableEngine) -> None:
        with held_for(engine, self._lock):
            if self._applied is not None:
                self._apply([self._group.member_of(engine)], self._applied)

    def _apply(self, members: list[Member], pointer: BufferPointer) -> None:
        def take(member: Member) -> None:
            member.init_weight_transfer_engine({"folder": self._folder})
            member.start_weight_update()
            member.update_weights(located_file(self._folder, pointer))

        def make_older(member: Member) -> None:
            # Another trainer's weights may have this version, and an engine's own version cancels an update.
            if member.engine.policy_version == pointer.version:
                member.engine.policy_version = pointer.version - 1

        with self._group.paused(members):
            try:
                self._group.each(members, take)
            except Exception:
                self._group.roll_back(members, are_mixed=False)
                raise
            self._group.each(members, make_older)
            self._group.commit(members, pointer.version)

    def shutdown(self) -> None:
        """Release threads, but not the engines."""
        self._group.shutdown()

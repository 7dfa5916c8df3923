"""`VLLMWeightSyncScheme`: new weights from a trainer into running vLLM engines, on CPU and on GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmrl.engines.base import EngineError

if TYPE_CHECKING:
    from llmrl.weight_sync.receiver import VLLMDoubleBufferWeightReceiver, VLLMWeightReceiver
    from llmrl.weight_sync.sender import VLLMDoubleBufferWeightSender, VLLMWeightSender
    from llmrl.weight_sync.transport import WeightTransport


class WeightSyncError(EngineError):
    """An update failed; the message says which weights the engine holds now. It may be tried again."""


@dataclass(kw_only=True)
class VLLMWeightSyncScheme:
    """How weights travel, and what happens to requests in flight meanwhile.

    The backend is the engine's own (`AsyncVLLM.weight_transfer_backend`): on CPU llmrl's shared memory, which copies
    the weights once, while the engine still generates, and makes it load them from there (or gloo, for an engine on
    another host); on GPU vLLM's NCCL, or CUDA IPC for an engine started with `weight_transfer="ipc"`.

    Args:
        master_address, master_port: where trainer and workers meet (NCCL, gloo); by default a free port of this host.
            A fixed port serves one engine only with gloo.
        pause_mode: requests in flight stay and go on with the new weights (`keep`), are finished first (`wait`) or
            end with what they have (`abort`).
        reset_running_requests: drop the key-value blocks of kept requests too, so that no block of old weights is
            used; without it they go on from old blocks, faster and off by that.
        rank: of this trainer process; 0 sends, the others only help to gather sharded weights.

    Raises:
        ValueError: for an unknown `pause_mode` or a negative rank.

    Example:
        >>> sender = VLLMWeightSyncScheme().create_sender()
        >>> sender.register_model(model)                                        # doctest: +SKIP
        >>> sender.init_all_workers_group(get_model_metadata(model), engine)    # doctest: +SKIP
        >>> sender.update_weights()                                             # doctest: +SKIP
        1
    """

    master_address: str | None = None
    master_port: int | None = None
    pause_mode: Literal["keep", "wait", "abort"] = "keep"
    reset_running_requests: bool = True
    rank: int = 0

    def __post_init__(self) -> None:
        if self.pause_mode not in ("keep", "wait", "abort"):
            raise ValueError(f"pause_mode must be 'keep', 'wait' or 'abort', got {self.pause_mode!r}.")
        if self.rank < 0:
            raise ValueError(f"rank must not be negative, got {self.rank}.")

    def create_sender(self) -> VLLMWeightSender:
        """The trainer's end."""
        from llmrl.weight_sync.sender import VLLMWeightSender

        return VLLMWeightSender(self)

    def create_receiver(self, engine: Any | Sequence[Any]) -> VLLMWeightReceiver:
        """The end of one engine, or of several that are to hold the same weights."""
        from llmrl.weight_sync.receiver import VLLMWeightReceiver

        return VLLMWeightReceiver(self, engine)

    def create_transport(self, backend: str | None, source: Any) -> WeightTransport:
        """What moves the bytes from `source` to workers with this weight-transfer backend."""
        from llmrl.weight_sync.transport import VLLMCollectiveTransport

        return VLLMCollectiveTransport(self, backend, source)

    def rendezvous(self, own_address: Callable[[], str]) -> tuple[str, int]:
        """Address and port where trainer and workers meet; `own_address` is asked when none was given."""
        from llmrl.weight_sync.gloo import free_port

        address = self.master_address if self.master_address is not None else own_address()
        return address, self.master_port if self.master_port is not None else free_port()


@dataclass(kw_only=True)
class VLLMDoubleBufferSyncScheme(VLLMWeightSyncScheme):
    """Weights through files: two buffers, of which one is always whole, and a pointer with a checksum.

    For engines on other hosts with a shared file system, on any device; on GPU they are started with
    `weight_transfer="llmrl"`. Sender and receiver are used as those of `VLLMWeightSyncScheme`. Where the trainer
    cannot call the engine, its sender is given none and only writes, and a receiver beside the engine reads:
    `scheme.create_receiver(engine).poll_and_apply()`.

    Args:
        remote_addr: the folder, as the trainer sees it.
        local_addr: the same folder as the engines' hosts see it; `remote_addr` when not given.
    """

    remote_addr: str
    local_addr: str | None = None

    def create_sender(self) -> VLLMDoubleBufferWeightSender:
        """The trainer's end."""
        from llmrl.weight_sync.sender import VLLMDoubleBufferWeightSender

        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(self, engine: Any | Sequence[Any]) -> VLLMDoubleBufferWeightReceiver:
        """The end of one engine, or of several that are to hold the same weights."""
        from llmrl.weight_sync.receiver import VLLMDoubleBufferWeightReceiver

        return VLLMDoubleBufferWeightReceiver(self, engine)

    def create_transport(self, backend: str | None, source: Any) -> WeightTransport:
        """What writes `source` and tells workers with this weight-transfer backend, if there are any."""
        from llmrl.weight_sync.transport import VLLMDoubleBufferTransport

        return VLLMDoubleBufferTransport(self, backend, source)

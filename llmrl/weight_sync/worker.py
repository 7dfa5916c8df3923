"""vLLM's end of weight transfers, which runs in its worker processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from llmrl.engines.base import TransferInfo
from llmrl.engines.vllm.private import (
    LinearBase,
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
    ParallelLMHead,
    VllmConfig,
    VocabParallelEmbedding,
    WeightTransferConfig,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    _layerwise_process,
    dispatch_cpu_unquantized_gemm,
    finalize_layerwise_reload,
    forget_loaded,
    forget_packing_of_experts,
    get_layerwise_info,
    initialize_layerwise_reload,
    is_deferred_attention_layer,
    materialize_layer,
    set_current_vllm_config,
)
from llmrl.weight_sync.buffers import UNREACHABLE, PackedLayout, open_shared, read_tag
from llmrl.weight_sync.deadline import TRANSFER_SECONDS, TimedCommunicator
from llmrl.weight_sync.double_buffer import BufferPointer, DoubleBuffer, FileWeights
from llmrl.weight_sync.gloo import Receiver, open_group
from llmrl.weight_sync.load_plan import STAYING, LoadPlan, TiedHeads, make_load_plan, trained_layers
from llmrl.weight_sync.partial import NeededPages


@dataclass
class WorkerInitInfo(WeightTransferInitInfo):
    """Layout of later updates, if known, and one transport to test: shared memory, a gloo group or a folder."""

    layout: dict[str, list] | None = None
    path: str = ""
    """Path of a buffer of `num_bytes` in the trainer's memory."""
    num_bytes: int = 0
    tag: str = ""
    """Expected tag of that buffer, because in another container the path may be another program's file."""
    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 1
    world_size: int = 0
    folder: str = ""
    """Folder of a double buffer, as this host sees it."""


@dataclass
class WorkerUpdateInfo(WeightTransferUpdateInfo):
    """Source of the weights: a double buffer's `pointer`, a shared buffer at `path`, or a broadcast."""

    is_discarded: bool = False
    """Whether to discard the received weights instead of receiving weights."""
    folder: str = ""
    pointer: dict[str, int] = field(default_factory=dict)
    path: str = ""
    num_bytes: int = 0
    tag: str = ""
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    checksum: int | None = None
    """Checksum of the broadcast weights, if deltas may follow."""
    num_delta_bytes: int = 0
    """Size of the broadcast delta; 0 if all weights are broadcast."""


class WorkerEngine(WeightTransferEngine):
    """Worker's end that receives weights into a flat buffer, checks them, and loads them at the end of the update.

    The buffer is the trainer's memory, one filled by broadcast, or a double buffer's file. `update_weights` does not
    change the model, so a failed transfer leaves the old weights in place on every worker.
    """

    init_info_cls = WorkerInitInfo
    update_info_cls = WorkerUpdateInfo
    _receiver: Receiver | None = None
    _mapped: tuple[str, torch.Tensor] = ("", torch.empty(0))
    _held: FileWeights | None = None
    """Weights last read from a double buffer, to which deltas may apply."""

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        for parameter in model.parameters():
            loader = getattr(parameter, "weight_loader", None)
            if isinstance(loader, partial):  # vLLM's reload asks loaders for their names
                loader.__name__ = "partial"  # type: ignore[attr-defined]
        self._tied_heads = find_tied_heads(model)
        self._taken: tuple[PackedLayout, torch.Tensor, WorkerUpdateInfo] | None = None
        self._layout: PackedLayout | None = None
        self._plan: LoadPlan | None = None
        self._pages: NeededPages | None = None
        self._direct: list[torch.nn.Module] | None = None
        """Layers that the model's class fills without the loaders that a reload wraps; None before any is found."""

    def init_transfer_engine(self, init_info: WorkerInitInfo) -> None:
        """Raise ValueError unless the weights fit the model and the trainer's memory or folder is accessible."""
        if init_info.layout is not None:
            self.plan_for(PackedLayout.from_plain(**init_info.layout))
        self.shutdown()
        if init_info.path:
            try:
                found = read_tag(open_shared(init_info.path, init_info.num_bytes))
                if found != init_info.tag:
                    raise ValueError("another process's file is there.")
            except (OSError, ValueError) as error:
                raise ValueError(f"{UNREACHABLE} at {init_info.path}: {error}") from error
        if init_info.folder and not Path(init_info.folder).is_dir():
            raise ValueError(
                f"the worker cannot see the folder {init_info.folder}; pass local_addr, the folder's "
                "path on the worker's host."
            )
        if init_info.master_address:
            parallel = self.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
            group = open_group(
                init_info.master_address, init_info.master_port, rank=rank, world_size=init_info.world_size
            )
            self._receiver = Receiver(group)

    def start_weight_update(self) -> None:
        """Discard the weights that an unfinished update received."""
        self._taken = None

    def update_weights(self, update_info: TransferInfo) -> None:
        """Receive all weights."""
        # The base class would also synchronise an accelerator, which this backend does not use.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WorkerUpdateInfo) -> None:
        """Receive all weights. Raises ValueError if they were not announced, or do not fit the model."""
        self._taken = None
        if update_info.is_discarded:
            return
        layout, buffer = self.take(update_info)
        self.plan_for(layout)
        self._taken = layout, buffer, update_info

    def plan_for(self, layout: PackedLayout) -> None:
        """Plan how to load weights. Raises ValueError if they do not fit the model, or some are missing."""
        if layout != self._layout:
            with set_current_vllm_config(self.vllm_config):
                self._plan, self._pages = make_load_plan(self.model, layout, self._tied_heads)
            self._layout = layout

    def finish_weight_update(self) -> None:
        """Load the received weights. Raises ValueError if they were overwritten, which leaves a mixture."""
        if self._taken is None:
            return
        layout, buffer, update_info = self._taken
        self._taken = None
        if self._plan is not None:
            self._plan.load(buffer)
        else:
            self._reload(layout, buffer)
        self._renew_tied_heads()
        self.require_intact(update_info)

    def take(self, update_info: WorkerUpdateInfo) -> tuple[PackedLayout, torch.Tensor]:
        """Read, map or receive the weights. Raises ValueError if they are not the announced weights."""
        if update_info.pointer:
            pointer = BufferPointer(**update_info.pointer)
            since = self._held
            self._held = None
            files = DoubleBuffer(update_info.folder)
            if pointer.anchor_every > 1:  # deltas need the whole buffer
                weights = self._held = files.read(pointer, since=since)
            else:
                weights = files.read(pointer, pages_of=self._pages_of)
            return weights.layout, weights.buffer
        layout = PackedLayout.from_plain(update_info.names, update_info.dtype_names, update_info.shapes)
        if layout.num_bytes != update_info.num_bytes:
            raise ValueError(
                f"the update announces {update_info.num_bytes} bytes, and its layout has {layout.num_bytes} bytes."
            )
        buffer = self._map(update_info) if update_info.path else self._receive(update_info, layout)
        if read_tag(buffer) != update_info.tag:
            raise ValueError(f"the buffer holds weights tagged {read_tag(buffer)!r}, not {update_info.tag!r}.")
        return layout, buffer

    def require_intact(self, update_info: WorkerUpdateInfo) -> None:
        """Raise ValueError if the tag has changed: the trainer may have staged its next weights after a timeout."""
        if update_info.path and read_tag(open_shared(update_info.path, update_info.num_bytes)) != update_info.tag:
            raise ValueError("the weights were overwritten while they were being loaded.")

    def shutdown(self) -> None:
        """Leave the group and unmap the trainer's memory."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None
        self._mapped = ("", torch.empty(0))

    def _map(self, update_info: WorkerUpdateInfo) -> torch.Tensor:
        # The mapping is kept between updates: mapping 270 MB costs as much as copying a third of
        # it. The tag shows whether the path now refers to another buffer.
        path, buffer = self._mapped
        if path != update_info.path or read_tag(buffer) != update_info.tag:
            buffer = open_shared(update_info.path, update_info.num_bytes)
            self._mapped = (update_info.path, buffer)
        return buffer

    def _receive(self, update_info: WorkerUpdateInfo, layout: PackedLayout) -> torch.Tensor:
        if self._receiver is None:
            raise ValueError("the trainer has opened no group; call init_weight_transfer_engine first.")
        if update_info.num_delta_bytes:
            return self._receiver.receive_delta(update_info.num_delta_bytes)
        pages = self._pages_of(layout)
        return self._receiver.receive(layout.num_bytes, pages=pages, checksum=update_info.checksum)

    def _pages_of(self, layout: PackedLayout) -> NeededPages | None:
        """Return the pages that this worker's part of the model is loaded from; None if it needs all."""
        if self.parallel_config.world_size == 1:
            return None
        try:
            self.plan_for(layout)
        except ValueError:  # raised again after the transfer, which this worker must join
            return None
        return self._pages

    def _reload(self, layout: PackedLayout, buffer: torch.Tensor) -> None:
        """Load with vLLM's layerwise reload, which supports any device and model."""
        self._begin_reload()
        try:
            self._materialize(self._direct or ())
            self.model.load_weights(layout.views(buffer))
            # The reload's loaders see no weight of a layer that the model's class fills itself.
            # Such layers get real parameters, and the weights are loaded again.
            if self._direct is None and (untouched := self._untouched()):
                self._direct = list(untouched.values())
                self._abandon()
                self._begin_reload()
                self._materialize(self._direct)
                self.model.load_weights(layout.views(buffer))
            for layer in self._direct or ():
                if not any(one.isnan().any() for one in layer.parameters(recurse=False)):  # all were filled
                    _layerwise_process(layer, get_layerwise_info(layer))
            self._require_complete()
        except BaseException:
            self._abandon()
            raise
        finalize_layerwise_reload(self.model, self.model_config)

    def _begin_reload(self) -> None:
        initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            forget_packing_of_experts(self.model)

    def _materialize(self, layers: Iterable[torch.nn.Module]) -> None:
        """Give layers parameters of NaN, which the model's class overwrites."""
        for layer in layers:
            materialize_layer(layer, get_layerwise_info(layer))
            for one in layer.parameters(recurse=False):
                one.data.fill_(torch.nan)

    def _untouched(self) -> dict[str, torch.nn.Module]:
        """Return the layers, by name, for which a reload's loaders received no weight."""
        heads = {id(head) for head, _ in self._tied_heads}
        trained = trained_layers(self.model)
        found = {}
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if not info.can_load() or is_deferred_attention_layer(layer):
                continue
            if id(layer) in heads or id(layer) not in trained:
                continue
            own = [one for one, _ in layer.named_parameters(recurse=False) if one not in STAYING]
            if own and info.load_numel == 0 and info.load_numel_total:
                found[name] = layer
        return found

    def _require_complete(self) -> None:
        missing = list(self._untouched())
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            # Only vocabularies are padded: a linear layer with missing elements lacks one of its fused weights.
            is_begun = info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0)
            if is_begun and isinstance(layer, LinearBase):
                missing.append(name)
        if missing:
            raise ValueError(f"the update lacks weights for {len(missing)} layers, among them {missing[:3]}.")

    def _abandon(self) -> None:
        forget_loaded(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        self._renew_tied_heads()

    def _renew_tied_heads(self) -> None:
        """Update tied heads; on CPU they hold a packed copy of their weight, which a reload leaves unchanged."""
        for head, embedding in self._tied_heads:
            if head.weight is not embedding.weight:
                head.weight = embedding.weight
            if self.device.type == "cpu":
                dispatch_cpu_unquantized_gemm(head, remove_weight=False)
                embedding.cpu_linear = head.cpu_linear


def find_tied_heads(model: torch.nn.Module) -> TiedHeads:
    """Return each output head that shares an embedding's weight, with the embedding."""
    embeddings = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    return [
        (head, embedding)
        for head in model.modules()
        if isinstance(head, ParallelLMHead)
        for embedding in embeddings
        if head.weight is embedding.weight or head.weight.data_ptr() == embedding.weight.data_ptr() != 0
    ]


@dataclass(kw_only=True)
class TimedInitInfo(NCCLWeightTransferInitInfo):
    """vLLM's arguments, and the timeout of a transfer."""

    timeout_seconds: float = TRANSFER_SECONDS


class TimedNCCLEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL worker end that fails if the trainer or another worker stalls."""

    init_info_cls = TimedInitInfo
    model_update_group: TimedCommunicator | None

    def init_transfer_engine(self, init_info: TimedInitInfo) -> None:
        """Join a new group with the trainer and the other workers."""
        self.shutdown()
        super().init_transfer_engine(init_info)
        if self.model_update_group is not None:
            self.model_update_group = TimedCommunicator(self.model_update_group, init_info.timeout_seconds)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive all weights. Raises TransferStalledError if the transfer stalls, which leaves a mixture."""
        if self.model_update_group is None:
            raise RuntimeError("the trainer has opened no group; call init_transfer_engine first.")
        with self.model_update_group.watched():
            super().receive_weights(update_info)

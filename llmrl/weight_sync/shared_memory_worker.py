"""vLLM's end of the shared-memory weight transfer: runs inside its worker processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, is_deferred_attention_layer

from llmrl.weight_sync.packing import PackedLayout, read_tag
from llmrl.weight_sync.shared_memory import open_shared


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """A buffer to try: a worker on another host finds out now."""

    path: str
    num_bytes: int


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Where the new weights lie; with `is_checkpoint`, those that the engine started with."""

    path: str = ""
    num_bytes: int = 0
    tag: str = ""
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    is_checkpoint: bool = False


class SharedMemoryWorkerEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads weights straight from the trainer's memory.

    All of the weights come in one update. What is wrong with it is found before it is finished: then the model can
    still be generated from, as a mixture of layers, and a further update (the previous weights) makes it whole.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._tied_heads = find_tied_heads(model)

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Try the way to the trainer's memory."""
        try:
            open_shared(init_info.path, init_info.num_bytes)
        except OSError as error:
            raise ValueError(
                f"the worker cannot open the trainer's memory at {init_info.path}: {error}. Trainer and engine must "
                "run on one host as one user; across hosts, use a double buffer on a shared file system."
            ) from error

    def start_weight_update(self) -> None:
        """Make every layer expect its weights in the checkpoint's format."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load all of the weights."""
        # The base class would also wait for an accelerator, which this backend does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load all of the weights.

        Raises:
            ValueError: when they are not those that were announced, or some are missing; nothing stays half loaded.
        """
        try:
            if update_info.is_checkpoint:
                self.model.load_weights(self._checkpoint())
            else:
                self._load(update_info)
            self._require_complete()
        except BaseException:
            self._abandon()
            raise

    def finish_weight_update(self) -> None:
        """Put the loaded weights to use."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._renew_tied_heads()

    def shutdown(self) -> None:
        """Nothing stays open between updates."""

    def _load(self, update_info: SharedMemoryUpdateInfo) -> None:
        layout = PackedLayout.of(
            (name, getattr(torch, dtype_name), shape)
            for name, dtype_name, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            )
        )
        if layout.num_bytes != update_info.num_bytes:
            raise ValueError(f"{update_info.num_bytes} bytes announced, the layout says {layout.num_bytes}.")
        buffer = open_shared(update_info.path, update_info.num_bytes)
        if read_tag(buffer) != update_info.tag:
            raise ValueError(f"the buffer holds weights tagged {read_tag(buffer)!r}, not {update_info.tag!r}.")
        self.model.load_weights(layout.views(buffer))
        if read_tag(buffer) != update_info.tag:
            raise ValueError("the weights were overwritten while they were being loaded.")

    def _checkpoint(self) -> Iterable[tuple[str, torch.Tensor]]:
        from vllm.model_executor.model_loader import get_model_loader

        loader: Any = get_model_loader(self.vllm_config.load_config)
        return loader.get_all_weights(self.model_config, self.model)

    def _require_complete(self) -> None:
        heads = {id(head) for head, _ in self._tied_heads}
        missing = []
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if not info.can_load() or is_deferred_attention_layer(layer) or id(layer) in heads:
                continue
            is_untouched = info.load_numel == 0 and bool(info.load_numel_total)
            # Only vocabularies are padded; a linear layer short of elements lacks one of the weights fused in it.
            is_partial = isinstance(layer, LinearBase) and 0 < info.load_numel < (info.load_numel_total or 0)
            if (is_untouched or is_partial) and any(True for _ in layer.parameters(recurse=False)):
                missing.append(name)
        if missing:
            raise ValueError(f"the update lacks weights for {len(missing)} layers, among them {missing[:3]}.")

    def _abandon(self) -> None:
        """Forget what waits to be loaded and put back what the layers had."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        self._renew_tied_heads()

    def _renew_tied_heads(self) -> None:
        """On CPU a head holds a packed copy of its weight, which a reload of the embedding does not reach."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for head, embedding in self._tied_heads:
            if head.weight is not embedding.weight:
                head.weight = embedding.weight
            if self.device.type == "cpu":
                dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def find_tied_heads(model: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Pairs of an output head and the embedding whose weight it shares."""
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

"""Inside vLLM's worker processes: weights taken in two steps, so that what fails leaves the old ones in force."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, is_deferred_attention_layer

from llmrl.weight_sync.load_plan import LoadPlan, make_load_plan
from llmrl.weight_sync.packing import PackedLayout


@dataclass
class ReloadingUpdateInfo(WeightTransferUpdateInfo):
    """What an update brings; with `is_discarded`, nothing: what was taken before is forgotten."""

    is_discarded: bool = False


class ReloadingWorkerEngine(WeightTransferEngine):
    """Takes a whole checkpoint's weights into a flat buffer and checks them; loads them when the update is finished.

    `update_weights` changes nothing of the model: a transfer that breaks, weights of another model and weights that
    are missing are found there, on every worker, before any worker loads.
    """

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._tied_heads = find_tied_heads(model)
        self._taken: tuple[PackedLayout, torch.Tensor, Any] | None = None
        self._layout: PackedLayout | None = None
        self._plan: LoadPlan | None = None

    @abstractmethod
    def take(self, update_info: Any) -> tuple[PackedLayout, torch.Tensor]:
        """The weights that `update_info` describes: their layout and a flat buffer ([num_bytes] uint8) of this host."""

    def require_intact(self, update_info: Any) -> None:
        """Raise `ValueError` when the buffer was overwritten since `take`; most cannot be."""

    def start_weight_update(self) -> None:
        """Forget what an update before took and did not finish."""
        self._taken = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take all of the weights."""
        # The base class would also wait for an accelerator, which this backend does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        """Take all of the weights.

        Raises:
            ValueError: when they are not those that were announced, do not fit the model, or some are missing.
        """
        self._taken = None
        if update_info.is_discarded:
            return
        layout, buffer = self.take(update_info)
        self.plan_for(layout)
        self._taken = layout, buffer, update_info

    def plan_for(self, layout: PackedLayout) -> None:
        """Check that the weights fit, and find the way for them.

        Raises:
            ValueError: when they do not fit the model, or some are missing.
        """
        if layout != self._layout:
            with set_current_vllm_config(self.vllm_config):
                self._plan = make_load_plan(self.model, layout, self._tied_heads)
            self._layout = layout

    def finish_weight_update(self) -> None:
        """Load what was taken.

        Raises:
            ValueError: when it was overwritten meanwhile; the model then holds a mixture.
        """
        if self._taken is None:
            return
        (layout, buffer, update_info), self._taken = self._taken, None
        if self._plan is not None:
            self._plan.load(buffer)
        else:
            self._reload(layout, buffer)
        self._renew_tied_heads()
        self.require_intact(update_info)

    def shutdown(self) -> None:
        """Nothing stays open between updates."""

    def _reload(self, layout: PackedLayout, buffer: torch.Tensor) -> None:
        """By vLLM's layerwise reload: for any device and model."""
        initialize_layerwise_reload(self.model)
        self._renew_experts()
        try:
            self.model.load_weights(layout.views(buffer))
            self._require_complete()
        except BaseException:
            self._abandon()
            raise
        finalize_layerwise_reload(self.model, self.model_config)

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

    def _renew_experts(self) -> None:
        """On CPU vLLM packs experts only when it first makes their kernel, and would read the next ones as if packed.

        Without a kernel it makes one, and packs.
        """
        if self.device.type == "cpu":
            for layer in self.model.modules():
                method = getattr(layer, "quant_method", None)
                if isinstance(method, FusedMoEMethodBase):
                    method.moe_kernel = None

    def _renew_tied_heads(self) -> None:
        """On CPU a head holds a packed copy of its weight, which a reload of the embedding does not reach."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for head, embedding in self._tied_heads:
            if head.weight is not embedding.weight:
                head.weight = embedding.weight
            if self.device.type == "cpu":
                dispatch_cpu_unquantized_gemm(head, remove_weight=False)
                embedding.cpu_linear = head.cpu_linear


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

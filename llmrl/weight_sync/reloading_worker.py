"""Inside vLLM's worker processes: weights taken all at once, whole or not at all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, is_deferred_attention_layer


class ReloadingWorkerEngine(WeightTransferEngine):
    """Loads a whole checkpoint's weights into the running model.

    All of the weights come in one update. What is wrong with it is found before it is finished: then the model can
    still be generated from, as a mixture of layers, and a further update (the previous weights) makes it whole.
    """

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._tied_heads = find_tied_heads(model)

    @abstractmethod
    def load(self, update_info: Any) -> None:
        """Pass the weights that `update_info` describes to `self.model.load_weights`."""

    def start_weight_update(self) -> None:
        """Make every layer expect its weights in the checkpoint's format."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load all of the weights."""
        # The base class would also wait for an accelerator, which this backend does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        """Load all of the weights.

        Raises:
            ValueError: when they are not those that were announced, or some are missing; nothing stays half loaded.
        """
        try:
            if update_info.is_checkpoint:
                self.model.load_weights(self._checkpoint())
            else:
                self.load(update_info)
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

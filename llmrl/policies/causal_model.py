"""What we need to know of a transformers model: its decoder, its head, its masks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from llmrl.data.packing import PackedRows
from llmrl.policies.attention import IMPLEMENTATION, MAX_PRODUCT_LENGTH, use_packed_attention
from llmrl.policies.log_probs import LogitTransform
from llmrl.policies.output_head import OutputHead


class CausalModel:
    """The parts of a causal language model: hidden states of packed rows, the output head, the logits' transform.

    Args:
        model: a transformers model with a linear output head.
        temperature: see `LogitTransform`.

    Raises:
        TypeError: when the output head is not linear, a layer attends in a way that packed rows cannot, or the
            logits made from the parts are not the model's own.
        ValueError: when the model is sharded already.
    """

    def __init__(self, model: Any, *, temperature: float = 1.0) -> None:
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        if any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            raise ValueError("model is sharded already; wrap it first, then shard it: its logits are checked whole.")
        self.config = getattr(self.model.config, "text_config", None) or self.model.config
        self.head = OutputHead(self.model.get_output_embeddings())
        self.transform = LogitTransform(
            scale=_logit_scale(self.config),
            soft_cap=getattr(self.config, "final_logit_softcapping", None),
            temperature=temperature,
        )
        self.window: int | None = getattr(self.config, "sliding_window", None)
        self.layer_types: set[str] = set(getattr(self.config, "layer_types", None) or ())
        unknown = self.layer_types - {"full_attention", "sliding_attention"}
        if unknown:
            raise TypeError(
                f"{type(self.model).__name__} has layers of type {sorted(unknown)}; rows can be packed only where "
                "every layer attends fully or within a sliding window."
            )
        if self.head.device.type == "cpu" and self.config._attn_implementation == "sdpa":
            use_packed_attention(self.model)
        self.set_deterministic_mode()
        self._check_logits()

    @property
    def decoder(self) -> torch.nn.Module:
        """The model without its head."""
        return self.model.base_model

    def set_deterministic_mode(self) -> None:
        """Eval mode; or, where gradient checkpointing needs it, training mode without dropout.

        Raises:
            ValueError: when gradient checkpointing is on and the model has dropout.
        """
        if not getattr(self.model, "is_gradient_checkpointing", False):
            self.model.eval()
            return
        dropouts = {
            name: value
            for name, value in self.config.to_dict().items()
            if "drop" in name and isinstance(value, float) and value > 0
        }
        dropouts |= {
            name: module.p
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Dropout) and module.p > 0
        }
        if dropouts:
            raise ValueError(
                f"Gradient checkpointing runs in training mode, where dropout would act: set {sorted(dropouts)} to 0."
            )
        self.model.train()

    def hidden_states(self, packed: PackedRows) -> torch.Tensor:
        """Last hidden states `[num_bins, bin_length, hidden_size]`."""
        if self.model.training != bool(getattr(self.model, "is_gradient_checkpointing", False)):
            self.set_deterministic_mode()
        output = self.decoder(
            input_ids=packed.input_ids,
            attention_mask=self._attention_mask(packed),
            position_ids=packed.position_ids,
            use_cache=False,
        )
        return output.last_hidden_state

    def _attention_mask(self, packed: PackedRows) -> Any:
        """The mask in the form that the model's layers and attention implementation take."""
        is_eager = self.config._attn_implementation == "eager"
        is_packed = self.config._attn_implementation == IMPLEMENTATION and (
            packed.input_ids.shape[1] <= MAX_PRODUCT_LENGTH
        )
        dtype = next(self.model.parameters()).dtype
        device_type = packed.input_ids.device.type
        if is_packed and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)

        def prepared(window: int | None) -> torch.Tensor:
            mask = packed.attention_mask(window=window)
            if not is_eager and not is_packed:
                return mask
            return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)

        if "sliding_attention" in self.layer_types:
            return {"full_attention": prepared(None), "sliding_attention": prepared(self.window)}
        # Without `layer_types` a window, if there is one, holds for every layer (Mistral).
        return prepared(None if self.layer_types else self.window)

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Compare our parts with the whole on two tokens: an unknown scale or cap must not pass in silence."""
        ids = torch.tensor([[0, 1]], device=self.head.device)
        hidden = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        unscaled = LogitTransform(scale=self.transform.scale, soft_cap=self.transform.soft_cap)
        logits, _ = unscaled.apply(torch.nn.functional.linear(hidden, self.head.weight(), self.head.bias()).float())
        if not torch.allclose(logits, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
            raise TypeError(
                f"{type(self.model).__name__} does more between its head and its logits than scale and soft cap: "
                "log-probs computed in chunks would be wrong."
            )


def _logit_scale(config: Any) -> float:
    """Granite divides logits by `logits_scaling`; Cohere multiplies them by `logit_scale`."""
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    return float(1.0 if scale is None else scale) / float(1.0 if divisor is None else divisor)

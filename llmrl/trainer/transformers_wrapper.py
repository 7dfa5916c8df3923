"""`TransformersWrapper`: a transformers model as a policy that scores tokens, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey

from llmrl._utils.ranks import rank_and_size, share_of
from llmrl.data.ragged import flat_batch, ragged_column, write_column
from llmrl.trainer.causal_model import CausalModel
from llmrl.trainer.fused_head import check_fused_head, fused_log_probs
from llmrl.trainer.log_probs import chunked_log_probs
from llmrl.trainer.packing import DEFAULT_TOKEN_BUDGET, PackedRows, pack_rows
from llmrl.trainer.trained_model import trained_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersWrapper(TensorDictModuleBase):
    """Log-probs of the trained tokens of ragged rows, without padding and with shared prefixes computed once.

    Reads `tokens_key` and `mask_key`, writes `log_probs_key`: `[num_tokens]` float32 a row, differentiable, 0 outside
    the mask (and at a row's first token, which nothing predicts).

    The model is kept in eval mode, gradients flow all the same: dropout would make the trainer's distribution differ
    from the sampler's. With gradient checkpointing enabled, which transformers ties to training mode, it is kept in
    training mode and must have no dropout.

    Args:
        model: a causal language model, or the name or folder of one (loaded in float32).
        temperature: of the sampler, so that both speak of the same distribution.
        token_budget: computed tokens in one forward pass.
        bin_length: tokens that attend to each other in one sequence; None weighs the attention of longer ones, by the
            model's size, against the shared tokens that they save, see `pack_rows`.
        chunk_size: positions whose logits are held at once, see `chunked_log_probs`.
        autocast_dtype: for example `torch.bfloat16` over float32 weights; None computes in the weights' dtype, and
            `auto` in that of `AsyncVLLM`'s default: bfloat16 over float32 weights on a GPU, else the weights'. It must
            be the engine's: an update that is smaller than the engine's rounding is lost, and weight sync warns.
        head_kernel: what makes log-probs of hidden states: `torch`, everywhere, or `liger`, liger-kernel on a GPU,
            which the extra `gpu` installs and which, in bfloat16, rounds logits before their softmax: 0.01 to 0.02
            nats a token. Entropies are always made by `torch`.
        tokens_key, mask_key, log_probs_key: entries read and written.

    Raises:
        ValueError: for an unknown kernel, a temperature that is not positive, or gradient checkpointing with dropout.
        TypeError: when the model's head or mask is of a kind that is not known (see `CausalModel`).

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tensordict import TensorDict, lazy_stack
        >>> config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> policy = TransformersWrapper(LlamaForCausalLM(config))
        >>> row = TensorDict({"tokens": {"full": torch.tensor([1, 2, 3])},
        ...                   "masks": {"all_assistant_mask": torch.tensor([False, True, True])}})
        >>> policy(lazy_stack([row]))["log_probs", "full"].shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        bin_length: int | None = None,
        chunk_size: int | None = None,
        autocast_dtype: torch.dtype | Literal["auto"] | None = "auto",
        head_kernel: Literal["torch", "liger"] = "torch",
        tokens_key: NestedKey = ("tokens", "full"),
        mask_key: NestedKey = ("masks", "all_assistant_mask"),
        log_probs_key: NestedKey = ("log_probs", "full"),
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}; greedy samples have no log-probs.")
        if isinstance(model, str):
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = model
        self.temperature, self.token_budget, self.bin_length = temperature, token_budget, bin_length
        weights_dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        if autocast_dtype == "auto":
            is_cast = weights_dtype == torch.float32 and self.device.type == "cuda"
            autocast_dtype = torch.bfloat16 if is_cast else None
        self.chunk_size, self.autocast_dtype = chunk_size, autocast_dtype
        trained_model(model).compute_dtype = autocast_dtype or weights_dtype
        self.tokens_key, self.mask_key, self.log_probs_key = tokens_key, mask_key, log_probs_key
        self.in_keys = [tokens_key, mask_key]
        self.out_keys = [log_probs_key]
        self._causal_model = CausalModel(model, temperature=temperature)
        if head_kernel not in ("torch", "liger"):
            raise ValueError(f"head_kernel must be 'torch' or 'liger', got {head_kernel!r}.")
        if head_kernel == "liger":
            check_fused_head(self._causal_model.transform)
        self.head_kernel = head_kernel
        self.train()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def measures_entropy(self) -> bool:
        """Whether entropies cost next to nothing; liger's kernel makes none, and asking for them leaves it unused."""
        return self.head_kernel == "torch"

    def train(self, mode: bool = True) -> TransformersWrapper:
        """Keep the model deterministic whatever `mode` says; see the class."""
        self.training = mode
        self._causal_model.set_deterministic_mode()
        return self

    def _autocast(self) -> torch.autocast:
        """Autocast as asked, or as it is around the call.

        Without its cache of cast weights, which outlives a call within an outer region: an optimizer's step would not
        reach it, and a sharded parameter's gradients would be lost, since those weights are gathered anew each time.
        """
        device_type, dtype = self.device.type, self.autocast_dtype
        if dtype is None and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)

    def pack(
        self,
        token_ids: list[torch.Tensor],
        scored_masks: list[torch.Tensor],
        *,
        token_budget: int | None = None,
    ) -> list[PackedRows]:
        """Micro-batches of rows, on the model's device."""
        packed = pack_rows(
            token_ids,
            scored_masks,
            token_budget=token_budget or self.token_budget,
            bin_length=self.bin_length,
            attention_length=self._causal_model.attention_length,
            one_row_per_bin=not self._causal_model.is_packed,
        )
        return [micro_batch.to(self.device) for micro_batch in packed]

    def packed_log_probs(
        self, packed: PackedRows, *, return_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs `[num_scored]` of a micro-batch's scored tokens, in its order, and entropies when asked."""
        if not packed.num_scored:
            nothing = torch.zeros(0, device=self.device)
            return nothing, nothing if return_entropy else None
        with self._autocast():
            hidden = self._causal_model.hidden_states(packed)
            weight = self._causal_model.head.weight(trained_model(self.model).sharded_dtype)
            predictors, positions = torch.unique_consecutive(packed.predictors, return_inverse=True)
            if self.head_kernel == "liger" and not return_entropy:
                log_probs = fused_log_probs(
                    hidden.flatten(0, 1)[predictors],
                    weight,
                    packed.targets,
                    positions=positions,
                    bias=self._causal_model.head.bias(),
                    transform=self._causal_model.transform,
                )
                return log_probs, None
            return chunked_log_probs(
                hidden.flatten(0, 1)[predictors],
                weight,
                packed.targets,
                positions=positions,
                bias=self._causal_model.head.bias(),
                transform=self._causal_model.transform,
                chunk_size=self.chunk_size,
                return_entropy=return_entropy,
            )

    def forward(
        self, tensordict: TensorDictBase, *, process_group: torch.distributed.ProcessGroup | None = None
    ) -> TensorDictBase:
        """Write the log-probs of every row's masked tokens.

        With the process group that the model is sharded over, every rank has the same rows, computes its share of the
        micro-batches, and writes all; without gradients.
        """
        batch = flat_batch(tensordict)
        token_ids = ragged_column(batch, self.tokens_key)
        masks = ragged_column(batch, self.mask_key)
        row_starts = torch.tensor([0, *(ids.shape[0] for ids in token_ids)], device=self.device).cumsum(0)
        log_probs = torch.zeros(int(row_starts[-1]), device=self.device)
        micro_batches = self.pack(token_ids, [mask.bool() for mask in masks])
        for packed, is_repeated in share_of(micro_batches, *rank_and_size(process_group)):
            scored, _ = self.packed_log_probs(packed)
            if not is_repeated:
                log_probs = log_probs.index_put((row_starts[packed.row_index] + packed.token_index,), scored.float())
        if process_group is not None:
            log_probs = log_probs.detach()
            torch.distributed.all_reduce(log_probs, group=process_group)
        rows = log_probs.split([ids.shape[0] for ids in token_ids])
        write_column(tensordict, self.log_probs_key, rows)
        return tensordict

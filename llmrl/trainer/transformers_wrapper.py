"""`TransformersWrapper`: a transformers model as a policy that generates, or scores tokens with gradients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Unpack

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch.nn.utils.rnn import pad_sequence
from torchrl.modules import LLMMaskedCategorical

from llmrl._utils.arguments import check_least
from llmrl._utils.model_parts import load_language_model
from llmrl._utils.ranks import share_of
from llmrl.data import LogProbs
from llmrl.data.keys import LOSS_MASK_KEY, TOKENS_KEY
from llmrl.data.ragged import ATTENTION_MASK_KEY, flat_batch, has_entry, ragged_column
from llmrl.data.routed_experts import Replay
from llmrl.data.sampling_mask import SamplingMask
from llmrl.engines import TransformersEngine
from llmrl.objectives.losses.inputs import masks_after_prompt
from llmrl.policies import WrapperOptions
from llmrl.policies.scored_rows import ScoresRows
from llmrl.trainer.head.fused_head import check_fused_head, fused_log_probs
from llmrl.trainer.head.log_probs import Head, chunked_log_probs
from llmrl.trainer.head.truncated import HeadOptions, kept_logits, truncated_log_probs
from llmrl.trainer.model.causal_model import CausalModel
from llmrl.trainer.model.checkpointing import set_scoring_mode
from llmrl.trainer.packing.packed_rows import DEFAULT_TOKEN_BUDGET, PackedRows, pack_rows
from llmrl.trainer.trained_model import half_dtype, trained_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersWrapper(ScoresRows):
    """Policy of a transformers model that generates or, with `generate=False`, scores tokens for training.

    To generate, the policy uses a `TransformersEngine` of the model; see `LLMWrapperBase`.

    To score, the policy reads `("tokens", "full")` and `("masks", "all_assistant_mask")`, and writes
    `(log_probs_key, "full")`: `[num_tokens]` float32 per row, differentiable, 0 outside the mask and at token 0.

    - Without a mask, every token is scored.
    - Without tokens, `("history", "full")` is tokenized with the chat template and its assistant turns give the mask,
      or `("text", "full")` is tokenized, depending on `input_mode`; the result is written into the batch.
    - A `"sampling_mask"` restricts a token's distribution to the ids that truncation kept;
      `"routed_experts"` sets the experts of each token (see `Routers`).

    The model always stays in eval mode: dropout would make the trainer's distribution differ from the sampler's.

    Args:
        model: a causal language model, or its name or folder (loaded in float32, with its tokenizer).
        generate: whether to generate or to score.
        token_budget: number of computed tokens per forward pass.
        bin_length: see `pack_rows`.
        chunk_size: see `chunked_log_probs`.
        autocast_dtype: for example `torch.bfloat16` over float32 weights; None computes in the weights' dtype, and
            `auto` in half precision over float32 weights on a GPU, else in the weights' dtype. Use
            the engine's dtype: otherwise updates below the engine's rounding error are lost, and
            weight sync warns. For `torch.float16`, `train_step` scales the loss.
        head_kernel: `torch`, or `liger` for liger-kernel on a GPU (extra `gpu`), which rounds logits in bfloat16 (an
            error of 0.01 to 0.02 nats per token). Entropies and truncated distributions always use `torch`.
        compile_layers: whether to compile the decoder's layers (`torch.compile`); attention on CUDA is always compiled.
        offload_activations: whether to store the layer inputs that gradient checkpointing keeps in host memory.
        options: see `LLMWrapperBase`. Scoring uses `temperature` of `generate_kwargs`; `pad_output` pads on the left.

    Raises:
        ValueError: if a size is below 1, the kernel is unknown, the temperature is 0 when scoring, activations are
            offloaded without checkpointing, or a batch has nothing to score; see `LLMWrapperBase`.
        TypeError: if the model cannot be scored exactly (see `CausalModel`).

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tensordict import TensorDict, lazy_stack
        >>> config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> policy = TransformersWrapper(LlamaForCausalLM(config), generate=False)
        >>> row = TensorDict({"tokens": {"full": torch.tensor([1, 2, 3])},
        ...                   "masks": {"all_assistant_mask": torch.tensor([False, True, True])}})
        >>> policy(lazy_stack([row]))["log_probs", "full"].shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        model: PreTrainedModel | str | os.PathLike[str],
        *,
        generate: bool = True,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        bin_length: int | None = None,
        chunk_size: int | None = None,
        autocast_dtype: torch.dtype | Literal["auto"] | None = "auto",
        head_kernel: Literal["torch", "liger"] = "torch",
        compile_layers: bool = False,
        offload_activations: bool = False,
        **options: Unpack[WrapperOptions],
    ) -> None:
        check_least(1, token_budget=token_budget, bin_length=bin_length, chunk_size=chunk_size)
        if isinstance(model, (str, os.PathLike)):
            from transformers import AutoTokenizer

            if options.get("tokenizer") is None:
                options["tokenizer"] = AutoTokenizer.from_pretrained(model)
            model = load_language_model(model, dtype=torch.float32)
        super().__init__(None, generate=generate, **options)
        self.model = model
        self.temperature = self.sampling.temperature
        self.token_budget = token_budget
        self.bin_length = bin_length
        self.chunk_size = chunk_size
        self.head_kernel = head_kernel
        self.compile_layers = compile_layers
        self.offload_activations = offload_activations
        self.replays_experts = True
        """Whether tokens have the experts of their rows; False for a teacher, because these are the student's."""
        weights_dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        if autocast_dtype == "auto":
            autocast_dtype = None
            if weights_dtype == torch.float32 and self.device.type == "cuda":
                autocast_dtype = half_dtype()
        self.autocast_dtype = autocast_dtype
        if generate:
            self.engine = TransformersEngine(model, tokenizer=self.tokenizer)
        else:
            self._prepare_scoring(weights_dtype)

    def _prepare_scoring(self, weights_dtype: torch.dtype) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}; greedy samples have no log-probs.")
        record = trained_model(self.model)
        if self.autocast_dtype is None:
            record.compute_dtype = weights_dtype
        else:
            record.compute_in(self.autocast_dtype, self.device)
        if self.input_mode != "text":
            # The sampling mask is optional and therefore not an input key.
            self.in_keys = list(dict.fromkeys([self.input_key, TOKENS_KEY, LOSS_MASK_KEY, ATTENTION_MASK_KEY]))
        self.causal_model = CausalModel(self.model, temperature=self.temperature)
        if self.head_kernel not in ("torch", "liger"):
            raise ValueError(f"head_kernel must be 'torch' or 'liger', got {self.head_kernel!r}.")
        if self.head_kernel == "liger":
            check_fused_head(self.causal_model.transform)
        self.causal_model.offload_activations(offload=self.offload_activations)
        if self.compile_layers:
            self.causal_model.compile_layers()
        self.train()

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @property
    def measures_entropy(self) -> bool:
        """Whether entropies are almost free; liger's kernel cannot compute them, so a request bypasses the kernel."""
        return self.head_kernel == "torch"

    def train(self, mode: bool = True) -> TransformersWrapper:
        """Set the flag `training`, but keep the model in scoring mode."""
        self.training = mode
        if not self.generate:
            set_scoring_mode(self.causal_model.model)
        return self

    def _autocast(self) -> torch.autocast:
        """Return the configured autocast, or the surrounding one, without its cache of cast weights.

        The cache could outlive an optimizer step, and would lose the gradients of sharded parameters.
        """
        device_type = self.device.type
        dtype = self.autocast_dtype
        if dtype is None and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)

    def pack(
        self,
        token_ids: list[torch.Tensor],
        scored_masks: list[torch.Tensor],
        *,
        token_budget: int | None = None,
        sampling_mask: SamplingMask | None = None,
        routed_experts: list[torch.Tensor] | None = None,
    ) -> list[PackedRows]:
        """Return the micro-batches of rows, on the model's device; for replayed columns see `Replay`."""
        experts: Sequence[torch.Tensor] | None = None
        if routed_experts is not None and self.replays_experts:
            experts = self.causal_model.routers.checked(routed_experts)
        packed = pack_rows(
            token_ids,
            scored_masks,
            token_budget=self.token_budget if token_budget is None else token_budget,
            bin_length=self.bin_length,
            attention_length=self.causal_model.attention_length,
            one_row_per_bin=not self.causal_model.is_packed,
            routed_experts=experts,
        )
        if sampling_mask is not None:
            lengths = torch.tensor([len(ids) for ids in token_ids])
            starts = (lengths.cumsum(0) - lengths).to(sampling_mask.counts.device)
            packed = [
                replace(one, sampling_mask=sampling_mask.chosen(starts[one.row_index] + one.token_index))
                for one in packed
            ]
        return [micro_batch.to(self.device) for micro_batch in packed]

    def packed_log_probs(
        self, packed: PackedRows, *, return_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probs of the scored tokens, `[num_scored]`, and their entropies if requested."""
        with self._autocast():
            head, positions = self.packed_head(packed)
            where = (head.states, head.weight, packed.targets)
            mask = packed.sampling_mask
            if self.head_kernel == "liger" and mask is None and not return_entropy:
                return fused_log_probs(*where, positions=positions, bias=head.bias, transform=head.transform), None
            options = HeadOptions(
                bias=head.bias, transform=head.transform, chunk_size=self.chunk_size, return_entropy=return_entropy
            )
            if mask is None:
                return chunked_log_probs(*where, positions=positions, **options)
            return truncated_log_probs(*where, positions=positions, sampling_mask=mask, **options)

    def packed_head(self, packed: PackedRows) -> tuple[Head, torch.Tensor]:
        """Return the head at the predicting positions, and each scored token's index into them, `[num_scored]`."""
        with self._autocast():
            return self.causal_model.packed_head(packed, trained_model(self.model).sharded_dtype)

    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        assistant_only: bool = True,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> TensorDictBase:
        """Generate, or write the log-probs of the masked tokens (of all tokens if `assistant_only` is False).

        If the model is sharded over `process_group`, every rank must pass the same rows; the ranks
        share the micro-batches, and each writes all log-probs, without gradients.
        """
        if self.generate:
            return super().forward(tensordict)
        scored = tensordict if self.inplace else tensordict.copy()
        token_ids, masks, replay = self.scored_tokens(scored)
        if not assistant_only:
            masks = [torch.ones_like(mask) for mask in masks]
        lengths = [len(ids) for ids in token_ids]
        row_starts = torch.tensor([0, *lengths], device=self.device).cumsum(0)
        log_probs = torch.zeros(sum(lengths), device=self.device)
        micro_batches = self.pack(token_ids, masks, **replay)
        record = trained_model(self.model)
        place = (0, 1) if process_group is None else record.place
        for packed, is_repeated in share_of(micro_batches, *place):
            values, _ = self.packed_log_probs(packed)
            if not is_repeated and (process_group is None or record.is_reporting):
                log_probs = log_probs.index_put((row_starts[packed.row_index] + packed.token_index,), values.float())
        if process_group is not None:
            log_probs = log_probs.detach()
            torch.distributed.all_reduce(log_probs, group=process_group)
        self.write_scored(scored, self.log_probs_key, LogProbs, {"full": log_probs.split(lengths)})
        return self._returned(tensordict, scored, ())

    def log_prob(self, data: TensorDictBase, **options: object) -> torch.Tensor | list[torch.Tensor]:
        """Return the log-probs of a batch; `options` are those of `get` (`as_list=True`, ...)."""
        self._check_scores("log_prob")
        return self(data).get((self.log_probs_key, "full"), **options)

    def get_dist(
        self, tensordict: TensorDictBase, *, mask_key: NestedKey | None = ATTENTION_MASK_KEY, logits_key: str = "logits"
    ) -> LLMMaskedCategorical:
        """Return the distribution of each token, `[num_rows, num_tokens, vocab_size]`; the batch is not changed.

        Rows are padded on the left, as in TorchRL's losses, and a row's first token has a uniform distribution.
        `mask_key` is the mask of the distribution, by default all tokens except padding; `logits_key` is ignored.
        """
        self._check_scores("get_dist")
        batch = flat_batch(tensordict.copy())
        token_ids, _, replay = self.scored_tokens(batch)
        masks = [torch.ones_like(ids).bool() for ids in token_ids]
        if mask_key not in (None, ATTENTION_MASK_KEY):
            masks = ragged_column(batch, mask_key)
        return self._masked_dist(token_ids, masks, replay)

    def _masked_dist(
        self, token_ids: list[torch.Tensor], masks: list[torch.Tensor], replay: Replay
    ) -> LLMMaskedCategorical:
        width = max(len(ids) for ids in token_ids)
        starts = torch.tensor([width - len(ids) for ids in token_ids], device=self.device)
        weight = self.causal_model.head.weight().float()
        bias = self.causal_model.head.bias(torch.float32)
        logits = torch.zeros(len(token_ids), width, weight.shape[0], device=self.device)
        is_scored = [torch.ones_like(ids).bool() for ids in token_ids]
        for packed in self.pack(token_ids, is_scored, **replay):
            with self._autocast():
                hidden = self.causal_model.hidden_states(packed).flatten(0, 1)[packed.predictors]
            product = torch.nn.functional.linear(hidden.float(), weight, bias)
            values, _ = self.causal_model.transform.apply(product)
            if packed.sampling_mask is not None:
                values = kept_logits(values, packed.sampling_mask)
            logits = logits.index_put((packed.row_index, starts[packed.row_index] + packed.token_index), values)
        mask = pad_sequence([mask.bool() for mask in masks], batch_first=True, padding_side="left")
        return LLMMaskedCategorical(logits=logits, mask=mask.to(self.device))

    # TorchRL's losses call one of these methods, depending on their masking strategy.

    def _get_sft_dist(self, tensordict: TensorDictBase) -> LLMMaskedCategorical:
        batch = flat_batch(tensordict.copy())
        token_ids, masks, replay = self.scored_tokens(batch)
        if has_entry(batch, ("tokens", "prompt")):
            masks = masks_after_prompt(batch, token_ids)
        return self._masked_dist(token_ids, masks, replay)

    def _get_rlhf_dist(self, tensordict: TensorDictBase) -> LLMMaskedCategorical:
        return self._masked_dist(*self.scored_tokens(flat_batch(tensordict.copy())))

    def _get_generic_dist(self, tensordict: TensorDictBase) -> LLMMaskedCategorical:
        return self.get_dist(tensordict)

    def _check_scores(self, method: str) -> None:
        if self.generate:
            raise RuntimeError(f"{method} needs a policy that scores: use policy.get_new_version(generate=False).")

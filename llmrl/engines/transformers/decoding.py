"""Batched sampling from a transformers model, with the exact log-prob of each token."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmrl.engines.base import Completion, FinishReason, SamplingConfig
from llmrl.engines.transformers.expert_routers import Routers

if TYPE_CHECKING:
    from transformers import LogitsProcessor, PreTrainedModel

DISTRIBUTION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that must be equal for sequences to be sampled together."""


@dataclass(eq=False)
class DecodedSequence:
    """A prompt and the tokens sampled for it so far."""

    prompt_ids: list[int]
    """[num_prompt_tokens]"""
    sampling: SamplingConfig
    budget: int
    """Maximum number of sampled tokens."""
    stop_token_ids: frozenset[int]
    decode: Callable[[list[int]], str] | None
    """Function from token ids to text; needed for stop strings."""
    generator: torch.Generator | None
    """The request's own generator, if it has a seed."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampling_mask: list[array[int]] = field(default_factory=list)
    """Mask entry of each token, if requested; otherwise empty."""
    routed_experts: list[np.ndarray] = field(default_factory=list)
    """`[num_tokens, num_layers, top_k]` per forward pass; empty if the model has no known routers."""
    finish_reason: FinishReason | None = None
    stop_string: str | None = None

    def append(self, token_id: int, log_prob: float, version: int) -> None:
        """Append a sampled token, and set the finish reason if it is the last."""
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if token_id in self.stop_token_ids:
            self.finish_reason = "stop"
            return
        if self.sampling.stop:
            assert self.decode is not None
            text = self.decode(self.token_ids)
            self.stop_string = next((stop for stop in self.sampling.stop if stop in text), None)
        if self.stop_string is not None:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.budget:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        """Return the sampled tokens, with finish reason `abort` if the sequence has not ended."""
        return Completion(
            self.token_ids,
            self.log_probs,
            self.versions,
            self.finish_reason or "abort",
            stop_string=self.stop_string,
            sampling_mask=self.sampling_mask if self.sampling.needs_sampling_mask else None,
            routed_experts=np.concatenate(self.routed_experts) if self.routed_experts else None,
        )


class DecodingBatch:
    """Left-padded sequences of one distribution that are decoded together."""

    def __init__(
        self, model: PreTrainedModel, sequences: list[DecodedSequence], *, version: int, generator: torch.Generator
    ):
        from transformers import DynamicCache

        self.sequences = list(sequences)
        self._model = model
        self._generator = generator
        self._routers = Routers(model)
        self._device = next(model.parameters()).device
        self._cache = DynamicCache(config=model.config)
        length = max(len(one.prompt_ids) for one in sequences)
        padding = [length - len(one.prompt_ids) for one in sequences]
        token_ids = [[0] * pad + one.prompt_ids for pad, one in zip(padding, sequences, strict=True)]
        mask = [[0] * pad + [1] * (length - pad) for pad in padding]
        self._attention_mask = torch.tensor(mask, device=self._device)
        self._forward(torch.tensor(token_ids, device=self._device), version)

    @torch.no_grad()
    def sample(self) -> None:
        """Sample the next token of every sequence."""
        logits = _shaped_logits(self._logits, self.sequences)
        log_probs = logits.log_softmax(-1)
        if self.sequences[0].sampling.temperature == 0:
            sampled = logits.argmax(-1)
        else:
            probabilities = log_probs.exp()
            sampled = torch.multinomial(probabilities, 1, generator=self._generator)[:, 0]
            for row, one in enumerate(self.sequences):
                if one.generator is not None:
                    sampled[row] = torch.multinomial(probabilities[row], 1, generator=one.generator)[0]
        chosen = log_probs.gather(1, sampled[:, None])[:, 0]
        columns = (self.sequences, sampled.tolist(), chosen.tolist(), log_probs)
        for one, token_id, log_prob, row in zip(*columns, strict=True):
            if one.sampling.needs_sampling_mask:
                one.sampling_mask.append(array("i", row.isfinite().nonzero()[:, 0].tolist()))
            one.append(token_id, log_prob, self._version)

    def advance(self, keep: Callable[[DecodedSequence], bool], *, version: int) -> None:
        """Drop the sequences that `keep` rejects, and compute the next logits of the others."""
        kept = [row for row, one in enumerate(self.sequences) if keep(one)]
        if len(kept) < len(self.sequences):
            self.sequences = [self.sequences[row] for row in kept]
            if not kept:
                return
            rows = torch.tensor(kept, device=self._device)
            self._cache.batch_select_indices(rows)
            self._attention_mask = self._attention_mask[rows]
        last = torch.tensor([[one.token_ids[-1]] for one in self.sequences], device=self._device)
        self._attention_mask = torch.cat([self._attention_mask, torch.ones_like(last)], 1)
        self._forward(last, version)

    @torch.no_grad()
    def _forward(self, token_ids: torch.Tensor, version: int) -> None:
        positions = (self._attention_mask.cumsum(1) - 1).clamp(min=0)[:, -token_ids.shape[1] :]
        with self._routers.telling() as choices:
            output = self._model(
                input_ids=token_ids,
                attention_mask=self._attention_mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        if choices and len(choices) == self._routers.num_layers:
            told = torch.stack([used for _, used in choices], 1).short().cpu().numpy()
            for one, experts in zip(self.sequences, np.split(told, len(self.sequences)), strict=True):
                num_new = 1 if one.routed_experts else len(one.prompt_ids)
                one.routed_experts.append(experts[len(experts) - num_new :])
        self._logits = output.logits[:, -1].float()
        # The next token is sampled from these logits even if other weights are loaded meanwhile.
        self._version = version


def _shaped_logits(logits: torch.Tensor, sequences: list[DecodedSequence]) -> torch.Tensor:
    """Return [num_sequences, vocab_size] logits of the sampled distribution."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    sampling = sequences[0].sampling
    if sampling.repetition_penalty != 1.0:
        logits = logits.clone()
        for row, one in enumerate(sequences):
            seen = torch.tensor([*{*one.prompt_ids, *one.token_ids}], device=logits.device)
            values = logits[row, seen]
            penalty = sampling.repetition_penalty
            logits[row, seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.temperature == 0:
        return logits
    warpers: list[LogitsProcessor] = []
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits

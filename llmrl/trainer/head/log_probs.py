"""Log-probs of chosen tokens from hidden states, computed without storing `[num_tokens, vocab_size]`.

The output head is applied to one chunk of positions at a time, in the forward pass and again in the backward pass. The
gradient of `log p(t) = z_t - logsumexp(z)` with respect to the logits is `onehot(t) - softmax(z)`;
that of the entropy `H = -sum_k p_k log p_k` is `-p_k (log p_k + H)`. Products of low-precision
operands are summed in float32, and logits are never rounded to the operands' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from llmrl._utils.arguments import check_least

Context: TypeAlias = Any
"""Autograd context, with our own attributes."""
MIN_LOG_PROB = -1e4
"""Lower bound of log-probs, at which `p log p` is 0 in any dtype; at minus infinity it would be NaN."""


def default_chunk_size(vocab_size: int, *, is_gpu: bool) -> int:
    """Return the default number of positions with logits in memory at once."""
    if is_gpu:
        # Each chunk reads the head and adds to its gradient, so chunks are large: 2 GiB of logits,
        # or more for vocabularies beyond 262,144 ids.
        return min(4096, max(2048, (1 << 29) // vocab_size))
    # 32 MiB of logits, which fit into the caches.
    return max(64, (1 << 23) // vocab_size)


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Transform from the output head's logits to the sampled distribution."""

    scale: float = 1.0
    """Factor of the logits (Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`)."""
    soft_cap: float | None = None
    """Cap of `soft_cap * tanh(logits / soft_cap)` (Gemma 2, arXiv:2408.00118, section 2)."""
    temperature: float = 1.0
    """Sampling temperature, by which logits are divided last."""

    def apply(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the transformed logits and the elementwise derivative of the transform."""
        derivative: torch.Tensor | float = self.scale / self.temperature
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            bounded = torch.tanh(logits / self.soft_cap)
            derivative = (1 - bounded * bounded) * derivative
            logits = bounded * self.soft_cap
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return logits, derivative


@dataclass(frozen=True, slots=True)
class Head:
    """Hidden states and the output head that turns them into next-token distributions."""

    states: torch.Tensor
    """`[num_positions, hidden_size]`."""
    weight: torch.Tensor
    """`[vocab_size, hidden_size]` of the output head."""
    bias: torch.Tensor | None = None
    """`[vocab_size]`."""
    transform: LogitTransform = LogitTransform()
    """Transform of the logits."""
    dtype: torch.dtype | None = None
    """dtype to which states and weight are rounded; None keeps theirs."""

    def rounded(self) -> Head:
        """Return the head with states, weight and bias in one dtype."""
        dtype = self.dtype or torch.promote_types(self.states.dtype, self.weight.dtype)
        bias = None if self.bias is None else _rounded_operand(self.bias, dtype)
        states = _rounded_operand(self.states, dtype)
        return Head(states, _rounded_operand(self.weight, dtype), bias, self.transform, dtype)

    def logits(self, part: slice) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the transformed logits of some positions of a `rounded` head, and the derivative of the transform.

        The logits are `[num_positions, vocab_size]` in at least float32.
        """
        product = wide_product(self.states[part], self.weight.T)
        if self.bias is not None:
            product.add_(self.bias)
        return self.transform.apply(product)


def compute_dtype_of(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype in which the product of both is computed: autocast's, if autocast is on."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return torch.promote_types(hidden.dtype, weight.dtype)


def _rounded_operand(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a tensor to the compute dtype; off GPU, half-precision values are returned in float32."""
    rounded = tensor.to(dtype)
    return rounded.float() if dtype.itemsize < 4 and not tensor.is_cuda else rounded


def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left @ right` in at least float32; in half precision, a logit of 20 would be off by 0.06."""
    with torch.autocast(left.device.type, enabled=False):
        return torch.mm(left, right, out_dtype=torch.float32) if left.dtype.itemsize < 4 else left @ right


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute `total += left @ right` in place; `total` is as large as the head."""
    with torch.autocast(left.device.type, enabled=False):
        if left.dtype == total.dtype:
            total.addmm_(left, right)
        else:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


class Removed(NamedTuple):
    """Ids that are excluded from the distributions of some positions."""

    positions: torch.Tensor
    """`[num_removed]` ascending indices of positions."""
    token_ids: torch.Tensor
    """`[num_removed]` the id that is excluded at each of these positions."""


class _ChunkedLogProbs(torch.autograd.Function):
    """Autograd function that saves its inputs and one number per position, and recomputes each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        positions: torch.Tensor,
        transform: LogitTransform,
        chunk_size: int,
        return_entropy: bool,
        removed: Removed | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = compute_dtype_of(hidden, weight)
        head = Head(hidden, weight, bias, transform, dtype).rounded()
        result_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        log_probs = torch.empty(targets.shape[0], dtype=result_dtype, device=hidden.device)
        normalizers = torch.empty(hidden.shape[0], dtype=result_dtype, device=hidden.device)
        entropies = torch.empty_like(normalizers) if return_entropy else None
        bounds = _chunk_bounds(positions, hidden.shape[0], chunk_size)
        for (start, first), (end, last) in pairwise(bounds):
            logits, _ = head.logits(slice(start, end))
            _remove(logits, removed, start, end)
            normalizer = logits.logsumexp(-1)
            normalizers[start:end] = normalizer
            local = positions[first:last] - start
            log_probs[first:last] = logits[local, targets[first:last]] - normalizer[local]
            if entropies is not None:
                log_p = logits.sub_(normalizer[:, None]).clamp_(min=MIN_LOG_PROB)
                entropies[start:end] = -log_p.exp().mul_(log_p).sum(-1)
        # Unused outputs get no gradient, as a gradient of zeros would cost a backward pass.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, positions, normalizers, entropies)
        ctx.transform = transform
        ctx.removed = removed
        ctx.bounds = bounds
        ctx.dtype = dtype
        return log_probs, None if entropies is None else entropies[positions]

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, positions, normalizers, entropies = ctx.saved_tensors
        grad_log_probs, grad_entropy = grads
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(targets, dtype=normalizers.dtype)
        # A position may predict several scored tokens: sum the gradients of its normalizer.
        per_position = torch.zeros_like(normalizers).index_add_(0, positions, grad_log_probs)
        entropy_per_position = None
        if grad_entropy is not None and entropies is not None:
            entropy_per_position = torch.zeros_like(normalizers).index_add_(0, positions, grad_entropy)
        head = Head(hidden, weight, bias, ctx.transform, ctx.dtype).rounded()
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Sums over many chunks need at least float32.
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if ctx.needs_input_grad[1] else None
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = torch.zeros_like(bias, dtype=sum_dtype)
        for (start, first), (end, last) in pairwise(ctx.bounds):
            logits, derivative = head.logits(slice(start, end))
            _remove(logits, ctx.removed, start, end)
            log_p = logits.sub_(normalizers[start:end, None])
            if entropy_per_position is None:
                grad = log_p.exp_().mul_(-per_position[start:end, None])
            else:
                surprise = log_p.clamp_(min=MIN_LOG_PROB) + entropies[start:end, None]
                surprise.mul_(entropy_per_position[start:end, None])
                grad = log_p.exp_().mul_(-(surprise + per_position[start:end, None]))
            local = positions[first:last] - start
            grad.index_put_((local, targets[first:last]), grad_log_probs[first:last], accumulate=True)
            if not isinstance(derivative, float) or derivative != 1.0:
                grad.mul_(derivative)
            grad_c = grad.to(head.weight.dtype)
            if grad_hidden is not None:
                grad_hidden[start:end] = wide_product(grad_c, head.weight)
            if grad_weight is not None:
                add_product(grad_weight, grad_c.T, head.states[start:end])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _remove(logits: torch.Tensor, removed: Removed | None, start: int, end: int) -> None:
    """Exclude ids from the distributions of positions `start` to `end`, in place; their gradients become 0."""
    if removed is not None:
        first, last = torch.searchsorted(removed.positions, torch.tensor([start, end], device=logits.device)).tolist()
        logits[removed.positions[first:last] - start, removed.token_ids[first:last]] = -torch.inf


def _chunk_bounds(positions: torch.Tensor, num_positions: int, chunk_size: int) -> list[tuple[int, int]]:
    """Return (position, scored token) at the start of each chunk, and at the end."""
    starts = [*range(0, num_positions, chunk_size), num_positions]
    firsts = torch.searchsorted(positions, torch.tensor(starts, device=positions.device)).tolist()
    return list(zip(starts, firsts, strict=True))


def chunked_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    transform: LogitTransform | None = None,
    chunk_size: int | None = None,
    return_entropy: bool = False,
    removed: Removed | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-prob of each target, and the entropy of its distribution if requested; both are differentiable.

    Args:
        hidden: `[num_positions, hidden_size]`.
        weight: `[vocab_size, hidden_size]` of the output head.
        targets: `[num_scored]` ids.
        positions: `[num_scored]` ascending indices into `hidden`, which may repeat; by default `i` for target `i`.
        bias: `[vocab_size]` of the output head.
        transform: scale, soft cap and temperature; none by default.
        chunk_size: number of positions with logits in memory at once; `default_chunk_size` by default.
        removed: ids without probability; none by default.

    Returns:
        `[num_scored]` log-probs and `[num_scored]` entropies or None, float32 (float64 for float64 inputs).

    Raises ValueError if shapes do not match, or `chunk_size` is below 1.

    Example:
        >>> hidden, weight = torch.eye(3), torch.eye(3)
        >>> chunked_log_probs(hidden, weight, torch.tensor([0, 1, 1]))[0]
        tensor([-0.5514, -0.5514, -1.5514])
    """
    if positions is None:
        if targets.shape != hidden.shape[:1]:
            raise ValueError(
                f"targets must be [{hidden.shape[0]}], one per position, got {tuple(targets.shape)}; pass positions "
                "to score several targets at one position."
            )
        positions = torch.arange(hidden.shape[0], device=hidden.device)
    if targets.shape != positions.shape or targets.ndim != 1:
        raise ValueError(f"positions must have the shape of targets, {targets.shape}, got {positions.shape}.")
    if hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(f"weight must be [vocab_size, {hidden.shape[-1]}], got {tuple(weight.shape)}.")
    check_least(1, chunk_size=chunk_size)
    if chunk_size is None:
        chunk_size = default_chunk_size(weight.shape[0], is_gpu=hidden.is_cuda)
    return _ChunkedLogProbs.apply(
        hidden, weight, bias, targets, positions, transform or LogitTransform(), chunk_size, return_entropy, removed
    )

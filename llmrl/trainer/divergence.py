"""Divergences of two models' next-token distributions over the whole vocabulary, without ever holding their logits.

Both heads are applied to a chunk of positions at a time, forward and again backward, as in `llmrl.trainer.log_probs`.
With the student's `p` and the teacher's `q`, the gradient with respect to the student's logits is

- reverse, KL(p || q): `p (log p - log q - KL)`;
- forward, KL(q || p): `p - q`;
- js, `beta KL(q || m) + (1 - beta) KL(p || m)` with `m = beta q + (1 - beta) p` (GKD, arXiv:2306.13649, equation 3):
  `(1 - beta) p (log p - log m - E_p[log p - log m])`, since what comes through `m` adds up to 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from llmrl.trainer.log_probs import (
    MIN_LOG_PROB,
    Head,
    add_product,
    default_chunk_size,
    head_logits,
    rounded_operand,
    wide_product,
)

if TYPE_CHECKING:
    from llmrl.trainer.packing import PackedRows
    from llmrl.trainer.transformers_wrapper import TransformersWrapper

Divergence = Literal["reverse", "forward", "js"]
Context: TypeAlias = Any
"""What autograd keeps between forward and backward; its attributes are ours."""


def chunked_divergence(
    student: Head, teacher: Head, divergence: Divergence, *, beta: float = 0.5, chunk_size: int | None = None
) -> torch.Tensor:
    """Return the divergence of each position's distributions, `[num_positions]` float32, differentiable by the student.

    Args:
        student, teacher: of the same positions and vocabulary; a longer head's further ids are padding, and left out.
        divergence: `reverse`, KL(student || teacher); `forward`, KL(teacher || student); or `js`, between the two.
        beta: of `js`: near 0 it is `beta` times forward, near 1 `1 - beta` times reverse.
        chunk_size: positions whose logits are held at once; see `default_chunk_size`.

    Raises:
        ValueError: for an unknown divergence, a beta that is not between 0 and 1, or other numbers of positions.

    Example:
        >>> same = Head(torch.eye(3), torch.eye(3))
        >>> chunked_divergence(same, same, "reverse")
        tensor([0., 0., 0.])
    """
    if divergence not in ("reverse", "forward", "js"):
        raise ValueError(f"divergence must be 'reverse', 'forward' or 'js', got {divergence!r}.")
    if divergence == "js" and not 0 < beta < 1:
        raise ValueError(f"beta must be between 0 and 1, got {beta}; at its ends it is 'forward' and 'reverse'.")
    if student.states.shape[0] != teacher.states.shape[0]:
        raise ValueError(f"student and teacher have {len(student.states)} and {len(teacher.states)} positions.")
    size = chunk_size or default_chunk_size(student.weight.shape[0], is_gpu=student.states.is_cuda)
    return _ChunkedDivergence.apply(
        student.states, student.weight, student.bias, student, teacher, divergence, beta, size
    )


def _rounded(head: Head) -> Head:
    """Return a head whose operands are in the dtype that they are multiplied in."""
    dtype = head.dtype or torch.promote_types(head.states.dtype, head.weight.dtype)
    bias = None if head.bias is None else rounded_operand(head.bias, dtype)
    return Head(rounded_operand(head.states, dtype), rounded_operand(head.weight, dtype), bias, head.transform, dtype)


def _distributions(
    student: Head, teacher: Head, part: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """Return log p and log q of some positions, `[num_positions, vocab_size]`, and the derivative of p's transform."""
    ours, derivative = student.transform.apply(head_logits(student.states[part], student.weight, student.bias))
    theirs, _ = teacher.transform.apply(head_logits(teacher.states[part], teacher.weight, teacher.bias))
    width = min(ours.shape[-1], theirs.shape[-1])
    log_p, log_q = ours[:, :width].log_softmax(-1), theirs[:, :width].log_softmax(-1).to(ours.dtype)
    if isinstance(derivative, torch.Tensor):
        derivative = derivative[:, :width]
    return log_p.clamp_(min=MIN_LOG_PROB), log_q.clamp_(min=MIN_LOG_PROB), derivative


def _log_mixture(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


class _ChunkedDivergence(torch.autograd.Function):
    """Forward keeps only the inputs; backward makes each chunk's distributions again."""

    @staticmethod
    def forward(
        ctx: Context,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        student: Head,
        teacher: Head,
        divergence: Divergence,
        beta: float,
        size: int,
    ) -> torch.Tensor:
        ours, theirs, values = _rounded(student), _rounded(teacher), []
        for start in range(0, len(states), size):
            log_p, log_q, _ = _distributions(ours, theirs, slice(start, start + size))
            if divergence == "reverse":
                values.append((log_p.exp() * (log_p - log_q)).sum(-1))
            elif divergence == "forward":
                values.append((log_q.exp() * (log_q - log_p)).sum(-1))
            else:
                log_m = _log_mixture(log_p, log_q, beta)
                parts = beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)
                values.append(parts.sum(-1))
        ctx.save_for_backward(states, weight, bias, teacher.states, teacher.weight, teacher.bias)
        ctx.heads = (student.transform, student.dtype), (teacher.transform, teacher.dtype)
        ctx.options = divergence, beta, size
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, *others = ctx.saved_tensors
        divergence, beta, size = ctx.options
        ours, theirs = _rounded(Head(states, weight, bias, *ctx.heads[0])), _rounded(Head(*others, *ctx.heads[1]))
        grad_states = torch.empty_like(states)
        # Summed over many chunks: in float32 at least.
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=sum_dtype)
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            log_p, log_q, derivative = _distributions(ours, theirs, part)
            p = log_p.exp()
            if divergence == "forward":
                grad = p - log_q.exp()
            else:
                gap = log_p - (log_q if divergence == "reverse" else _log_mixture(log_p, log_q, beta))
                grad = p * (gap - (p * gap).sum(-1, keepdim=True))
                grad = grad if divergence == "reverse" else (1 - beta) * grad
            grad = grad * derivative * grads[0][part, None]
            width, grad_c = grad.shape[-1], grad.to(ours.weight.dtype)
            grad_states[part] = wide_product(grad_c, ours.weight[:width])
            add_product(grad_weight[:width], grad_c.T, ours.states[part])
            if grad_bias is not None:
                grad_bias[:width] += grad.sum(0)
        bias_grad = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_states, grad_weight.to(weight.dtype), bias_grad, None, None, None, None, None


class TeacherDistribution:
    """A teacher whose whole distribution is the target at each trained token: `DistillationLoss(teacher=...)`.

    The rows may be anybody's: the student's own, a teacher's, or of a data set. Both models compute the same packed
    rows; the teacher's part is without gradient, and neither's logits are held for more than a chunk.

    Args:
        policy: scores with the teacher's model, as `load_teacher` gives it.
        beta: of the divergence `js`.

    Example:
        >>> teacher = TeacherDistribution(load_teacher(actor, "teacher", tokenizer=tokenizer))      # doctest: +SKIP
        >>> loss = DistillationLoss(actor, teacher=teacher, kl_direction="js")                      # doctest: +SKIP
    """

    def __init__(self, policy: TransformersWrapper, *, beta: float = 0.5) -> None:
        self.policy, self.beta = policy, beta

    def packed_divergence(
        self, student: TransformersWrapper, packed: PackedRows, divergence: Divergence
    ) -> torch.Tensor:
        """Return the divergence at each scored token of a micro-batch, `[num_scored]`.

        Raises:
            ValueError: for tokens that were sampled from truncated distributions, whose vocabularies differ.
        """
        if packed.sampling_mask is not None:
            raise ValueError(
                "a divergence over the vocabulary is of whole distributions, and these rows were sampled from "
                "truncated ones: sample with top_p=1, top_k=0 and min_p=0."
            )
        if not packed.num_scored:
            return torch.zeros(0, device=student.device)
        ours, positions = student.packed_head(packed)
        with torch.no_grad():
            theirs, _ = self.policy.packed_head(packed)
        return chunked_divergence(ours, theirs, divergence, beta=self.beta, chunk_size=student.chunk_size)[positions]

"""Divergences of two models' next-token distributions, computed without storing their logits.

Both heads are applied to one chunk of positions at a time, in the forward pass and again in the backward pass. With the
student's `p` and the teacher's `q`, the gradient with respect to the student's logits is

- reverse, KL(p || q): `p (log p - log q - KL)`;
- forward, KL(q || p): `p - q`;
- js, `beta KL(q || m) + (1 - beta) KL(p || m)` with `m = beta q + (1 - beta) p` (GKD,
  arXiv:2306.13649, equation 3): `(1 - beta) p (log p - log m - E_p[log p - log m])`.

If only the teacher's most likely ids are known, all others are merged into one, the *tail*, with
the remaining probability (arXiv:2608.14728), so the result is a lower bound of the divergence over
the vocabulary. The gradient of the tail is distributed over its ids in proportion to `p`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from tensordict.utils import NestedKey

from llmrl._utils.arguments import check_least
from llmrl.trainer.head.log_probs import MIN_LOG_PROB, Context, Head, add_product, default_chunk_size, wide_product

if TYPE_CHECKING:
    from llmrl.trainer.packing.packed_rows import PackedRows
    from llmrl.trainer.transformers_wrapper import TransformersWrapper

Divergence = Literal["reverse", "forward", "js"]
TOP_K_KEY = ("next", "teacher_top")
"""Key of a teacher's most likely ids in a batch."""
_SMALLEST_TAIL = 2.0**-23
"""Smallest tail probability: the rounding error of a sum of float32 probabilities."""


@dataclass(frozen=True, slots=True)
class TopK:
    """A teacher's most likely ids at each position."""

    token_ids: torch.Tensor
    """`[num_positions, top_k]` int64; unique per position."""
    log_probs: torch.Tensor
    """`[num_positions, top_k]`: their log-probs over the whole vocabulary."""


def chunked_divergence(
    student: Head, teacher: Head | TopK, divergence: Divergence, *, beta: float = 0.5, chunk_size: int | None = None
) -> torch.Tensor:
    """Return the divergence at each position, `[num_positions]` float32, differentiable with respect to the student.

    Args:
        teacher: the teacher's distributions at the same positions, or its most likely ids, with all others merged. Of
            two vocabularies, the additional ids of the larger one are treated as padding and ignored.
        divergence: `reverse`, KL(student || teacher); `forward`, KL(teacher || student); or `js`, between the two.
        beta: weight of `js`; near 0 it is `beta` times forward, near 1 `1 - beta` times reverse.
        chunk_size: number of positions with logits in memory at once; `default_chunk_size` by default.

    Raises:
        ValueError: if an option is invalid, the numbers of positions differ, or a `TopK` has no
            ids, the whole vocabulary, or ids beyond the student's.

    Example:
        >>> same = Head(torch.eye(3), torch.eye(3))
        >>> chunked_divergence(same, same, "reverse")
        tensor([0., 0., 0.])
    """
    if divergence not in ("reverse", "forward", "js"):
        raise ValueError(f"divergence must be 'reverse', 'forward' or 'js', got {divergence!r}.")
    if divergence == "js" and not 0 < beta < 1:
        raise ValueError(f"beta must be between 0 and 1, got {beta}; in place of 0 or 1, use 'forward' or 'reverse'.")
    num_taught = len(teacher.token_ids if isinstance(teacher, TopK) else teacher.states)
    if len(student.states) != num_taught:
        raise ValueError(f"student and teacher have {len(student.states)} and {num_taught} positions.")
    if isinstance(teacher, TopK):
        vocab_size = len(student.weight)
        if not 0 < teacher.token_ids.shape[1] < vocab_size:
            raise ValueError(
                f"top_k must be at least 1 and less than the {vocab_size} ids of the vocabulary, got "
                f"{teacher.token_ids.shape[1]}; pass the teacher's Head to compare whole distributions."
            )
        if num_taught and (largest := int(teacher.token_ids.max())) >= vocab_size:
            raise ValueError(
                f"the teacher's most likely ids go up to {largest}, beyond the student's {vocab_size} ids: they "
                "include padding of a larger head; use a smaller top_k."
            )
    check_least(1, chunk_size=chunk_size)
    size = chunk_size or default_chunk_size(student.weight.shape[0], is_gpu=student.states.is_cuda)
    return _ChunkedDivergence.apply(
        student.states, student.weight, student.bias, student, teacher, divergence, beta, size
    )


@dataclass(slots=True)
class _Compared:
    """Two models' distributions at some positions, over all ids or over the most likely ids and the tail."""

    log_p: torch.Tensor
    """`[num_positions, num_compared]`: the student's log-probs."""
    log_q: torch.Tensor
    """`[num_positions, num_compared]`: the teacher's log-probs."""
    derivative: torch.Tensor | float
    """Derivative of the student's transformed logits with respect to the output of its head."""
    log_p_of_all: torch.Tensor
    """`[num_positions, vocab_size]`: the student's log-probs."""
    token_ids: torch.Tensor | None
    """`[num_positions, top_k]`: ids outside the tail; None without a tail."""

    @classmethod
    def of(cls, student: Head, teacher: Head | TopK, part: slice) -> _Compared:
        ours, derivative = student.logits(part)
        if isinstance(teacher, TopK):
            all_log_p = ours.log_softmax(-1)
            ids = teacher.token_ids[part]
            tail = all_log_p.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
            log_p = torch.cat([all_log_p.gather(1, ids), tail], 1).clamp_(min=MIN_LOG_PROB)
            log_q = teacher.log_probs[part].to(ours.dtype)
            left = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST_TAIL).log()
            return cls(log_p, torch.cat([log_q, left], 1).clamp_(min=MIN_LOG_PROB), derivative, all_log_p, ids)
        theirs, _ = teacher.logits(part)
        width = min(ours.shape[-1], theirs.shape[-1])
        log_p = ours[:, :width].log_softmax(-1)
        log_q = theirs[:, :width].log_softmax(-1).to(ours.dtype)
        if isinstance(derivative, torch.Tensor):
            derivative = derivative[:, :width]
        log_p = log_p.clamp_(min=MIN_LOG_PROB)
        return cls(log_p, log_q.clamp_(min=MIN_LOG_PROB), derivative, log_p, None)

    def log_mixture(self, beta: float) -> torch.Tensor:
        return torch.logaddexp(self.log_q + math.log(beta), self.log_p + math.log1p(-beta))

    def values(self, divergence: Divergence, beta: float) -> torch.Tensor:
        log_p = self.log_p
        log_q = self.log_q
        if divergence == "reverse":
            return (log_p.exp() * (log_p - log_q)).sum(-1)
        if divergence == "forward":
            return (log_q.exp() * (log_q - log_p)).sum(-1)
        log_m = self.log_mixture(beta)
        return (beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)).sum(-1)

    def gradient(self, divergence: Divergence, beta: float) -> torch.Tensor:
        """Return the gradient with respect to the student's logits, `[num_positions, vocab_size]`."""
        if divergence == "forward":
            grad = self.log_p.exp() - self.log_q.exp()
        elif divergence == "reverse":
            grad = self._gradient_from(self.log_q)
        else:
            grad = (1 - beta) * self._gradient_from(self.log_mixture(beta))
        if self.token_ids is not None:
            share = (self.log_p_of_all - self.log_p[:, -1:]).clamp_(max=0.0).exp_()  # share of each id in the tail
            grad = share.mul_(grad[:, -1:]).scatter_(1, self.token_ids, grad[:, :-1])
        return grad * self.derivative

    def _gradient_from(self, log_r: torch.Tensor) -> torch.Tensor:
        """Return the gradient of KL(p || r) with a constant `r`."""
        p = self.log_p.exp()
        gap = self.log_p - log_r
        return p * (gap - (p * gap).sum(-1, keepdim=True))


class _ChunkedDivergence(torch.autograd.Function):
    """Autograd function that saves only its inputs and recomputes each chunk's distributions in the backward pass."""

    @staticmethod
    def forward(
        ctx: Context,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        student: Head,
        teacher: Head | TopK,
        divergence: Divergence,
        beta: float,
        size: int,
    ) -> torch.Tensor:
        if isinstance(teacher, TopK):
            ctx.save_for_backward(states, weight, bias, teacher.token_ids, teacher.log_probs)
            ctx.teachers = None
        else:
            ctx.save_for_backward(states, weight, bias, teacher.states, teacher.weight, teacher.bias)
            ctx.teachers = teacher.transform, teacher.dtype
            teacher = teacher.rounded()
        ours = student.rounded()
        parts = [slice(start, start + size) for start in range(0, len(states), size)]
        values = [_Compared.of(ours, teacher, part).values(divergence, beta) for part in parts]
        ctx.head = student.transform, student.dtype
        ctx.options = divergence, beta, size
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, *known = ctx.saved_tensors
        divergence, beta, size = ctx.options
        ours = Head(states, weight, bias, *ctx.head).rounded()
        theirs = TopK(*known) if ctx.teachers is None else Head(*known, *ctx.teachers).rounded()
        grad_states = torch.empty_like(states)
        # Sums over many chunks need at least float32.
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=sum_dtype)
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            grad = _Compared.of(ours, theirs, part).gradient(divergence, beta) * grads[0][part, None]
            width = grad.shape[-1]
            grad_c = grad.to(ours.weight.dtype)
            grad_states[part] = wide_product(grad_c, ours.weight[:width])
            add_product(grad_weight[:width], grad_c.T, ours.states[part])
            if grad_bias is not None:
                grad_bias[:width] += grad.sum(0)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_states, grad_weight.to(weight.dtype), grad_bias, None, None, None, None, None


@torch.no_grad()
def chunked_top_k(teacher: Head, top_k: int, *, chunk_size: int | None = None) -> TopK:
    """Return the most likely ids of each position in descending order, computed a chunk of positions at a time.

    Raises ValueError if `chunk_size` is below 1, or `top_k` is not from 1 to the size of the vocabulary.

    Example:
        >>> chunked_top_k(Head(torch.eye(3), torch.eye(3)), 1).token_ids.tolist()
        [[0], [1], [2]]
    """
    check_least(1, chunk_size=chunk_size)
    if not 1 <= top_k <= len(teacher.weight):
        raise ValueError(f"top_k must be from 1 to the {len(teacher.weight)} ids of the vocabulary, got {top_k}.")
    head = teacher.rounded()
    found = []
    size = chunk_size or default_chunk_size(head.weight.shape[0], is_gpu=head.states.is_cuda)
    for start in range(0, max(1, len(head.states)), size):
        logits, _ = head.logits(slice(start, start + size))
        found.append(logits.log_softmax(-1).topk(top_k))
    return TopK(torch.cat([top.indices for top in found]), torch.cat([top.values for top in found]))


class TeacherDistribution:
    """Teacher with its whole distribution as the target of each trained token: `DistillationLoss(teacher=...)`.

    Args:
        policy: wrapper of the teacher's model, as `load_teacher` returns it.
        beta: weight of the divergence `js`.

    Example:
        >>> teacher = TeacherDistribution(load_teacher(actor, "teacher", tokenizer=tokenizer))      # doctest: +SKIP
        >>> loss = DistillationLoss(actor, teacher=teacher, kl_direction="js")                      # doctest: +SKIP
    """

    def __init__(self, policy: TransformersWrapper, *, beta: float = 0.5) -> None:
        self.policy = policy
        self.beta = beta
        self.in_keys: list[NestedKey] = []
        """Entries read besides the tokens; always empty."""

    def packed_divergence(
        self, student: TransformersWrapper, packed: PackedRows, divergence: Divergence
    ) -> torch.Tensor:
        """Return the divergence at each scored token, `[num_scored]`; raise ValueError for truncated distributions."""
        _check_whole(packed)
        ours, positions = student.packed_head(packed)
        with torch.no_grad():
            theirs, _ = self.policy.packed_head(replace(packed, routed_experts=None))  # these are the student's
        return chunked_divergence(ours, theirs, divergence, beta=self.beta, chunk_size=student.chunk_size)[positions]


class TeacherTopK:
    """Teacher with the most likely ids written by `write_top_k` as the target: `DistillationLoss(teacher=...)`.

    The divergence merges all other ids into one; see `chunked_divergence`.

    Args:
        beta: weight of the divergence `js`.
        key: parent of the entries `token_ids` and `log_probs`.

    Example:
        >>> loss = DistillationLoss(actor, teacher=TeacherTopK(), kl_direction="reverse")           # doctest: +SKIP
        >>> train_step(loss, write_top_k(teacher, batch, 20), optimizer)                            # doctest: +SKIP
    """

    def __init__(self, *, beta: float = 0.5, key: tuple[str, ...] = TOP_K_KEY) -> None:
        self.beta = beta
        self.in_keys: list[NestedKey] = [(*key, "token_ids"), (*key, "log_probs")]
        """Entries read besides the tokens, `[num_tokens, top_k]` per row."""

    def packed_divergence(
        self,
        student: TransformersWrapper,
        packed: PackedRows,
        divergence: Divergence,
        token_ids: torch.Tensor,
        log_probs: torch.Tensor,
    ) -> torch.Tensor:
        """Return the divergence at each scored token, `[num_scored]`, from columns of `[num_scored, top_k]`.

        Raises ValueError if tokens were sampled from truncated distributions, or the teacher did not score them.
        """
        _check_whole(packed)
        if bool((token_ids < 0).any()):
            raise ValueError(
                f"{self.in_keys[0]!r} has no ids at some of the trained tokens: write_top_k scores only the tokens of "
                "the loss mask, so use masking_strategy='rlhf'."
            )
        ours, positions = student.packed_head(packed)
        # One position per token: tokens that share a position may have different teacher scores (hints).
        ours = replace(ours, states=ours.states[positions])
        theirs = TopK(token_ids, log_probs)
        return chunked_divergence(ours, theirs, divergence, beta=self.beta, chunk_size=student.chunk_size)


def _check_whole(packed: PackedRows) -> None:
    if packed.sampling_mask is not None:
        raise ValueError(
            "a divergence over the vocabulary compares whole distributions, but these rows were sampled from "
            "truncated ones: sample with top_p=1, top_k=0 and min_p=0."
        )

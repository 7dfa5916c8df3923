"""Compares liger-kernel's output head with ours, in Triton's interpreter: `TRITON_INTERPRET=1 python fused_head.py`."""

from __future__ import annotations

import torch
from loss_batches import ragged_batch, tiny_model

from llmrl.objectives import GRPOLoss
from llmrl.trainer import TransformersWrapper
from llmrl.trainer.head.fused_head import fused_log_probs
from llmrl.trainer.head.log_probs import LogitTransform, chunked_log_probs


def compare_log_probs(transform: LogitTransform, *, has_bias: bool) -> None:
    """Values and gradients of both."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 8, generator=generator).requires_grad_()
    weight = torch.randn(37, 8, generator=generator).requires_grad_()
    bias = torch.randn(37, generator=generator).requires_grad_() if has_bias else None
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    positions = torch.tensor([0, 0, 1, 3, 4])
    targets = torch.randint(0, 37, (5,), generator=generator)
    arguments = {"positions": positions, "bias": bias, "transform": transform}
    ours, _ = chunked_log_probs(hidden, weight, targets, **arguments)
    theirs = fused_log_probs(hidden, weight, targets, **arguments)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    weights = torch.randn(5, generator=generator)
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), leaves) for x in (theirs, ours)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def compare_policies() -> None:
    """The loss of a whole policy with either."""
    batch = ragged_batch()
    gradients = []
    for head_kernel in ("torch", "liger"):
        model = tiny_model(is_tied=True)
        loss = GRPOLoss(
            TransformersWrapper(model, generate=False, generate_kwargs={"temperature": 0.8}, head_kernel=head_kernel),
            clip_epsilon=(1.0, 1e4),
        )
        loss(batch).total_loss().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


if __name__ == "__main__":
    compare_log_probs(LogitTransform(), has_bias=False)
    compare_log_probs(LogitTransform(scale=0.5, temperature=0.7), has_bias=True)
    compare_policies()
    print("same")

"""Output heads that are wrapped, compiled or of few bits: the log-probs stay those of the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_batches import ragged_batch, tiny_model, with_lora

from llmrl._utils.imports import MissingExtraError
from llmrl.objectives import GRPOLoss
from llmrl.trainer import TransformersWrapper, train_step, write_log_probs
from llmrl.trainer.head.fused_head import check_fused_head
from llmrl.trainer.head.log_probs import LogitTransform, chunked_log_probs

LORA = {
    "decoder": {"targets": ["q_proj", "up_proj"]},
    "head": {"targets": ["q_proj", "lm_head"]},
    "copied head": {"targets": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def _adapted(kind: str) -> Any:
    pytest.importorskip("peft")
    arguments = dict(LORA[kind])
    return with_lora(tiny_model(), arguments.pop("targets"), **arguments)


def _plain_log_probs(model: Any, batch: Any) -> list[torch.Tensor]:
    rows = []
    for row in batch.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        log_probs = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        scored = torch.zeros(len(ids))
        scored[1:] = log_probs[:-1].gather(-1, ids[1:, None])[:, 0]
        rows.append(scored * mask)
    return rows


@pytest.mark.parametrize("kind", LORA)
def test_log_probs_and_gradients_with_lora_are_those_of_the_model(kind: str) -> None:
    model, batch = _adapted(kind), ragged_batch()
    policy = TransformersWrapper(model, generate=False)
    expected = _plain_log_probs(model.eval(), batch)
    torch.cat(expected).square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    written = torch.cat([row["log_probs", "full"] for row in policy(batch.clone()).unbind(0)])
    torch.testing.assert_close(written, torch.cat(expected), rtol=1e-5, atol=2e-5)
    written.square().sum().backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys() and any("lora_A" in name for name in got)
    for name, gradient in wanted.items():
        assert (got[name] - gradient).norm() <= 1e-4 * gradient.norm().clamp(min=1e-6), name


@pytest.mark.parametrize("kind", LORA)
def test_the_reference_of_an_adapted_model_is_itself_without_adapters(kind: str) -> None:
    batch = ragged_batch()
    expected = _plain_log_probs(tiny_model().eval(), batch)
    policy = TransformersWrapper(_adapted(kind), generate=False)
    key = ("next", "ref_log_probs", "full")
    write_log_probs(policy, batch, key, disable_adapter=True)
    for row, wanted in zip(batch.unbind(0), expected, strict=True):
        torch.testing.assert_close(row[key], wanted, rtol=1e-5, atol=2e-5)
    # And the adapters are back: the KL to the reference is not zero.
    assert GRPOLoss(policy, kl_to_ref_coeff=0.1)(batch).kl_to_ref > 0.01


def test_scoring_writes_one_entry_and_nothing_else() -> None:
    batch = ragged_batch()
    before = batch.clone()
    policy = TransformersWrapper(tiny_model(), generate=False)
    write_log_probs(policy, batch, ("old_log_probs", "full"))
    assert torch.equal(batch[0]["log_probs", "full"], before[0]["log_probs", "full"])
    assert not batch[0]["old_log_probs", "full"].requires_grad
    assert GRPOLoss(policy, importance_cap=2.0)(batch).ratio.item() == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(TypeError, match="needs a peft model"):
        write_log_probs(policy, batch, ("next", "ref_log_probs", "full"), disable_adapter=True)


def test_only_adapters_are_trained() -> None:
    model = _adapted("head")
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    policy = TransformersWrapper(model, generate=False, autocast_dtype=torch.bfloat16)
    report = train_step(GRPOLoss(policy, clip_epsilon=(1.0, 1e4)), ragged_batch(), optimizer)
    assert not report.is_skipped
    named = dict(model.named_parameters())
    assert all(torch.equal(value, named[name]) for name, value in frozen.items())
    assert all(not torch.equal(value, named[name]) for name, value in trained.items())


def test_heads_that_are_not_one_matrix_are_refused() -> None:
    model = tiny_model()
    model.set_output_embeddings(torch.nn.Sequential(torch.nn.Linear(16, 41)))
    with pytest.raises(TypeError, match="linear output head, got Sequential"):
        TransformersWrapper(model, generate=False)


def test_the_gradient_of_a_bfloat16_head_is_summed_over_chunks_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, 8, generator=generator).bfloat16()
    weight = torch.randn(5, 8, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 5, (4096,), generator=generator)
    exact = weight.detach().double().requires_grad_()
    (hidden.double() @ exact.T).log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    chunked_log_probs(hidden, weight, targets, chunk_size=4)[0].sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    assert (weight.grad.double() - exact.grad).norm() < 5e-3 * exact.grad.norm()


def test_a_compiled_decoder_and_compiled_log_probs_give_the_same_gradients(own_programs: None) -> None:
    batch = ragged_batch()
    results = []
    for is_compiled in (False, True):
        model = tiny_model(is_tied=True)
        policy = TransformersWrapper(model, generate=False)
        if is_compiled:
            # The tracer without a code generator: that needs a compiler, and minutes.
            model.base_model.compile(backend="aot_eager")
        GRPOLoss(policy, clip_epsilon=(1.0, 1e4))(batch).total_loss().backward()
        results.append([p.grad for p in model.parameters()])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-6)

    hidden, weight = torch.randn(9, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    targets = torch.randint(0, 7, (9,))

    def score(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 2 * chunked_log_probs(hidden, weight, targets, chunk_size=4)[0]

    compiled_score = torch.compile(score, backend="aot_eager")
    for function in (score, compiled_score):
        results.append(torch.autograd.grad(function(hidden, weight).sum(), [hidden, weight]))
    for plain, compiled in zip(*results[2:], strict=True):
        torch.testing.assert_close(compiled, plain)


@pytest.mark.slow
def test_the_fused_head_gives_the_same_log_probs_and_gradients() -> None:
    """On the CPU the kernel runs in Triton's interpreter, which is chosen when Triton is imported."""
    pytest.importorskip("liger_kernel")
    script = Path(__file__).parents[1] / "helpers" / "fused_head.py"
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    process = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=250)
    assert process.returncode == 0 and process.stdout.strip().endswith("same"), process.stdout + process.stderr


def test_a_fused_head_that_is_not_installed_is_refused_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(MissingExtraError, match=r"llmrl\[gpu\]"):
        TransformersWrapper(tiny_model(), generate=False, head_kernel="liger")


def test_a_fused_head_that_cannot_do_what_the_model_does_is_refused() -> None:
    pytest.importorskip("liger_kernel")
    with pytest.raises(ValueError, match="head_kernel"):
        TransformersWrapper(tiny_model(), generate=False, head_kernel="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="soft cap"):
        check_fused_head(LogitTransform(soft_cap=3.0))

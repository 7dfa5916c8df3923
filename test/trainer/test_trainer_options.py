"""Compiled layers and activations in the host's memory change nothing but what a step costs."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from causal_types import VOCAB_SIZE, tiny_model
from tensordict import TensorDict, lazy_stack

from llmrl.trainer import TransformersWrapper, load_model, make_reference


def _batches(num: int) -> list[list[torch.Tensor]]:
    """Rows of a batch share a prompt; batches differ in number and length of their rows."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(num):
        prompt = torch.randint(5, VOCAB_SIZE, (9 + 4 * index,), generator=generator)
        lengths = [5 + index, 11, 7 + 2 * index][: 1 + index % 3]
        made.append([torch.cat([prompt, torch.randint(5, VOCAB_SIZE, (n,), generator=generator)]) for n in lengths])
    return made


def _assert_step_is_eager(policy: TransformersWrapper, reference: torch.nn.Module, rows: list[torch.Tensor]) -> None:
    """Log-probs and gradients, beside those of the model by itself, one row at a time."""
    (packed,) = policy.pack(rows, [torch.ones_like(ids).bool() for ids in rows])
    log_probs, _ = policy.packed_log_probs(packed)
    expected = [
        reference(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0] for ids in rows
    ]
    pairs = zip(packed.row_index.tolist(), packed.token_index.tolist(), strict=True)
    torch.testing.assert_close(log_probs, torch.stack([expected[i][j - 1] for i, j in pairs]), atol=2e-5, rtol=1e-5)
    log_probs.sum().backward()
    torch.cat(expected).sum().backward()
    for (name, own), other in zip(policy.model.named_parameters(), reference.parameters(), strict=True):
        assert (own.grad - other.grad).norm() < 1e-5 * other.grad.norm() + 1e-6, name
    policy.model.zero_grad()
    reference.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "is_checkpointing", "num_graphs"), [("llama", False, 4), ("llama", True, 4), ("gemma2", False, 8)]
)
def test_layers_are_compiled_once_for_rows_of_all_lengths_and_stay_exact(
    monkeypatch: pytest.MonkeyPatch, model_type: str, is_checkpointing: bool, num_graphs: int
) -> None:
    # Traced as for any device; code for this one would take a minute to make.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(model_type, attn_implementation="eager")
    reference = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    if is_checkpointing:
        model.gradient_checkpointing_enable()
    policy = TransformersWrapper(model, generate=False, compile_layers=True)
    for index, rows in enumerate(_batches(6)):
        _assert_step_is_eager(policy, reference, rows)
        if index == 3:
            num_compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < num_compiled == torch._dynamo.utils.counters["stats"]["unique_graphs"] <= num_graphs
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_reference_offloads_nothing(tiny_model_path: str) -> None:
    model = load_model(tiny_model_path, gradient_checkpointing=True)
    policy = TransformersWrapper(model, generate=False, offload_activations=True)
    ids = torch.tensor([5, 6, 7, 8])
    batch = lazy_stack([TensorDict({"tokens": {"full": ids}, "masks": {"all_assistant_mask": torch.ones(4).bool()}})])
    found = make_reference(policy, tiny_model_path)(batch)[0]["next", "ref_log_probs", "full"]
    logits = load_model(tiny_model_path)(input_ids=ids[None]).logits
    expected = logits.log_softmax(-1)[0, :-1].gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(found[1:], expected.detach(), atol=1e-4, rtol=0)


def test_context_ranks_without_a_mesh_are_refused(tiny_model_path: str) -> None:
    with pytest.raises(ValueError, match=r"context_ranks=7 needs mesh.*leave context_ranks=1"):
        load_model(tiny_model_path, context_ranks=7)


def test_each_layers_input_is_kept_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", attn_implementation="eager")
    reference = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    policy = TransformersWrapper(model, generate=False, offload_activations=True)
    moved, save_on_cpu = [], torch.autograd.graph.save_on_cpu

    def noting(pin_memory: bool) -> save_on_cpu:
        assert not pin_memory  # there is no GPU that would want it
        context = save_on_cpu(pin_memory)
        pack = context.pack_hook
        context.pack_hook = lambda tensor: (moved.append(tensor.shape), pack(tensor))[1]
        return context

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", noting)
    rows = _batches(3)[2]
    _assert_step_is_eager(policy, reference, rows)
    (packed,) = policy.pack(rows, [torch.ones_like(ids).bool() for ids in rows])
    hidden = (*packed.input_ids.shape, model.config.hidden_size)
    assert moved.count(hidden) >= model.config.num_hidden_layers
    assert sum(shape.numel() for shape in moved) < 2 * (model.config.num_hidden_layers + 3) * torch.Size(hidden).numel()
    with torch.no_grad():
        moved.clear()
        policy.packed_log_probs(packed)
    assert not moved


def test_offloading_without_checkpointing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs gradient checkpointing.*its weights, would go to the host"):
        TransformersWrapper(tiny_model("llama"), generate=False, offload_activations=True)


@pytest.mark.parametrize("name", ["token_budget", "bin_length", "chunk_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_size_below_one_is_refused_when_the_policy_is_built(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        TransformersWrapper(tiny_model("llama"), generate=False, **{name: value})


def test_a_token_budget_of_zero_is_refused_and_not_replaced_by_that_of_the_policy() -> None:
    policy = TransformersWrapper(tiny_model("llama"), generate=False)
    with pytest.raises(ValueError, match="token_budget must be at least 1, got 0"):
        policy.pack([torch.tensor([5, 6])], [torch.tensor([False, True])], token_budget=0)

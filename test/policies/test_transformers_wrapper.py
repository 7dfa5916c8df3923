"""`TransformersWrapper` against plain forward passes of the same tiny models, and chunked log-probs against softmax."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from llmrl.engines import SamplingConfig, TransformersEngine
from llmrl.trainer.head.log_probs import LogitTransform, chunked_log_probs
from llmrl.trainer.transformers_wrapper import TransformersWrapper

VOCAB_SIZE = 61
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 2,
    "eos_token_id": 2,
}


def _model(family: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    name, extra = {
        "llama": ("Llama", {}),
        "llama_tied": ("Llama", {"tie_word_embeddings": True}),
        "qwen2": ("Qwen2", {}),
        "gemma2": ("Gemma2", {"sliding_window": 4, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
        "granite": ("Granite", {"logits_scaling": 4.0}),
        "mistral": ("Mistral", {"sliding_window": 4}),
    }[family]
    config = getattr(transformers, f"{name}Config")(**(_SIZES | extra | changes))
    return getattr(transformers, f"{name}ForCausalLM")(config)


FAMILIES = ["llama", "llama_tied", "qwen2", "gemma2", "granite", "mistral"]


def _eager(model: Any) -> Any:
    """A model of its own with the same weights, in `eager`."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    eager = type(model)(config).eval()
    eager.load_state_dict(model.state_dict())
    return eager


def _rows(num_prompts: int = 3, num_samples: int = 4) -> list[TensorDict]:
    """Groups that share prompts, with some context after the first completion."""
    generator = torch.Generator().manual_seed(1)

    def ids(num: int) -> torch.Tensor:
        return torch.randint(0, VOCAB_SIZE, (num,), generator=generator)

    rows = []
    for _ in range(num_prompts):
        prompt = ids(5)
        for sample in range(num_samples):
            parts = [prompt, ids(sample + 1), ids(2), ids(3)]
            trained = [False, True, False, True]
            mask = torch.cat([torch.full((len(p),), t) for p, t in zip(parts, trained, strict=True)])
            row = {"tokens": {"full": torch.cat(parts)}, "masks": {"all_assistant_mask": mask}}
            rows.append(TensorDict(row))
    return rows


def _expected(model: Any, row: TensorDictBase, temperature: float = 1.0) -> torch.Tensor:
    """`[num_tokens]` from a plain forward pass of one row."""
    ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
    log_probs = (model(input_ids=ids[None]).logits[0].float() / temperature).log_softmax(-1)
    scored = torch.zeros(len(ids))
    scored[1:] = log_probs[:-1].gather(-1, ids[1:, None])[:, 0]
    return scored * mask


def _padded_loss(model: Any, rows: list[TensorDict], weights: list[torch.Tensor]) -> torch.Tensor:
    """The weighted sum of log-probs by an ordinary padded forward pass."""
    ids = [row["tokens", "full"] for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=2)
    lengths = torch.tensor([len(row) for row in ids])
    attention_mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    log_probs = model(input_ids=padded, attention_mask=attention_mask).logits.float().log_softmax(-1)
    chosen = log_probs[:, :-1].gather(-1, padded[:, 1:, None])[..., 0]
    weight = torch.nn.utils.rnn.pad_sequence(weights, batch_first=True)[:, 1:]
    return (chosen * weight).sum()


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_a_plain_forward_pass(family: str) -> None:
    model, rows = _model(family), _rows()
    with torch.no_grad():
        expected = [_expected(_eager(model), row) for row in rows]
    written = TransformersWrapper(model, generate=False, token_budget=60, bin_length=30, chunk_size=7)(
        lazy_stack(rows, 0)
    )
    for row, wanted in zip(written.unbind(0), expected, strict=True):
        torch.testing.assert_close(row["log_probs", "full"], wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_shared_prefix_gradients_equal_those_of_unshared_padded_rows(family: str, attention: str) -> None:
    model, rows = _model(family, attn_implementation=attention), _rows()
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(len(row["tokens", "full"]), generator=generator) for row in rows]
    weights = [w * row["masks", "all_assistant_mask"] for w, row in zip(weights, rows, strict=True)]
    reference = _eager(model)
    _padded_loss(reference, rows, weights).backward()
    expected = _gradients(reference)
    written = TransformersWrapper(model, generate=False, bin_length=40)(lazy_stack(rows, 0))
    sum(
        (row["log_probs", "full"] * weight).sum() for row, weight in zip(written.unbind(0), weights, strict=True)
    ).backward()
    gradients = _gradients(model)
    assert gradients.keys() == expected.keys()
    for name, wanted in expected.items():
        difference = (gradients[name] - wanted).norm() / wanted.norm().clamp(min=1e-6)
        assert difference < 1e-4, (name, float(difference))


def test_a_model_s_size_decides_how_long_its_bins_are() -> None:
    """Attention of a token costs 4 x keys x width in each layer, its weights cost 2 each: wider models share more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    lengths = []
    for width in (16, 256):
        config = LlamaConfig(
            vocab_size=64, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=1, num_attention_heads=2
        )
        policy = TransformersWrapper(LlamaForCausalLM(config), generate=False)
        num_weights = 4 * width**2 + 3 * 4 * width**2
        assert policy.causal_model.attention_length == num_weights / (2 * width)
        prompt, generator = torch.arange(600) % 60, torch.Generator().manual_seed(0)
        rows = [torch.cat([prompt, torch.randint(0, 60, (300,), generator=generator)]) for _ in range(8)]
        masks = [torch.arange(900) >= 600] * 8
        lengths.append(max(micro.input_ids.shape[1] for micro in policy.pack(rows, masks)))
    assert lengths[0] < lengths[1]


def test_temperature_is_that_of_the_distribution_sampled_from() -> None:
    model, rows = _model("llama"), _rows()
    written = TransformersWrapper(model, generate=False, generate_kwargs={"temperature": 0.6})(lazy_stack(rows, 0))
    with torch.no_grad():
        for row in written.unbind(0):
            torch.testing.assert_close(
                row["log_probs", "full"].detach(), _expected(_eager(model), row, 0.6), atol=2e-5, rtol=1e-5
            )


def test_a_first_token_is_never_scored_whatever_its_mask_says() -> None:
    row = TensorDict(
        {
            "tokens": {"full": torch.tensor([3, 4, 5])},
            "masks": {"all_assistant_mask": torch.tensor([True, True, True])},
        }
    )
    log_probs = TransformersWrapper(_model("llama"), generate=False)(lazy_stack([row, row.clone()], 0))[
        "log_probs", "full"
    ]
    assert (log_probs[:, 0] == 0).all()
    assert (log_probs[:, 1:] != 0).all()


def test_a_padded_batch_is_read_by_its_attention_mask_and_padded_again() -> None:
    model, rows = _model("llama"), _rows()
    end_of_turn = 2
    for row in rows:
        row["tokens", "full"][-1] = end_of_turn
    ragged = TransformersWrapper(model, generate=False)(lazy_stack([row.clone() for row in rows], 0))
    lengths = torch.tensor([len(row["tokens", "full"]) for row in rows])

    def padded(name: str, key: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [row[name, key] for row in rows], batch_first=True, padding_value=end_of_turn if name == "tokens" else 0
        )

    tokens = padded("tokens", "full")
    attention_mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    batch = TensorDict(
        {
            "tokens": {"full": tokens},
            "masks": {
                "all_assistant_mask": padded("masks", "all_assistant_mask"),
                "all_attention_mask": attention_mask,
            },
        },
        batch_size=[len(rows)],
    )
    written = TransformersWrapper(model, generate=False)(batch)["log_probs", "full"]
    for index, row in enumerate(ragged.unbind(0)):
        torch.testing.assert_close(written[index][attention_mask[index]], row["log_probs", "full"])
        assert float(row["log_probs", "full"][-1].detach()) != 0, "the end-of-turn token is trained"
    assert (written[~attention_mask] == 0).all()


def test_gradient_checkpointing_is_respected_and_changes_no_gradient() -> None:
    model, rows = _model("llama"), _rows()

    def gradients(policy: TransformersWrapper) -> dict[str, torch.Tensor]:
        written = policy(lazy_stack([row.clone() for row in rows], 0))
        sum(row["log_probs", "full"].sum() for row in written.unbind(0)).backward()
        return _gradients(model)

    expected = gradients(TransformersWrapper(model, generate=False))
    model.gradient_checkpointing_enable()
    policy = TransformersWrapper(model, generate=False)
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    model.model.layers[0].mlp.register_forward_pre_hook(count)
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, expected[name])
    assert num_forwards == 2, "forward, and again in backward"


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_peft_that_adds_tokens_of_its_own_is_refused(kind: str) -> None:
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(TypeError, match=r"peft's (PROMPT|PREFIX|P)_TUNING does more than adapt .* train LoRA"):
        TransformersWrapper(peft.get_peft_model(_model("llama"), config), generate=False)


def test_an_engine_of_the_model_that_is_trained_keeps_its_cache() -> None:
    """Layers that checkpoint would drop it."""
    model = _model("llama")
    model.gradient_checkpointing_enable()
    engine = TransformersEngine(model)
    greedy = SamplingConfig(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    with engine:
        expected = asyncio.run(engine.generate([1, 2, 3], greedy)).token_ids
        TransformersWrapper(model, generate=False)(lazy_stack(_rows(), 0))
        assert asyncio.run(engine.generate([1, 2, 3], greedy)).token_ids == expected


def test_the_model_stays_deterministic_whatever_mode_is_asked_for() -> None:
    model = _model("llama", attention_dropout=0.5)
    policy = TransformersWrapper(model, generate=False).train()
    assert not model.training
    batch = lazy_stack(_rows(), 0)
    first, second = (policy(batch.copy())[0]["log_probs", "full"] for _ in range(2))
    assert torch.equal(first, second)
    model.gradient_checkpointing_enable()
    policy.train()
    again = policy(batch.copy())[0]["log_probs", "full"]
    assert again.grad_fn is not None and torch.equal(first, again)


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused() -> None:
    model = _model("llama")
    forward: Callable = model.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = shifted
    with pytest.raises(TypeError, match="between its head and its logits"):
        TransformersWrapper(model, generate=False)


def test_unknown_arguments_and_impossible_temperatures_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        TransformersWrapper(_model("llama"), generate=False, temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="temperature"):
        TransformersWrapper(_model("llama"), generate=False, generate_kwargs={"temperature": 0.0})


def test_bfloat16_autocast_stays_near_and_leaves_weights_and_gradients_in_float32() -> None:
    model, rows = _model("llama", initializer_range=0.05), _rows()
    exact = TransformersWrapper(model, generate=False)(lazy_stack([row.clone() for row in rows], 0))
    policy = TransformersWrapper(model, generate=False, autocast_dtype=torch.bfloat16)
    rough = policy(lazy_stack([row.clone() for row in rows], 0))
    for a, b in zip(exact.unbind(0), rough.unbind(0), strict=True):
        torch.testing.assert_close(a["log_probs", "full"], b["log_probs", "full"], atol=0.05, rtol=0.02)
    sum(row["log_probs", "full"].sum() for row in rough.unbind(0)).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


TRANSFORMS = [
    LogitTransform(),
    LogitTransform(temperature=0.7),
    LogitTransform(scale=0.25, soft_cap=2.0, temperature=1.3),
]


def _naive(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, t: LogitTransform) -> torch.Tensor:
    logits = (hidden @ weight.T + bias) * t.scale
    if t.soft_cap is not None:
        logits = t.soft_cap * torch.tanh(logits / t.soft_cap)
    return (logits / t.temperature).log_softmax(-1)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunked_log_probs_and_entropies_are_exact_in_value_and_gradient(
    transform: LogitTransform, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(37, 8, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(37, generator=generator).to(dtype).requires_grad_()
    # Some positions score several targets, some none.
    positions = torch.tensor([0, 0, 0, 1, 3, 4, 4, 9, 10])
    targets = torch.randint(0, 37, positions.shape, generator=generator)
    log_probs, entropy = chunked_log_probs(
        hidden,
        weight,
        targets,
        positions=positions,
        bias=bias,
        transform=transform,
        chunk_size=4,
        return_entropy=True,
    )
    everything = _naive(hidden, weight, bias, transform)
    wanted = everything[positions, targets]
    wanted_entropy = -(everything.exp() * everything).sum(-1)[positions]
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 1e-12, "rtol": 1e-12}
    torch.testing.assert_close(log_probs, wanted, **tolerance)
    torch.testing.assert_close(entropy, wanted_entropy, **tolerance)
    a, b = (torch.randn(9, generator=generator).to(dtype) for _ in range(2))
    leaves = [hidden, weight, bias]
    got = torch.autograd.grad((log_probs * a + entropy * b).sum(), leaves)
    for gradient, expected in zip(
        got, torch.autograd.grad((wanted * a + wanted_entropy * b).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(gradient, expected, **tolerance)


def test_no_tensor_of_all_positions_by_vocabulary_is_made() -> None:
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        num_elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, (tuple, list)) else [output]:
                if isinstance(tensor, torch.Tensor):
                    Largest.num_elements = max(Largest.num_elements, tensor.numel())
            return output

    hidden = torch.randn(400, 4, requires_grad=True)
    weight = torch.randn(300, 4, requires_grad=True)
    with Largest():
        log_probs, _ = chunked_log_probs(hidden, weight, torch.zeros(400, dtype=torch.int64), chunk_size=16)
        log_probs.sum().backward()
    assert Largest.num_elements == 16 * 300


def test_chunked_log_probs_names_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="targets"):
        chunked_log_probs(torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="weight"):
        chunked_log_probs(torch.zeros(3, 2), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64))


def test_entropy_of_logits_that_are_minus_infinity_is_finite_and_costs_no_backward_where_unused() -> None:
    hidden = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bias = torch.zeros(7, dtype=torch.float64)
    bias[2] = -math.inf
    targets = torch.tensor([0, 1, 6])
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, bias=bias, return_entropy=True)
    kept = torch.tensor([0, 1, 3, 4, 5, 6])
    everything = (hidden @ weight[kept].T).log_softmax(-1)
    wanted = -(everything.exp() * everything).sum(-1)
    torch.testing.assert_close(entropy, wanted)
    expected = torch.autograd.grad((wanted * 2).sum(), hidden, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad((entropy * 2).sum(), hidden, retain_graph=True), expected)
    seen = []
    log_probs.grad_fn.register_hook(lambda inputs, outputs: seen.append(outputs))
    (alone,) = torch.autograd.grad(log_probs.sum(), hidden)
    assert seen[0][1] is None
    (wanted_alone,) = torch.autograd.grad(everything[torch.arange(3), torch.tensor([0, 1, 5])].sum(), hidden)
    torch.testing.assert_close(alone, wanted_alone)

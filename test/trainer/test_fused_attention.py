"""Attention without `[length, length]` masks, as on a GPU: its arithmetic, on a CPU.

`flex_attention` is PyTorch's own, not compiled. PyTorch's kernel for sequences of several lengths is on CUDA alone: a
loop stands for it that does what its documentation says of its arguments.
"""

from __future__ import annotations

import functools

import pytest
import torch
from causal_types import VOCAB_SIZE, compare, tiny_config, tiny_model
from torch.nn.attention import flex_attention as flex
from torch.nn.attention import varlen

from llmrl.trainer import TransformersWrapper
from llmrl.trainer.model import causal_model, exactness
from llmrl.trainer.packing import masks
from llmrl.trainer.packing.attention import _flex_attention, packed_attention
from llmrl.trainer.packing.masks import IMPLEMENTATION, PackedMask, packed_mask
from llmrl.trainer.packing.packed_rows import PackedRows, pack_rows

# Plain, windowed, soft-capped, with sinks, experts, latent or differential attention, learned and scaled positions.
PACKED = [
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma4_unified_text",
    "gpt_oss",
    "olmo3",
    "cohere2",
    "granite_swa",
    "qwen3_moe",
    "minimax_m2",
    "deepseek_v3",
    "minicpm3",
    "diffllama",
    "gpt2",
    "opt",
    "starcoder2",
    "doge",
    "gptj",
]
DENSE = {"doge", "gptj"}
"""Index masks themselves, or cannot be given an attention: theirs are dense anywhere."""


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if a CPU had the kernels; each call of one is noted."""
    noted: list[str] = []
    plain = flex.flex_attention

    def noted_flex(*arguments, **options):
        noted.append("flex")
        return plain(*arguments, **options)

    def sequences(query, key, value, bounds, key_bounds, longest, longest_key, *, scale, window_size, enable_gqa):
        noted.append("sequences")
        assert bounds.dtype == torch.int32 and int(bounds[-1]) == len(query)
        assert longest == longest_key == int(bounds.diff().max()) and window_size[1] == 0
        assert query.dtype == key.dtype == value.dtype == torch.bfloat16
        assert enable_gqa or query.shape[1] == key.shape[1]
        num_shared, outputs = query.shape[1] // key.shape[1], []
        for start, end in zip(bounds[:-1].tolist(), key_bounds[1:].tolist(), strict=True):
            one_query, one_key, one_value = (part[start:end].transpose(0, 1).float() for part in (query, key, value))
            one_key, one_value = (part.repeat_interleave(num_shared, 0) for part in (one_key, one_value))
            place = torch.arange(end - start)
            distance = place[:, None] - place
            is_seen = distance >= 0 if window_size[0] < 0 else (distance >= 0) & (distance <= window_size[0])
            scores = one_query @ one_key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
            weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
            outputs.append((weights @ one_value).transpose(0, 1).to(query.dtype))
        return torch.cat(outputs)

    _flex_attention.cache_clear()
    for module in (masks, exactness, causal_model):
        monkeypatch.setattr(module, "FUSED_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr("llmrl.trainer.packing.attention.flex_attention", noted_flex)
    monkeypatch.setattr(varlen, "varlen_attn", sequences)
    # Uncompiled it is slow in the backward pass, and refused, though it is there.
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    return noted


@pytest.mark.parametrize("model_type", PACKED)
def test_an_architecture_is_as_exact_as_with_a_dense_mask(model_type: str, calls: list[str]) -> None:
    result = compare(model_type)
    assert result.is_exact, result
    assert (result.outcome, calls[-1:]) == ("packed", [] if model_type in DENSE else ["flex"]), result.reason


@pytest.mark.slow
def test_soft_caps_windows_and_sinks_are_computed_and_biases_refused(calls: list[str]) -> None:
    for model_type in ("gemma2", "gpt_oss"):
        result = compare(model_type)
        assert result.is_exact and result.outcome == "packed" and not result.reason, result
    assert set(calls) <= {"flex", "sequences"} and "sequences" not in _kernels_of("gpt_oss")
    arguments = [torch.zeros(1, 2, 4, 8)] * 3
    mask = _mask(_pack([4]))
    with pytest.raises(TypeError, match="position biases are computed by attn_implementation='eager'"):
        packed_attention(torch.nn.Identity(), *arguments, mask, position_bias=torch.zeros(1, 2, 4, 4))


def _kernels_of(model_type: str) -> set[str]:
    """Of rows that share nothing, in half precision; tiny, since a CPU is slow at that."""
    noted: list[str] = []
    policy = TransformersWrapper(tiny_model(model_type), generate=False, autocast_dtype=torch.bfloat16)
    (packed,) = policy.pack([torch.arange(5, 12), torch.arange(20, 25)], [torch.ones(7).bool(), torch.ones(5).bool()])
    before = varlen.varlen_attn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", lambda *a, **k: noted.append("sequences") or before(*a, **k))
        policy.packed_log_probs(packed)
    return set(noted)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "gemma3_text", "gpt_oss"])
def test_in_half_precision_rows_that_share_nothing_are_as_near_to_float32_as_eager(
    model_type: str, calls: list[str]
) -> None:
    config = tiny_config(model_type, initializer_range=0.05)
    ids = [torch.randint(5, VOCAB_SIZE, (num,), generator=torch.Generator().manual_seed(num)) for num in (25, 22, 30)]
    exact = tiny_model(model_type, config=config, attn_implementation="eager")
    policy = TransformersWrapper(tiny_model(model_type, config=config), generate=False, autocast_dtype=torch.bfloat16)
    (packed,) = policy.pack(ids, [torch.ones_like(row).bool() for row in ids])
    assert packed.sequence_bounds is not None
    log_probs, _ = policy.packed_log_probs(packed)
    assert calls[-1] == ("flex" if model_type == "gpt_oss" else "sequences")
    errors: dict[str, list[torch.Tensor]] = {"ours": [], "eager": []}
    for index, row in enumerate(ids):
        expected = _log_probs(exact, row)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            errors["eager"].append(_log_probs(exact, row) - expected)
        is_row = packed.row_index == index
        errors["ours"].append(log_probs[is_row] - expected[packed.token_index[is_row] - 1])
    ours, eager = (torch.cat(errors[name]).abs().mean() for name in ("ours", "eager"))
    assert 0 < ours < 2 * eager


@torch.no_grad()
def _log_probs(model, row: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=row[None], use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0]


def _pack(lengths: list[int], num_shared: int = 0, **options: int) -> PackedRows:
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(0, 1000, (num_shared,), generator=generator)
    token_ids = [
        torch.cat([prefix, torch.randint(0, 1000, (num + 1 - num_shared,), generator=generator)]) for num in lengths
    ]
    (packed,) = pack_rows(token_ids, [torch.ones_like(row).bool() for row in token_ids], **options)
    return packed


def _mask(packed: PackedRows, window: int | None = None) -> PackedMask:
    mask = packed_mask(packed, implementation=IMPLEMENTATION, dtype=torch.float32, window=window)
    assert isinstance(mask, PackedMask)
    return mask


LAYOUTS = [
    ("one short row", [5], 0, {}),
    ("rows by themselves", [300, 200, 77], 0, {}),
    ("a prompt and its answers", [700, 650, 600, 520], 500, {}),
    ("several bins", [300, 310, 290, 150], 40, {"bin_length": 560}),
    ("one whole block", [128], 0, {}),
]


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("lengths", "num_shared", "options"), [layout[1:] for layout in LAYOUTS])
def test_the_blocks_are_those_of_the_dense_mask(
    lengths: list[int], num_shared: int, options: dict[str, int], window: int | None
) -> None:
    """Against PyTorch's own blocks, made of the dense mask: all pairs that are seen lie in blocks that are visited."""
    packed = _pack(lengths, num_shared, **options)
    num_bins, length = packed.input_ids.shape
    size = num_bins * length
    dense = torch.block_diag(*packed.attention_mask(window=window)[:, 0].int()).bool()
    expected = flex.create_block_mask(lambda b, h, q, k: dense[q, k], 1, None, size, size, device="cpu")
    mask = _mask(packed, window)
    index = torch.arange(size)
    assert torch.equal(mask.mask_mod(index[:1], index[:1], index[:, None], index[None]), dense)

    def is_full(blocks: flex.BlockMask) -> torch.Tensor:
        num_full, indices = blocks.full_kv_num_blocks[0, 0], blocks.full_kv_indices[0, 0]
        full = torch.zeros_like(indices, dtype=torch.bool)
        for row, num in enumerate(num_full.tolist()):
            full[row, indices[row, :num]] = True
        return full

    visited, needed = mask.to_dense()[0, 0].bool(), expected.to_dense()[0, 0].bool()
    assert (visited | ~needed).all() and torch.equal(is_full(mask), is_full(expected))
    if window is None:  # with one, also blocks with nearest tokens in reach of each other, on one path or not
        assert torch.equal(visited, needed)


def test_sequences_end_where_rows_and_padding_do() -> None:
    packed = _pack([30, 20, 25, 12], bin_length=50)
    bounds = packed.sequence_bounds
    assert bounds is not None
    (num_bins, length), (lengths, ends) = packed.input_ids.shape, (bounds.diff().tolist(), bounds.tolist())
    assert sorted(lengths) == sorted([30, 20, 25, 12, num_bins * length - 87])  # the last is padding, one sequence
    assert all(bin_index * length in ends for bin_index in range(num_bins))
    assert _pack([30, 20], 10).sequence_bounds is None


def test_memory_of_a_mask_grows_with_blocks_and_not_with_pairs() -> None:
    packed = _pack([20_000, 12_768], token_budget=40_000)
    mask = _mask(packed)
    held = [value for value in vars(mask).values() if isinstance(value, torch.Tensor)]
    assert sum(value.numel() * value.element_size() for value in held) < 32_768**2 / 500


@pytest.mark.slow
def test_what_is_compiled_for_two_batches_serves_those_of_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options that it is compiled with on CUDA, soft cap, window and scale; their numbers stay numbers."""
    monkeypatch.setattr("llmrl.trainer.packing.attention.flex_attention", flex.flex_attention)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # for want of CUDA
    compiled = _flex_attention.__wrapped__("cuda")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr("llmrl.trainer.packing.attention._flex_attention", lambda device_type: compiled)
    for lengths, num_shared, options in (
        ([300, 280], 150, {}),
        ([500, 400, 350], 150, {}),
        ([260, 250, 240], 20, {"bin_length": 300}),
        ([900, 700], 650, {}),
    ):
        packed = _pack(lengths, num_shared, **options)
        (num_bins, length), sinks = packed.input_ids.shape, torch.linspace(-1, 1, 6)
        # As models make them, of `[num_bins, length, num_heads * head_size]`.
        query, key, value = (torch.randn(num_bins, length, num_heads, 8).transpose(1, 2) for num_heads in (6, 3, 3))
        output, _ = packed_attention(
            torch.nn.Identity(), query, key, value, _mask(packed, 100), scaling=0.3, softcap=2.0, s_aux=sinks
        )
        scores = 2 * torch.tanh(0.3 * query @ key.repeat_interleave(2, 1).mT / 2)
        scores = scores.masked_fill(~packed.attention_mask(window=100), -torch.inf)
        sink = sinks[None, :, None, None].expand(num_bins, 6, length, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_bins_are_as_long_as_what_is_shared() -> None:
    policy = TransformersWrapper(tiny_model("llama"), generate=False, token_budget=4096)
    assert policy.causal_model.attention_length == float("inf")


def test_eager_that_stands_for_want_of_sdpa_is_replaced_and_another_is_not() -> None:
    for model, replaced in (
        (tiny_model("gpt_oss"), True),
        (tiny_model("llama", attn_implementation="eager"), False),
    ):
        policy = TransformersWrapper(model, generate=False)
        assert (policy.causal_model.config._attn_implementation == IMPLEMENTATION) == replaced


@pytest.mark.parametrize("window", [None, 1, 4])
def test_sequences_see_as_far_as_their_window(window: int | None, calls: list[str]) -> None:
    packed = _pack([9, 6, 5], bin_length=15)
    num_bins, length = packed.input_ids.shape
    query, key, value = (
        torch.randn(num_bins, length, num_heads, 8).transpose(1, 2).bfloat16() for num_heads in (4, 2, 2)
    )
    output, _ = packed_attention(torch.nn.Identity(), query, key, value, _mask(packed, window))
    assert calls == ["sequences"]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(),
        key.repeat_interleave(2, 1).float(),
        value.repeat_interleave(2, 1).float(),
        attn_mask=packed.attention_mask(window=window),
    ).transpose(1, 2)
    held = torch.zeros(num_bins * length, dtype=torch.bool)
    held[packed.token_positions] = True  # padding sees padding here
    torch.testing.assert_close(output.float().flatten(0, 1)[held], expected.flatten(0, 1)[held], atol=2e-2, rtol=0)

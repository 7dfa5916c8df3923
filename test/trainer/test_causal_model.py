"""How rows are computed is chosen by comparing with `eager`, one row at a time."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from causal_types import WINDOW, compare, page_outcomes, rows, tiny_config, tiny_model

from llmrl.trainer import TransformersWrapper
from llmrl.trainer.head.output_head import OutputHead
from llmrl.trainer.model.causal_model import CausalModel
from llmrl.trainer.model.exactness import ExactnessProbe
from llmrl.trainer.packing.masks import IMPLEMENTATION, MAX_PRODUCT_LENGTH
from llmrl.trainer.trained_model import trained_model


@torch.no_grad()
def _eager_log_probs(model_type: str, ids: torch.Tensor, **changes: Any) -> torch.Tensor:
    """`[num_tokens - 1, vocab_size]` of one row."""
    model = tiny_model(model_type, config=tiny_config(model_type, **changes), attn_implementation="eager")
    return model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)


FEATURES = [
    ("mistral", {"sliding_window": 1000}),
    ("gemma2", {"sliding_window": 1000}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma3_text", {"sliding_window": 1000}),
    ("gpt_oss", {"sliding_window": 1000}),
    ("gpt_neo", {"window_size": 1000}),
    ("recurrent_gemma", {"attention_window_size": 1000}),
    ("recurrent_gemma", {"logits_soft_cap": 1000.0}),
    ("llama4_text", {"attention_chunk_size": 1000}),
    ("llama4_text", {"floor_scale": 1000}),
    ("deepseek_v32", {"index_topk": 1000}),
    ("falcon", {"alibi": False}),
    ("granite", {"logits_scaling": 1.0}),
    ("cohere", {"logit_scale": 1.0}),
    ("mixtral", {"num_experts_per_tok": 1}),
]


@pytest.mark.parametrize(("model_type", "changes"), FEATURES, ids=lambda value: str(value))
def test_the_tiny_models_have_features_that_matter(model_type: str, changes: dict[str, Any]) -> None:
    ids = rows()[0][1]
    with_feature, without = _eager_log_probs(model_type, ids), _eager_log_probs(model_type, ids, **changes)
    assert (with_feature - without).abs().max() > 0.01


def test_sinks_matter() -> None:
    ids = rows()[0][1]
    model = tiny_model("gpt_oss")
    before = model(input_ids=ids[None]).logits
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, 5.0)
    assert (model(input_ids=ids[None]).logits - before).abs().max() > 0.01


@pytest.mark.parametrize("length", [MAX_PRODUCT_LENGTH // 2, 2 * MAX_PRODUCT_LENGTH])
def test_a_soft_cap_on_scores_is_applied_in_bins_of_any_length(length: int) -> None:
    config = tiny_config("gemma2", max_position_embeddings=1024)
    ids = torch.randint(5, 60, (length,), generator=torch.Generator().manual_seed(0))
    expected = _eager_log_probs("gemma2", ids, max_position_embeddings=1024)[:-1].gather(-1, ids[1:, None])[:, 0]
    policy = TransformersWrapper(tiny_model("gemma2", config=config), generate=False)
    (packed,) = policy.pack([ids], [torch.ones(length, dtype=torch.bool)])
    log_probs, _ = policy.packed_log_probs(packed)
    torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=1e-5)


def _registered(name: str, *, is_mask_used: bool) -> str:
    """An attention that transformers knows: causal, and without a mask or with one that it leaves out."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **arguments: Any) -> Any:
        if is_mask_used and attention_mask is not None:
            raise IndexError("too many indices for tensor of dimension 4")
        return sdpa_attention_forward(module, query, key, value, None, **arguments)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, flash_attention_mask)
    return name


def test_an_attention_that_takes_no_mask_gives_way_to_eager(caplog: pytest.LogCaptureFixture) -> None:
    name = _registered("test_without_masks", is_mask_used=True)
    with caplog.at_level(logging.WARNING, logger="llmrl"):
        result = compare("llama", attn_implementation=name)
    assert (result.outcome, result.log_prob_error < 2e-5, result.gradient_error < 1e-4) == ("packed", True, True)
    assert f"attn_implementation={name!r}" in caplog.text and "IndexError" in caplog.text


def test_an_attention_that_leaves_masks_out_is_found(caplog: pytest.LogCaptureFixture) -> None:
    name = _registered("test_leaves_masks_out", is_mask_used=False)
    with caplog.at_level(logging.WARNING, logger="llmrl"):
        result = compare("llama", attn_implementation=name)
    assert (result.outcome, result.log_prob_error < 2e-5) == ("packed", True)
    assert "'eager' is used" in caplog.text


def test_flash_attention_is_kept_with_one_row_a_bin_before_eager_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no masks, and is chosen for long rows, since `eager` would hold their attention weights."""
    model = tiny_model("llama")
    tried: list[tuple[str, bool]] = []

    def fault(probe: ExactnessProbe, implementation: str, *, is_packed: bool) -> str | None:
        tried.append((implementation, is_packed))
        return "takes no masks" if is_packed and implementation != "eager" else None

    monkeypatch.setattr(ExactnessProbe, "fault", fault)
    probe = ExactnessProbe(model, OutputHead(model.get_output_embeddings()))
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)  # it is not installed here
    model.config._attn_implementation = "flash_attention_2"
    causal_model = CausalModel.__new__(CausalModel)
    causal_model.model, causal_model.config, causal_model.faults = model, model.config, {}
    causal_model.head = probe.head
    causal_model._choose_computation(probe)
    assert tried == [("flash_attention_2", True), ("flash_attention_2", False)]
    assert causal_model.is_packed is False


@pytest.mark.parametrize("chosen", ["sdpa", "flex_attention"])
def test_attentions_that_are_fast_elsewhere_give_way_to_ours(chosen: str) -> None:
    model = tiny_model("llama", attn_implementation=chosen)
    CausalModel(model)
    assert model.config._attn_implementation == IMPLEMENTATION


def test_falcon_with_alibi_is_exact_in_eager_and_refused_in_sdpa() -> None:
    result = compare("falcon", attn_implementation="eager")
    assert result.outcome == "one row a bin"
    assert max(result.log_prob_error, result.gradient_error) < 2e-5
    refused = compare("falcon", attn_implementation="sdpa")
    assert refused.outcome == "refused" and "attn_implementation='eager'" in refused.reason


def test_what_one_row_a_bin_costs_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("mamba", config=tiny_config("mamba", num_hidden_layers=1))
    with caplog.at_level(logging.WARNING, logger="llmrl"):
        policies = [TransformersWrapper(model, generate=False) for _ in range(2)]
    said = [record.getMessage() for record in caplog.records if "rows cannot be packed" in record.getMessage()]
    assert len(said) == 1 and "MambaForCausalLM" in said[0] and "shared prefixes are computed once per row" in said[0]
    token_ids, weights = rows()
    packed = policies[0].pack(token_ids, [weight != 0 for weight in weights])
    assert sum(micro_batch.input_ids.shape[0] for micro_batch in packed) == len(token_ids)


def test_a_model_that_sees_what_follows_is_refused() -> None:
    with pytest.raises(TypeError, match="XLNetLMHeadModel is not causal"):
        CausalModel(tiny_model("xlnet"))


def test_a_model_that_changes_its_weights_when_called_is_refused() -> None:
    model = tiny_model("rwkv", config=tiny_config("rwkv", rescale_every=1))
    with pytest.raises(TypeError, match="changes its weights"):
        CausalModel(model)


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = tiny_model("gemma2")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    TransformersWrapper(model, generate=False)
    assert model.config.sliding_window == model.model.layers[0].self_attn.sliding_window == WINDOW
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_a_window_that_no_layer_has_is_no_reason_not_to_pack() -> None:
    config = tiny_config("olmo3", layer_types=["full_attention"] * 2)
    assert config.sliding_window == WINDOW
    assert compare("olmo3", config=config).outcome == "packed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_packed_where_float32_ones_are(dtype: torch.dtype) -> None:
    for model_type, is_packed in {"llama": True, "gemma2": True, "mixtral": True, "gpt_neo": False}.items():
        assert CausalModel(tiny_model(model_type).to(dtype)).is_packed == is_packed, model_type


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 20},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
         "original_max_position_embeddings": 20},
    ],
)  # fmt: skip
def test_rows_beyond_a_rotary_embedding_that_changes_with_length_are_refused(rope: dict[str, Any]) -> None:
    config = tiny_config("llama", rope_parameters=rope | {"rope_theta": 1e4}, max_position_embeddings=64)
    policy = TransformersWrapper(tiny_model("llama", config=config), generate=False)
    token_ids, weights = rows()
    masks = [weight != 0 for weight in weights]
    (short,) = policy.pack([ids[:17] for ids in token_ids], [mask[:17] for mask in masks])
    policy.packed_log_probs(short)
    (long,) = policy.pack(copy.copy(token_ids), masks)
    with pytest.raises(ValueError, match="changes beyond 20"):
        policy.packed_log_probs(long)


def test_long_rope_takes_its_long_frequencies_for_every_row_where_an_engine_does() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 20, "rope_theta": 1e4}  # fmt: skip
    config = tiny_config("llama", rope_parameters=rope, max_position_embeddings=64)
    long_config = tiny_config("llama", rope_parameters=rope | {"short_factor": [4.0] * 4}, max_position_embeddings=64)
    token_ids, weights = rows()
    masks = [weight != 0 for weight in weights]
    computed = []
    for one, engine_length in ((config, 20), (config, 21), (long_config, 20)):
        model = tiny_model("llama", config=one)
        policy = TransformersWrapper(model, generate=False)
        trained_model(model).engine_length = engine_length
        (packed,) = policy.pack([ids[:17] for ids in token_ids], [mask[:17] for mask in masks])
        computed.append(policy.packed_log_probs(packed)[0].detach())
        if engine_length > 20:
            (packed,) = policy.pack(copy.copy(token_ids), masks)
            policy.packed_log_probs(packed)
    short, long, expected = computed
    torch.testing.assert_close(long, expected)
    assert (short - expected).abs().max() > 0.01


_DROPPED = {"attention_dropout": 0.5, "hidden_dropout": 0.5, "dropout": 0.5, "activation_dropout": 0.5}
# What acts in training mode, by itself or by an entry of the configuration.
_NOISE: dict[str, dict[str, Any]] = {
    "phimoe": {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1},
    "mixtral": {"router_jitter_noise": 0.5},
    "minimax": {"router_jitter_noise": 0.5},
    "dbrx": {
        "resid_pdrop": 0.5,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0, "attn_pdrop": 0.5},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.5},
    },
    "gpt_neox": _DROPPED | {"classifier_dropout": 0.5},
    "gpt_neo": {"embed_dropout": 0.5, "resid_dropout": 0.5, "attention_dropout": 0.5, "classifier_dropout": 0.5},
    "gpt2": {"embd_pdrop": 0.5, "resid_pdrop": 0.5, "attn_pdrop": 0.5},
    "opt": _DROPPED | {"layerdrop": 0.5},
    "xglm": _DROPPED | {"layerdrop": 0.5},
    "biogpt": {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5, "layerdrop": 0.5},
    "doge": _DROPPED,
}


@pytest.mark.parametrize("model_type", _NOISE)
def test_gradient_checkpointing_switches_on_nothing_that_acts_by_chance(model_type: str) -> None:
    config = tiny_config(model_type)
    known = {name: value for name, value in _NOISE[model_type].items() if hasattr(config, name)}
    assert known
    result = compare(model_type, config=tiny_config(model_type, **known), is_checkpointing=True)
    assert result.outcome == page_outcomes()[model_type], result.reason
    assert result.is_exact, result


def test_what_code_of_its_own_does_in_training_mode_is_compared_in_that_mode() -> None:
    """A decoder that checkpoints by itself is in training mode, and so is its own dropout."""
    model = tiny_model("llama")

    class Decoder(type(model.model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            states = torch.nn.functional.dropout(output.last_hidden_state, 0.1, self.training)
            return type(output)(last_hidden_state=states)

    model.model.__class__ = Decoder
    CausalModel(model)
    for layer in model.model.layers:
        layer.__dict__.pop("gradient_checkpointing", None)
    model.model.gradient_checkpointing = True
    with pytest.raises(TypeError, match=r"train\.gradient_checkpointing=false"):
        CausalModel(model)


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")


def test_a_way_whose_backward_pass_fails_on_the_gpu_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrl.trainer.model.exactness.FUSED_DEVICES", frozenset({"cpu"}))
    model = tiny_model("llama")
    probe = ExactnessProbe(model, OutputHead(model.get_output_embeddings()))
    assert probe.fault("eager", is_packed=True) is None

    class Decoder(type(model.model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            return type(output)(last_hidden_state=_FailingBackward.apply(output.last_hidden_state))

    model.model.__class__ = Decoder
    assert "shared memory" in str(probe.fault("eager", is_packed=True))
    assert all(parameter.grad is None for parameter in model.parameters())

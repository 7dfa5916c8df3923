"""Arguments of vLLM that llmrl passes through: tested ones, refused ones with the reason, and all others."""

from __future__ import annotations

from collections.abc import Mapping

# Tests compare log-probs of engines with these arguments with the trainer's.
TESTED: frozenset[str] = frozenset(
    {
        "async_scheduling", "enable_chunked_prefill", "hf_overrides", "long_prefill_token_threshold", "max_lora_rank",
        "max_loras", "max_num_batched_tokens", "num_gpu_blocks_override", "skip_tokenizer_init",
        "tensor_parallel_size",
    }
)  # fmt: skip

_SPECULATION = "llmrl compares drafts by n-grams alone with the trainer; set speculative='ngram' for these"
_DISTRIBUTION = "it changes the distribution that tokens are sampled from, which the trainer cannot reproduce"
_TEXT = "llmrl trains and serves text alone"
_SAMPLING = "SamplingConfig sets all sampling parameters; vLLM's defaults would silently replace them"
_ROUNDED = "it rounds the engine's cache of earlier tokens, so that the engine's log-probs are not the trainer's"
_GRAMMAR = "llmrl recomputes which tokens a grammar kept, with xgrammar and from the first token on"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _SPECULATION),
    **dict.fromkeys(("logits_processors", "watermark_config", "diffusion_config"), _DISTRIBUTION),
    **dict.fromkeys(("generation_config", "override_generation_config"), _SAMPLING),
    **dict.fromkeys(
        (
            "default_mm_loras", "enable_mm_embeds", "enable_prompt_embeds", "limit_mm_per_prompt", "mm_encoder_only",
            "mm_processor_kwargs",
        ),
        _TEXT,
    ),
    **dict.fromkeys(("reasoning_parser", "structured_outputs_config"), _GRAMMAR),
    **dict.fromkeys(("convert", "pooler_config", "runner"), "llmrl's engines generate"),
    **dict.fromkeys(("enable_mamba_cache_stochastic_rounding", "kv_cache_dtype"), _ROUNDED),
}  # fmt: skip


def check_passed_through(engine_args: Mapping[str, object]) -> None:
    """Raise ValueError, with the reason, for arguments with which an engine's log-probs are not the trainer's.

    Example:
        >>> check_passed_through({"max_num_batched_tokens": 2048})
        >>> check_passed_through({"speculative_config": {"method": "ngram"}})
        Traceback (most recent call last):
        ValueError: engine_args may not hold 'speculative_config': llmrl compares drafts by n-grams alone ...
    """
    for name, value in engine_args.items():
        if name in REFUSED and value not in (None, "auto"):
            raise ValueError(f"engine_args may not hold {name!r}: {REFUSED[name]}. Leave it out.")


def untested(engine_args: Mapping[str, object]) -> tuple[str, ...]:
    """Return the sorted names of arguments with which no test of llmrl compares an engine with the trainer.

    Tests cover only `head_dtype` of `hf_overrides`; other overrides may make the engine's model another one.

    Example:
        >>> untested({"tensor_parallel_size": 2, "attention_backend": "CPU_ATTN"})
        ('attention_backend',)
    """
    names = engine_args.keys() - TESTED - REFUSED.keys()
    overrides = engine_args.get("hf_overrides") or {}
    if not isinstance(overrides, Mapping) or overrides.keys() - {"head_dtype"}:
        names.add("hf_overrides")
    return tuple(sorted(names))

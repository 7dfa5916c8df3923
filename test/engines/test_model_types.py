"""Models with which an engine does not start, or does not take weights: each is refused by its configuration."""

import json
import math

import pytest
import transformers
from causal_types import causal_types
from engine_checkpoints import enlarged
from engine_halves import is_shown, page_rows, wrapper_types

from llmrl.engines.base import EngineError
from llmrl.engines.vllm.model_types import check_model, exact_length_of, problem_of


def test_what_the_page_says_of_engines_is_what_is_refused(takes_long):
    names = {**causal_types(), **wrapper_types()}
    for model_type, row in page_rows().items():
        if row["engine"].startswith("refused: ImportError"):  # the class itself needs a package
            continue
        config = enlarged(model_type, getattr(transformers, names[model_type])).to_dict()
        problem = problem_of(config | {"architectures": [row["class"]]}, dtype="bfloat16", is_cpu=True)
        is_taken = problem is None and exact_length_of(config)[0] == math.inf
        agrees = is_shown(row["engine"]) and is_shown(row["nats"])
        assert is_taken == agrees, (model_type, row["engine"], row["nats"], problem)


def test_a_row_beyond_a_models_exact_length_is_refused_before_an_engine_starts(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "cohere2", "sliding_window": 4096, "max_position_embeddings": 8192})
    )
    options = {"dtype": "float32", "is_cpu": True}
    check_model(str(tmp_path), 4096, is_updated=True, **options)
    check_model(str(tmp_path), 8192, is_updated=False, **options)
    for max_model_len in (8192, None):
        with pytest.raises(EngineError, match=r"windows are one token longer .* max_model_len=4096 or less, got 8192"):
            check_model(str(tmp_path), max_model_len, is_updated=True, **options)


def test_drafts_for_layers_with_a_state_are_refused_on_a_cpu(tmp_path):
    options = {"dtype": "bfloat16", "is_updated": True}
    for config in (
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
        {"model_type": "qwen3_5", "text_config": {"layer_types": ["linear_attention", "full_attention"]}},
        {"model_type": "bamba", "mamba_d_conv": 4},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(EngineError, match="cannot draft: leave speculative out"):
            check_model(str(tmp_path), 64, is_cpu=True, is_drafting=True, **options)
        check_model(str(tmp_path), 64, is_cpu=True, **options)
        check_model(str(tmp_path), 64, is_cpu=False, is_drafting=True, **options)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    check_model(str(tmp_path), 64, is_cpu=True, is_drafting=True, **options)

"""What tests share: the embedded model, its renderer, one engine."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def model_path():
    """Folder of SmolLM2-135M-Instruct, bfloat16."""
    from llmrl.embedded_model import ensure_embedded_model

    return str(ensure_embedded_model())


@pytest.fixture(scope="session")
def tokenizer(model_path):
    """Its tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="session")
def renderer(tokenizer):
    """Its renderer."""
    from llmrl.rendering import make_renderer

    return make_renderer(tokenizer)

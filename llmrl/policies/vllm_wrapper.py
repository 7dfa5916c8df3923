"""`vLLMWrapper`: a vLLM engine as a TensorDict policy."""

from __future__ import annotations

import os
from typing import Unpack

from llmrl.engines import Engine
from llmrl.engines.base import HasTokenizer
from llmrl.policies.arguments import WrapperOptions
from llmrl.policies.base import LLMWrapperBase


class vLLMWrapper(LLMWrapperBase):
    """Generates with vLLM.

    Args:
        model: an `AsyncVLLM`, `EngineReplicas` of them, or the name or folder of a model, for which an engine is
            started.
        generate: that is all it does.
        options: see `LLMWrapperBase`; tokenizer and renderer are loaded from the model when neither is given.

    Raises:
        ImportError: if vLLM is not installed, naming the extra.
        ValueError: if tokenizer and renderer are missing and cannot be loaded from the model; see `LLMWrapperBase`.
    """

    def __init__(
        self, model: Engine | str | os.PathLike[str], *, generate: bool = True, **options: Unpack[WrapperOptions]
    ) -> None:
        from llmrl.engines import AsyncVLLM

        engine = AsyncVLLM.from_pretrained(model) if isinstance(model, (str, os.PathLike)) else model
        is_known = options.get("tokenizer") is not None or options.get("renderer") is not None
        if not is_known and options.get("input_mode") != "tokens":
            if not isinstance(engine, HasTokenizer):
                raise ValueError("tokenizer or renderer is needed where model is an engine that has none, nor a name.")
            options["tokenizer"] = engine.get_tokenizer()
        super().__init__(engine, generate=generate, **options)

"""`vLLMWrapper`: a vLLM engine as a TensorDict policy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from llmrl._utils.types import Tokenizer
from llmrl.engines import SamplingConfig
from llmrl.engines.base import HasTokenizer
from llmrl.policies.base import LLMWrapperBase
from llmrl.rendering import DEFAULT_FORK_THRESHOLD_TOKENS, Renderer

if TYPE_CHECKING:
    from llmrl.engines import AsyncVLLM, EngineReplicas


class vLLMWrapper(LLMWrapperBase):
    """Generates with vLLM.

    Args:
        model: an `AsyncVLLM`, `EngineReplicas` of them, or the name or folder of a model, for which an engine is
            started.
        tokenizer, renderer: of the model; loaded from it when neither is given.
        input_mode, generate_kwargs, conversation_mode, fork_threshold_tokens: see `LLMWrapperBase`.

    Raises:
        ImportError: when vLLM is not installed, naming the extra.
        ValueError: without tokenizer and renderer, where they cannot be loaded from the model.
    """

    def __init__(
        self,
        model: AsyncVLLM | EngineReplicas | str | os.PathLike[str],
        *,
        tokenizer: Tokenizer | None = None,
        renderer: Renderer | None = None,
        input_mode: Literal["history", "text", "tokens"] = "history",
        generate_kwargs: Mapping[str, object] | SamplingConfig | None = None,
        conversation_mode: Literal["auto", "token", "message"] = "auto",
        fork_threshold_tokens: int = DEFAULT_FORK_THRESHOLD_TOKENS,
    ) -> None:
        from llmrl.engines import AsyncVLLM

        engine = AsyncVLLM.from_pretrained(model) if isinstance(model, (str, os.PathLike)) else model
        if tokenizer is None and renderer is None and input_mode != "tokens":
            if not isinstance(engine, HasTokenizer):
                raise ValueError("tokenizer or renderer is needed where model is an engine that has none, nor a name.")
            tokenizer = engine.get_tokenizer()
        super().__init__(
            engine,
            renderer=renderer,
            tokenizer=tokenizer,
            input_mode=input_mode,
            generate_kwargs=generate_kwargs,
            conversation_mode=conversation_mode,
            fork_threshold_tokens=fork_threshold_tokens,
        )

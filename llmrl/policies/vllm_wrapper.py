"""`vLLMWrapper`: a vLLM engine as a TensorDict policy."""

from __future__ import annotations

import os
from typing import Self, Unpack

from llmrl.engines import Engine
from llmrl.engines.base import HasTokenizer
from llmrl.policies.arguments import WrapperOptions
from llmrl.policies.base import LLMWrapperBase


class vLLMWrapper(LLMWrapperBase):
    """A policy that generates with vLLM.

    Args:
        model: `AsyncVLLM`, `EngineReplicas`, or the name or folder of a model, for which an engine is started.
        generate: must be true.
        options: see `LLMWrapperBase`; by default, tokenizer and renderer are those of the model.

    Raises ImportError if vLLM is not installed, ValueError if there is no tokenizer, and the errors
    of `LLMWrapperBase`.
    """

    def __init__(
        self, model: Engine | str | os.PathLike[str], *, generate: bool = True, **options: Unpack[WrapperOptions]
    ) -> None:
        if not isinstance(model, (str, os.PathLike)):
            self._set_up(model, generate=generate, options=options)
            return
        from llmrl.engines import AsyncVLLM

        self._check_arguments(generate=generate, **options)  # before the engine starts, which takes minutes
        engine = AsyncVLLM.from_pretrained(model)
        try:
            self._set_up(engine, generate=generate, options=options)
        except BaseException:
            engine.shutdown()
            raise

    def get_new_version(self, **kwargs: object) -> Self:
        """Return a policy with these arguments changed; a given `model` has its own tokenizer."""
        if "model" in kwargs and "tokenizer" not in self._keywords:
            kwargs.setdefault("tokenizer", None)
        return super().get_new_version(**kwargs)

    def _set_up(self, engine: Engine, *, generate: bool, options: WrapperOptions) -> None:
        """Initialize the policy with its engine; a subclass may add what needs the engine."""
        is_known = options.get("tokenizer") is not None or options.get("renderer") is not None
        if not is_known and options.get("input_mode") != "tokens":
            if not isinstance(engine, HasTokenizer):
                raise ValueError(
                    "pass tokenizer= or renderer=: model is an engine without a tokenizer, not the name of a model."
                )
            options["tokenizer"] = engine.get_tokenizer()
        super().__init__(engine, generate=generate, **options)

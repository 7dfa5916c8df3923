"""`NullEngine`: a placeholder where no engine is needed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from llmrl.engines import Completion, EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NullEngine:
    """An engine that provides a tokenizer and refuses requests, for ranks above 0 and runs without generation."""

    max_model_len: int = sys.maxsize
    vocab_size: int | None = None
    policy_version: int = 0
    is_alive: bool = False

    def __init__(self, model: str) -> None:
        self._model = model

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model, trust_remote_code=False)  # by default, it may ask on the tty

    async def generate(self, *arguments: Any, **options: Any) -> Completion:
        """Raise EngineError."""
        raise EngineError("this process has no engine: it is a rank above 0, or a run that generates nothing.")

    async def abort(self, request_id: str) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""

"""`NullEngine`: stands in for an engine that is not needed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from llmrl.engines import Completion, EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NullEngine:
    """An engine with a tokenizer that refuses requests, for ranks above 0 and runs that generate nothing."""

    max_model_len: int = sys.maxsize
    vocab_size: int | None = None
    policy_version: int = 0
    is_alive: bool = False

    def __init__(self, model: str) -> None:
        self._model = model

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model, trust_remote_code=False)  # else it asks on the terminal

    async def generate(self, *arguments: Any, **options: Any) -> Completion:
        """Raise EngineError."""
        raise EngineError("this rank has no engine: only the first rank of a trainer has one.")

    async def abort(self, request_id: str) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""

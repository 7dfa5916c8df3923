"""Sampling masks of grammars, recomputed from the sampled tokens."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrl.engines.vllm.private import all_stop_token_ids

if TYPE_CHECKING:
    from vllm import SamplingParams

    from llmrl.engines.vllm.private import AsyncLLM


class Grammars:
    """Compiler of grammars that recomputes the masks of an engine from its sampled tokens; thread-safe.

    vLLM does not report a grammar's masks. A mask is a function of the grammar and the preceding
    tokens, so vLLM's own backend computes it here a second time.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._lock = threading.Lock()

    @cached_property
    def _backend(self) -> Any:
        from llmrl.engines.vllm.private import XgrammarBackend

        config = self._llm.vllm_config
        vocab_size = config.model_config.get_vocab_size()
        return XgrammarBackend(config, tokenizer=self._llm.get_tokenizer(), vocab_size=vocab_size)

    def _compiled(self, grammar: str, stop_token_ids: set[int] | None = None) -> Any:
        from llmrl.engines.vllm.private import StructuredOutputOptions

        kind = StructuredOutputOptions.STRUCTURAL_TAG
        return self._backend.compile_grammar(kind, grammar, stop_token_ids=stop_token_ids)

    def check(self, grammar: str) -> None:
        """Raise ValueError for a grammar that xgrammar cannot follow exactly."""
        from llmrl.engines.vllm.private import has_xgrammar_unsupported_json_features

        with self._lock:
            if any(map(has_xgrammar_unsupported_json_features, _schemas(json.loads(grammar)))):
                raise ValueError(
                    "the JSON schema has a constraint that vLLM's grammars ignore, such as multipleOf, uniqueItems, "
                    "allOf of several, or pattern with a length: leave it out, and describe it in a message."
                )
            try:
                self._compiled(grammar)
            except Exception as error:  # xgrammar's errors have no base class
                raise ValueError(f"the JSON schema cannot be compiled to a grammar: {error}") from error

    def masks(self, grammar: str, token_ids: Sequence[int], params: SamplingParams) -> list[array[int]]:
        """Return an answer's sampling mask: the ids that the grammar kept at each token, or `~id` of the removed.

        Equal masks share one array.
        """
        known: dict[bytes, array[int]] = {}
        masks = []
        with self._lock:
            followed = self._compiled(grammar, all_stop_token_ids(self._llm, params))
            bits = self._backend.allocate_token_bitmask(1)
            for token_id in token_ids:
                followed.fill_bitmask(bits, 0)
                key = bits.numpy().tobytes()
                if key not in known:
                    known[key] = _listed(bits.numpy(), self._backend.vocab_size)
                masks.append(known[key])
                followed.accept_tokens("", [token_id])
        return masks


def _listed(bits: np.ndarray, vocab_size: int) -> array[int]:
    is_kept = np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)
    kept = is_kept.nonzero()[0]
    removed = (~is_kept).nonzero()[0]
    ids = kept if len(kept) <= len(removed) or not len(removed) else ~removed
    return array("i", ids.astype(np.int32).tobytes())


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON schemas of a structural tag."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return
    for name, entry in value.items():
        if name == "json_schema" and isinstance(entry, dict):
            yield entry
        else:
            yield from _schemas(entry)

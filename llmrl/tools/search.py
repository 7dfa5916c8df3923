"""`SearchIndex`: local full-text search for the model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from llmrl._utils.arguments import check_least
from llmrl._utils.imports import require
from llmrl.tools.output import truncate
from llmrl.tools.tool import Tool, only_text, text_parameters

_MAX_RESULT_CHARS = 1000
_DESCRIPTION = "Search the documents. The answer is those that fit best, the best first."


class SearchIndex:
    """Documents ranked by BM25 (Robertson and Zaragoza, 2009, equation 3.15; computed by bm25s).

    Args:
        documents: texts, or mappings with `title` and `text`.
        num_results: number of documents per answer, each cut after 1,000 characters.

    Raises:
        MissingExtraError: if the `tools` extra is not installed.
        ValueError: if there are no documents, or `num_results` is not positive.

    Example:
        >>> index = SearchIndex(["Paris is in France.", "Rome is in Italy."])
        >>> index.search("Where is Rome?")
        [(1, 'Rome is in Italy.')]
    """

    def __init__(
        self,
        documents: Sequence[str | Mapping[str, str]],
        *,
        num_results: int = 3,
    ) -> None:
        if not documents:
            raise ValueError("documents is empty; there is nothing to search.")
        check_least(1, num_results=num_results)
        bm25s = require("bm25s", extra="tools")
        self.documents = [_as_text(document) for document in documents]
        self.num_results = num_results
        # Without stop words, because questions consist largely of them.
        self._tokenize = functools.partial(bm25s.tokenize, stopwords="en", show_progress=False)
        self._index = bm25s.BM25()
        self._index.index(self._tokenize(self.documents), show_progress=False)

    def search(self, query: str) -> list[tuple[int, str]]:
        """Return the indices and texts of the documents that share words with the query, best first."""
        words = self._tokenize([query], return_ids=False)
        if not words[0]:
            return []
        count = min(self.num_results, len(self.documents))
        places, scores = self._index.retrieve(words, k=count, show_progress=False)
        return [
            (int(place), self.documents[int(place)])
            for place, score in zip(places[0], scores[0], strict=True)
            if score > 0
        ]

    def tool(self, name: str = "search", description: str = _DESCRIPTION) -> Tool:
        """Return the index as a tool with one argument, `query`."""

        async def run(arguments: dict[str, object], conversation_id: str) -> str:
            found = [truncate(text, _MAX_RESULT_CHARS, "end") for _, text in self.search(only_text(arguments, "query"))]
            return "\n".join(f"[{number}] {text}" for number, text in enumerate(found, 1)) or "Nothing was found."

        return Tool(name, description, text_parameters("query", "words to look for"), run)


def _as_text(document: str | Mapping[str, str]) -> str:
    return document if isinstance(document, str) else f"{document['title']}: {document['text']}"

"""`SearchIndex`: local full-text search for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmrl._utils.arguments import check_least
from llmrl._utils.imports import require
from llmrl.tools.output import truncate
from llmrl.tools.tool import InvalidArguments, Tool

if TYPE_CHECKING:
    from bm25s.tokenization import Tokenized

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
        self._bm25s = require("bm25s", extra="tools")
        self.documents = [_as_text(document) for document in documents]
        self.num_results = num_results
        self._index = self._bm25s.BM25()
        self._index.index(self._words(self.documents), show_progress=False)

    def _words(self, texts: list[str]) -> Tokenized:
        # Without stop words, because questions consist largely of them.
        return self._bm25s.tokenize(texts, stopwords="en", show_progress=False)

    def search(self, query: str) -> list[tuple[int, str]]:
        """Return the indices and texts of documents that share a word with the query, best first."""
        words = self._bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)
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
        query = {"type": "string", "description": "words to look for"}
        parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}

        async def run(arguments: dict[str, object], conversation_id: str) -> str:
            if set(arguments) != {"query"} or not isinstance(arguments["query"], str):
                raise InvalidArguments(f"the only argument is 'query' (a string), got {sorted(arguments)}")
            found = self.search(arguments["query"])
            if not found:
                return "Nothing was found."
            return "\n".join(
                f"[{number}] {truncate(text, _MAX_RESULT_CHARS, 'end')}" for number, (_, text) in enumerate(found, 1)
            )

        return Tool(name, description, parameters, run)


def _as_text(document: str | Mapping[str, str]) -> str:
    return document if isinstance(document, str) else f"{document['title']}: {document['text']}"

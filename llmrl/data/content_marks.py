"""Protection against special tokens in contents: they are split into ordinary tokens, so they cannot forge a turn."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from llmrl._utils.types import Tokenizer
from llmrl.data.message import Message, ToolSchema

# Candidates for the mark: private-use characters, which have no meaning in texts.
_CANDIDATES = [chr(code) for code in range(0xE000, 0xE100)]


class RenderingError(ValueError):
    """Raised if a chat template rejects messages, or cannot be rendered exactly."""


class ContentMarks:
    """Marks the special tokens in contents, so that a rendering is encoded without treating them as special.

    The mark is a private-use character, which is inserted into each special token in a content
    before the template renders it. The marks' tokens are removed after encoding, so the ids decode
    to the same text. Contents without special tokens are not changed.

    Args:
        tokenizer: Hugging Face tokenizer.
        further: texts that are marked in addition to the special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, further: Iterable[str] = ()) -> None:
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        marked = special.union(tokenizer.all_special_tokens, further)
        self._tokenizer = tokenizer
        self.tokens = frozenset(token for token in marked if len(token) > 1)
        """The texts that are marked."""
        beginnings: dict[str, list[str]] = {}
        for token in sorted(self.tokens):
            beginnings.setdefault(token[:2], []).append(token)
        self._tokens_of = {beginning: tuple(tokens) for beginning, tokens in beginnings.items()}
        # A lookahead also finds overlapping tokens.
        self._pattern = re.compile("(?=(" + "|".join(map(re.escape, self._tokens_of)) + "))")
        # Some tokens are matched in the normalised text, and some models' special tokens are also ordinary pieces.
        self._normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        normalize = None if self._normalizer is None else self._normalizer.normalize_str
        self._is_ascii_kept = normalize is None or normalize(string.printable) == string.printable

    def find(self, text: str) -> list[int]:
        """Return the positions where special tokens begin."""
        if not any(beginning in text for beginning in self._tokens_of):
            return []
        found = self._pattern.finditer(text)
        return [match.start() for match in found if text.startswith(self._tokens_of[match[1]], match.start())]

    def first_in(self, *values: object) -> str | None:
        """Return the first special token in messages or tools, or None.

        If only the normalised form of a text has a special token, return the start of the text.
        """
        for text in _texts_of(values):
            if starts := self.find(text):
                rest = text[starts[0] :]
                return next(token for token in self._tokens_of[rest[:2]] if rest.startswith(token))
            if self._is_hidden(text):
                return text[:100]
        return None

    def mark(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None
    ) -> tuple[str, Sequence[Message], Sequence[ToolSchema] | None]:
        """Return the mark (empty if none is needed), and the messages and tools with it in each special token.

        Raises RenderingError if the texts contain all candidates for a mark.
        """
        if self.first_in(messages, tools) is None:
            return "", messages, tools
        texts = _texts_of((messages, tools))
        mark = next(
            (one for one in _CANDIDATES if not any(one in text or json.dumps(one)[1:-1] in text for text in texts)),
            None,
        )
        if mark is None:
            raise RenderingError(
                "A content has special tokens and all private-use characters from U+E000 to U+E0FF; remove one of "
                "these characters."
            )
        return mark, self._marked(messages, mark), self._marked(tools, mark)

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            marked = value
            for start in reversed(self.find(value)):
                marked = marked[: start + 1] + mark + marked[start + 1 :]
            if not self._is_hidden(marked):
                return marked
            return mark.join(value)
        if isinstance(value, Mapping):
            return {self._marked(key, mark): self._marked(entry, mark) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            # Templates join the texts of a content's parts, and may leave out what is between them,
            # such as images. A mark before each text prevents a token across two of them.
            return [
                {**self._marked(entry, mark), "text": mark + self._marked(entry["text"], mark)}
                if _is_text_part(entry)
                else self._marked(entry, mark)
                for entry in value
            ]
        return value

    def _is_hidden(self, text: str) -> bool:
        """Return whether normalisation turns part of a text into a special token."""
        if self._normalizer is None or (self._is_ascii_kept and text.isascii()):
            return False
        return bool(self.find(self._normalizer.normalize_str(text)))

    def encode(self, text: str, mark: str) -> list[int]:
        """Return the token ids of a rendering without the marks; marked tokens are not special."""
        return [token_id for token_id, _ in self.locate(with_plain_marks(text, mark), mark)]

    def locate(self, text: str, mark: str) -> list[tuple[int, tuple[int, int]]]:
        """Return the tokens of `encode` with their character spans in a text with plain marks (`with_plain_marks`).

        Raises RenderingError if the tokenizer does not report the positions of the marks.
        """
        if mark and not self._tokenizer.is_fast:
            raise _refusal("the tokenizer is slow (not Rust-based) and does not report the positions of tokens")
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        located = []
        for token_id, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            covered = text[start:end]
            if not mark or not covered or covered.strip(mark):
                if mark and mark in covered:
                    raise _refusal("the tokenizer merges the mark that splits it with other text into one token")
                located.append((token_id, (start, end)))
        return located

    def refuse(self, *values: object) -> None:
        """Raise RenderingError for messages or tools with special tokens, if their rendering cannot be marked."""
        if (token := self.first_in(*values)) is not None:
            raise _refusal(
                f"{token!r} would be encoded as special. TemplateRenderer splits it, for policies of histories "
                "(input_mode='history')"
            )


def with_plain_marks(text: str, mark: str) -> str:
    """Return a rendering in which marks that the template escaped as JSON, for example in arguments, are plain."""
    if not mark:
        return text
    return text.replace(json.dumps(mark)[1:-1], mark)


def _refusal(reason: str) -> RenderingError:
    return RenderingError(
        f"A content has a special token of the chat template, which cannot be split into ordinary tokens: {reason}."
    )


def _is_text_part(value: object) -> TypeGuard[Mapping[str, str]]:
    """Return whether a value is a part of a content with a text; `text_of` joins these without regard to a type."""
    return isinstance(value, Mapping) and isinstance(value.get("text"), str)


def _texts_of(value: object) -> list[str]:
    """Return all texts in a value, including keys of dicts and the joined text parts of contents."""
    texts: list[str] = []
    _gather(value, texts)
    return texts


def _gather(value: object, texts: list[str]) -> None:
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _gather(key, texts)
            _gather(entry, texts)
    elif isinstance(value, list | tuple):
        for entry in value:
            _gather(entry, texts)
        parts = [entry["text"] for entry in value if _is_text_part(entry)]
        if len(parts) > 1:
            texts.append("".join(parts))

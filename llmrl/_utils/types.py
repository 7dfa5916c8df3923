"""Shared types: JSON values, nested lists, datasets, tokenizers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

Item = TypeVar("Item")

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None
"""A value that `json.dumps` can write."""

Nested: TypeAlias = Item | list["Nested[Item]"]
"""One item, or lists of items nested like a batch."""

InputMode: TypeAlias = Literal["history", "text", "tokens"]
"""The form in which a policy reads conversations."""

StateDict: TypeAlias = dict[str, Any]
"""The value that `state_dict` returns and `load_state_dict` takes."""

Row: TypeAlias = Mapping[str, Any]
"""A row of a dataset: its columns by name."""


class Encoding(TypedDict):
    """Result of tokenizing one text."""

    input_ids: list[int]
    offset_mapping: list[tuple[int, int]]
    """Start and end of each token in characters, if requested."""


class AddedToken(Protocol):
    """A token added to a vocabulary."""

    content: str
    special: bool


class Tokenizer(Protocol):
    """The tokenizer methods that llmrl uses; every `PreTrainedTokenizerBase` has them."""

    chat_template: str | None
    eos_token: str | None
    eos_token_id: int | None
    all_special_tokens: list[str]
    all_special_ids: list[int]
    special_tokens_map: Mapping[str, str]
    is_fast: bool
    added_tokens_decoder: Mapping[int, AddedToken]

    def __len__(self) -> int: ...

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> Encoding: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **options: object,
    ) -> str | list[int]: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def get_vocab(self) -> dict[str, int]: ...

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> tuple[str, ...]: ...

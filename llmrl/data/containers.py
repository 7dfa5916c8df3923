"""Containers of a turn: the input (`prompt`), the answer (`response`), and both (`full`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from tensordict import TensorClass
from torchrl.data import Composite, NonTensor, Unbounded

from llmrl._utils.types import Tokenizer
from llmrl.data.chats import flatten
from llmrl.data.history import History
from llmrl.data.tensordicts import batch_elements, documented, restacked

Turn = TypeVar("Turn")
Converted = TypeVar("Converted")


@documented
class ChatHistory(TensorClass["nocast"]):  # type: ignore[name-defined]
    """A turn as conversations.

    Example:
        >>> from llmrl.data import ChatHistory, History
        >>> prompt = History.from_chats([{"role": "user", "content": "Hi"}])
        >>> ChatHistory(prompt=prompt, batch_size=()).prompt.role
        ['user']
    """

    _documentation = __doc__

    prompt: History | None = None
    """Input of the policy."""
    response: History | None = None
    """The assistant's message alone."""
    full: History | None = None
    """Prompt and response."""

    @staticmethod
    def default_spec(shape: Sequence[int] = (), keys: Sequence[str] = ("prompt", "response", "full")) -> Composite:
        """Return the spec of a turn with these entries."""
        entries = {key: History.default_spec(shape) for key in keys}
        return Composite(entries, shape=torch.Size(shape), data_cls=ChatHistory)

    def to_text(
        self, tokenizer: Tokenizer, chat_template_name: str | None = None, chat_template: str | None = None
    ) -> Text:
        """Render the turn with the chat template; the prompt ends with the generation prompt, the response follows it.

        This is for display and for supervised data; `("tokens", ...)` has the exact tokens of a sampled turn. Raises
        ValueError if the template changes the prompt when the response follows.
        """

        def render(history: History | None, *, is_prompt: bool = False) -> str | None:
            if history is None:
                return None
            return history.apply_chat_template(
                tokenizer,
                add_generation_prompt=is_prompt,
                chat_template=chat_template,
                chat_template_name=chat_template_name,
            )

        def convert(turn: ChatHistory) -> Text:
            prompt = render(turn.prompt, is_prompt=True)
            full = render(turn.full)
            if prompt is None or full is None:
                return Text(prompt=prompt, response=render(turn.response), full=full)
            if not full.startswith(prompt):
                raise ValueError(
                    f"the template rewrites the prompt {prompt!r:.80} once its response follows: {full!r}."
                )
            return Text(prompt=prompt, response=full[len(prompt) :], full=full)

        return _each(self, convert)

    def to_tokens(
        self, tokenizer: Tokenizer, chat_template_name: str | None = None, chat_template: str | None = None
    ) -> Tokens:
        """Return the token ids of `to_text`."""
        return self.to_text(tokenizer, chat_template_name, chat_template).to_tokens(tokenizer)


@documented
class Text(TensorClass["nocast"]):  # type: ignore[name-defined]
    """A turn as templated text.

    Example:
        >>> Text(prompt="7 + 8 =", response=" 15", full="7 + 8 = 15").response
        ' 15'
    """

    _documentation = __doc__

    prompt: str | None = None
    """A string, or a list of strings for a batch."""
    response: str | None = None
    full: str | None = None

    @staticmethod
    def default_spec(shape: Sequence[int] = (), keys: Sequence[str] = ("prompt", "response", "full")) -> Composite:
        """Return the spec of a turn with these entries."""
        entries = {key: NonTensor(shape=tuple(shape), example_data="") for key in keys}
        return Composite(entries, shape=torch.Size(shape), data_cls=Text)

    def to_tokens(self, tokenizer: Tokenizer) -> Tokens:
        """Tokenize the text without adding special tokens, which the template has already written."""

        def encode(text: str | None) -> torch.Tensor | None:
            if text is None:
                return None
            return torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)

        def convert(turn: Text) -> Tokens:
            prompt = encode(turn.prompt)
            full = encode(turn.full)
            if prompt is None or full is None:
                return Tokens(prompt=prompt, response=encode(turn.response), full=full, padded=False)
            # Split by the number of ids, since the prompt's text may end within a token of the full text.
            return Tokens(prompt=prompt, response=full[len(prompt) :], full=full, padded=False)

        return _each(self, convert)

    def to_history(self, tokenizer: Tokenizer | None = None, chat_template_name: str | None = None) -> ChatHistory:
        r"""Parse the messages that a chat template wrote, as `History.from_text` does; `tokenizer` is ignored.

        Example:
            >>> prompt = "<|im_start|>user\n7 + 8 =<|im_end|>\n<|im_start|>assistant\n"
            >>> Text(prompt=prompt, full=prompt + "15<|im_end|>").to_history().response.content
            ['15']
        """

        def convert(turn: Text) -> ChatHistory:
            prompt, full = (
                None if text is None else History.from_text(text, chat_template_name)
                for text in (turn.prompt, turn.full)
            )
            response = None
            if prompt is not None and full is not None:
                [given] = flatten(prompt.chats)
                [whole] = flatten(full.chats)
                response = History.from_chats(whole[len(given) :], check=False)
            return ChatHistory(prompt=prompt, response=response, full=full)

        return _each(self, convert)


class _Ragged(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Ragged per-token entries; a batch is lazily stacked, and padded only on request."""

    def as_list(self, key: str) -> list[torch.Tensor]:
        """Return one entry as a list with one tensor `[num_tokens]` per conversation."""
        if self.batch_size:
            return list(self.get(key, as_list=True))
        return [self.get(key)]

    def as_padded_tensor(self, key: str, *, padding_value: float = 0, padding_side: str = "right") -> torch.Tensor:
        """Return one entry as `[*batch, max_num_tokens]`; raise ValueError for an unknown `padding_side`."""
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}.")
        padded = torch.nn.utils.rnn.pad_sequence(
            [row.get(key) for row in batch_elements(self)],
            batch_first=True,
            padding_value=padding_value,
            padding_side=padding_side,
        )
        return padded.reshape(*self.batch_size, *padded.shape[1:])

    def as_nested_tensor(self, key: str) -> torch.Tensor:
        """Return one entry as a jagged nested tensor `[batch, num_tokens]`; ValueError for several batch dimensions."""
        if len(self.batch_size) > 1:
            raise ValueError(f"as_nested_tensor takes one batch dimension, got {list(self.batch_size)}; flatten it.")
        return torch.nested.as_nested_tensor(self.as_list(key), layout=torch.jagged)


@documented
class Tokens(_Ragged):
    """A turn as token ids, `[num_tokens]` int64 each.

    Example:
        >>> from tensordict import lazy_stack
        >>> batch = lazy_stack([Tokens(full=torch.tensor([1, 2])), Tokens(full=torch.tensor([3]))])
        >>> batch.as_padded_tensor("full", padding_value=-1).tolist()
        [[1, 2], [3, -1]]
    """

    _documentation = __doc__

    prompt: torch.Tensor | None = None
    response: torch.Tensor | None = None
    full: torch.Tensor | None = None
    padded: bool | None = None
    """Whether the entries are padded; None if unknown."""

    @staticmethod
    def default_spec(shape: Sequence[int] = (), keys: Sequence[str] = ("prompt", "response", "full")) -> Composite:
        """Return the spec of a turn with these entries."""
        return _ragged_spec(Tokens, shape, keys, torch.int64)

    def to_text(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> Text:
        """Decode the tokens; raise ValueError if they are padded."""

        def decode(token_ids: torch.Tensor | None) -> str | None:
            if token_ids is None:
                return None
            return tokenizer.decode(
                token_ids.tolist(), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )

        if any(turn.padded for turn in batch_elements(self)):
            raise ValueError("padded tokens cannot be decoded: their end is unknown; use a policy without pad_output.")

        def convert(turn: Tokens) -> Text:
            return Text(prompt=decode(turn.prompt), response=decode(turn.response), full=decode(turn.full))

        return _each(self, convert)

    def to_history(self, tokenizer: Tokenizer, chat_template_name: str | None = None) -> ChatHistory:
        """Decode the tokens and parse the messages, as `Text.to_history` does."""
        return self.to_text(tokenizer).to_history(tokenizer, chat_template_name)


@documented
class LogProbs(_Ragged):
    """Log-probs of sampled tokens, `[num_tokens]` float32; in `full`, 0 for tokens that were not sampled.

    Example:
        >>> LogProbs(response=torch.tensor([-0.5])).as_list("response")
        [tensor([-0.5000])]
    """

    _documentation = __doc__

    prompt: torch.Tensor | None = None
    response: torch.Tensor | None = None
    full: torch.Tensor | None = None
    padded: bool | None = None

    @staticmethod
    def default_spec(shape: Sequence[int] = (), keys: Sequence[str] = ("prompt", "response", "full")) -> Composite:
        """Return the spec of a turn with these entries."""
        return _ragged_spec(LogProbs, shape, keys, torch.float32)


@documented
class Masks(_Ragged):
    """Masks over `("tokens", "full")`, `[num_tokens]` bool each.

    Example:
        >>> Masks(all_assistant_mask=torch.tensor([False, True])).all_assistant_mask.sum()
        tensor(1)
    """

    _documentation = __doc__

    all_attention_mask: torch.Tensor | None = None
    """True for every real token."""
    all_assistant_mask: torch.Tensor | None = None
    """True for tokens that the policy sampled (the loss mask)."""
    padded: bool | None = None

    @staticmethod
    def default_spec(
        shape: Sequence[int] = (), keys: Sequence[str] = ("all_attention_mask", "all_assistant_mask")
    ) -> Composite:
        """Return the spec of a turn with these entries."""
        return _ragged_spec(Masks, shape, keys, torch.bool)


def _ragged_spec(cls: type, shape: Sequence[int], keys: Sequence[str], dtype: torch.dtype) -> Composite:
    entries = {key: Unbounded((*shape, -1), dtype=dtype) for key in keys}
    return Composite(entries, shape=torch.Size(shape), data_cls=cls)


def _each(container: TensorClass, convert: Callable[[Turn], Converted]) -> Converted:
    return restacked([_converted(turn, convert) for turn in batch_elements(container)], container.batch_size)


def _converted(turn: TensorClass, convert: Callable[[Turn], Converted]) -> Converted:
    """Convert a turn, or each turn of a container without batch size that holds the entries of several turns."""
    entries = {name: getattr(turn, name) for name in _TURN if getattr(turn, name) is not None}
    sizes = {_num_within(entry) for entry in entries.values()}
    if sizes <= {None}:
        return convert(turn)
    if len(sizes) != 1:
        raise ValueError(f"{type(turn).__name__} has entries of different lengths, {sizes}; give it a batch_size.")
    several = [
        convert(type(turn)(**dict(zip(entries, one, strict=True)))) for one in zip(*entries.values(), strict=True)
    ]
    columns = {name: [getattr(one, name) for one in several] for name in _TURN}
    joined = {name: _joined(column) for name, column in columns.items() if column[0] is not None}
    return type(several[0])(**joined, **({"padded": False} if isinstance(several[0], Tokens) else {}))


_TURN = ("prompt", "response", "full")


def _num_within(entry: History | torch.Tensor | str | list[str]) -> int | None:
    if isinstance(entry, History):
        if not entry.conversation_shape:
            return None
        return len(entry)
    if isinstance(entry, list) or (isinstance(entry, torch.Tensor) and entry.ndim > 1):
        return len(entry)
    return None


def _joined(column: list) -> object:
    if isinstance(column[0], History):
        return torch.stack(column)
    if not isinstance(column[0], torch.Tensor):
        return column
    is_even = len({len(ids) for ids in column}) == 1
    if is_even:
        return torch.stack(column)
    return torch.nested.as_nested_tensor(column, layout=torch.jagged)

"""`History`: conversations as a TensorDict leaf; one element is one conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard, TypeVar, cast

import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass
from torchrl.data import Composite, NonTensor

from llmrl._utils.types import Nested, Tokenizer
from llmrl.data.message import Message, check_messages, text_of
from llmrl.data.templated_text import assistant_spans, parse_templated
from llmrl.data.tensordicts import container_of, documented, non_tensor

Result = TypeVar("Result")
Chats: TypeAlias = Sequence[Message] | Sequence["Chats"]
"""One conversation, or any nesting of lists of them."""


class Chat:
    """The messages of one conversation as a leaf of a TensorDict; they are not changed, so a copy is the same object.

    TensorDict copies what is not a tensor at each step, through every dict within: of a plain tuple of messages the
    copy of a long conversation costs many times that of a short one. It saves what it takes for JSON as JSON, which
    would come back as a list; this is pickled.

    Example:
        >>> import copy
        >>> chat = Chat([{"role": "user", "content": "Hi"}])
        >>> copy.deepcopy(chat) is chat, chat.messages
        (True, ({'role': 'user', 'content': 'Hi'},))
    """

    __slots__ = ("messages",)

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self.messages = tuple(messages)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chat) and self.messages == other.messages

    __hash__ = None  # type: ignore[assignment]  # messages are dicts

    def __copy__(self) -> Chat:
        return self

    def __deepcopy__(self, memo: object) -> Chat:
        return self

    def __repr__(self) -> str:
        return f"Chat({list(self.messages)!r})"


@documented
class History(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Conversations, batched: each element of the batch is one conversation, an immutable tuple of messages.

    The number of messages is ragged, so it is not a batch dimension: `history[0]` is the first conversation of a
    batch and `history.chats[0][-1]` its last message. `append` returns a new history that shares every message, so a
    step of a long conversation costs no more than that of a short one.

    Example:
        >>> history = History.from_chats([{"role": "user", "content": "7 + 8 ="}])
        >>> history = history.append({"role": "assistant", "content": "15"})
        >>> history.role, history.content
        (['user', 'assistant'], ['7 + 8 =', '15'])
    """

    _documentation = __doc__

    messages: Chat | NonTensorStack
    """A `Chat` for one conversation (batch shape `[]`); nested lists of them for a batch. Read `chats`."""

    @classmethod
    def from_chats(cls, chats: Chats, *, check: bool = True) -> History:
        """Build from one conversation (a list of messages) or any nesting of lists of conversations.

        Raises:
            TypeError, ValueError: when a message is malformed, naming it.
        """
        if is_conversation(chats):
            messages = Chat(check_messages(chats) if check else chats)
            return container_of(cls, {"messages": non_tensor(messages)})
        elements = [cls.from_chats(chat, check=check) for chat in cast("Sequence[Chats]", chats)]
        return _stacked(elements)

    @classmethod
    def from_text(cls, text: Nested[str], *, family: str | None = None) -> History:
        r"""Read back what a chat template wrote: one text, or any nesting of lists of texts.

        Args:
            text: special tokens included; see `parse_templated`. A last turn that was cut says `is_complete: False`.
            family: `chatml`, `llama3`, `gemma` or `mistral`; by default the one whose marks occur.

        Raises:
            ValueError: for an unknown family, or a text without its marks.

        Example:
            >>> History.from_text("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n").to_chats()
            [{'role': 'user', 'content': 'Hi'}]
        """
        if isinstance(text, str):
            messages, are_ended = parse_templated(text, family=family)
            if not are_ended[-1]:
                messages[-1] = {**messages[-1], "is_complete": False}
            return cls.from_chats(messages, check=False)
        elements = [cls.from_text(one, family=family) for one in text]
        return _stacked(elements)

    @property
    def chats(self) -> Nested[tuple[Message, ...]]:
        """The messages: a tuple for one conversation, nested lists of tuples for a batch."""
        chats = _to_lists(self.messages)
        if isinstance(chats, tuple):  # one value broadcast over the batch, as specs make it
            for size in reversed(self.batch_size):
                chats = [chats] * size
        return chats

    def to_chats(self) -> Nested[list[dict[str, object]]]:
        """Plain lists of message dicts, nested as the batch is; the reverse of `from_chats`."""
        return _map_chats(self.chats, lambda chat: [dict(message) for message in chat])

    @property
    def role(self) -> Nested[list[str]]:
        """Roles of the messages, nested as the batch is."""
        return _map_chats(self.chats, lambda chat: [message["role"] for message in chat])

    @property
    def content(self) -> Nested[list[str]]:
        """Texts of the messages, nested as the batch is."""
        return _map_chats(self.chats, lambda chat: [text_of(message.get("content")) for message in chat])

    @property
    def tool_calls(self) -> Nested[list[list[dict[str, object]]]]:
        """Tool calls of the messages, an empty list where there are none, nested as the batch is."""
        return _map_chats(self.chats, lambda chat: [list(message.get("tool_calls") or ()) for message in chat])

    @property
    def tool_responses(self) -> Nested[list[str | None]]:
        """Texts of the messages that answer a tool call, None for the others, nested as the batch is."""

        def answers(chat: Sequence[Message]) -> list[str | None]:
            return [text_of(m.get("content")) if m["role"] == "tool" else None for m in chat]

        return _map_chats(self.chats, answers)

    @property
    def is_complete(self) -> Nested[list[bool]]:
        """Whether each message was ended, as far as it is known, nested as the batch is."""
        return _map_chats(self.chats, lambda chat: [bool(message.get("is_complete", True)) for message in chat])

    @property
    def num_messages(self) -> Nested[int]:
        """Number of messages, nested as the batch is."""
        return _map_chats(self.chats, len)

    def append(self, message: Message) -> History:
        """Return a new history in which each conversation has one more message.

        Raises:
            ValueError: when the message is malformed.
        """
        return self.extend([message])

    def extend(self, messages: Iterable[Message]) -> History:
        """Return a new history in which each conversation has these messages added at its end."""
        added = check_messages(messages)
        return History.from_chats(_map_chats(self.chats, lambda chat: (*chat, *added)), check=False)

    def apply_chat_template(
        self,
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        return_assistant_tokens_mask: bool = False,
        **template_kwargs: Any,
    ) -> Any:
        """Render each conversation with a tokenizer's chat template: text, or ids with `tokenize=True`.

        With `return_assistant_tokens_mask`, a pair `(token_ids, mask)` of lists a conversation: the mask is true at
        what the assistant wrote, its end-of-turn token included. It is found for any template that only appends,
        generation markers or not.

        For reading, for single turns and for supervised data. Token-exact multi-turn prompts come from
        `llmrl.rendering.Conversation`.

        Raises:
            ValueError: for a mask, when the template rewrites earlier turns.
        """

        def render(chat: Sequence[Message]) -> str | list[int]:
            return tokenizer.apply_chat_template(
                [dict(message) for message in chat],
                add_generation_prompt=add_generation_prompt,
                tokenize=tokenize,
                **({"return_dict": False} if tokenize else {}),
                **template_kwargs,
            )

        def masked(chat: Sequence[Message]) -> tuple[list[int], list[bool]]:
            def text(messages: Sequence[Message], is_prompt: bool) -> str:
                return History.from_chats(list(messages), check=False).apply_chat_template(
                    tokenizer, add_generation_prompt=is_prompt, **template_kwargs
                )

            return _masked_ids(tokenizer, text(chat, add_generation_prompt), assistant_spans(chat, text))

        return _map_chats(self.chats, masked if return_assistant_tokens_mask else render)

    def save(self, path: str | Path) -> None:
        """Write as JSON lines, one conversation a line, in the form that datasets of chats have.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "chats.jsonl"
            >>> History.from_chats([{"role": "user", "content": "Hi"}]).save(path)
            >>> History.load(path).chats
            [({'role': 'user', 'content': 'Hi'},)]
        """
        lines = (json.dumps({"messages": [dict(m) for m in chat]}, ensure_ascii=False) for chat in flatten(self.chats))
        Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read what `save` wrote, as a batch `[num_conversations]`.

        Raises:
            TypeError, ValueError: when a message is malformed.
        """
        # Not `splitlines`, which splits at U+2028 too, and JSON has that within its strings.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
        return cls.from_chats([json.loads(line)["messages"] for line in lines if line.strip()])

    @staticmethod
    def default_spec(shape: Sequence[int] = ()) -> Composite:
        """Return the spec of histories of batch shape `shape`."""
        return Composite(
            messages=NonTensor(shape=tuple(shape), example_data=Chat()), data_cls=History, shape=torch.Size(shape)
        )


def stack_histories(histories: Sequence[History]) -> History:
    """Stack single conversations into a history of shape `[num_conversations]`."""
    stacked = NonTensorStack(*[NonTensorData(Chat(*flatten(history.chats))) for history in histories])
    return History(messages=stacked, batch_size=(len(histories),))


def _stacked(histories: list[History]) -> History:
    if not histories[0].batch_size:
        return stack_histories(histories)
    return torch.stack(histories, 0)  # type: ignore[arg-type, return-value]  # torch hands it to tensordict


def is_conversation(value: Chats) -> TypeGuard[Sequence[Message]]:
    """Return whether a value is one conversation: a sequence of messages, possibly empty."""
    return isinstance(value, (list, tuple)) and (not value or isinstance(value[0], Mapping))


def _masked_ids(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
    """Token ids of a rendering, and which of them lie in the spans, up to the last special token of each."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    token_ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    mask = [False] * len(token_ids)
    for start, end in spans:
        places = [place for place, (left, right) in enumerate(offsets) if start <= left and right <= end]
        ends = [place for place in places if token_ids[place] in special]
        last = ends[-1] if ends else places[-1] if places else -1
        for place in places:
            mask[place] = place <= last  # what follows the end-of-turn token was the template's
    return token_ids, mask


def _to_lists(value: Chat | tuple[Message, ...] | Iterable[Chat]) -> Nested[tuple[Message, ...]]:
    # A chat, or a tuple of messages, is a conversation; anything else iterable is a batch dimension.
    if isinstance(value, Chat):
        return value.messages
    return value if isinstance(value, tuple) else [_to_lists(item) for item in value]


def _map_chats(value: Nested[tuple[Message, ...]], function: Callable[[tuple[Message, ...]], Result]) -> Nested[Result]:
    return function(value) if isinstance(value, tuple) else [_map_chats(item, function) for item in value]


def flatten(value: Nested[tuple[Message, ...]]) -> list[tuple[Message, ...]]:
    """Return the conversations of a batch of any shape, one after another."""
    return [value] if isinstance(value, tuple) else [chat for item in value for chat in flatten(item)]


def _represent(self: History) -> str:
    chats = flatten(self.chats)
    body = "\n--\n".join("\n".join(f"  {m['role']}: {text_of(m.get('content'))}" for m in chat) for chat in chats)
    return f"History(batch_size={list(self.batch_size)}):\n{body}"


# The tensorclass machinery writes its own __repr__ over one defined in the body.
History.__repr__ = _represent  # type: ignore[method-assign, assignment]

"""Conversations as immutable leaves, and nested lists of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeGuard, TypeVar, cast

from llmrl._utils.types import Item, Nested
from llmrl.data.message import Message

Result = TypeVar("Result")
Chats: TypeAlias = Sequence[Message] | Sequence["Chats"]
"""One conversation, or nested lists of conversations."""


class Chat:
    """The messages of one conversation as an immutable leaf of a TensorDict.

    TensorDict copies non-tensor data at each step, and saves plain sequences as JSON lists. Copying a `Chat` returns
    the same object, so long conversations cost no more than short ones, and TensorDict saves it by pickling. With
    `is_message`, it is one message of a conversation that a TensorDict holds message by message (`History`).

    Example:
        >>> import copy
        >>> chat = Chat([{"role": "user", "content": "Hi"}])
        >>> copy.deepcopy(chat) is chat, chat.messages
        (True, ({'role': 'user', 'content': 'Hi'},))
    """

    __slots__ = ("is_message", "messages")

    def __init__(self, messages: Iterable[Message] = (), *, is_message: bool = False) -> None:
        self.messages = tuple(messages)
        self.is_message = is_message

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chat) and (self.messages, self.is_message) == (other.messages, other.is_message)

    __hash__ = None  # type: ignore[assignment]  # messages are dicts

    def __copy__(self) -> Chat:
        return self

    def __deepcopy__(self, memo: object) -> Chat:
        return self

    def __repr__(self) -> str:
        return f"Chat({list(self.messages)!r})"


# The leaves of a batch are nested lists of the batch's shape. Either each leaf is a conversation,
# or each is one message, and the last dimension is that of the messages.


def leaves_of(value: Chat | tuple[Message, ...] | Iterable[Chat], batch_size: Sequence[int]) -> Nested[Chat]:
    """Return the leaves of a batch; a single value, such as a spec creates, is broadcast over the batch."""
    if isinstance(value, (Chat, tuple)):
        leaf: Nested[Chat] = value if isinstance(value, Chat) else Chat(value)
        for size in reversed(batch_size):
            leaf = [leaf] * size
        return leaf
    return [leaves_of(item, ()) for item in value]


def are_messages(leaves: Nested[Chat]) -> bool:
    """Return whether the leaves are messages rather than conversations."""
    while not isinstance(leaves, Chat):
        if not leaves:
            return False
        leaves = leaves[0]
    return leaves.is_message


def unwrapped(leaves: Nested[Chat]) -> Nested[tuple[Message, ...]]:
    """Return the messages of each leaf."""
    return map_nested(leaves, lambda leaf: leaf.messages)


def conversations(leaves: Nested[Chat]) -> Nested[tuple[Message, ...]]:
    """Return the conversations of leaves of either kind; a single message is a conversation of one."""
    if isinstance(leaves, Chat) or not are_messages(leaves):
        return unwrapped(leaves)
    if isinstance(leaves[0], Chat):
        return tuple(message for leaf in leaves for message in cast(Chat, leaf).messages)
    return [conversations(leaf) for leaf in leaves]


def message_leaves(chats: Nested[tuple[Message, ...]]) -> Nested[Chat]:
    """Return one leaf per message."""
    return map_nested(chats, lambda chat: [Chat([message], is_message=True) for message in chat])


def concatenated(chats: Nested[tuple[Message, ...]], added: Nested[tuple[Message, ...]]) -> Nested[tuple[Message, ...]]:
    """Append messages to conversations: the same messages to all, or one sequence per conversation.

    Example:
        >>> concatenated([({"role": "user"},), ()], ({"role": "tool"},))
        [({'role': 'user'}, {'role': 'tool'}), ({'role': 'tool'},)]
    """
    if isinstance(chats, tuple):
        return (*chats, *cast("tuple[Message, ...]", added))
    each = [added] * len(chats) if isinstance(added, tuple) else added
    return [concatenated(chat, end) for chat, end in zip(chats, each, strict=True)]


def is_conversation(value: Chats) -> TypeGuard[Sequence[Message]]:
    """Return whether a value is one conversation: a sequence of messages, possibly empty."""
    return isinstance(value, (list, tuple)) and (not value or isinstance(value[0], Mapping))


def map_nested(value: Nested[Item], function: Callable[[Item], Result]) -> Nested[Result]:
    """Apply a function to each item, and return the results with the same nesting."""
    if isinstance(value, list):
        return [map_nested(item, function) for item in value]
    return function(value)


def flatten(value: Nested[Item]) -> list[Item]:
    """Return the items of a batch of any shape as a flat list."""
    if not isinstance(value, list):
        return [value]
    return [one for item in value for one in flatten(item)]

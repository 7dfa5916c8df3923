"""Conversations as immutable leaves, and nested lists of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeGuard, TypeVar, cast

from llmrl._utils.types import Nested
from llmrl.data.message import Message

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

    Args:
        messages: in order.
        is_message: it is one message of a conversation that a TensorDict holds message by message, see `History`.
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


# A batch's leaves are nested lists as the batch is. Either each is a conversation, or each is one message; the last
# dimension is then that of the messages.


def leaves_of(value: Chat | tuple[Message, ...] | Iterable[Chat], batch_size: Sequence[int]) -> Nested[Chat]:
    """Return the leaves of a batch; one value is broadcast over it, as specs make it."""
    if isinstance(value, (Chat, tuple)):
        leaf: Nested[Chat] = value if isinstance(value, Chat) else Chat(value)
        for size in reversed(batch_size):
            leaf = [leaf] * size
        return leaf
    return [leaves_of(item, ()) for item in value]


def are_messages(leaves: Nested[Chat]) -> bool:
    """Return whether leaves are messages, not conversations."""
    while not isinstance(leaves, Chat):
        if not leaves:
            return False
        leaves = leaves[0]
    return leaves.is_message


def unwrapped(leaves: Nested[Chat]) -> Nested[tuple[Message, ...]]:
    """Return the messages of each leaf."""
    return leaves.messages if isinstance(leaves, Chat) else [unwrapped(leaf) for leaf in leaves]


def conversations(leaves: Nested[Chat]) -> Nested[tuple[Message, ...]]:
    """Return the conversations, whichever the leaves are; a message alone is a conversation of one."""
    if isinstance(leaves, Chat) or not are_messages(leaves):
        return unwrapped(leaves)
    if isinstance(leaves[0], Chat):
        return tuple(message for leaf in leaves for message in cast(Chat, leaf).messages)
    return [conversations(leaf) for leaf in leaves]


def message_leaves(chats: Nested[tuple[Message, ...]]) -> Nested[Chat]:
    """Return a leaf for each message."""
    if isinstance(chats, tuple):
        return [Chat([message], is_message=True) for message in chats]
    return [message_leaves(chat) for chat in chats]


def concatenated(chats: Nested[tuple[Message, ...]], added: Nested[tuple[Message, ...]]) -> Nested[tuple[Message, ...]]:
    """Return conversations with others at their ends, the same for all or one for each.

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


def map_chats(value: Nested[tuple[Message, ...]], function: Callable[[tuple[Message, ...]], Result]) -> Nested[Result]:
    """Return what a function makes of each conversation, nested as they are."""
    return function(value) if isinstance(value, tuple) else [map_chats(item, function) for item in value]


def flatten(value: Nested[tuple[Message, ...]]) -> list[tuple[Message, ...]]:
    """Return the conversations of a batch of any shape, one after another."""
    return [value] if isinstance(value, tuple) else [chat for item in value for chat in flatten(item)]

"""TorchRL's view of messages as arrays: parallel lists of their parts, and indices of several kinds."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, TypeVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

from llmrl._utils.types import Nested
from llmrl.data.chats import Chat, are_messages, flatten, map_nested, unwrapped
from llmrl.data.message import Message, text_of
from llmrl.data.tensordicts import non_tensor

Container = TypeVar("Container")


class _Messages(Protocol):
    """Interface of the decorated class."""

    batch_size: torch.Size
    batch_dims: int

    @property
    def chats(self) -> Nested[tuple[Message, ...]]: ...

    @property
    def is_message(self) -> bool: ...

    @property
    def _leaves(self) -> Nested[Chat]: ...


def array_of_messages(cls: type[Container]) -> type[Container]:
    """Class decorator that gives a tensorclass with a leaf `messages` the constructor and the indices of `History`.

    The methods are set on the class, since the tensorclass decorator replaces those that a class body defines.
    """
    made: Any = cls  # mypy does not know the methods that tensordict generates
    generated_init = made.__init__
    generated_get = made.__getitem__
    generated_unbind = made.unbind

    def initialize(
        self: _Messages,
        role: Nested[str] | None = None,
        content: object = None,
        is_complete: object = True,
        tool_calls: object = None,
        tool_responses: object = None,
        *,
        messages: Chat | NonTensorData | NonTensorStack | None = None,
        batch_size: Sequence[int] | int | None = None,
        device: torch.device | str | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if isinstance(batch_size, int):
            batch_size = (batch_size,)
        if isinstance(role, str) and batch_size is not None and len(batch_size) == 1:
            role = [role] * batch_size[0]  # a single role is broadcast, as in TorchRL
        if messages is None:
            if role is None:
                raise ValueError("History takes role and content; use History.from_chats to build one from messages.")
            leaves, shape = messages_of(role, content, is_complete, tool_calls, tool_responses)
            for size in reversed(batch_size if batch_size and not shape else ()):  # one message is broadcast
                leaves = [leaves] * size
                shape = (size, *shape)
            if batch_size is not None and tuple(batch_size) != shape:
                raise ValueError(f"batch_size must be that of role, {list(shape)}, got {list(batch_size)}.")
            messages = leaf_of(leaves)
            batch_size = shape
        generated_init(self, messages=messages, batch_size=batch_size or (), device=device, names=names)

    def get(self: _Messages, index: object) -> _Messages:
        found = None if are_messages(self._leaves) else message_index(index, self.batch_dims)
        if found is None:
            return generated_get(self, index)
        of_batch, of_messages = found
        chosen = generated_get(self, of_batch) if of_batch else self
        leaves = map_nested(chosen.chats, lambda chat: at(chat, of_messages))
        return made(messages=leaf_of(leaves), batch_size=chosen.batch_size)

    def length(self: _Messages) -> int:
        if self.is_message:
            raise TypeError("a single message has no length.")
        if self.batch_dims:
            return self.batch_size[0]
        return len(self.chats)

    def iterate(self: _Messages) -> Iterator[_Messages]:
        return (get(self, place) for place in range(length(self)))

    def unbind(self: _Messages, dim: int = 0) -> tuple[_Messages, ...]:
        if self.batch_dims or self.is_message:
            return generated_unbind(self, dim)
        return tuple(iterate(self))

    def represent(self: _Messages) -> str:
        body = "\n--\n".join(
            "\n".join(f"  {message['role']}: {text_of(message.get('content'))}" for message in chat)
            for chat in flatten(self.chats)
        )
        return f"{cls.__name__}(batch_size={list(self.batch_size)}):\n{body}"

    def shape(self: _Messages) -> torch.Size:
        leaves = self._leaves
        if are_messages(leaves):
            return self.batch_size
        lengths = {len(chat) for chat in flatten(unwrapped(leaves))}
        return torch.Size((*self.batch_size, lengths.pop() if len(lengths) == 1 else -1))

    def with_shape(name: str) -> Any:
        """Wrap a method so that it accepts a shape that ends with the number of messages, as `shape` does."""
        generated = getattr(made, name)

        def change(self: _Messages, *sizes: Any) -> _Messages:
            size = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
            own = shape(self)
            if len(size) > self.batch_dims < len(own) and size[-1] == own[-1]:
                size = size[:-1]
            return generated(self, size)

        return change

    made.__init__ = initialize
    made.__repr__ = represent
    made.shape = property(shape)
    made.ndim = property(lambda self: len(shape(self)))
    for name in ("expand", "view", "reshape"):
        setattr(made, name, with_shape(name))
    made.__getitem__ = get
    made.__len__ = length
    made.__iter__ = iterate
    made.unbind = unbind
    return cls


def leaf_of(leaves: Nested[Chat]) -> NonTensorData | NonTensorStack:
    """Return nested chats as one leaf of a TensorDict."""
    if isinstance(leaves, Chat):
        return non_tensor(leaves)
    return NonTensorStack(*map(leaf_of, leaves))


def messages_of(
    role: Nested[str], content: object, is_complete: object, tool_calls: object, tool_responses: object
) -> tuple[Nested[Chat], tuple[int, ...]]:
    """Return messages as leaves, nested as `role` is, and their shape; the arguments are as in `History`."""
    if isinstance(role, str):
        answered = "".join(map(str, tool_responses)) if isinstance(tool_responses, (list, tuple)) else tool_responses
        message: dict[str, object] = {"role": role, "content": content or answered or content}
        if tool_calls:
            message["tool_calls"] = [_call(call) for call in tool_calls]  # type: ignore[attr-defined]
        if message["content"] is None and not tool_calls:
            raise ValueError(f"a message of role {role!r} has neither content nor tool_calls.")
        if not is_complete:
            message["is_complete"] = False
        return Chat([message], is_message=True), ()
    columns = [
        _spread(name, value, len(role))
        for name, value in (
            ("content", content), ("is_complete", is_complete), ("tool_calls", tool_calls),
            ("tool_responses", tool_responses),
        )
    ]  # fmt: skip
    made = [messages_of(*one) for one in zip(role, *columns, strict=True)]
    shapes = {shape for _, shape in made}
    if len(shapes) != 1:
        raise ValueError(f"role must be nested lists of equal lengths, got {role!r}; use History.from_chats.")
    return [leaf for leaf, _ in made], (len(made), *shapes.pop())


def _spread(name: str, value: object, size: int) -> Sequence[object]:
    if value is None or isinstance(value, (str, bool)):
        return [value] * size
    if not isinstance(value, (list, tuple)) or len(value) != size:
        raise ValueError(f"{name} must be one value or a list of {size} values, as role is, got {value!r:.80}.")
    return value


def _call(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    return dict(call)


def message_index(index: object, num_batch_dims: int) -> tuple[tuple[object, ...], object] | None:
    """Split an index into its parts for the batch and for the messages; None if it does not index messages.

    Example:
        >>> message_index((0, -1), 1), message_index((..., slice(2)), 1), message_index(0, 1)
        (((0,), -1), ((slice(None, None, None),), slice(None, 2, None)), None)
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    num_indexed = sum(_num_dims(part) for part in parts)
    places = [place for place, part in enumerate(parts) if part is Ellipsis]
    if places:
        parts[places[0] : places[0] + 1] = [slice(None)] * (num_batch_dims + 1 - num_indexed)
        num_indexed = num_batch_dims + 1
    if num_indexed > num_batch_dims + 1:
        raise IndexError(f"{num_indexed} indices for {num_batch_dims} dimensions of conversations and one of messages.")
    if num_indexed <= num_batch_dims:
        return None
    return tuple(parts[:-1]), parts[-1]


def _num_dims(part: object) -> int:
    if part is None or part is Ellipsis:
        return 0
    if not (isinstance(part, torch.Tensor) and part.dtype == torch.bool):
        return 1
    return part.ndim


def at(chat: tuple[Message, ...], index: object) -> Chat:
    """Return one message of a conversation, or, for a slice, a mask or several indices, a conversation of these.

    Example:
        >>> chat = ({"role": "user"}, {"role": "assistant"}, {"role": "tool"})
        >>> at(chat, -1), at(chat, slice(1)), at(chat, [0, 2])
        (Chat([{'role': 'tool'}]), Chat([{'role': 'user'}]), Chat([{'role': 'user'}, {'role': 'tool'}]))
    """
    if isinstance(index, slice):
        return Chat(chat[index])
    if isinstance(index, (torch.Tensor, np.ndarray)):
        index = index.tolist()
    if isinstance(index, SupportsIndex):
        return Chat([chat[operator.index(index)]], is_message=True)
    if isinstance(index, Iterable):
        return Chat(chat[place] for place in np.arange(len(chat))[list(index)])  # places, or a mask
    raise IndexError(f"messages are indexed by numbers and slices, got {index!r}.")

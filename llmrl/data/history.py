"""`History`: conversations as a TensorDict leaf."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, lazy_stack
from torchrl.data import Composite, NonTensor

from llmrl._utils.types import Nested, Tokenizer
from llmrl.data.chats import (
    Chat,
    Chats,
    are_messages,
    concatenated,
    conversations,
    flatten,
    is_conversation,
    leaves_of,
    map_nested,
    message_leaves,
    unwrapped,
)
from llmrl.data.history_rendering import ChatRendering
from llmrl.data.message import Message, check_messages, copied, text_of
from llmrl.data.message_arrays import array_of_messages, leaf_of
from llmrl.data.templated_text import parse_templated, template_named
from llmrl.data.tensordicts import container_of, documented, non_tensor, plain

Result = TypeVar("Result")


@documented
@array_of_messages
class History(TensorClass["nocast"]):  # type: ignore[name-defined]
    """A batch of conversations; each element is one conversation, an immutable tuple of messages.

    The messages are a last, ragged dimension, which is not part of the batch size. For a batch
    `[2]`, `history[0]` is the first conversation, `history[0, -1]` its last message,
    `history[..., -1]` the last message of each conversation, and `history[..., :2]` the first two
    messages of each. `append` with messages returns a new history that shares its messages.

    TorchRL's form is also supported: `History(role=..., content=...)` is one message; with nested lists, the messages
    are the last dimension of `batch_size`; `torch.stack` of messages returns a conversation.

    Args:
        role: role of each message, a string or nested lists of strings.
        content: content of each message, a text or a list of parts; a single value applies to all messages.
        is_complete: whether each message was ended; by default true.
        tool_calls: list of the tool calls of each message.
        tool_responses: texts that answer calls, for messages without content.
        messages: leaf to use instead of the arguments above; prefer `from_chats`.
        batch_size: shape of `role`, the default.

    Raises ValueError if the shapes of the arguments differ, or a message has no role, or neither content nor calls.

    Example:
        >>> history = History.from_chats([{"role": "user", "content": "7 + 8 ="}])
        >>> history = history.append({"role": "assistant", "content": "15"})
        >>> history.role, history.content, history[-1].content, len(history)
        (['user', 'assistant'], ['7 + 8 =', '15'], '15', 2)
        >>> torch.stack([History(role="user", content="Hi"), History(role="assistant", content="Hello")]).content
        ['Hi', 'Hello']
    """

    _documentation = __doc__

    messages: Chat | NonTensorStack
    """A `Chat` for one conversation (batch shape `[]`); nested lists of them for a batch. Read `chats` instead."""

    @classmethod
    def from_chats(cls, chats: Chats, *, check: bool = True) -> History:
        """Build a history from one conversation (a list of messages) or nested lists of conversations.

        With `check`, raise TypeError or ValueError if a message is malformed.
        """
        if is_conversation(chats):
            messages = Chat(copied(check_messages(chats)) if check else chats)
            return container_of(cls, {"messages": non_tensor(messages)})
        elements = [cls.from_chats(chat, check=check) for chat in cast("Sequence[Chats]", chats)]
        return _stacked(elements)

    @classmethod
    def from_text(
        cls,
        text: Nested[str],
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> History:
        r"""Parse text that a chat template wrote: one text, or nested lists of texts.

        Args:
            text: templated text with its special tokens. A truncated last message gets `is_complete: False`.
            chat_template_name: a family (`chatml`, `llama3`, `llama4`, `gemma`, `mistral`) or a model of a family
                (`qwen`, `llama`); by default the family of the first mark in the text.
            chat_template, tokenizer: ignored, as in TorchRL.

        Raises ValueError if the name is unknown, or the text has none of the family's marks.

        Example:
            >>> History.from_text("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n").to_chats()
            [{'role': 'user', 'content': 'Hi'}]
        """
        if isinstance(text, str):
            messages, are_ended = parse_templated(text, family=chat_template_name)
            if not are_ended[-1]:
                messages[-1] = {**messages[-1], "is_complete": False}
            return cls.from_chats(messages, check=False)
        return _stacked([cls.from_text(one, chat_template_name) for one in text])

    @property
    def chats(self) -> Nested[tuple[Message, ...]]:
        """Messages: a tuple for one conversation, nested lists of tuples for a batch."""
        return conversations(self._leaves)

    @property
    def _leaves(self) -> Nested[Chat]:
        held = self._tensordict.get("messages")  # ten times faster than the attribute
        return leaves_of(plain(held) if isinstance(held, NonTensorData) else self.messages, self._tensordict.batch_size)

    def _clone(self, recurse: bool = True) -> History:
        held = self._tensordict
        leaf = held.get("messages")
        if recurse or not isinstance(leaf, NonTensorData) or held.device is not None or held.batch_size:
            return super()._clone(recurse)
        # Messages are immutable, so copies share the leaf. tensordict would copy it, and leave
        # reference cycles that Python's garbage collector has to find.
        return container_of(History, {"messages": leaf})

    def copy(self) -> History:
        """Return a copy that shares the messages."""
        return self._clone(recurse=False)

    @property
    def is_message(self) -> bool:
        """Whether this is a single message."""
        return not self.batch_size and are_messages(self._leaves)

    def to_chats(self) -> Nested[list[dict[str, object]]]:
        """Return plain lists of message dicts, nested as the batch is; the reverse of `from_chats`."""
        return map_nested(self.chats, lambda chat: [dict(message) for message in chat])

    def _each(self, read: Callable[[Message], Result]) -> Nested[list[Result]] | Result:
        leaves = self._leaves
        found = map_nested(conversations(leaves), lambda chat: [read(message) for message in chat])
        if not (isinstance(leaves, Chat) and leaves.is_message):
            return found
        return found[0]

    @property
    def role(self) -> Nested[list[str]] | str:
        """Roles of the messages, nested as the batch is; for a single message, its role."""
        return self._each(lambda message: message["role"])

    @property
    def content(self) -> Nested[list[str]] | str:
        """Texts of the messages, nested as the batch is; for a single message, its text."""
        return self._each(lambda message: text_of(message.get("content")))

    @property
    def tool_calls(self) -> Nested[list[list[dict[str, object]]]] | list[dict[str, object]]:
        """Tool calls of the messages, possibly empty lists, nested as the batch is."""
        return self._each(lambda message: list(message.get("tool_calls") or ()))

    @property
    def tool_responses(self) -> Nested[list[str | None]] | str | None:
        """Texts of the messages that answer a tool call, None for other messages, nested as the batch is."""
        return self._each(lambda message: text_of(message.get("content")) if message["role"] == "tool" else None)

    @property
    def is_complete(self) -> Nested[list[bool]] | bool:
        """Whether each message was ended, true if unknown, nested as the batch is."""
        return self._each(lambda message: bool(message.get("is_complete", True)))

    def append(self, history: Message | History, *, inplace: bool | None = None, dim: int = -1) -> History:
        """Append one message to each conversation.

        Args:
            history: a message for all conversations; or a `History` of one message, or of one message per conversation.
            inplace: whether to also change this history; by default true for a `History`, as in
                TorchRL, and false for a message.
            dim: dimension of the messages, which is the last one.

        Raises:
            ValueError: if the message is malformed, the batch sizes differ, or `dim` is another dimension.
            RuntimeError: if this history is a single message.
        """
        if not isinstance(history, History):
            return self.extend([history], inplace=inplace)
        if history.is_message:
            added: Nested[tuple[Message, ...]] = history.chats
        elif history.batch_size == self.conversation_shape and are_messages(history._leaves):
            added = unwrapped(history._leaves)
        else:
            raise ValueError(
                f"append takes one message, or one for each conversation of the batch {list(self.conversation_shape)}, "
                f"got a history of batch size {list(history.batch_size)}; use extend for several."
            )
        if dim not in (-1, len(self.conversation_shape)):
            raise ValueError(f"dim must be the messages' dimension, {len(self.conversation_shape)} or -1, got {dim}.")
        return self._longer(added, inplace)

    def extend(
        self, history: Iterable[Message] | History, *, inplace: bool | None = None, dim: int | None = None
    ) -> History:
        """Append messages to each conversation, or conversations to the batch.

        Args:
            history: messages for all conversations; or a `History` of conversations.
            inplace: as for `append`.
            dim: dimension for a `History`: by default 0, as in TorchRL, which appends conversations
                to a batch; the last dimension appends messages.

        Raises:
            ValueError: if a message is malformed, the batch sizes differ, or there is no dimension `dim`.
            RuntimeError: if either history is a single message.
        """
        if not isinstance(history, History):
            return self._longer(copied(check_messages(history)), bool(inplace))
        if history.is_message:
            raise RuntimeError("extend got a single message; append it instead.")
        num_dims = len(self.conversation_shape) + 1
        place = dim or 0
        if not -num_dims <= place < num_dims:
            raise ValueError(f"dim must be from {-num_dims} to {num_dims - 1} for this history, got {dim}.")
        place %= num_dims
        if place == len(self.conversation_shape):
            if history.conversation_shape != self.conversation_shape:
                raise ValueError(
                    f"extend takes a history of the batch size {list(self.conversation_shape)} for the messages, got "
                    f"{list(history.conversation_shape)}."
                )
            return self._longer(history.chats, inplace)
        both = [History.from_chats(part.chats, check=False).unbind(place) for part in (self, history)]
        return self._changed(cast(History, lazy_stack([*both[0], *both[1]], place)), inplace)

    @property
    def conversation_shape(self) -> torch.Size:
        """Batch size without the dimension of the messages."""
        return self.batch_size[:-1] if are_messages(self._leaves) else self.batch_size

    def _longer(self, added: Nested[tuple[Message, ...]], inplace: bool | None) -> History:
        if self.is_message:
            raise RuntimeError(
                "messages can only be appended to a conversation, and this history is a single message: call "
                "unsqueeze(0) first."
            )
        return self._changed(History.from_chats(concatenated(self.chats, added), check=False), inplace)

    def _changed(self, other: History, inplace: bool | None) -> History:
        """Return `other` in the form of this history (messages or not), in this object unless `inplace` is false."""
        lengths = {len(chat) for chat in flatten(other.chats)}
        if are_messages(self._leaves) and len(lengths) == 1:
            other = History(messages=leaf_of(message_leaves(other.chats)), batch_size=(*other.batch_size, *lengths))
        if inplace is False:
            return other
        self.__dict__["_tensordict"] = other._tensordict
        return self

    def apply_chat_template(
        self,
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        continue_final_message: bool = False,
        tokenize: bool | None = None,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool | None = None,
        return_assistant_tokens_mask: bool = False,
        **template_kwargs: object,
    ) -> Any:
        """Render each conversation with a chat template, as text or token ids.

        This is for display, single turns and supervised data; exact multi-turn prompts come from
        `llmrl.rendering.Conversation`. In token ids, special tokens in contents are encoded as
        ordinary text, so contents cannot forge a turn. Rendered text does not show where a special
        token is from, so do not tokenize rendered text with untrusted contents.

        Args:
            tokenizer: tokenizer, and source of the template unless another is given or was added for its model's name.
                A tokenizer without template uses `dialogpt`, `falcon` or `deepseek` by the model's name, else `chatml`.
            add_generation_prompt: whether to end with the beginning of an answer.
            chat_template: template to use instead of the tokenizer's.
            chat_template_name: name of a template: a family (`chatml`, `llama3`, `llama4`,
                `gemma`), a model, or a name given to `add_chat_template`.
            continue_final_message: whether to leave the last message open.
            tokenize: whether to return token ids; by default true with `return_tensors`,
                `return_dict` or `return_assistant_tokens_mask`.
            padding: True pads to the longest row of the batch, `"max_length"` to `max_length`, on the tokenizer's side.
            truncation: whether to keep only the first `max_length` tokens.
            return_tensors: `"pt"` or None.
            return_dict: whether to return a TensorDict with `input_ids` and `attention_mask`, `[num_tokens]` each.
            return_assistant_tokens_mask: whether to add `assistant_masks`, which is true for tokens in the template's
                `{% generation %}` blocks. If a template has none, it is true for the assistant's turns, including
                end-of-turn tokens, and the template must not rewrite earlier turns.
            template_kwargs: further variables of the template, such as `tools`.

        Returns:
            A text, a tensor `[1, num_tokens]` or a TensorDict; for a batch, nested lists of texts
            or tensors, or a lazily stacked TensorDict, which is dense if padded.

        Raises:
            ValueError: if the template does not read a variable, `max_length` is missing, a name is
                unknown, the tokenizer cannot split special tokens in contents, or a mask is
                requested that the template does not allow.
        """
        if chat_template_name is not None:
            if chat_template is not None:
                raise ValueError("chat_template and chat_template_name each choose the template: pass one of them.")
            chat_template = template_named(chat_template_name)
        if return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors must be 'pt', got {return_tensors!r}.")
        is_dict = return_assistant_tokens_mask if return_dict is None else return_dict
        rendering = ChatRendering(
            tokenizer,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            has_mask=return_assistant_tokens_mask,
            template_kwargs=template_kwargs,
        )
        if not (bool(is_dict or return_tensors) if tokenize is None else tokenize):
            return map_nested(self.chats, rendering.text)
        return rendering.encode(self.chats, is_dict=is_dict)

    def save(self, path: str | Path) -> None:
        """Write the conversations as JSON lines, one conversation with `messages` per line.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "chats.jsonl"
            >>> History.from_chats([{"role": "user", "content": "Hi"}]).save(path)
            >>> History.load(path).chats
            [({'role': 'user', 'content': 'Hi'},)]
        """
        records = ({"messages": [dict(message) for message in chat]} for chat in flatten(self.chats))
        text = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
        Path(path).write_bytes(text.encode("utf-8", errors="backslashreplace"))  # JSON's own form of lone surrogates

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read a file that `save` wrote, as a batch `[num_conversations]`, and check its messages.

        Raises ValueError if the file has no conversation or a message is malformed.
        """
        # `splitlines` would also split at U+2028, which JSON strings may contain.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
        chats = [json.loads(line)["messages"] for line in lines if line.strip()]
        if not chats:
            raise ValueError(f"path must be a file with a conversation in each line, and {str(path)!r} has none.")
        return cls.from_chats(chats)

    @staticmethod
    def default_spec(shape: Sequence[int] = ()) -> Composite:
        """Return the spec of histories of batch shape `shape`."""
        return Composite(
            messages=NonTensor(shape=tuple(shape), example_data=Chat()), data_cls=History, shape=torch.Size(shape)
        )


def _stacked(histories: list[History]) -> History:
    if not histories[0].batch_size:
        leaves: list[Nested[Chat]] = [Chat(*flatten(history.chats)) for history in histories]
        return History(messages=leaf_of(leaves), batch_size=(len(histories),))
    return torch.stack(histories, 0)  # type: ignore[arg-type, return-value]  # torch hands it to tensordict

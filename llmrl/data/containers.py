"""Containers of a step: what was given (`prompt`), what was generated (`response`), and both (`full`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorClass
from torchrl.data import Composite, NonTensor

from llmrl.data.history import History


class ChatHistory(TensorClass["nocast"]):  # type: ignore[name-defined]
    """A turn as conversations.

    Example:
        >>> from llmrl.data import ChatHistory, History
        >>> prompt = History.from_chats([{"role": "user", "content": "Hi"}])
        >>> ChatHistory(prompt=prompt, batch_size=()).prompt.role
        ['user']
    """

    prompt: History | None = None
    """What the policy is given."""
    response: History | None = None
    """The assistant's message alone."""
    full: History | None = None
    """Prompt and response."""

    @staticmethod
    def default_spec(shape: Sequence[int] = (), keys: Sequence[str] = ("prompt", "response", "full")) -> Composite:
        """The spec of a turn with these entries."""
        return Composite({key: History.default_spec(shape) for key in keys}, shape=torch.Size(shape))


class Text(TensorClass["nocast"]):  # type: ignore[name-defined]
    """A turn as templated text."""

    prompt: Any = None
    """str; a list of str for a batch."""
    response: Any = None
    full: Any = None

    @staticmethod
    def default_spec(shape: Sequence[int] = (), keys: Sequence[str] = ("prompt", "response", "full")) -> Composite:
        """The spec of a turn with these entries."""
        return Composite({key: NonTensor(shape=tuple(shape), example_data="") for key in keys}, shape=torch.Size(shape))


class _Ragged(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Ragged per-token entries; a batch of them is lazily stacked and padded only when asked."""

    def as_padded_tensor(self, key: str, *, padding_value: float = 0, padding_side: str = "right") -> torch.Tensor:
        """One entry as `[*batch, max_num_tokens]`.

        Raises:
            ValueError: when `padding_side` is neither left nor right.
        """
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}.")
        rows = self.get(key, as_list=True) if self.batch_size else [self.get(key)]
        padded = torch.nn.utils.rnn.pad_sequence(
            list(rows), batch_first=True, padding_value=padding_value, padding_side=padding_side
        )
        return padded if self.batch_size else padded[0]

    def as_nested_tensor(self, key: str) -> torch.Tensor:
        """One entry as a jagged nested tensor `[*batch, num_tokens]`."""
        return torch.nested.as_nested_tensor(list(self.get(key, as_list=True)), layout=torch.jagged)


class Tokens(_Ragged):
    """A turn as token ids, `[num_tokens]` int64 each."""

    prompt: torch.Tensor | None = None
    response: torch.Tensor | None = None
    full: torch.Tensor | None = None


class LogProbs(_Ragged):
    """Log-probs of sampled tokens, `[num_tokens]` float32; `full` is 0 where the policy sampled nothing."""

    prompt: torch.Tensor | None = None
    response: torch.Tensor | None = None
    full: torch.Tensor | None = None


class Masks(_Ragged):
    """Masks over `("tokens", "full")`, `[num_tokens]` bool each."""

    all_attention_mask: torch.Tensor | None = None
    """True for every real token."""
    all_assistant_mask: torch.Tensor | None = None
    """True for tokens that the policy sampled: the trained-token mask."""

"""`Conversation`: the exact token state of one conversation, as a value that each step extends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from llmrl.data import Message, ParsedCompletion, TokenColumns, ToolSchema, Turn
from llmrl.rendering.base import Renderer
from llmrl.rendering.ledger import Column, Ledger
from llmrl.rendering.reconciler import (
    DEFAULT_FORK_THRESHOLD_TOKENS,
    Reconciliation,
    RowBuilder,
    classify,
    common_prefix_length,
)
from llmrl.rendering.tree import TurnNode

if TYPE_CHECKING:
    import torch

Mode = Literal["auto", "token", "message"]
_MODES = ("auto", "token", "message")


class Conversation:
    """What the engine saw and sampled so far, and how the next prompt follows from it.

    An immutable value: `with_prompt` and `with_completion` return the next one, which shares the tokens of this one.
    Stepping twice from the same value branches; the branches share their turns. Build one with `start`.

    The modes:

    - `token`: prompts are the held tokens and a delta for what is new, also where the template itself would render
      earlier turns anew (it drops earlier reasoning, say). Where messages or tools were rewritten the prompt is
      rendered afresh, and the row forks or is realigned.
    - `message`: as `token`, but with a template that rewrites history every prompt is rendered afresh, so that the
      model sees what the template shows. With a template that only appends, nothing differs and nothing is compared.
    - `auto`: `message`, the choice that shows the model what it was trained on.

    Example:
        >>> from llmrl.rendering import Conversation
        >>> conversation = Conversation.start(None).with_prompt_ids([1, 2])
        >>> conversation = conversation.with_completion([3], log_probs=[-0.5], versions=[0])
        >>> conversation = conversation.with_prompt_ids([1, 2, 3, 9])
        >>> conversation.prompt_ids, conversation.num_turns
        ([1, 2, 3, 9], 1)
    """

    __slots__ = (
        "_held", "_is_prompted", "_num_kept", "_num_tokens", "fork_threshold_tokens", "last", "messages", "mode",
        "node", "renderer", "tools",
    )  # fmt: skip

    renderer: Renderer | None
    """None where prompts are given as ids."""
    node: TurnNode | None
    """The last turn, with its parents; None before the first completion."""
    messages: tuple[Message, ...]
    """The messages that the held tokens stand for, parsed answers included."""
    last: ParsedCompletion | None
    """The last completion, parsed; None while a prompt waits for its completion."""
    tools: tuple[ToolSchema, ...] | None
    """The tools of the last prompt."""
    mode: Mode
    fork_threshold_tokens: int
    _held: Ledger
    _num_tokens: int
    # Tokens of the last turn that the waiting prompt keeps, or that the last turn's prompt kept of its parent.
    _num_kept: int
    _is_prompted: bool

    @classmethod
    def start(
        cls,
        renderer: Renderer | None,
        *,
        mode: Mode = "auto",
        fork_threshold_tokens: int = DEFAULT_FORK_THRESHOLD_TOKENS,
    ) -> Conversation:
        """An empty conversation.

        Raises:
            ValueError: for an unknown mode, or a negative threshold.
        """
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {_MODES}, got {mode!r}.")
        if fork_threshold_tokens < 0:
            raise ValueError(f"fork_threshold_tokens must be at least 0, got {fork_threshold_tokens}.")
        return cls._make(
            renderer=renderer,
            mode=mode,
            fork_threshold_tokens=fork_threshold_tokens,
            node=None,
            messages=(),
            tools=None,
            last=None,
            _held=Ledger(),
            _num_tokens=0,
            _num_kept=0,
            _is_prompted=False,
        )

    @classmethod
    def _make(cls, **values: Any) -> Conversation:
        conversation = cls.__new__(cls)
        for name, value in values.items():
            object.__setattr__(conversation, name, value)
        return conversation

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a Conversation does not change; with_prompt and with_completion return the next one.")

    def _with(self, **changes: Any) -> Conversation:
        return self._make(**{name: changes.get(name, getattr(self, name)) for name in self.__slots__})

    # Prompts

    def with_prompt(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> Conversation:
        """The conversation with its next prompt: these messages, up to where the assistant is to speak.

        The first prompt is rendered whole; a later one costs only the messages that are new, unless earlier ones, or
        the tools, were rewritten. The same prompt again gives the same value.

        Raises:
            ValueError: without a renderer.
            RenderingError: when the template refuses the messages.
        """
        if self.renderer is None:
            raise ValueError("this conversation has no renderer; start it with one, or use with_prompt_ids.")
        messages = tuple(messages)
        tools = tuple(tools) if tools else None
        is_kept = tools == self.tools and _starts_with(messages, self.messages)
        if self._is_prompted and is_kept and len(messages) == len(self.messages):
            return self
        is_template_faithful = self.mode == "token" or not self.renderer.is_history_rewritten
        if self.node is not None and not self._is_prompted and is_kept and is_template_faithful:
            new_messages = messages[len(self.messages) :]
            held_ids = self._held.columns.token_ids
            is_newest = len(held_ids) == self._num_tokens
            tail = held_ids if is_newest else held_ids[: self._num_tokens]
            delta = self.renderer.bridge(tail, new_messages, tools=tools)
            prompted = self._append(delta)
        else:
            prompt_ids = self.renderer.render(messages, tools=tools, add_generation_prompt=True)
            prompted = self._with_whole_prompt(prompt_ids)
        return prompted._with(messages=messages, tools=tools)

    def with_prompt_ids(self, prompt_ids: Sequence[int]) -> Conversation:
        """The conversation with its next prompt given as ids, [num_prompt_tokens], compared with the held ones."""
        if self._is_prompted and self.prompt_ids == list(prompt_ids):
            return self
        return self._with_whole_prompt(list(prompt_ids))

    def _with_whole_prompt(self, prompt_ids: list[int]) -> Conversation:
        """Compare a whole prompt with the tokens of the last turn: append, realign or fork."""
        node = self.node
        if node is None:
            held = Ledger()
            held.columns.append_context(prompt_ids)
            return self._with(_held=held, _num_tokens=len(prompt_ids), _num_kept=0, _is_prompted=True, last=None)
        columns, num_held = self._turn_columns()
        num_kept = common_prefix_length(columns.token_ids[:num_held], prompt_ids)
        if num_kept == num_held and not self._is_prompted:
            return self._append(prompt_ids[num_kept:])
        kind = classify(
            num_held, num_kept, node.num_completion_tokens, fork_threshold_tokens=self.fork_threshold_tokens
        )
        rewritten = columns.copy(num_kept)
        if kind == "forked":
            rewritten.mark_context(0, num_kept)
        rewritten.append_context(prompt_ids[num_kept:])
        return self._with(
            _held=Ledger(rewritten), _num_tokens=len(prompt_ids), _num_kept=num_kept, _is_prompted=True, last=None
        )

    def _turn_columns(self) -> tuple[TokenColumns, int]:
        """Columns that start with the last turn's tokens, and how many those are."""
        assert self.node is not None
        if not self._is_prompted:
            return self._held.columns, self._num_tokens
        # A prompt that is replaced before it was answered: what it appended is left out.
        if self._num_kept == self.node.num_tokens:
            return self._held.columns, self._num_kept
        builder = self._builder()
        return builder.held, len(builder.held)

    def _append(self, context_ids: Sequence[int]) -> Conversation:
        held = self._extendable()
        held.columns.append_context(context_ids)
        return self._with(
            _held=held,
            _num_tokens=self._num_tokens + len(context_ids),
            _num_kept=self._num_tokens,
            _is_prompted=True,
            last=None,
        )

    def _extendable(self) -> Ledger:
        """The held tokens if nobody extended them since, otherwise a copy: a branch."""
        if len(self._held.columns) == self._num_tokens:
            return self._held
        return Ledger(self._held.columns.copy(self._num_tokens))

    # Completions

    def with_completion(
        self, token_ids: Sequence[int], *, log_probs: Sequence[float], versions: Sequence[int]
    ) -> Conversation:
        """The conversation after the engine answered its prompt, [num_completion_tokens] each.

        Raises:
            ValueError: without a prompt, or when log-probs or versions are missing or short.
        """
        if not self._is_prompted:
            raise ValueError("there is no prompt to complete; call with_prompt first.")
        held = self._extendable()
        start = self._num_kept
        held.columns.append_completion(token_ids, log_probs=log_probs, versions=versions)
        node = TurnNode.over(self.node, self._num_kept, held.columns, start=start, num_completion_tokens=len(token_ids))
        parsed = None if self.renderer is None else self.renderer.parse(token_ids, tools=self.tools)
        return self._with(
            _held=held,
            _num_tokens=self._num_tokens + len(token_ids),
            _is_prompted=False,
            node=node,
            last=parsed,
            messages=self.messages if parsed is None else (*self.messages, parsed.message),
        )

    # What it holds

    @property
    def prompt_ids(self) -> list[int]:
        """[num_tokens] the held tokens: what the engine is given next."""
        return self._held.columns.token_ids[: self._num_tokens]

    @property
    def num_tokens(self) -> int:
        """Held tokens: of the prompt that waits, or of the last prompt and its completion."""
        return self._num_tokens

    @property
    def num_turns(self) -> int:
        """Completions so far."""
        return 0 if self.node is None else sum(1 for _ in self.node.ancestors())

    @property
    def turns(self) -> list[Turn]:
        """Every request and its answer, put together on demand."""
        if self.node is None:
            return []
        turns = []
        for node in self.node.path():
            completion_ids = node.completion_ids
            prompt_ids = node.token_ids()[: node.num_tokens - len(completion_ids)]
            turns.append(Turn(prompt_ids, completion_ids, node.log_probs, node.versions))
        return turns

    def tensor_view(self, column: Column) -> torch.Tensor:
        """A column of the held tokens, [num_tokens]: a view that costs what is new since the last one.

        Raises:
            ValueError: for an unknown column.
        """
        return self._held.tensor_view(column, self._num_tokens)

    def _builder(self) -> RowBuilder:
        builder = RowBuilder(fork_threshold_tokens=self.fork_threshold_tokens)
        for node in [] if self.node is None else self.node.path():
            kept, context_ids, completion_ids, log_probs, versions = node.record()
            builder.add_turn(kept, context_ids, completion_ids, log_probs=log_probs, versions=versions)
        return builder

    def reconcile(self) -> Reconciliation:
        """The training rows of the turns so far, with the counts of how they came about."""
        return self._builder().finish()

    def __reduce__(self) -> Any:
        # What travels is cloned to its own size: the turns, and the context of a prompt that waits.
        pending = self._held.columns.token_ids[self._num_kept : self._num_tokens] if self._is_prompted else None
        state = (self.renderer, self.mode, self.fork_threshold_tokens, self.messages, self.tools, self.last)
        return _rebuild, (state, self.node, self._num_kept, pending)


def _rebuild(state: tuple[Any, ...], node: TurnNode | None, num_kept: int, pending: list[int] | None) -> Conversation:
    renderer, mode, fork_threshold_tokens, messages, tools, last = state
    conversation = Conversation.start(renderer, mode=mode, fork_threshold_tokens=fork_threshold_tokens)
    conversation = conversation._with(node=node)
    builder = conversation._builder()
    conversation = conversation._with(_held=Ledger(builder.held), _num_tokens=len(builder.held))
    if pending is not None:
        conversation = conversation._with_whole_prompt(builder.held.token_ids[:num_kept] + pending)
    return conversation._with(messages=messages, tools=tools, last=last)


def _starts_with(messages: tuple[Message, ...], held: tuple[Message, ...]) -> bool:
    # Identity first: a history that was only appended to shares its messages.
    return len(messages) >= len(held) and all(a is b or a == b for a, b in zip(messages, held, strict=False))

"""`Conversation`: the exact tokens of one conversation, as an immutable value."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from llmrl._utils.arguments import check_choice, check_least
from llmrl.data import Message, ParsedCompletion, TokenColumns, ToolSchema, check_messages, text_of
from llmrl.rendering.base import Renderer, end_of_turn
from llmrl.rendering.reasoning import NUM_END_TOKENS, said_after
from llmrl.rendering.reconciler import DEFAULT_FORK_THRESHOLD_TOKENS, classify, common_prefix_length
from llmrl.rendering.results import name_results
from llmrl.rendering.rows import Reconciliation, count_turns, open_row, reconcile
from llmrl.rendering.tool_calls import ToolCall
from llmrl.rendering.turn import Column, TokenBuffer, TurnNode

if TYPE_CHECKING:
    import numpy as np
    import torch

Mode = Literal["auto", "token", "message"]


class Conversation:
    """The prompts and completions of one conversation, and the derivation of the next prompt.

    Conversations are immutable: `with_prompt` and `with_completion` return new values, which share tokens with this
    value. Several steps from the same value create branches. Create a conversation with `start`. Modes:

    - `token`: a prompt is the existing tokens plus a delta for new messages, even if the template
      would render earlier turns differently. If earlier messages or tools changed, the prompt is
      rendered anew, and the row forks or is realigned.
    - `message`: as `token`, but if the template renders earlier turns differently, the model sees that rendering in a
      new row. Each answer is trained as sampled, and stays in the row if it parses to the same message.
    - `auto`: as `message`, so that the model sees prompts in the form that it was trained on.

    Example:
        >>> from llmrl.rendering import Conversation
        >>> conversation = Conversation.start(None).with_prompt_ids([1, 2])
        >>> conversation = conversation.with_completion([3], log_probs=[-0.5], versions=[0])
        >>> conversation = conversation.with_prompt_ids([1, 2, 3, 9])
        >>> conversation.prompt_ids, conversation.num_turns
        ([1, 2, 3, 9], 1)
    """

    __slots__ = (
        "_before", "_num_kept", "_num_tokens", "_shown", "fork_threshold_tokens", "held", "last", "messages", "mode",
        "node", "renderer", "tools",
    )  # fmt: skip

    renderer: Renderer | None
    """None if prompts are given as ids."""
    node: TurnNode | None
    """The last turn, with its parents; None before the first completion."""
    messages: tuple[Message, ...]
    """Messages of the held tokens, including parsed answers."""
    last: ParsedCompletion | None
    """Last completion, parsed; None while a prompt is pending."""
    tools: tuple[ToolSchema, ...] | None
    """Tools of the last prompt."""
    mode: Mode
    fork_threshold_tokens: int
    held: TokenBuffer
    """Tokens and their columns; conversations that continue one another share them."""
    _num_tokens: int
    # Number of the last turn's tokens that the pending prompt keeps; if no prompt is pending,
    # number of its parent's tokens that the last turn's prompt kept.
    _num_kept: int
    # The value before the pending prompt; None if no prompt is pending.
    _before: Conversation | None
    # The last prompt as the template renders it, if it was rendered whole.
    _shown: list[int] | None

    @classmethod
    def start(
        cls,
        renderer: Renderer | None,
        *,
        mode: Mode = "auto",
        fork_threshold_tokens: int = DEFAULT_FORK_THRESHOLD_TOKENS,
    ) -> Conversation:
        """Return an empty conversation; raise ValueError for an unknown mode or a negative threshold."""
        check_choice(get_args(Mode), mode=mode)
        check_least(0, fork_threshold_tokens=fork_threshold_tokens)
        return cls._make(
            renderer=renderer,
            mode=mode,
            fork_threshold_tokens=fork_threshold_tokens,
            node=None,
            messages=(),
            tools=None,
            last=None,
            held=TokenBuffer(TokenColumns()),
            _num_tokens=0,
            _num_kept=0,
            _before=None,
            _shown=None,
        )

    @classmethod
    def _make(cls, **values: object) -> Conversation:
        conversation = cls.__new__(cls)
        for name, value in values.items():
            object.__setattr__(conversation, name, value)
        return conversation

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Conversation is immutable; with_prompt and with_completion return a new one.")

    def _with(self, **changes: object) -> Conversation:
        return self._make(**{**{name: getattr(self, name) for name in self.__slots__}, **changes})

    # Prompts

    @property
    def is_prompted(self) -> bool:
        """Whether a prompt is pending."""
        return self._before is not None

    def with_prompt(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> Conversation:
        """Return the conversation with all messages up to the next assistant turn as its prompt.

        The first prompt is rendered whole, later ones only from their new messages, unless earlier messages or the
        tools changed. The same prompt returns this value; a different prompt replaces the pending one. Raises
        TypeError or ValueError if a message is malformed, and RenderingError if the template refuses the messages.
        """
        if self.renderer is None:
            raise ValueError("this conversation has no renderer; start it with one, or use with_prompt_ids.")
        messages = tuple(messages)
        tools = tuple(tools or ()) or None
        is_begun = _starts_with(messages, self.messages)
        if not is_begun:  # held messages have no lone surrogates
            messages = check_messages(messages)
            is_begun = _starts_with(messages, self.messages)
        is_kept = tools == self.tools and is_begun
        if self._before is not None:
            if is_kept and len(messages) == len(self.messages):
                return self
            return self._before.with_prompt(messages, tools=tools)
        if is_begun:
            num_held = len(self.messages)
            messages = (*messages[:num_held], *check_messages(messages[num_held:]))
        # An assistant message that was not sampled here cannot be a delta, so the whole prompt is rendered.
        is_foreign = any(message["role"] == "assistant" for message in messages[len(self.messages) :])
        is_appended = self.node is not None and is_kept and not is_foreign
        shown = None
        if not is_appended or (self.mode != "token" and self.renderer.may_rewrite(messages, tools=tools)):
            shown = self.renderer.render(messages, tools=tools, add_generation_prompt=True)
        delta = None
        if is_appended and (shown is None or self._is_shown_in(shown)):
            # The last answer's calls give tool results the names of their functions.
            new = name_results(messages[len(self.messages) - 1 :])[1:]
            delta = self.renderer.bridge(self._end_ids, new, tools=tools)
        if delta is not None and (shown is None or self._is_end_of(shown, delta)):
            prompted = self._continued(self._num_tokens, delta)
        else:
            assert shown is not None
            prompted = self._compared(shown, is_answer_kept_whole=is_appended)
        return prompted._with(messages=messages, tools=tools, _shown=shown)

    def _is_shown_in(self, shown: list[int]) -> bool:
        """Return whether the rendering `shown` repeats the last prompt, and its answer parses to the same message."""
        renderer = self.renderer
        last = self.last
        assert renderer is not None and last is not None
        before = self._shown
        if before is None:
            before = renderer.render(self.messages[:-1], tools=self.tools, add_generation_prompt=True)
        num_equal = common_prefix_length(before, shown)
        rest = shown[num_equal:]
        end = end_of_turn(renderer, rest)
        if end is None:
            return False
        # Compared as text, since white space before the answer may be merged with the next token.
        lead = renderer.decode(before[num_equal:])
        said = said_after(lead, renderer.decode(rest[: end - 1]), renderer.thought_marks)
        if said is None:
            return False
        sampled = [*renderer.encode(said), rest[end - 1]]
        answer = renderer.parse(sampled, tools=self.tools, prompt_ids=before[-NUM_END_TOKENS:])
        return reading_of(answer.message) == reading_of(last.message)

    def _is_end_of(self, shown: list[int], delta: list[int]) -> bool:
        """Return whether the rendering `shown` ends with the delta, compared from after the delta's first end token."""
        assert self.renderer is not None
        start = end_of_turn(self.renderer, delta) or 0
        return shown[len(shown) - len(delta) + start :] == delta[start:]

    def with_prompt_ids(self, prompt_ids: Sequence[int]) -> Conversation:
        """Return the conversation with its next prompt, `[num_prompt_tokens]`; raise ValueError if it is empty.

        The prompt is compared with the held tokens: it is appended, or the row is realigned or forked.
        """
        prompt_ids = list(prompt_ids)
        if not prompt_ids:
            raise ValueError("prompt_ids is empty; a prompt has at least one token.")
        if self._before is not None:
            return self if self.prompt_ids == prompt_ids else self._before.with_prompt_ids(prompt_ids)
        return self._compared(prompt_ids)

    def _compared(self, prompt_ids: list[int], *, is_answer_kept_whole: bool = False) -> Conversation:
        """Append a whole prompt, or realign or fork the row for it; `is_answer_kept_whole` excludes a realign."""
        num_kept = common_prefix_length(self.prompt_ids, prompt_ids)
        if num_kept < self._num_tokens and is_answer_kept_whole and self.node is not None:
            num_kept = min(num_kept, self._num_tokens - self.node.num_completion_tokens)
        return self._continued(num_kept, prompt_ids[num_kept:])

    def _continued(self, num_kept: int, context_ids: Sequence[int]) -> Conversation:
        """Return the conversation prompted with its first `num_kept` tokens and these ids."""
        num_answer = 0 if self.node is None else self.node.num_completion_tokens
        kind = classify(self._num_tokens, num_kept, num_answer, fork_threshold_tokens=self.fork_threshold_tokens)
        held = self._extendable() if kind == "clean" else self._rewritten(num_kept)
        if kind == "forked":
            held.columns.mark_context(0, num_kept)
        held.columns.append_context(context_ids)
        num_tokens = num_kept + len(context_ids)
        return self._with(held=held, _num_tokens=num_tokens, _num_kept=num_kept, _before=self, last=None)

    def _rewritten(self, num_kept: int) -> TokenBuffer:
        """Return a copy of the row's first tokens; the turns of the current row also get their own copies."""
        rewritten = TokenBuffer(self.held.columns.copy(num_kept))
        for node in reversed(self.turns):
            if node.stored_columns is not self.held.columns:
                break
            node.own()
        return rewritten

    def _extendable(self) -> TokenBuffer:
        """Return the held tokens if no other value has extended them, otherwise a copy for a new branch."""
        if len(self.held.columns) == self._num_tokens:
            return self.held
        return TokenBuffer(self.held.columns.copy(self._num_tokens))

    # Completions

    def with_completion(
        self,
        token_ids: Sequence[int],
        *,
        log_probs: Sequence[float],
        versions: Sequence[int],
        sampling_mask: Sequence[array[int] | None] | None = None,
        routed_experts: np.ndarray | None = None,
    ) -> Conversation:
        """Return the conversation after a completion; raise ValueError without a prompt or if columns do not match."""
        if self._before is None:
            raise ValueError("there is no prompt to complete; call with_prompt first.")
        held = self._extendable()
        held.columns.append_completion(
            token_ids,
            log_probs=log_probs,
            versions=versions,
            sampling_mask=sampling_mask,
            routed_experts=routed_experts,
        )
        node = TurnNode.over(
            self.node,
            self._num_kept,
            held.columns,
            num_completion_tokens=len(token_ids),
            fork_threshold_tokens=self.fork_threshold_tokens,
        )
        completed = self._with(held=held, _num_tokens=self._num_tokens + len(token_ids), _before=None, node=node)
        if self.renderer is None:
            return completed
        parsed = self.renderer.parse(token_ids, tools=self.tools, prompt_ids=self._end_ids)
        return completed._with(last=parsed, messages=(*self.messages, parsed.message))

    def with_messages(self, messages: Sequence[Message]) -> Conversation:
        """Return the conversation with its messages replaced by equivalent ones."""
        return self._with(messages=tuple(messages))

    # Contents

    @property
    def prompt_ids(self) -> list[int]:
        """`[num_tokens]`: held tokens, the engine's next input."""
        return self.held.columns.token_ids[: self._num_tokens]

    @property
    def _end_ids(self) -> list[int]:
        """`[at most NUM_END_TOKENS]`: the last held tokens, which bridges and parsers read."""
        return self.held.columns.token_ids[max(0, self._num_tokens - NUM_END_TOKENS) : self._num_tokens]

    @property
    def num_tokens(self) -> int:
        """Number of held tokens: the pending prompt, or the last prompt and its completion."""
        return self._num_tokens

    @property
    def num_kept_tokens(self) -> int:
        """Number of the prompt's tokens that the previous turn contained."""
        return self._num_kept

    @property
    def num_turns(self) -> int:
        """Number of completions."""
        return len(self.turns)

    @property
    def num_completion_tokens(self) -> int:
        """Number of sampled tokens in all turns."""
        return sum(turn.num_completion_tokens for turn in self.turns)

    @property
    def turns(self) -> tuple[TurnNode, ...]:
        """All turns in order, each with its context and its completion."""
        return () if self.node is None else tuple(self.node.path())

    def tensor_view(self, column: Column) -> torch.Tensor:
        """Return a column of the held tokens as a view, `[num_tokens]`; raise ValueError for an unknown column."""
        return self.held.tensor_view(column, self._num_tokens)

    @property
    def sampling_mask(self) -> list[array[int] | None]:
        """`[num_tokens]`: ids that truncation kept when a held token was sampled; None if it kept all."""
        return self.held.columns.sampling_mask[: self._num_tokens]

    @property
    def routed_experts(self) -> list[np.ndarray | None]:
        """`[num_tokens]`: experts that computed a held token's log-prob (`TokenColumns`)."""
        return self.held.columns.routed_experts[: self._num_tokens]

    def reconcile(self) -> Reconciliation:
        """Return the training rows of all turns and their counts."""
        return reconcile(self.turns[-1:])

    def count_turns(self) -> dict[str, int]:
        """Return the counts of `reconcile` without building rows."""
        return count_turns(self.turns[-1:])

    def __reduce__(self) -> tuple[object, ...]:
        # Only this value's tokens are pickled: its turns and the context of a pending prompt.
        pending = None
        if self._before is not None:
            context = self.held.columns.token_ids[self._num_kept : self._num_tokens]
            before = self._before
            pending = (self._num_kept, context, before.messages, before.tools, before.last)
        state = (self.renderer, self.mode, self.fork_threshold_tokens, self.messages, self.tools, self.last)
        return _rebuild, (state, self.node, pending)

    def __deepcopy__(self, memo: object) -> Conversation:
        return self

    def __repr__(self) -> str:
        return (
            f"Conversation(mode={self.mode!r}, num_turns={self.num_turns}, num_messages={len(self.messages)}, "
            f"num_tokens={self.num_tokens}, is_prompted={self.is_prompted})"
        )


# A pending prompt: the number of kept tokens, its context, and the messages, tools and last answer before it.
_Pending = tuple[int, list[int], tuple[Message, ...], tuple[ToolSchema, ...] | None, ParsedCompletion | None]


def _rebuild(state: tuple[Any, ...], node: TurnNode | None, pending: _Pending | None) -> Conversation:
    renderer, mode, fork_threshold_tokens, messages, tools, last = state
    conversation = Conversation.start(renderer, mode=mode, fork_threshold_tokens=fork_threshold_tokens)
    if node is not None:
        conversation = conversation._with(node=node, held=TokenBuffer(open_row(node)), _num_tokens=node.num_tokens)
    if pending is not None:
        num_kept, context_ids, messages_before, tools_before, last_before = pending
        conversation = conversation._with(messages=messages_before, tools=tools_before, last=last_before)
        conversation = conversation._continued(num_kept, context_ids)
    return conversation._with(messages=messages, tools=tools, last=last)


def _starts_with(messages: tuple[Message, ...], held: tuple[Message, ...]) -> bool:
    if len(messages) < len(held):
        return False
    if messages[: len(held)] == held:  # fast if the messages are the same objects, as in an extended history
        return True
    return all(a is b or _meaning(a) == _meaning(b) for a, b in zip(messages, held, strict=False))


def reading_of(message: Message) -> tuple[str, str, list[ToolCall]]:
    """Return the content, reasoning and calls of a message, without surrounding white space."""
    content, reasoning = (text_of(message.get(key)).strip() for key in ("content", "reasoning_content"))
    return content, reasoning, [call["function"] for call in message.get("tool_calls") or ()]


def _meaning(message: Message) -> Message:
    """Return a message without entries that are None or empty."""
    return {key: value for key, value in message.items() if value is not None and value != [] and value != ""}

"""Finding out, by rendering short conversations, how a chat template behaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrl.data import Message
from llmrl.rendering.base import RenderingError
from llmrl.rendering.reasoning import CLOSING

if TYPE_CHECKING:
    from llmrl.rendering.template import TemplateRenderer

ANSWER = "Xq7AnswerMarkXq7"
_REASONING = "Xq7ReasoningMarkXq7"
_RESULT = "Xq7ResultMarkXq7"
_TOOL_NAME = "xq7_tool_mark"

_USER: Message = {"role": "user", "content": "a"}
_NEXT_USER: Message = {"role": "user", "content": "b"}
_ANSWER: Message = {"role": "assistant", "content": ANSWER}
_TOOL_RESULT: Message = {"role": "tool", "name": _TOOL_NAME, "content": _RESULT, "tool_call_id": "call00000"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "v"}},
            "required": ["value"],
        },
    },
}


def _calling(name: str = _TOOL_NAME, call_id: str = "call00000") -> Message:
    function = {"name": name, "arguments": {"value": ANSWER}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": call_id, "function": function}],
    }


def chat_features(messages: Iterable[Message], tools: Sequence[Any] | None) -> frozenset[str]:
    """What of a conversation makes some templates rewrite its earlier turns.

    Example:
        >>> sorted(chat_features([{"role": "assistant", "content": "", "reasoning_content": "r"}], tools=None))
        ['reasoning']
    """
    features = {"tools"} if tools else set()
    for message in messages:
        if "reasoning_content" in message or CLOSING in (message.get("content") or ""):
            features.add("reasoning")
        if message.get("tool_calls"):
            features.add("tool calls")
    return frozenset(features)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a template ends an assistant's turn, and the fixed conversation before a delta."""

    token_id: int
    """The end-of-turn token."""
    offset: int
    """Characters between the mark in the base's answer and the end-of-turn token."""
    lead_ids: tuple[int, ...]
    """Tokens that the template puts between an answer and the end-of-turn token; most have none."""
    is_call: bool
    """Whether the base's answer is a tool call, for deltas that start with a tool's result."""

    def base(self, new_messages: Sequence[Message]) -> list[Message]:
        """The fixed conversation that new messages are rendered after."""
        if not self.is_call:
            return [_USER, _ANSWER]
        result = new_messages[0]
        return [_USER, _calling(result.get("name") or _TOOL_NAME, result.get("tool_call_id") or "call00000")]


class TemplateProbe:
    """Asks a renderer's template questions."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        self.renderer = renderer

    def text(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, is_prompt: bool = True
    ) -> str | None:
        """What the template writes; None when it refuses."""
        try:
            return self.renderer.render_text(messages, tools=tools, add_generation_prompt=is_prompt)
        except RenderingError:
            return None

    def are_arguments_text(self) -> bool:
        """Whether the template wants a call's arguments as JSON text, refusing a dict."""
        messages = [_USER, _calling(), _TOOL_RESULT]
        if self.text(messages, tools=[_TOOL]) is not None:
            return False
        self.renderer._are_arguments_text = True
        return self.text(messages, tools=[_TOOL]) is not None

    def are_tools_shown(self) -> bool:
        """Whether the schema of a tool reaches the prompt."""
        text = self.text([_USER], tools=[_TOOL])
        return text is not None and _TOOL_NAME in text

    def is_system_known(self) -> bool:
        """Whether the template takes a system message."""
        return self.text([{"role": "system", "content": "s"}, _USER]) is not None

    def are_calls_shown(self) -> bool:
        """Whether an assistant's tool calls are rendered."""
        texts = (self.text([_USER, _calling(), *more]) for more in ([_TOOL_RESULT], [_NEXT_USER]))
        return any(text is not None and ANSWER in text for text in texts)

    def generation_prompt(self) -> str:
        """The end of a prompt that asks for a completion.

        Raises:
            RenderingError: when the template refuses a single user message.
        """
        return self.renderer.render_text([_USER], add_generation_prompt=True)

    def answer_ending(self) -> Ending:
        """How a plain answer ends: at the first added token after it.

        Raises:
            RenderingError: when no such token is written, so that turns cannot be told apart exactly.
        """
        after = self.renderer.render_text([_USER, _ANSWER, _NEXT_USER], add_generation_prompt=True)
        if ANSWER not in after:
            raise RenderingError("The chat template does not write an assistant's content; it cannot be bridged.")
        after = after[after.index(ANSWER) + len(ANSWER) :]
        before_next = after[: after.rindex(_NEXT_USER["content"])]
        found = self._first_token(before_next, self._added_tokens())
        if found is None:
            raise RenderingError(
                "The chat template does not end an assistant's turn with a special token "
                f"(it writes {before_next!r}), so turns cannot be appended token by token; pass another chat_template."
            )
        offset, token_id = found
        lead_ids = tuple(self.renderer.encode(after[:offset])) if offset else ()
        return Ending(token_id, offset, lead_ids, is_call=False)

    def call_ending(self, answer_ending: Ending) -> Ending | None:
        """How a tool call ends, None when the template does not tell calls from answers."""
        text = None if self.renderer._are_calls_written else self.text([_USER, _calling(), _TOOL_RESULT])
        if text is None or ANSWER not in text or _RESULT not in text:
            return None
        between = text[text.index(ANSWER) + len(ANSWER) : text.index(_RESULT)]
        # The marks that close a call may be added tokens too: the answer's own ending comes first.
        convert = self.renderer.tokenizer.convert_ids_to_tokens
        found = self._first_token(between, {convert(answer_ending.token_id): answer_ending.token_id})
        if found is None:
            tokenizer = self.renderer.tokenizer
            special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
            found = self._first_token(between, special)
        return None if found is None else Ending(found[1], found[0], (), is_call=True)

    def _added_tokens(self) -> dict[str, int]:
        tokenizer = self.renderer.tokenizer
        return {
            **tokenizer.get_added_vocab(),
            **dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)),
        }

    @staticmethod
    def _first_token(text: str, tokens: dict[str, int]) -> tuple[int, int] | None:
        """Offset and id of the token that starts first in a text, the longest where several do."""
        found = [(text.find(token), -len(token), token_id) for token, token_id in tokens.items() if token in text]
        if not found:
            return None
        offset, _, token_id = min(found)
        return offset, token_id

    def rewriting_features(self, *, is_reasoning_read: bool) -> frozenset[frozenset[str]]:
        """The sets of `chat_features` with which some turn is rendered differently once others follow it."""
        return frozenset(
            chat_features([answer], tools)
            for tools, answer, following in self._turns()
            if self._is_rewritten(tools, answer, following, is_reasoning_read)
        )

    @staticmethod
    def _turns() -> Iterator[tuple[list[Any] | None, Message, Message]]:
        for tools in (None, [_TOOL]):
            for reasoning in ({}, {"reasoning_content": _REASONING}):
                yield tools, {**_ANSWER, **reasoning}, _NEXT_USER
                yield tools, {**_calling(), **reasoning}, _TOOL_RESULT

    def _is_rewritten(
        self, tools: list[Any] | None, answer: Message, following: Message, is_reasoning_read: bool
    ) -> bool:
        prompt = self.text([_USER], tools=tools)
        later_turns = [[following], [following, _ANSWER, _NEXT_USER]]
        as_last = self.text([_USER, answer], tools=tools, is_prompt=False)
        if prompt is None or as_last is None or ANSWER not in as_last:
            return False
        as_last = as_last[: as_last.index(ANSWER)]
        for later in later_turns:
            text = self.text([_USER, answer, *later], tools=tools)
            if text is None or ANSWER not in text:
                continue
            head = text[: text.index(ANSWER)]
            if head != as_last or not head.startswith(prompt):
                return True
            if is_reasoning_read and "reasoning_content" in answer and _REASONING not in head:
                return True
        return False

    def check_bridge(self) -> None:
        """Compare deltas with full renderings after longer conversations than the fixed base.

        Raises:
            RenderingError: when they differ.
        """
        histories: list[list[Message]] = [
            [_USER, {"role": "assistant", "content": "c"}],
            [{"role": "system", "content": "s"}, _USER, {"role": "assistant", "content": "c"}],
            [_USER, {"role": "assistant", "content": "c"}, _NEXT_USER, {"role": "assistant", "content": "d"}],
            [_USER, _calling()],
            [_USER, _calling(), _TOOL_RESULT, {"role": "assistant", "content": "c"}],
        ]
        for history in histories:
            following = _TOOL_RESULT if history[-1].get("tool_calls") else _NEXT_USER
            for tools in (None, [_TOOL]):
                text = self.text([*history, following], tools=tools)
                if text is None:
                    continue  # the template refuses such a conversation anyway
                full = self.renderer.encode(text)
                delta = self.renderer.bridge([], [following], tools=tools)
                if full[-len(delta) :] != delta or self.renderer.encode_turns(text) != full:
                    roles = [message["role"] for message in history]
                    raise RenderingError(
                        f"The chat template writes {following['role']} messages after {roles} differently than after "
                        f"a shorter conversation ({self.renderer.decode(full[-len(delta) :])!r}, not "
                        f"{self.renderer.decode(delta)!r}), so turns cannot be appended exactly; "
                        "pass another chat_template."
                    )

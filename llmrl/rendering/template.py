"""`TemplateRenderer`: any Hugging Face chat template, incremental by rendering a delta after a fixed base."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmrl.data import MalformedToolCall, Message, ParsedCompletion, ToolSchema
from llmrl.rendering.base import RenderingError
from llmrl.rendering.probing import ANSWER, Ending, TemplateProbe, chat_features
from llmrl.rendering.reasoning import CLOSING, OPENING, split_reasoning
from llmrl.rendering.tool_calls import choose_tool_call_parser, find_tool_call_parser

# A few megabytes.
_NUM_REMEMBERED_TURNS = 4096

TOOL_ROLES = ("tool", "function", "ipython")

_TOOL_PROMPT = """You may call functions to help the user. These are their signatures, as JSON, within <tools></tools>:
<tools>
{schemas}
</tools>

For each call, write a JSON object with the function's name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


class TemplateRenderer:
    """Renders with a chat template, whole or as a delta that costs the new messages alone.

    A delta is what the template writes after the answer of a short fixed conversation when the new messages follow
    it, from the end-of-turn token on: special tokens are boundaries of tokenization, so the delta's ids are those of
    the full rendering. At construction the template is probed: its end-of-turn token is found, `is_history_rewritten`
    is set, and a template for which the delta is not exact is refused.

    A template that does not show tools gets them through the system message (the first message where it knows no
    system role), in the Hermes convention (`is_tool_prompt_added`), so that they are never dropped silently.

    Args:
        tokenizer: of Hugging Face.
        chat_template: Jinja text; the tokenizer's own by default.
        tool_parser: name of a tool-call parser, `auto` to choose by the template.
        reasoning_parser: `think`, `none`, or `auto` to choose by the template.
        template_kwargs: variables that the template reads, such as `enable_thinking`.

    Raises:
        RenderingError: without a template, or for one that cannot be rendered exactly.
        TypeError: for a template variable that the template does not read.
        ValueError: for an unknown parser.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template if chat_template is not None else _own_template(tokenizer)
        self.template_kwargs = dict(template_kwargs or {})
        for name in self.template_kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", self.chat_template):
                raise TypeError(f"template_kwargs has {name!r}, which the chat template does not read.")
        self._are_arguments_text = False
        self.is_tool_prompt_added = False
        self._are_calls_written = False
        self._is_system_known = True
        probe = TemplateProbe(self)
        self._are_arguments_text = probe.are_arguments_text()
        self.is_tool_prompt_added = not probe.are_tools_shown()
        self._are_calls_written = not probe.are_calls_shown()
        self._is_system_known = probe.is_system_known()
        if tool_parser == "auto":
            tool_parser = "hermes" if self.is_tool_prompt_added else choose_tool_call_parser(self.chat_template)
        self.tool_parser = tool_parser
        self._parse_calls = find_tool_call_parser(tool_parser)
        if reasoning_parser == "auto":
            reasoning_parser = "think" if CLOSING in self.chat_template else "none"
        if reasoning_parser not in ("think", "none"):
            raise ValueError(f"reasoning_parser must be 'auto', 'think' or 'none', got {reasoning_parser!r}.")
        self.reasoning_parser = reasoning_parser
        prompt = probe.generation_prompt()
        self._is_reasoning_open = prompt.rfind(OPENING) > prompt.rfind(CLOSING)
        self._answer_ending: Ending = probe.answer_ending()
        self._call_ending: Ending | None = probe.call_ending(self._answer_ending)
        endings = [ending for ending in (self._answer_ending, self._call_ending) if ending is not None]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ending.token_id for ending in endings))
        self._end_ids = frozenset({*self.stop_token_ids, getattr(tokenizer, "eos_token_id", None)} - {None})
        self._rewriting_features = probe.rewriting_features(is_reasoning_read=reasoning_parser == "think")
        self.is_history_rewritten: bool = bool(self._rewriting_features)
        self._end_text = self.decode(self.stop_token_ids[:1])
        self._turn_ids: dict[str, list[int]] = {}
        probe.check_bridge()

    @classmethod
    def from_pretrained(cls, path: str, **kwargs: Any) -> TemplateRenderer:
        """Of a model folder or hub name; `kwargs` are those of the constructor."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(path), **kwargs)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """The whole conversation, [num_tokens].

        Raises:
            RenderingError: when the template refuses the messages.
        """
        text = self.render_text(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return self.encode_turns(text)

    def render_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The whole conversation as the template writes it.

        Raises:
            RenderingError: when the template refuses the messages.
        """
        chat = [self._plain(message) for message in messages]
        if tools and self.is_tool_prompt_added:
            chat, tools = _with_tool_prompt(chat, tools, is_system_known=self._is_system_known), None
        try:
            return self.tokenizer.apply_chat_template(
                chat,
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.template_kwargs,
            )
        except Exception as error:  # whatever a template's own code raises
            roles = [message["role"] for message in messages]
            raise RenderingError(
                f"The chat template refuses messages with roles {roles}: {type(error).__name__}: {error}"
            ) from error

    def may_rewrite(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> bool:
        """Whether some turn of this conversation may be rendered differently once others follow.

        A template that drops earlier reasoning rewrites nothing where there is none, nor one that moves the tools'
        schemas where there are none: those conversations need no comparison.
        """
        if not self.is_history_rewritten:
            return False
        features = chat_features(messages, tools)
        return any(rewriting <= features for rewriting in self._rewriting_features)

    def bridge(
        self,
        token_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
    ) -> list[int]:
        """What to append after `token_ids`, which end with a completion as sampled, to ask for the next one.

        The end-of-turn token is added where the completion was cut, the template's text between turns exactly once.

        Raises:
            RenderingError: when the template refuses the messages.
        """
        is_tool_result = bool(new_messages) and new_messages[0]["role"] in TOOL_ROLES
        ending = self._call_ending if is_tool_result and self._call_ending is not None else self._answer_ending
        if self.is_tool_prompt_added:
            tools = None  # they stand in the system message, which the base has not
        text = self.render_text([*ending.base(new_messages), *new_messages], tools=tools, add_generation_prompt=True)
        start = text.index(ANSWER) + len(ANSWER) + ending.offset
        delta = self.encode(text[start:])
        # The longest part of the text between turns that is already there, from an end-of-turn token on.
        for count in range(min(len(delta), len(token_ids), 4), 0, -1):
            tail = list(token_ids[len(token_ids) - count :])
            if tail[0] in self.stop_token_ids and tail[1:] == delta[1:count]:
                return delta[count:]
        return [*ending.lead_ids, *delta]

    def parse(self, completion_ids: Sequence[int], *, tools: Sequence[ToolSchema] | None = None) -> ParsedCompletion:
        """Read sampled tokens as an assistant message; never raises.

        `tools` are not needed: whether a named tool exists is for whoever executes the call to say.
        """
        ids = list(completion_ids)
        is_complete = bool(ids) and ids[-1] in self._end_ids
        text = self.decode(ids[:-1] if is_complete else ids)
        reasoning: str | None = None
        if self.reasoning_parser == "think":
            reasoning, text = split_reasoning(text, is_open=self._is_reasoning_open)
        try:
            calls = self._parse_calls(text)
        except Exception as error:  # a registered parser of someone else's
            failure = MalformedToolCall(text, f"{type(error).__name__}: {error}")
            message = {"role": "assistant", "content": text}
            return ParsedCompletion(message, is_complete, (failure,))
        message = {"role": "assistant", "content": calls.content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls.tool_calls:
            message["tool_calls"] = list(calls.tool_calls)  # type: ignore[assignment]
        return ParsedCompletion(message, is_complete, calls.malformed)

    def encode(self, text: str) -> list[int]:
        """Token ids of templated text; special tokens are recognised, none is added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_turns(self, text: str) -> list[int]:
        """As `encode`, turn by turn: tokenizing is nine tenths of a rendering, and most turns were rendered before."""
        token_ids: list[int] = []
        *turns, rest = text.split(self._end_text)
        for turn in turns:
            turn_ids = self._turn_ids.get(turn)
            if turn_ids is None:
                turn_ids = self.encode(turn + self._end_text)
                if len(self._turn_ids) >= _NUM_REMEMBERED_TURNS:
                    self._turn_ids.clear()
                self._turn_ids[turn] = turn_ids
            token_ids += turn_ids
        return token_ids + self.encode(rest)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_turn_ids": {}}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _plain(self, message: Message) -> dict[str, Any]:
        """The message as templates expect it: text for content, no empty lists."""
        plain = {key: value for key, value in message.items() if value is not None}
        plain.setdefault("content", "")
        calls = plain.pop("tool_calls", None)
        if not calls:
            return plain
        if self._are_calls_written:
            written = (json.dumps(call["function"], ensure_ascii=False) for call in calls)
            blocks = [f"<tool_call>\n{text}\n</tool_call>" for text in written]
            plain["content"] = "\n".join([plain["content"], *blocks] if plain["content"] else blocks)
            return plain
        if self._are_arguments_text:
            calls = [{**call, "function": _with_text_arguments(call["function"])} for call in calls]
        plain["tool_calls"] = list(calls)
        return plain


def _own_template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise RenderingError(
            f"The tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template and none is guessed; "
            "pass chat_template=..., the Jinja text that the model was trained with."
        )
    return template


def _with_tool_prompt(
    chat: list[dict[str, Any]], tools: Sequence[ToolSchema], *, is_system_known: bool
) -> list[dict[str, Any]]:
    prompt = _TOOL_PROMPT.format(schemas="\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools))
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{prompt}"}, *chat[1:]]
    if is_system_known or not chat:
        return [{"role": "system", "content": prompt}, *chat]
    return [{**chat[0], "content": f"{prompt}\n\n{chat[0]['content']}"}, *chat[1:]]


def _with_text_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}

"""`TemplateRenderer`: renders conversations with any Hugging Face chat template, whole or as a delta."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

from llmrl._utils.failure import describe
from llmrl._utils.types import StateDict, Tokenizer
from llmrl.data import MalformedToolCall, Message, ParsedCompletion, ToolSchema, text_of
from llmrl.data.content_marks import ContentMarks, RenderingError
from llmrl.data.message import prompt_of
from llmrl.data.template_limit import SlowTemplateError
from llmrl.rendering.answer_format import find_answer_format
from llmrl.rendering.base import Ending, TextCoder, completion_of
from llmrl.rendering.probing import (
    ANSWER,
    NEXT_USER,
    PLAIN_ANSWER,
    RESULT,
    SYSTEM,
    TOOL,
    USER,
    TemplateProbe,
    calling,
    chat_features,
)
from llmrl.rendering.reasoning import NUM_END_TOKENS
from llmrl.rendering.results import TOOL_ROLES
from llmrl.rendering.tool_calls import TOOL_CALL_WRITERS
from llmrl.rendering.tool_format import choose_tool_format
from llmrl.rendering.writer import TemplateWriter

_CARRY_RESULTS = "; or write results as user messages: TemplateRenderer(tokenizer, tool_results='user')."

_SAID: Message = {"role": "assistant", "content": "c"}
# Limits the cache to a few megabytes.
_NUM_REMEMBERED_TURNS = 4096


class TemplateRenderer(TextCoder):
    """Renders with a chat template, either whole or as a delta that costs only the new messages.

    A delta is rendered after the answer of a short fixed conversation, from the end-of-turn token
    on. Its ids are those of the full rendering, since special tokens are token boundaries. The
    constructor probes the template and refuses one for which deltas are not exact.

    If the template does not show tools, the system message (or the first message) shows them with
    an example call (`is_tool_prompt_added`), in the template's own format or Hermes's. If it shows
    tools but no parser reads its calls, tools are refused (`check_tools`).

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template: Jinja text; the tokenizer's by default.
        tool_parser: name of a tool-call parser; `auto` selects one that reads the template's calls, `none` reads none.
        tool_results: `tool` writes results under the template's role for them, `user` as user
            messages, for templates without such a role (Gemma, Cohere's Command R).
        reasoning_parser: `auto` detects the marks, `think` uses `<think>` and `</think>`, `none` reads no reasoning.
        template_kwargs: variables of the template, such as `enable_thinking`.

    Raises:
        RenderingError: if the template is missing, cannot be rendered exactly, or writes calls or
            reasoning that cannot be read.
        TypeError: if the template does not read a variable.
        ValueError: if a parser is unknown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        tool_parser: str = "auto",
        tool_results: Literal["tool", "user"] = "tool",
        reasoning_parser: str = "auto",
        template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        if tool_results not in ("tool", "user"):
            raise ValueError(f"tool_results must be 'tool' or 'user', got {tool_results!r}.")
        if reasoning_parser not in ("auto", "think", "none"):
            raise ValueError(f"reasoning_parser must be 'auto', 'think' or 'none', got {reasoning_parser!r}.")
        self.tokenizer = tokenizer
        self.chat_template = chat_template if chat_template is not None else _own_template(tokenizer)
        template_kwargs = dict(template_kwargs or {})
        for name in template_kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", self.chat_template):
                raise TypeError(f"template_kwargs has {name!r}, which the chat template does not read.")
        self.content_marks = ContentMarks(tokenizer)  # encodes special tokens in contents as plain text
        # Words in a message that switch reasoning on or off in all later prompts.
        self._switches = sorted(set(re.findall(r"(?<=['\"])/(?:no_)?think\b", self.chat_template)))
        self._turn_ids: dict[str, list[int]] = {}
        self._probe = TemplateProbe(TemplateWriter(tokenizer, self.chat_template, template_kwargs))
        self._probe_messages(tool_results)
        self._probe_turns(reasoning_parser)
        self._choose_tool_format(tool_parser)
        self.content_marks = ContentMarks(tokenizer, [ANSWER, *self._probe.turn_marks()])

    def _probe_messages(self, tool_results: str) -> None:
        """Detect which messages the template supports, and in which form."""
        self._know(are_arguments_text=self._probe.are_arguments_text())
        self._know(is_tool_prompt_added=not self._probe.are_tools_shown())
        self._know(is_system_known=self._probe.is_system_known(), are_results_carried=tool_results == "user")
        if not self._probe.are_calls_shown():
            self._know(write_call=TOOL_CALL_WRITERS["hermes"])
        if not self.writer.are_results_carried:
            result_role = self._probe.result_role()
            if result_role is None:
                tool_fault = (
                    "Its chat template has no role for tool results, so conversations could not continue after a tool "
                    f"call; use another model{_CARRY_RESULTS}"
                )
                self._know(tool_fault=tool_fault)
            else:
                self._know(result_role=result_role)
            self._know(are_orphans_carried=not self._probe.are_orphans_shown())
        self._are_result_names_written = self._probe.are_result_names_written()
        self._probe = replace(self._probe, shows_parallel_calls=self._probe.are_parallel_calls_shown())

    def _probe_turns(self, reasoning_parser: str) -> None:
        """Detect the ends of turns and the text around answers, and check that deltas are exact."""
        prompt = self.writer.write([USER], is_prompt=True)
        ending = self._answer_ending = self._probe.find_answer_ending()
        answer_format = find_answer_format(self.writer, ending, reasoning_parser)
        probe = self._probe = replace(
            self._probe, writer=replace(self.writer, answer_format=answer_format), answer_ending=ending
        )
        thoughts = self.thought_marks = answer_format.thoughts
        self._is_reasoning_open = thoughts is not None and thoughts.is_open_at_end(prompt)
        self._end_text = self.decode([ending.token_id])
        roles = ["user"] if self.writer.are_results_carried else ["user", "tool"]
        found = [(role, probe.ending(is_call=is_call, role=role)) for role in roles for is_call in (False, True)]
        ends = [(role, one.token_id) for role, one in found if one is not None]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(token_id for _, token_id in ends))
        self._result_ids = set(self.stop_token_ids) - {token_id for role, token_id in ends if role == "user"}
        """Tokens that end an answer only if a tool's result follows."""
        self.end_ids = frozenset({*self.stop_token_ids, getattr(self.tokenizer, "eos_token_id", None)} - {None})
        """Tokens that end an answer and are not part of its text."""
        self._rewriting_features = probe.rewriting_features()
        self.is_history_rewritten: bool = bool(self._rewriting_features)
        self._check_bridge(is_system_moved=frozenset({"system"}) in self._rewriting_features)

    def _choose_tool_format(self, tool_parser: str) -> None:
        """Detect how calls are read and written, and check that deltas with tool results are exact."""
        try:
            tool_format = choose_tool_format(self._probe, tool_parser)
        except RenderingError as error:
            if tool_parser != "auto" or isinstance(error, SlowTemplateError):
                raise
            self._know(tool_fault=str(error))
            tool_format = choose_tool_format(self._probe, "none")
        self.tool_parser = tool_format.name
        self._parse_calls = tool_format.parse
        example = {"argument": "value"}
        if tool_format.write is not None:
            self._know(write_call=tool_format.write, tool_example=tool_format.write("function_name", example))
        else:
            written = self._probe.written_call("function_name", {"argument": ANSWER}) or ""
            if self.thought_marks is not None:
                written = written.rpartition(self.thought_marks.closing)[-1]
            self._know(tool_example=written.replace(ANSWER, example["argument"]).strip())
        if not self.tool_fault:
            try:
                self._check_tool_bridge()
            except SlowTemplateError:
                raise
            except RenderingError as error:
                self._know(tool_fault=str(error).rstrip(".") + _CARRY_RESULTS)

    def _know(self, **found: Any) -> None:
        """Store detected properties of the template in a new probe, which detects endings again."""
        self._probe = replace(self._probe, writer=replace(self.writer, **found))

    @property
    def writer(self) -> TemplateWriter:
        """Writer of the template's text."""
        return self._probe.writer

    @property
    def tool_fault(self) -> str:
        """Reason why conversations with tools cannot be rendered; empty if they can."""
        return self.writer.tool_fault

    @property
    def is_tool_prompt_added(self) -> bool:
        """Whether llmrl adds a prompt with the tools, because the template does not show them."""
        return self.writer.is_tool_prompt_added

    def check_tools(self) -> None:
        """Raise RenderingError, with a remedy, if conversations with tools cannot be rendered."""
        self.writer.check_tools()

    @classmethod
    def from_pretrained(cls, path: str, **kwargs: Any) -> TemplateRenderer:
        """Load from a model folder or hub name; `kwargs` are passed to the constructor."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(path), **kwargs)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Return the token ids of the whole conversation, `[num_tokens]`; raise RenderingError if it is refused."""
        mark, messages, tools = self.content_marks.mark(messages, tools)
        text = self.render_text(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return self.encode_turns(text, mark)

    def render_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the whole conversation as text; raise RenderingError if the template refuses it."""
        return self.writer.write(messages, tools=tools, is_prompt=add_generation_prompt)

    def may_rewrite(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> bool:
        """Return whether later turns may change the rendering of an earlier turn in this conversation."""
        new = prompt_of(reversed(messages))
        if len(new) < len(messages) and self._roles_written_elsewhere(new):
            return True
        if not self.is_history_rewritten and not self._switches:
            return False
        if any(switch in text_of(message.get("content")) for switch in self._switches for message in messages):
            return True
        features = chat_features(messages, tools, self.thought_marks)
        if tools and self.is_tool_prompt_added:
            features |= {"system"}
        return any(rewriting <= features for rewriting in self._rewriting_features)

    def bridge(
        self,
        token_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
    ) -> list[int]:
        """Return the ids to append to `token_ids` for the next completion; raise RenderingError if refused."""
        if elsewhere := self._roles_written_elsewhere(new_messages):
            raise RenderingError(
                f"The chat template does not write messages of roles {elsewhere} after an answer, but elsewhere or not "
                "at all."
            )
        if self.is_tool_prompt_added:
            tools = None  # they are in the system message, which the base does not have
        mark, new_messages, tools = self.content_marks.mark(new_messages, tools)
        base, ending, end_ids = self._base(new_messages)
        text = self.writer.write([*base, *new_messages], tools=tools, is_prompt=True)
        start = text.rindex(ANSWER) + len(ANSWER) + ending.offset
        delta = self.content_marks.encode(text[start:], mark) if mark else self.encode(text[start:])
        # Skip the longest part of the text between turns that already ends `token_ids`, from an end-of-turn token on.
        for count in range(min(len(delta), len(token_ids), 4), 0, -1):
            tail = list(token_ids[len(token_ids) - count :])
            if tail[0] in end_ids and tail[1:] == delta[1:count]:
                return delta[count:]
        lead_ids = list(ending.lead_ids)
        if lead_ids and list(token_ids[-len(lead_ids) :]) == lead_ids:  # only the end-of-turn token is missing
            return delta
        return [*lead_ids, *delta]

    def _base(self, new_messages: Sequence[Message]) -> tuple[list[Message], Ending, frozenset[int]]:
        """Return the conversation before the new messages, its ending, and the tokens that may end it."""
        results = list(takewhile(lambda message: message["role"] in TOOL_ROLES, new_messages))
        # A result without name and id reports a malformed call, and answers no call.
        answers = [result for result in results if result.get("name") or result.get("tool_call_id")]
        is_carried = self.writer.are_results_carried or (not answers and self.writer.are_orphans_carried)
        role = new_messages[0]["role"] if new_messages and not (results and is_carried) else "user"
        endings = {is_call: self._probe.ending(is_call=is_call, role=role) for is_call in (False, True)}
        end_ids = frozenset(ending.token_id for ending in endings.values() if ending is not None)
        call_ending = endings[True]
        if answers and call_ending is not None:
            if self._are_result_names_written and not all(result.get("name") for result in answers):
                raise RenderingError(
                    "The chat template writes the function's name with a tool's result, and a message of role "
                    f"{role!r} has no 'name'; add it, or append messages to a Conversation, which knows the calls."
                )
            answered = answers if self._probe.shows_parallel_calls else answers[:1]
            call_ids = [result.get("tool_call_id") or f"call{index:05d}" for index, result in enumerate(answered)]
            names = [result.get("name") or "function" for result in answered]
            return [USER, calling(*names, call_ids=call_ids)], call_ending, end_ids
        return [USER, PLAIN_ANSWER], endings[False] or self._answer_ending, end_ids

    def _roles_written_elsewhere(self, messages: Iterable[Message]) -> list[str]:
        """Return the roles that the template does not write after an answer, such as moved system messages."""
        roles = {message["role"] for message in messages} - {"user", *TOOL_ROLES}
        return sorted(role for role in roles if self._probe.ending(is_call=False, role=role) is None)

    def parse(
        self,
        completion_ids: Sequence[int],
        *,
        tools: Sequence[ToolSchema] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedCompletion:
        """Return sampled tokens as an assistant message; never raise.

        `tools` only provide argument types. `prompt_ids`, the prompt or its last tokens, show
        whether the completion starts within reasoning; the default is a prompt with one message.
        """
        ids = list(completion_ids)
        is_complete = bool(ids) and ids[-1] in self.end_ids
        text = self.decode(ids[:-1] if is_complete else ids)
        reasoning: str | None = None
        if self.thought_marks is not None:
            is_open = self._is_reasoning_open
            if prompt_ids is not None:
                is_open = self.thought_marks.is_open_at_end(self.decode(prompt_ids[-NUM_END_TOKENS:]))
            reasoning, text = self.thought_marks.split(text, is_open=is_open)
        try:
            calls = self._parse_calls(text, tools or ())
            if not (calls.tool_calls or calls.malformed) and is_complete and ids[-1] in self._result_ids:
                calls = self._parse_calls(text, ())  # not prose, but perhaps a call of a tool that is not offered
        except Exception as error:  # a user's registered parser may raise any exception
            failure = MalformedToolCall(text, describe(error))
            return completion_of(text, is_complete=is_complete, malformed=[failure])
        return completion_of(
            self.writer.answer_format.said(calls.content),
            is_complete=is_complete,
            reasoning=reasoning,
            tool_calls=calls.tool_calls,
            malformed=calls.malformed,
        )

    def encode_turns(self, text: str, mark: str = "") -> list[int]:
        """Encode a text turn by turn with a cache, or without a cache if `ContentMarks` inserted `mark`."""
        if mark:
            return self.content_marks.encode(text, mark)
        token_ids: list[int] = []
        # A piece includes the end-of-turn token before it: some tokenizers encode the start of a text differently.
        first, *pieces = text.split(self._end_text)
        *turns, rest = [first, *(self._end_text + piece for piece in pieces)]
        for turn in turns:
            turn_ids = self._turn_ids.get(turn)
            if turn_ids is None:
                turn_ids = self.encode(turn)
                if len(self._turn_ids) >= _NUM_REMEMBERED_TURNS:
                    self._turn_ids.clear()
                self._turn_ids[turn] = turn_ids
            token_ids += turn_ids
        return token_ids + self.encode(rest)

    def __getstate__(self) -> StateDict:
        return {**self.__dict__, "_turn_ids": {}}

    def _check_bridge(self, *, is_system_moved: bool) -> None:
        """Raise RenderingError if deltas are not exact; `is_system_moved` skips conversations with system messages."""
        histories = [[USER, _SAID], [USER, _SAID, NEXT_USER, {**_SAID, "content": "d"}]]
        if not is_system_moved:
            histories.insert(1, [SYSTEM, USER, _SAID])
        self._check_deltas(histories, NEXT_USER)

    def _check_tool_bridge(self) -> None:
        """Raise RenderingError if deltas differ from full renderings after tool calls."""
        called = [USER, calling("f"), {"role": "tool", "name": "f", "content": "r", "tool_call_id": "call00000"}]
        asked = [calling("g", call_ids=["call00007"])]
        self._check_deltas([[*called, _SAID]], NEXT_USER)
        result = {"role": "tool", "name": "g", "content": RESULT, "tool_call_id": "call00007"}
        self._check_deltas([[USER, *asked], [*called, *asked]], result)

    def _check_deltas(self, histories: Sequence[list[Message]], following: Message) -> None:
        for history in histories:
            for tools in (None, [TOOL]):
                text = self._probe.text([*history, following], tools=tools)
                if text is None:
                    continue  # the template refuses such a conversation
                full = self.encode(text)
                delta = self.bridge([], [following], tools=tools)
                if full[-len(delta) :] != delta or self.encode_turns(text) != full:
                    roles = [message["role"] for message in history]
                    raise RenderingError(
                        f"The chat template writes {following['role']} messages after {roles} differently than after "
                        f"a shorter conversation ({self.decode(full[-len(delta) :])!r}, not {self.decode(delta)!r}), "
                        "so turns cannot be appended exactly; pass another chat_template."
                    )


def _own_template(tokenizer: Tokenizer) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise RenderingError(
            f"The tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template and none is guessed: "
            "pass chat_template=..., the Jinja text that the model was trained with."
        )
    return template

"""`TemplateRenderer`: any Hugging Face chat template, incremental by rendering a delta after a fixed base."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Literal

from llmrl._utils.types import StateDict, Tokenizer
from llmrl.data import MalformedToolCall, Message, ParsedCompletion, ToolSchema, text_of
from llmrl.data.content_marks import ContentMarks, RenderingError
from llmrl.data.template_limit import SlowTemplateError, written_in_time
from llmrl.rendering.answer_format import find_answer_format
from llmrl.rendering.base import Ending
from llmrl.rendering.probing import ANSWER, PLAIN_ANSWER, USER, TemplateProbe, calling, chat_features
from llmrl.rendering.reasoning import NO_MARKS, ThoughtMarks
from llmrl.rendering.results import TOOL_ROLES, carry_results, name_results
from llmrl.rendering.tool_calls import TOOL_CALL_WRITERS
from llmrl.rendering.tool_format import choose_tool_format, with_tool_prompt

_CARRY_RESULTS = "; or carry results as the user's messages: TemplateRenderer(tokenizer, tool_results='user')."

# Tokens of a prompt in which the mark that opens reasoning ends it.
_NUM_END_TOKENS = 32

# A few megabytes.
_NUM_REMEMBERED_TURNS = 4096


class TemplateRenderer:
    """Renders with a chat template, whole or as a delta that costs the new messages alone.

    A delta is what the template writes after the answer of a short fixed conversation when the new messages follow
    it, from the end-of-turn token on: special tokens are boundaries of tokenization, so the delta's ids are those of
    the full rendering. At construction the template is probed: its end-of-turn token is found, `is_history_rewritten`
    is set, and a template for which the delta is not exact is refused.

    A template that does not show tools gets them through the system message (the first message where it knows no
    system role), with an example of a call (`is_tool_prompt_added`): as the template itself writes calls, or in the
    Hermes convention where it writes none. So they are never dropped silently. A template that shows tools
    but writes calls that no parser reads is refused where tools are used (`check_tools`).

    Args:
        tokenizer: tokenizer of Hugging Face.
        chat_template: Jinja text; the tokenizer's own by default.
        tool_parser: name of a tool-call parser; `auto` takes the one that reads what the template writes for a call;
            `none` where no tools are used.
        tool_results: `tool` writes results as messages of the template's role for them; `user` as messages of the
            user, for templates that have no such role (Gemma, Cohere's Command R).
        reasoning_parser: `auto` takes what the template writes around reasoning for its marks; `think` takes `<think>`
            and `</think>`, and `none` takes nothing for reasoning.
        template_kwargs: variables that the template reads, such as `enable_thinking`.

    Raises:
        RenderingError: without a template, or for one that cannot be rendered exactly, or when the named parser
            does not read its calls, or its marks of reasoning are not found.
        TypeError: for a template variable that the template does not read.
        ValueError: for an unknown parser.
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
        self.template_kwargs = dict(template_kwargs or {})
        for name in self.template_kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", self.chat_template):
                raise TypeError(f"template_kwargs has {name!r}, which the chat template does not read.")
        self.content_marks = ContentMarks(tokenizer)  # splits special tokens in contents
        # Words of a message that switch reasoning on or off in all prompts that follow.
        self._switches = sorted(set(re.findall(r"(?<=['\"])/(?:no_)?think\b", self.chat_template)))
        self._turn_ids: dict[str, list[int]] = {}
        self._endings: dict[tuple[bool, str], Ending | None] = {}
        self.thought_marks: ThoughtMarks | None = None
        """What stands around reasoning in its turns; None where there is none."""
        self._answer_format = NO_MARKS
        self._probe_messages(tool_results)
        self._probe_turns(reasoning_parser)
        self._choose_tool_format(tool_parser)
        self.content_marks = ContentMarks(tokenizer, [ANSWER, *TemplateProbe(self).turn_marks()])

    def _probe_messages(self, tool_results: str) -> None:
        """Find out which messages the template knows."""
        probe = TemplateProbe(self)
        self.tool_fault = ""
        """Why conversations with tools cannot be rendered; empty when they can."""
        self._tool_example = ""
        self._are_arguments_text = self.is_tool_prompt_added = self._are_calls_written = False
        self._is_system_known = self._are_parallel_calls_shown = False
        self._are_results_carried = self._are_orphans_carried = False
        self._write_call = TOOL_CALL_WRITERS["hermes"]
        self._result_role = "tool"
        self._are_arguments_text = probe.are_arguments_text()
        self.is_tool_prompt_added = not probe.are_tools_shown()
        self._is_system_known = probe.is_system_known()
        self._are_results_carried = tool_results == "user"
        self._are_calls_written = not probe.are_calls_shown()
        if not self._are_results_carried:
            result_role = probe.result_role()
            if result_role is None:
                self.tool_fault = (
                    "Its chat template has no role for tool results, so that only conversations without tool calls "
                    f"could go on{_CARRY_RESULTS}"
                )
            self._result_role = result_role or "tool"
            self._are_orphans_carried = not probe.are_orphans_shown()
        self._are_result_names_written = probe.are_result_names_written()
        self._are_parallel_calls_shown = probe.are_parallel_calls_shown()

    def _probe_turns(self, reasoning_parser: str) -> None:
        """Find out how turns end, what stands around answers, and whether deltas are exact."""
        probe = TemplateProbe(self)
        prompt = probe.generation_prompt()
        self._answer_end_ids: tuple[int, ...] = ()
        self._answer_ending: Ending = probe.answer_ending()
        self._answer_end_ids = (self._answer_ending.token_id,)
        self._answer_format = find_answer_format(self, self._answer_ending, reasoning_parser)
        self.thought_marks = self._answer_format.thoughts
        self._is_reasoning_open = self.thought_marks is not None and self.thought_marks.is_open_at_end(prompt)
        self._end_text = self.decode(self._answer_end_ids)
        roles = ["user"] if self._are_results_carried else ["user", "tool"]
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys(
                ending.token_id
                for role in roles
                for is_call in (False, True)
                if (ending := self._ending(is_call=is_call, role=role)) is not None
            )
        )
        self._end_ids = frozenset({*self.stop_token_ids, getattr(self.tokenizer, "eos_token_id", None)} - {None})
        self._rewriting_features = probe.rewriting_features()
        self.is_history_rewritten: bool = bool(self._rewriting_features)
        probe.check_bridge(is_system_moved=frozenset({"system"}) in self._rewriting_features)

    def _choose_tool_format(self, tool_parser: str) -> None:
        """Find out how calls are read and written, and whether deltas with tool results are exact."""
        try:
            tool_format = choose_tool_format(self, tool_parser)
        except RenderingError as error:
            if tool_parser != "auto" or isinstance(error, SlowTemplateError):
                raise
            self.tool_fault = str(error)
            tool_format = choose_tool_format(self, "none")
        self.tool_parser = tool_format.name
        self._parse_calls = tool_format.parse
        if tool_format.write is not None:
            self._are_calls_written = True
            self._write_call = tool_format.write
            self._endings.clear()  # calls end as answers do
        probe = TemplateProbe(self)
        example = {"argument": "value"}
        self._tool_example = self._write_call("function_name", example)
        if not self._are_calls_written:
            written = probe.written_call("function_name", {"argument": ANSWER}) or ""
            if self.thought_marks is not None:
                written = written.rpartition(self.thought_marks.closing)[-1]
            self._tool_example = written.replace(ANSWER, example["argument"]).strip()
        if not self.tool_fault:
            try:
                probe.check_tool_bridge()
            except SlowTemplateError:
                raise
            except RenderingError as error:
                self.tool_fault = str(error).rstrip(".") + _CARRY_RESULTS

    def _ending(self, *, is_call: bool, role: str) -> Ending | None:
        """Return how a turn ends when `role` speaks next; None where the template does not write that."""
        role = "tool" if role in TOOL_ROLES else role
        key = (is_call, role)
        if key not in self._endings:
            self._endings[key] = TemplateProbe(self).ending(is_call=is_call, role=role)
        return self._endings[key]

    def check_tools(self) -> None:
        """Say before anything is sampled whether conversations with tools can be rendered.

        Raises:
            RenderingError: when they cannot, and what to do about it.
        """
        if self.tool_fault:
            name = getattr(self.tokenizer, "name_or_path", "")
            raise RenderingError(f"{name!r} cannot be used with tools. {self.tool_fault}")

    @classmethod
    def from_pretrained(cls, path: str, **kwargs: Any) -> TemplateRenderer:
        """Load from a model folder or hub name; `kwargs` are those of the constructor."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(path), **kwargs)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Return the token ids of the whole conversation, `[num_tokens]`.

        Raises:
            RenderingError: when the template refuses the messages.
        """
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
        """Return the whole conversation as the template writes it.

        Raises:
            RenderingError: when the template refuses the messages.
        """
        if tools or any(message["role"] in TOOL_ROLES for message in messages):
            self.check_tools()
        carried = carry_results(
            name_results(messages), carry_all=self._are_results_carried, carry_orphans=self._are_orphans_carried
        )
        chat = [self._plain(message) for message in carried]
        if tools and self.is_tool_prompt_added:
            chat = with_tool_prompt(chat, tools, self._tool_example, self._is_system_known)
            tools = None
        try:
            return written_in_time(
                partial(
                    self.tokenizer.apply_chat_template,
                    chat,
                    tools=[dict(tool) for tool in tools] if tools else None,
                    chat_template=self.chat_template,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **self.template_kwargs,
                )
            )
        except SlowTemplateError:
            raise
        except Exception as error:  # whatever a template's own code raises
            roles = [message["role"] for message in messages]
            raise RenderingError(
                f"The chat template refuses messages with roles {roles}: {type(error).__name__}: {error}"
            ) from error

    def may_rewrite(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> bool:
        """Return whether some turn of this conversation may be rendered differently once others follow.

        A template that drops earlier reasoning rewrites nothing where there is none, nor one that moves the tools'
        schemas where there are none: those conversations need no comparison.
        """
        new = list(takewhile(lambda message: message["role"] != "assistant", reversed(messages)))
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
        """Return what to append after `token_ids`, which end with a completion as sampled, to ask for the next one.

        The end-of-turn token is added where the completion was cut, the template's text between turns exactly once.

        Raises:
            RenderingError: when the template refuses the messages.
        """
        if elsewhere := self._roles_written_elsewhere(new_messages):
            raise RenderingError(
                f"The chat template writes messages of role {elsewhere} elsewhere than after an answer, or not at all."
            )
        if self.is_tool_prompt_added:
            tools = None  # they stand in the system message, which the base has not
        mark, new_messages, tools = self.content_marks.mark(new_messages, tools)
        base, ending, end_ids = self._base(new_messages)
        text = self.render_text([*base, *new_messages], tools=tools, add_generation_prompt=True)
        start = text.rindex(ANSWER) + len(ANSWER) + ending.offset
        delta = self.content_marks.encode(text[start:], mark) if mark else self.encode(text[start:])
        # The longest part of the text between turns that is already there, from an end-of-turn token on.
        for count in range(min(len(delta), len(token_ids), 4), 0, -1):
            tail = list(token_ids[len(token_ids) - count :])
            if tail[0] in end_ids and tail[1:] == delta[1:count]:
                return delta[count:]
        lead_ids = list(ending.lead_ids)
        if lead_ids and list(token_ids[-len(lead_ids) :]) == lead_ids:  # all but the end of the turn is there
            return delta
        return [*lead_ids, *delta]

    def _base(self, new_messages: Sequence[Message]) -> tuple[list[Message], Ending, frozenset[int]]:
        """Return the conversation that new messages are rendered after, its ending, and the tokens that may be that.

        These are what the template ends an answer or a call with when the same role follows: where turns end with
        what opens the next role's, the token of another role does not.
        """
        results = list(takewhile(lambda message: message["role"] in TOOL_ROLES, new_messages))
        # A result without name and id tells that a call could not be read: it answers none.
        answers = [result for result in results if result.get("name") or result.get("tool_call_id")]
        is_carried = self._are_results_carried or (not answers and self._are_orphans_carried)
        role = new_messages[0]["role"] if new_messages else "user"
        role = "user" if results and is_carried else role
        endings = {is_call: self._ending(is_call=is_call, role=role) for is_call in (False, True)}
        end_ids = frozenset(ending.token_id for ending in endings.values() if ending is not None)
        call_ending = endings[True]
        if answers and call_ending is not None:
            if self._are_result_names_written and not all(result.get("name") for result in answers):
                raise RenderingError(
                    "The chat template writes the name of its function with a tool's result, and a message of role "
                    f"{role!r} has no 'name'; add it, or append messages through a Conversation, which knows the calls."
                )
            answered = answers if self._are_parallel_calls_shown else answers[:1]
            call_ids = [result.get("tool_call_id") or f"call{index:05d}" for index, result in enumerate(answered)]
            names = [result.get("name") or "function" for result in answered]
            return [USER, calling(*names, call_ids=call_ids)], call_ending, end_ids
        return [USER, PLAIN_ANSWER], endings[False] or self._answer_ending, end_ids

    def _roles_written_elsewhere(self, messages: Iterable[Message]) -> list[str]:
        """Return the roles of messages that the template does not write after an answer (some hoist system ones)."""
        roles = {message["role"] for message in messages} - {"user", *TOOL_ROLES}
        return sorted(role for role in roles if self._ending(is_call=False, role=role) is None)

    def parse(
        self,
        completion_ids: Sequence[int],
        *,
        tools: Sequence[ToolSchema] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedCompletion:
        """Read sampled tokens as an assistant message; never raises.

        `tools` say what type an argument has; whether a named tool exists is for the caller that executes it to say.
        `prompt_ids` are what the tokens were sampled after, or the end of that, and say whether they begin within
        reasoning; without them they begin as after a conversation of one message.
        """
        ids = list(completion_ids)
        is_complete = bool(ids) and ids[-1] in self._end_ids
        text = self.decode(ids[:-1] if is_complete else ids)
        reasoning: str | None = None
        if self.thought_marks is not None:
            is_open = self._is_reasoning_open
            if prompt_ids is not None:
                is_open = self.thought_marks.is_open_at_end(self.decode(prompt_ids[-_NUM_END_TOKENS:]))
            reasoning, text = self.thought_marks.split(text, is_open=is_open)
        try:
            calls = self._parse_calls(text, tools or ())
        except Exception as error:  # a registered parser of someone else's
            failure = MalformedToolCall(text, f"{type(error).__name__}: {error}")
            message = {"role": "assistant", "content": text}
            return ParsedCompletion(message, is_complete, (failure,))
        message = {"role": "assistant", "content": self._answer_format.said(calls.content)}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls.tool_calls:
            message["tool_calls"] = list(calls.tool_calls)  # type: ignore[assignment]
        return ParsedCompletion(message, is_complete, calls.malformed)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of templated text; special tokens are recognised, none is added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_turns(self, text: str, mark: str = "") -> list[int]:
        """Encode turn by turn, since most were rendered before; `mark` is in special tokens of `ContentMarks`."""
        if mark:
            return self.content_marks.encode(text, mark)
        token_ids: list[int] = []
        # A piece begins with the token before it: some tokenizers read the beginning of a text otherwise.
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

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _plain(self, message: Message) -> dict[str, object]:
        """Return the message as templates expect it: text for content, no empty lists."""
        plain = {key: value for key, value in message.items() if value is not None}
        plain.setdefault("content", "")
        if plain["role"] == "tool":
            plain["role"] = self._result_role
        calls = plain.pop("tool_calls", None)
        if not calls:
            return self._answer_format.written(plain)
        if self._are_calls_written:
            blocks = [self._write_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            plain["content"] = "\n".join([plain["content"], *blocks] if plain["content"] else blocks)
            return self._answer_format.written(plain)
        if self._are_arguments_text:
            calls = [{**call, "function": _with_text_arguments(call["function"])} for call in calls]
        plain["tool_calls"] = list(calls)
        return self._answer_format.written(plain)


def _own_template(tokenizer: Tokenizer) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise RenderingError(
            f"The tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template and none is guessed; "
            "pass chat_template=..., the Jinja text that the model was trained with."
        )
    return template


def _with_text_arguments(function: Mapping[str, object]) -> dict[str, object]:
    arguments = function.get("arguments", {})
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}

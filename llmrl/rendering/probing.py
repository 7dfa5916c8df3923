"""Detection of a chat template's properties by rendering short conversations with marks in their texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from llmrl.data import Message, ToolSchema, text_of
from llmrl.data.content_marks import RenderingError
from llmrl.data.template_limit import SlowTemplateError
from llmrl.rendering.base import Ending
from llmrl.rendering.reasoning import ThoughtMarks
from llmrl.rendering.results import TOOL_ROLES
from llmrl.rendering.tool_calls import Arguments, ToolCallParser
from llmrl.rendering.writer import TemplateWriter

ANSWER = "Xq7AnswerMarkXq7"
REASONING = "Xq7ReasoningMarkXq7"
RESULT = "Xq7ResultMarkXq7"
_TEXT = "Xq7TextMarkXq7"
_TOOL_NAME = "xq7_tool_mark"

SYSTEM: Message = {"role": "system", "content": "s"}
USER: Message = {"role": "user", "content": "a"}
NEXT_USER: Message = {"role": "user", "content": "b"}
PLAIN_ANSWER: Message = {"role": "assistant", "content": ANSWER}
_TOOL_RESULT: Message = {"role": "tool", "name": _TOOL_NAME, "content": RESULT, "tool_call_id": "call00000"}
_ORPHAN_RESULT: Message = {"role": "tool", "content": RESULT}
# Arguments that a parsed call must reproduce: a text that looks like a number, a text that some formats escape, and the
# mark, which must be last, also alphabetically, since some templates sort arguments.
_ARGUMENTS = {"code": "90210", "path": "C:\\new", "value": ANSWER}
TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "string", "description": "v"} for name in _ARGUMENTS},
            "required": ["value"],
        },
    },
}


_MARKED: Arguments = {"value": ANSWER}


def calling(*names: str, call_ids: Sequence[str] | None = None, arguments: Arguments = _MARKED) -> Message:
    """Return an assistant message that calls these functions, with the mark in each call's arguments."""
    names = names or (_TOOL_NAME,)
    call_ids = call_ids or [f"call{index:05d}" for index in range(len(names))]
    calls = [
        {"type": "function", "id": call_id, "function": {"name": name, "arguments": dict(arguments)}}
        for name, call_id in zip(names, call_ids, strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


_CHATS_WITH_CALL = [[USER, calling(), following] for following in (_TOOL_RESULT, NEXT_USER)]


def chat_features(
    messages: Iterable[Message], tools: Sequence[ToolSchema] | None, thoughts: ThoughtMarks | None
) -> frozenset[str]:
    """Return the features of a conversation that make some templates rewrite earlier turns.

    Example:
        >>> answer = {"role": "assistant", "content": "", "reasoning_content": "r"}
        >>> sorted(chat_features([answer], tools=None, thoughts=None))
        ['reasoning']
    """
    features = {"tools"} if tools else set()
    for message in messages:
        content = text_of(message.get("content"))
        if "reasoning_content" in message or (thoughts is not None and thoughts.closing in content):
            features.add("reasoning")
        if message["role"] == "system":
            features.add("system")
        if message.get("tool_calls"):
            features.add("tool calls")
            if content.strip():
                features.add("text beside calls")
    return frozenset(features)


@dataclass
class TemplateProbe:
    """Detector of a template's properties; the fields are properties that earlier probes detected."""

    writer: TemplateWriter
    shows_parallel_calls: bool = False
    """Whether the template writes several calls in one message."""
    answer_ending: Ending | None = None
    """Ending of a plain answer before a user message."""
    _endings: dict[tuple[bool, str], Ending | None] = field(default_factory=dict, init=False)

    @property
    def thoughts(self) -> ThoughtMarks | None:
        """Marks around reasoning; None if unknown."""
        return self.writer.answer_format.thoughts

    def text(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None, is_prompt: bool = True
    ) -> str | None:
        """Return the rendered text; None if the template refuses the messages."""
        try:
            return self.writer.write(messages, tools=tools, is_prompt=is_prompt)
        except SlowTemplateError:
            raise
        except RenderingError:
            return None

    def are_arguments_text(self) -> bool:
        """Return whether the template requires a call's arguments as JSON text instead of a dict."""
        if any(self.text(chat, tools=[TOOL]) is not None for chat in _CHATS_WITH_CALL):
            return False
        as_text = TemplateProbe(replace(self.writer, are_arguments_text=True))
        return any(as_text.text(chat, tools=[TOOL]) is not None for chat in _CHATS_WITH_CALL)

    def are_tools_shown(self) -> bool:
        """Return whether prompts contain the schema of a tool."""
        return _TOOL_NAME in (self.text([USER], tools=[TOOL]) or "")

    def is_system_known(self) -> bool:
        """Return whether the template accepts a system message."""
        return self.text([SYSTEM, USER]) is not None

    def are_calls_shown(self) -> bool:
        """Return whether an assistant's tool calls are rendered."""
        return any(ANSWER in (self.text(chat) or "") for chat in _CHATS_WITH_CALL)

    def result_role(self) -> str | None:
        """Return the role of tool results in the template; None if the template has no such role."""
        added = self._added_tokens()
        # Some templates write any role; prefer a role with its own token.
        for role in sorted(TOOL_ROLES, key=lambda role: f"<|{role}|>" not in added):
            is_named = role == "tool" or re.search(rf"\b{role}\b", self.writer.chat_template) is not None
            probe = TemplateProbe(replace(self.writer, result_role=role))
            if is_named and probe._after_mark(calling(), _TOOL_RESULT):
                return role
        return None

    def are_orphans_shown(self) -> bool:
        """Return whether the template also writes a tool result after an answer without calls."""
        return bool(self._after_mark(PLAIN_ANSWER, _ORPHAN_RESULT))

    def are_result_names_written(self) -> bool:
        """Return whether a tool result is written with the name of its function."""
        return _TOOL_NAME in self._after_mark(calling(), _TOOL_RESULT)

    def are_parallel_calls_shown(self) -> bool:
        """Return whether two calls in one message are both rendered."""
        text = self.text([USER, calling("f", "g"), _TOOL_RESULT]) or ""
        return text.count(ANSWER) == 2

    def _after_mark(self, answer: Message, following: Message) -> str:
        """Return the text after the last mark in `answer`; empty if it does not contain the following message."""
        return self._around_mark(answer, following)[1]

    def _around_mark(self, answer: Message, following: Message) -> tuple[str, str]:
        """Return the text before and after the last mark; empty if the following message is not written after it."""
        text = self.text([USER, answer, following]) or ""
        before, mark, after = text.rpartition(ANSWER)
        return (before, after) if mark and following["content"] in after else ("", "")

    def find_answer_ending(self) -> Ending:
        """Return the ending of a plain answer before a user message; raise RenderingError if no token marks it."""
        after = self.writer.write([USER, PLAIN_ANSWER, NEXT_USER], is_prompt=True)
        if ANSWER not in after:
            raise RenderingError("The chat template does not write an assistant's content; pass another chat_template.")
        ending = self.ending(is_call=False, role="user")
        if ending is None:
            after = after[after.index(ANSWER) + len(ANSWER) :]
            raise RenderingError(
                "The chat template does not end an assistant's turn with a special token "
                f"(it writes {after[: after.rindex(NEXT_USER['content'])]!r}), so turns cannot be appended token by "
                "token; pass another chat_template."
            )
        self._check_turn_is_one_message(self.writer.decode([ending.token_id]))
        return ending

    def turn_marks(self) -> set[str]:
        """Return the added tokens, special or not, around turns and tool results."""
        frames = [self._after_mark(PLAIN_ANSWER, NEXT_USER), self._after_mark(calling(), _TOOL_RESULT)]
        endings = [self.ending(is_call=False, role="user"), self.ending(is_call=True, role="tool")]
        text = "".join(
            frame[ending.offset :] for frame, ending in zip(frames, endings, strict=True) if ending is not None
        )
        marks = {token for token in self._added_tokens() if token in text}
        if self.thoughts is not None:
            marks -= {self.thoughts.opening, self.thoughts.closing}
        return marks

    def _check_turn_is_one_message(self, end: str) -> None:
        """Raise RenderingError if reasoning and answer are separate messages with the same end token, as in harmony."""
        for key in ("reasoning_content", "reasoning", "thinking"):
            text = self.text([USER, {**PLAIN_ANSWER, key: REASONING}], is_prompt=False) or ""
            _, found, after = text.partition(REASONING)
            before_answer, answer, _ = after.partition(ANSWER)
            if found and answer and end in before_answer:
                family = "the harmony format of gpt-oss" if "<|channel|>" in text else "a format of several messages"
                raise RenderingError(
                    f"The chat template ends an assistant's reasoning with {end!r}, the end of its turn ({family}), so "
                    "sampling would stop before the answer. Use backend='renderers', which has a hand-written renderer "
                    "for such turns: pip install 'llmrl[renderers]', and a tokenizer whose name_or_path is the "
                    "model's name on the hub."
                )

    def ending(self, *, is_call: bool, role: str) -> Ending | None:
        """Return the ending of an answer, or of a message with calls, before a message of `role`; None if unknown."""
        key = (is_call, "tool" if role in TOOL_ROLES else role)
        if key not in self._endings:
            self._endings[key] = self._find_ending(*key)
        return self._endings[key]

    def _find_ending(self, is_call: bool, role: str) -> Ending | None:
        if is_call and self.writer.write_call is not None:
            return None
        answer, result = PLAIN_ANSWER, _ORPHAN_RESULT
        if is_call:
            names = ("f", "g") if self.shows_parallel_calls else ("f",)
            answer, result = calling(*names), _TOOL_RESULT
        following = {"user": NEXT_USER, "tool": result}.get(role, {"role": role, "content": RESULT})
        before, after = self._around_mark(answer, following)
        if not after:
            return None
        # The user's content is one letter, which may also occur in the text before it.
        find = after.rindex if role == "user" else after.index
        between = after[: find(following["content"])]
        tokenizer = self.writer.tokenizer
        end_of_text = {}
        if tokenizer.eos_token and tokenizer.eos_token_id is not None:
            end_of_text = {tokenizer.eos_token: tokenizer.eos_token_id}
        candidates = [end_of_text, self._added_tokens()]
        if is_call:
            # Marks that close a call may also be added tokens; a token between two calls is not the ending.
            within = before.partition(ANSWER)[2]
            added = {one.content: token_id for token_id, one in tokenizer.added_tokens_decoder.items() if one.special}
            special = self._special_tokens() | added
            if self.answer_ending is not None:
                end_id = self.answer_ending.token_id
                end_of_text = {tokenizer.convert_ids_to_tokens(end_id): end_id} | end_of_text
            candidates = [end_of_text, {token: special[token] for token in special if token not in within}]
        for tokens in candidates:
            found = [(between.find(token), -len(token), tokens[token]) for token in tokens if token in between]
            if found:
                offset, _, token_id = min(found)  # the first token; the longest if several start there
                lead_ids = () if is_call or not offset else tuple(self.writer.encode(between[:offset]))
                return Ending(token_id, offset, lead_ids)
        return None

    def _added_tokens(self) -> dict[str, int]:
        return self.writer.tokenizer.get_added_vocab() | self._special_tokens()

    def _special_tokens(self) -> dict[str, int]:
        tokenizer = self.writer.tokenizer
        return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))

    def rewriting_features(self) -> frozenset[frozenset[str]]:
        """Return the sets of `chat_features` for which later turns change the rendering of an earlier turn."""
        return frozenset(
            chat_features([*asked, answer], tools, self.thoughts)
            for tools, asked, answer, following in self._turns()
            if self._is_rewritten(tools, asked, answer, following)
        )

    @staticmethod
    def _turns() -> Iterator[tuple[list[ToolSchema] | None, list[Message], Message, Message]]:
        for tools in (None, [TOOL]):
            for reasoning in ({}, {"reasoning_content": REASONING}):
                yield tools, [USER], {**PLAIN_ANSWER, **reasoning}, NEXT_USER
                yield tools, [USER], {**calling(), **reasoning}, _TOOL_RESULT
            yield tools, [SYSTEM, USER], PLAIN_ANSWER, NEXT_USER
            yield tools, [USER], {**calling(), "content": _TEXT}, _TOOL_RESULT

    def _is_rewritten(
        self, tools: list[ToolSchema] | None, asked: list[Message], answer: Message, following: Message
    ) -> bool:
        """Return whether the rendering up to the answer's mark depends on what follows, or lacks reasoning or text."""
        prompt = self._comparable(self.text(asked, tools=tools))
        as_last = self._comparable(self.text([*asked, answer], tools=tools, is_prompt=False))
        if prompt is None or as_last is None or ANSWER not in as_last:
            return False
        as_last = as_last[: as_last.index(ANSWER)]
        said = [_TEXT] if answer["content"] == _TEXT else []
        if self.thoughts is not None and "reasoning_content" in answer:
            said.append(REASONING)
        for later in ([following], [following, PLAIN_ANSWER, NEXT_USER]):
            text = self._comparable(self.text([*asked, answer, *later], tools=tools))
            if text is None or ANSWER not in text:
                continue
            head = text[: text.index(ANSWER)]
            if head != as_last or not head.startswith(prompt) or not all(each in head for each in said):
                return True
        return False

    def _comparable(self, text: str | None) -> str | None:
        """Return a rendering without empty reasoning blocks."""
        thoughts = self.thoughts
        return text if text is None or thoughts is None else thoughts.without_empty(text)

    def written_call(self, name: str, arguments: Arguments, *, num_calls: int = 1) -> str | None:
        """Return the template's text of a turn with calls, or None; the last argument must be the mark."""
        # Some templates write a call's id instead of its name.
        ids = [f"functions.{name}:{index}" for index in range(num_calls)]
        written = (self._written_call(name, arguments, num_calls, each) for each in (None, ids))
        return next((text for text in written if text is not None and name in text), None)

    def _written_call(self, name: str, arguments: Arguments, num_calls: int, ids: Sequence[str] | None) -> str | None:
        asked = calling(*[name] * num_calls, arguments=arguments, call_ids=ids)
        for role, following in (("tool", _TOOL_RESULT), ("user", NEXT_USER)):
            ending = self.ending(is_call=True, role=role)
            tools = None if self.writer.is_tool_prompt_added else [TOOL]
            prompt = self.text([USER], tools=tools)
            text = self.text([USER, asked, following], tools=tools)
            if ending is None or prompt is None or text is None or ANSWER not in text:
                continue
            start = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(prompt))
            if start < len(prompt):
                # The prompt opens a block that the turn lacks, such as reasoning: begin at the start of that block.
                start = max((text.rfind(mark, 0, start) + 1 for mark in "\n>]"), default=0)
            return text[start : text.rindex(ANSWER) + len(ANSWER) + ending.offset]
        return None

    def is_call_read(self, parser: ToolCallParser) -> bool:
        """Return whether a parser reads the template's calls, including parallel ones if it writes them."""
        num_calls = 2 if self.shows_parallel_calls else 1
        text = self.written_call(_TOOL_NAME, _ARGUMENTS, num_calls=num_calls)
        if text is None:
            return False
        if self.thoughts is not None:
            _, text = self.thoughts.split(text)
        parsed = parser(text, [TOOL])
        expected = {"name": _TOOL_NAME, "arguments": _ARGUMENTS}
        return not parsed.malformed and [call["function"] for call in parsed.tool_calls] == [expected] * num_calls

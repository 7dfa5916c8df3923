"""`TemplateWriter`: writes conversations with a chat template according to the detected properties of the template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from llmrl._utils.failure import describe
from llmrl._utils.types import Tokenizer
from llmrl.data import Message, ToolSchema
from llmrl.data.content_marks import RenderingError
from llmrl.data.template_limit import SlowTemplateError, written_in_time
from llmrl.rendering.base import TextCoder
from llmrl.rendering.reasoning import NO_MARKS, AnswerFormat
from llmrl.rendering.results import TOOL_ROLES, carry_results, name_results, with_text
from llmrl.rendering.tool_calls import ToolCallWriter

_TOOL_PROMPT = """You may call functions to help the user. These are their signatures, as JSON, within <tools></tools>:
<tools>
{schemas}
</tools>

Write each call like this one, with the function's name and arguments:
{example}"""


@dataclass(frozen=True)
class TemplateWriter(TextCoder):
    """Writer that passes messages to a chat template in the form that it reads; probes use modified copies."""

    tokenizer: Tokenizer
    chat_template: str
    template_kwargs: Mapping[str, object]
    tool_fault: str = ""
    """Reason why conversations with tools cannot be rendered; empty if they can."""
    are_arguments_text: bool = False
    """Whether the template expects a call's arguments as JSON text instead of a dict."""
    is_tool_prompt_added: bool = False
    """Whether llmrl adds a prompt with the tools, because the template does not show them."""
    is_system_known: bool = False
    result_role: str = "tool"
    """Role of tool results in the template."""
    are_results_carried: bool = False
    """Whether tool results are written as user messages."""
    are_orphans_carried: bool = False
    """Whether results after an answer without calls are written as user messages."""
    write_call: ToolCallWriter | None = None
    """Function that writes a call into a message's content; None if the template writes calls."""
    tool_example: str = ""
    """Example of a call, for the added tool prompt."""
    answer_format: AnswerFormat = NO_MARKS

    @property
    def model_name(self) -> str:
        """Name of the tokenizer's model; empty if unknown."""
        return getattr(self.tokenizer, "name_or_path", "")

    def check_tools(self) -> None:
        """Raise RenderingError if conversations with tools cannot be rendered."""
        if self.tool_fault:
            raise RenderingError(f"{self.model_name!r} cannot be used with tools. {self.tool_fault}")

    def write(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None, is_prompt: bool = False
    ) -> str:
        """Return the whole conversation as text; raise RenderingError if the template refuses it."""
        if tools or any(message["role"] in TOOL_ROLES for message in messages):
            self.check_tools()
        carried = carry_results(
            name_results(messages), carry_all=self.are_results_carried, carry_orphans=self.are_orphans_carried
        )
        chat = [self._plain(message) for message in carried]
        if tools and self.is_tool_prompt_added:
            chat = self._with_tool_prompt(chat, tools)
            tools = None
        try:
            return written_in_time(
                partial(
                    self.tokenizer.apply_chat_template,
                    chat,
                    tools=[dict(tool) for tool in tools or ()] or None,
                    chat_template=self.chat_template,
                    add_generation_prompt=is_prompt,
                    tokenize=False,
                    **self.template_kwargs,
                )
            )
        except SlowTemplateError:
            raise
        except Exception as error:  # templates may raise any exception
            roles = [message["role"] for message in messages]
            raise RenderingError(f"The chat template refuses messages with roles {roles}: {describe(error)}") from error

    def _plain(self, message: Message) -> dict[str, object]:
        """Return the message in the form that the template expects, without entries that are None or empty lists."""
        plain = {key: value for key, value in message.items() if value is not None}
        plain.setdefault("content", "")
        if plain["role"] == "tool":
            plain["role"] = self.result_role
        calls = plain.pop("tool_calls", None)
        if calls and self.write_call is not None:
            blocks = [self.write_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            written = "\n".join(blocks)
            plain["content"] = with_text(plain["content"], after=f"\n{written}") if plain["content"] else written
        elif calls and self.are_arguments_text:
            plain["tool_calls"] = [{**call, "function": _with_text_arguments(call["function"])} for call in calls]
        elif calls:
            plain["tool_calls"] = list(calls)
        return self.answer_format.written(plain)

    def _with_tool_prompt(self, chat: list[dict[str, object]], tools: Sequence[ToolSchema]) -> list[dict[str, object]]:
        """Return the chat with tools and an example call in its system message, or its first message."""
        schemas = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
        prompt = _TOOL_PROMPT.format(schemas=schemas, example=self.tool_example)
        if chat and chat[0]["role"] == "system":
            return [{**chat[0], "content": with_text(chat[0]["content"], after=f"\n\n{prompt}")}, *chat[1:]]
        if self.is_system_known or not chat:
            return [{"role": "system", "content": prompt}, *chat]
        return [{**chat[0], "content": with_text(chat[0]["content"], before=f"{prompt}\n\n")}, *chat[1:]]


def _with_text_arguments(function: Mapping[str, object]) -> dict[str, object]:
    arguments = function.get("arguments", {})
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}

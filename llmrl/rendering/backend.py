"""Selection of a renderer: with the chat template, or with the optional package `renderers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from llmrl._utils.failure import describe
from llmrl._utils.imports import require
from llmrl._utils.types import Tokenizer
from llmrl.data import MalformedToolCall, Message, ParsedCompletion, ToolSchema
from llmrl.data.content_marks import ContentMarks, RenderingError
from llmrl.data.template_limit import SlowTemplateError
from llmrl.rendering.base import Renderer, TextCoder, completion_of
from llmrl.rendering.reasoning import ThoughtMarks
from llmrl.rendering.results import name_results
from llmrl.rendering.template import TemplateRenderer
from llmrl.rendering.tool_calls import make_tool_call


def make_renderer(
    tokenizer: Tokenizer, *, backend: Literal["auto", "template", "renderers"] = "auto", **template_arguments: Any
) -> Renderer:
    """Return a renderer for a tokenizer's model.

    Args:
        tokenizer: a Hugging Face tokenizer.
        backend: `template` renders the chat template; `renderers` uses the package of that name; `auto` uses the
            template, or the package if the template cannot be rendered exactly or its calls cannot be read, and the
            package supports the model. With template arguments, `auto` only uses the template.
        template_arguments: arguments of `TemplateRenderer`.

    Raises RenderingError if no backend renders the model exactly, MissingExtraError if `renderers` is requested and not
    installed, TypeError if it gets template arguments, and ValueError if the backend is unknown.
    """
    if backend not in ("auto", "template", "renderers"):
        raise ValueError(f"backend must be 'auto', 'template' or 'renderers', got {backend!r}.")
    if backend == "renderers":
        if template_arguments:
            raise TypeError(
                f"backend='renderers' does not accept {sorted(template_arguments)}, which need backend='template'."
            )
        return PackageRenderer(tokenizer)
    try:
        renderer = TemplateRenderer(tokenizer, **template_arguments)
    except RenderingError as error:
        if backend == "template" or template_arguments or isinstance(error, SlowTemplateError):
            raise
        try:
            return PackageRenderer(tokenizer)
        except (ImportError, RenderingError) as package_error:
            raise RenderingError(f"{error} (backend='renderers': {package_error})") from error
    if backend == "auto" and renderer.tool_parser == "none" and not template_arguments:
        with suppress(ImportError, RenderingError):
            return PackageRenderer(tokenizer)
    return renderer


class PackageRenderer(TextCoder):
    """Adapter for the package `renderers`; raises RenderingError if it does not know the model's exact hub name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        package = require("renderers.base", extra="renderers")
        name = getattr(tokenizer, "name_or_path", "")
        if name not in package.MODEL_RENDERER_MAP:
            raise RenderingError(
                f"The package renderers does not know {name!r} (it needs the exact hub name); use backend='template'."
            )
        self.tokenizer = tokenizer
        self._renderer = package.create_renderer(tokenizer)
        self._content_marks = ContentMarks(tokenizer)
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self.is_history_rewritten: bool = not self._renderer.is_prefix_stable
        self.thought_marks: ThoughtMarks | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Return the conversation's token ids; raise RenderingError, for example if a message has a special token."""
        self._content_marks.refuse(messages, tools)
        try:
            return list(
                self._renderer.render_ids(
                    [_plain(message) for message in name_results(messages)],
                    tools=_schemas(tools),
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except Exception as error:
            raise RenderingError(f"renderers refuses the messages: {describe(error)}") from error

    def may_rewrite(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> bool:
        """Return whether later turns may change the rendering of earlier turns, which only depends on the model."""
        return self.is_history_rewritten

    def check_tools(self) -> None:
        """Do nothing: the package supports tools for all its models."""

    def bridge(
        self,
        token_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
    ) -> list[int]:
        """Return the ids to append; raise RenderingError, for example if a message has a special token."""
        self._content_marks.refuse(new_messages, tools)
        # Only the last token can end this turn; earlier end tokens are those of earlier turns.
        before = list(token_ids[:-1])
        last = list(token_ids[-1:])
        bridged = self._renderer.bridge_to_next_turn(
            before, last, [_plain(message) for message in new_messages], tools=_schemas(tools)
        )
        if bridged is None:
            roles = [message["role"] for message in new_messages]
            raise RenderingError(f"renderers cannot append messages with roles {roles}; use mode='message'.")
        return list(bridged.token_ids[len(token_ids) :])

    def parse(
        self,
        completion_ids: Sequence[int],
        *,
        tools: Sequence[ToolSchema] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedCompletion:
        """Return sampled tokens as an assistant message; never raise."""
        ids = list(completion_ids)
        is_complete = bool(ids) and ids[-1] in self.stop_token_ids
        try:
            parsed = self._renderer.parse_response(ids, tools=_schemas(tools))
        except Exception as error:
            text = self.decode(ids[:-1] if is_complete else ids)
            failure = MalformedToolCall(text, describe(error))
            return completion_of(text, is_complete=is_complete, malformed=[failure])
        calls = []
        malformed = []
        for call in parsed.tool_calls:
            if call.status != "ok" or not call.name or not isinstance(call.arguments, Mapping):
                malformed.append(MalformedToolCall(call.raw, str(call.status)))
                continue
            try:
                calls.append(make_tool_call(call.name, call.arguments, call_id=call.id))
            except ValueError as error:
                malformed.append(MalformedToolCall(call.raw, str(error)))
        return completion_of(
            parsed.content or "",
            is_complete=is_complete,
            reasoning=parsed.reasoning_content,
            tool_calls=calls,
            malformed=malformed,
        )


def _plain(message: Message) -> dict[str, object]:
    return {key: value for key, value in message.items() if value is not None and value != []}


def _schemas(tools: Sequence[ToolSchema] | None) -> list[dict[str, object]] | None:
    return [dict(tool) for tool in tools or ()] or None

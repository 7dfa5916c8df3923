"""Rendering of conversations with a tokenizer's chat template: text, token ids and assistant masks."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from llmrl._utils.arguments import check_choice
from llmrl._utils.types import Nested, Tokenizer
from llmrl.data.chats import flatten, map_nested
from llmrl.data.content_marks import ContentMarks, with_plain_marks
from llmrl.data.message import Message, ToolSchema
from llmrl.data.template_limit import written_in_time
from llmrl.data.templated_text import assistant_spans, has_generation_marks, template_of_model


@dataclass(frozen=True, slots=True)
class ChatRendering:
    """Options for rendering and encoding conversations, as in `History.apply_chat_template`."""

    tokenizer: Tokenizer
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    padding: bool | str = False
    truncation: bool = False
    max_length: int | None = None
    has_mask: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice((False, True, "longest", "max_length"), padding=self.padding)
        if (self.truncation or self.padding == "max_length") and self.max_length is None:
            raise ValueError("truncation and padding='max_length' need max_length.")
        if not self.chat_template:
            model = str(getattr(self.tokenizer, "name_or_path", ""))
            has_own = bool(self.tokenizer.chat_template)
            object.__setattr__(self, "chat_template", template_of_model(model, has_own=has_own))
        template = self._template
        if isinstance(template, str):
            unread = [name for name in self.template_kwargs if not re.search(rf"\b{re.escape(name)}\b", template)]
            if unread:
                raise ValueError(
                    f"apply_chat_template got {unread}, which are neither arguments nor read by the template."
                )

    @property
    def _template(self) -> object:
        """The given or chosen template, otherwise the tokenizer's: Jinja text, or several texts by name."""
        return self.chat_template or self.tokenizer.chat_template

    def text(self, chat: Sequence[Message]) -> str:
        """Render a conversation."""
        options = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return written_in_time(
            partial(
                self.tokenizer.apply_chat_template,
                [dict(message) for message in chat],
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                tokenize=False,
                **options,
                **self.template_kwargs,
            )
        )

    def tokens(self, chat: Sequence[Message]) -> TensorDict:
        """Encode a conversation: `input_ids`, `attention_mask`, `assistant_masks` if requested, `[num_tokens]` each."""
        marks = ContentMarks(self.tokenizer)
        given = self.template_kwargs.get("tools")
        mark, chat, tools = marks.mark(chat, cast(Sequence[ToolSchema] | None, given))
        marked = replace(self, template_kwargs={**self.template_kwargs, **({} if tools is None else {"tools": tools})})

        def render(messages: Sequence[Message], is_prompt: bool) -> str:
            is_whole = len(messages) == len(chat) and all(map(operator.is_, messages, chat))
            is_continued = is_whole and self.continue_final_message
            rendering = replace(marked, add_generation_prompt=is_prompt, continue_final_message=is_continued)
            return with_plain_marks(rendering.text(messages), mark)

        text = render(chat, self.add_generation_prompt)
        are_assistants = []
        if self.has_mask:
            located = marks.locate(text, mark)
            token_ids = [token_id for token_id, _ in located]
            are_assistants = _mask(self.tokenizer, text, located, marked._spans(chat, render, mark))
        elif mark:
            token_ids = marks.encode(text, mark)
        else:
            token_ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        entries = {"input_ids": torch.tensor(token_ids, dtype=torch.int64)}
        entries["attention_mask"] = torch.ones_like(entries["input_ids"])
        if self.has_mask:
            entries["assistant_masks"] = torch.tensor(are_assistants, dtype=torch.bool)
        length = self.max_length if self.truncation else None
        return TensorDict({name: entry[:length] for name, entry in entries.items()})

    def _spans(
        self, chat: Sequence[Message], render: Callable[[Sequence[Message], bool], str], mark: str
    ) -> list[tuple[int, int]]:
        """Return the masked character spans: the template's `{% generation %}` blocks, else the assistant's turns."""
        template = self._template
        if not (isinstance(template, str) and has_generation_marks(template)):
            return assistant_spans(chat, render)
        from transformers.utils.chat_template_utils import render_jinja_template

        # No time limit is needed: the same rendering has just ended within it.
        [text], [blocks] = render_jinja_template(
            [[dict(message) for message in chat]],
            chat_template=template,
            return_assistant_tokens_mask=True,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
            **{**self.tokenizer.special_tokens_map, **self.template_kwargs},
        )
        # Escaped marks are shorter in the encoded text, which shifts the spans.
        spans = [
            (len(with_plain_marks(text[:start], mark)), len(with_plain_marks(text[:end], mark)))
            for start, end in blocks
        ]
        if all(message.get("is_complete", True) for message in chat):
            return spans
        written = assistant_spans(chat, render)
        both = [(max(a, c), min(b, d)) for a, b in spans for c, d in written]
        return [(start, end) for start, end in both if start < end]

    def encode(self, chats: Nested[tuple[Message, ...]], *, is_dict: bool) -> Nested[torch.Tensor] | TensorDictBase:
        """Encode a batch as one TensorDict, or as nested lists of tensors `[1, num_tokens]`."""
        rows = map_nested(chats, self.tokens)
        if self.padding:
            rows = self._padded(rows)
        if is_dict:
            return _stacked(rows)
        return map_nested(rows, lambda row: row["input_ids"].reshape(1, -1))

    def _padded(self, rows: Nested[TensorDict]) -> Nested[TensorDict]:
        is_left = getattr(self.tokenizer, "padding_side", "right") == "left"
        pad_id = getattr(self.tokenizer, "pad_token_id", None)
        fillers = {"input_ids": (self.tokenizer.eos_token_id or 0) if pad_id is None else pad_id}
        fixed = (self.max_length or 0) if self.padding == "max_length" else 0
        length = max(fixed, *(len(row["input_ids"]) for row in flatten(rows)))

        def padded(row: TensorDict) -> TensorDict:
            filled = {}
            for name, entry in row.items():
                rest = entry.new_full((length - len(entry),), fillers.get(name, 0))
                filled[name] = torch.cat([rest, entry] if is_left else [entry, rest])
            return TensorDict(filled)

        return map_nested(rows, padded)


def _stacked(rows: Nested[TensorDict]) -> TensorDictBase:
    if not isinstance(rows, list):
        return rows
    return lazy_stack([_stacked(row) for row in rows])


def _mask(
    tokenizer: Tokenizer, text: str, located: Sequence[tuple[int, tuple[int, int]]], spans: Sequence[tuple[int, int]]
) -> list[bool]:
    """Return whether each token lies in a span; white space after a span's end-of-turn token does not count."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    mask = [False] * len(located)
    for start, end in spans:
        places = [place for place, (_, (left, right)) in enumerate(located) if start <= left and right <= end]
        ends = [place for place in places if located[place][0] in special]
        # Text after the end-of-turn token belongs to the template; not every template has such a token.
        is_ended = bool(ends) and not text[located[ends[-1]][1][1] : end].strip()
        for place in places:
            mask[place] = not is_ended or place <= ends[-1]
    return mask

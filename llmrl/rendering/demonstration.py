"""Conversion of recorded conversations, for supervised training."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmrl.data import Message, ToolSchema, check_messages, text_of
from llmrl.data.columns import CONTEXT_VERSION
from llmrl.data.content_marks import RenderingError
from llmrl.data.message import prompt_of
from llmrl.rendering.base import Renderer, end_of_turn
from llmrl.rendering.conversation import Conversation, Mode, reading_of
from llmrl.rendering.reasoning import ThoughtMarks, said_after
from llmrl.rendering.reconciler import common_prefix_length
from llmrl.rendering.results import name_results

_FOLLOWING: Message = {"role": "user", "content": "a"}


def demonstrate(
    renderer: Renderer, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None, mode: Mode = "auto"
) -> Conversation:
    """Return a `Conversation` in which the given assistant messages are the policy's completions.

    Each assistant message is a turn. Its text in the template, up to the end-of-turn token, is
    trained. A message with `"weight": 0` is context. If a template renders earlier turns
    differently, each turn has its own row, as if sampled. Log-probs are NaN and versions -1.

    Raises TypeError or ValueError if a message is malformed or no message is trained, and RenderingError if the
    template refuses the messages, or its text for an answer cannot be sampled or does not parse to the same message.

    Example:
        >>> conversation = demonstrate(renderer, [                                     # doctest: +SKIP
        ...     {"role": "user", "content": "1 + 2 ="}, {"role": "assistant", "content": "3"}])
        >>> renderer.decode(conversation.turns[0].completion_ids)                      # doctest: +SKIP
        '3<|im_end|>'
    """
    messages = check_messages(messages)
    conversation = Conversation.start(renderer, mode=mode)
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        prompted = conversation.with_prompt(messages[:place], tools=tools)
        ids = _completion_ids(renderer, messages, place, prompted.prompt_ids, tools)
        conversation = prompted.with_completion(
            ids, log_probs=[math.nan] * len(ids), versions=[CONTEXT_VERSION] * len(ids)
        )
        assert conversation.last is not None
        if reading_of(conversation.last.message) not in (
            reading_of(message),
            reading_of(_with_split_thoughts(message, renderer.thought_marks)),
        ):
            raise RenderingError(
                f"messages[{place}] does not survive the chat template: its rendering parses as "
                f"{conversation.last.message!r:.300} in place of {message!r:.300}."
            )
        conversation = conversation.with_messages(messages[: place + 1])
    if not conversation.num_turns:
        raise ValueError("messages have nothing to train: no assistant message has a 'weight' other than 0.")
    return conversation


def _with_split_thoughts(message: Message, thoughts: ThoughtMarks | None) -> Message:
    """Return the message with reasoning moved from its content to `reasoning_content`."""
    if message.get("reasoning_content") or message.get("content") is None or thoughts is None:
        return message
    reasoning, content = thoughts.split(text_of(message["content"]))
    return {**message, "reasoning_content": reasoning, "content": content}


def _completion_ids(
    renderer: Renderer,
    messages: Sequence[Message],
    place: int,
    prompt_ids: Sequence[int],
    tools: Sequence[ToolSchema] | None,
) -> list[int]:
    """Return the ids that a model would sample for `messages[place]`, as the template writes it."""
    prompt = renderer.render(messages[:place], tools=tools, add_generation_prompt=True)
    written = renderer.render(messages[: place + 1], tools=tools)
    num_equal = common_prefix_length(prompt, written)
    answer = written[num_equal:]
    if num_equal < len(prompt):  # the prompt's end may be merged with the answer's start into one token
        lead = renderer.decode(prompt[num_equal:])
        text = renderer.decode(answer)
        thoughts = renderer.thought_marks
        said = said_after(lead, text, thoughts)
        is_dropped = thoughts is not None and thoughts.is_open_at_end(lead) and thoughts.closing not in text
        if said is None or is_dropped:
            raise RenderingError(
                f"the chat template asks for messages[{place}] with a prompt that ends with {lead!r}, but writes it as "
                f"{text!r:.300}: the completion of that prompt cannot be determined."
            )
        answer = renderer.encode(said)
    end = end_of_turn(renderer, answer)
    if end is None:  # the model samples the token that opens the next role's turn
        new = prompt_of(messages[place + 1 :]) or [_FOLLOWING]
        named = name_results([messages[place], *new])[1:]
        answer += renderer.bridge([*prompt_ids, *answer], named, tools=tools)
        end = end_of_turn(renderer, answer)
    if end is None:
        raise RenderingError(f"the chat template does not end messages[{place}] with a token that is sampled.")
    return answer[:end]

"""A bound of what a chat template computes: it is a program that came with a model."""

from __future__ import annotations

from collections.abc import Callable

from llmrl._utils.cpu_limit import CpuLimitError, call_within
from llmrl.data.content_marks import RenderingError

TEMPLATE_SECONDS = 10.0
"""Of the processor, for one rendering, which takes milliseconds; a loop within loops would take hours."""


class SlowTemplateError(RenderingError):
    """A chat template that does not end in time."""


def written_in_time(write: Callable[[], object]) -> str:
    """Return what a call of a chat template writes.

    Args:
        write: calls it.

    Raises:
        SlowTemplateError: if it computes for more than `TEMPLATE_SECONDS`.

    Example:
        >>> written_in_time(lambda: "user: Hello")
        'user: Hello'
    """
    try:
        return str(call_within(write, TEMPLATE_SECONDS))
    except CpuLimitError:
        raise SlowTemplateError(
            f"The chat template was still computing after {TEMPLATE_SECONDS:g} s: it has loops within loops, or is "
            "meant to hang. Give another template (chat_template=, --chat-template), or take another model."
        ) from None

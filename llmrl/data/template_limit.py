"""Time limit for chat templates, which are programs that come with models."""

from __future__ import annotations

from collections.abc import Callable

from llmrl._utils.cpu_limit import CpuLimitError, call_within
from llmrl.data.content_marks import RenderingError

TEMPLATE_SECONDS = 10.0
"""CPU time limit of one rendering, in seconds; it normally takes milliseconds."""


class SlowTemplateError(RenderingError):
    """Raised if a chat template exceeds its time limit."""


def written_in_time(write: Callable[[], object]) -> str:
    """Return the text of `write`, which renders a chat template; raise SlowTemplateError after `TEMPLATE_SECONDS`.

    Example:
        >>> written_in_time(lambda: "user: Hello")
        'user: Hello'
    """
    try:
        return str(call_within(write, TEMPLATE_SECONDS))
    except CpuLimitError:
        raise SlowTemplateError(
            f"The chat template was still computing after {TEMPLATE_SECONDS:g} s: it has loops within loops, or is "
            "meant to hang. Pass another template (chat_template=, --chat-template), or use another model."
        ) from None

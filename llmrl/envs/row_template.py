"""Text templates with placeholders such as `{query}` for the columns of a row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from llmrl._utils.json_values import as_json
from llmrl._utils.types import Row

_NAME = re.compile(r"\{\{(\w+)\}\}|\{([^\W\d]\w*)\}")


def names_in(template: str) -> Iterator[str]:
    """Yield the names of a template's placeholders.

    Example:
        >>> list(names_in('{"task": "{query}", "keep": "{{query}}", "n": {}}'))
        ['query']
    """
    return (match[2] for match in _NAME.finditer(template) if match[2])


def filled(template: str, row: Row, fields: Mapping[str, str]) -> str:
    """Replace a template's placeholders by entries of `fields` or columns of the row, and `{row}` by the row as JSON.

    Example:
        >>> filled('{"{{x}}": "{query}"} {n}', {"query": "1 + 1", "n": [2]}, {})
        '{"{x}": "1 + 1"} [2]'
    """
    values = {"row": dict(row), **row, **fields}

    def value(match: re.Match[str]) -> str:
        if not match[2]:
            return "{" + match[1] + "}"
        found = values[match[2]]
        return found if isinstance(found, str) else json.dumps(as_json(found), ensure_ascii=False)

    return _NAME.sub(value, template)

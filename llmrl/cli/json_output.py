"""Results as JSON, for programs."""

from __future__ import annotations

import json

from llmrl._utils.json_values import finite


def print_json(content: object) -> None:
    """Print one JSON object; numbers that JSON does not support become null."""
    print(json.dumps(finite(content), ensure_ascii=False, default=str))

"""Results as JSON, for programs."""

from __future__ import annotations

import json
import math


def print_json(content: object) -> None:
    """Print one JSON object; numbers that JSON does not have are null."""

    def finite(value: object) -> object:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {str(key): finite(one) for key, one in value.items()}
        return [finite(one) for one in value] if isinstance(value, list | tuple) else value

    print(json.dumps(finite(content), ensure_ascii=False, default=str))

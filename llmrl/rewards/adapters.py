"""Scorers of other libraries."""

from __future__ import annotations

from collections.abc import Mapping

from llmrl._utils.imports import require
from llmrl.rewards.answers import extract_answer


def score_reasoning_gym(completion: str, task: str, entry: Mapping[str, object], *, reasoning: bool = False) -> float:
    """Return the score from 0 to 1 of an answer by reasoning-gym's scorer of a task; 0 if the scorer fails.

    Example:
        >>> entry = {"question": "1 + 2 =", "answer": "3", "metadata": {}}
        >>> score_reasoning_gym("3", "chain_sum", entry), score_reasoning_gym("", "chain_sum", entry)
        (1.0, 0.0)
    """
    given = extract_answer(completion, reasoning=reasoning)
    if given is None or len(given) > 10_000:
        return 0.0
    scorer = require("reasoning_gym.factory", extra="envs").get_score_answer_fn(task)
    try:
        return min(1.0, max(0.0, float(scorer(given, dict(entry)))))
    except Exception:  # scorers may fail on unexpected answers
        return 0.0

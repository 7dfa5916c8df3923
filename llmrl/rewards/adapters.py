"""Reward functions of other libraries as `RewardFn`s."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping

from llmrl._utils.imports import require
from llmrl.data import Message, text_of
from llmrl.rewards.answers import extract_answer
from llmrl.rewards.reward import RewardFn


def prompt_completion_reward(
    function: Callable[[str, str], float | Awaitable[float]], *, name: str | None = None, weight: float = 1.0
) -> RewardFn:
    """Wrap a function of the prompt's text and the completion's, plain or async, as a `RewardFn`.

    The prompt is the last user message; a function that wants the whole conversation, or a column of the dataset,
    needs no adapter: `RewardFn` hands it both by parameter name.

    Example:
        >>> from llmrl._utils.asynchronous import run_sync
        >>> from llmrl.rewards import RewardInput
        >>> echo = prompt_completion_reward(lambda prompt, completion: float(prompt == completion), name="echo")
        >>> chat = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"})
        >>> run_sync(echo.score(RewardInput(chat)))
        1.0
    """
    name = name or getattr(function, "__name__", None)

    def score(messages: tuple[Message, ...], completion: str) -> float | Awaitable[float]:
        prompts = [text_of(message.get("content")) for message in messages if message["role"] == "user"]
        return function(prompts[-1] if prompts else "", completion)

    async def score_later(messages: tuple[Message, ...], completion: str) -> float:
        result = score(messages, completion)
        return await result if inspect.isawaitable(result) else result

    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    reward_fn = RewardFn(score_later if is_async else score, name=name, weight=weight)
    reward_fn.author_function = function
    return reward_fn


def score_reasoning_gym(completion: str, task: str, entry: Mapping[str, object], *, reasoning: bool = False) -> float:
    """Return the score, 0 to 1, that reasoning-gym's own scorer of a task gives an answer; 0 where it stumbles over it.

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
    except Exception:  # scorers parse answers, and not every one expects what a model writes
        return 0.0

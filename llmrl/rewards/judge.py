"""`Judge`: a reward from a model's score, through an API like OpenAI's."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import re
import string
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.imports import require
from llmrl._utils.numbers import finite_number
from llmrl.data import text_of

_NUMBER = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)(?![\w.]*\d)(?!\w)(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?))?")
"""A number and its maximum: "8/10", "8 out of 10"."""


@dataclass(slots=True)
class JudgeUsage:
    """The requests to a judge, and their cost."""

    num_requests: int = 0
    """Number of answered requests; retries are not counted."""
    num_cached: int = 0
    """Number of questions with a remembered reply."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    cost: float = 0.0
    """Cost, in the currency of `prices`."""


class Judge:
    """Lets a model score answers, behind any API like OpenAI's; give it to a `RewardFn` or a `Rubric`.

    Its prompt says in braces what it reads, as the parameters of a reward function do: `{completion}`, or a column of
    the dataset. The score is the last number of the reply, which has to lie within `scale`, mapped to 0 to 1. Whatever
    goes wrong for good (no answer, no number, a number outside) leaves the rollout unscored, as of any reward function.
    The official client tries again after a lost connection, a refusal for too many requests, or a server's error.

    The same question is asked once, also where several rollouts ask it together.

    What a policy writes is part of the judge's prompt: it may learn to talk its judge into a good score. Look at the
    answers that it rewards, and measure something else beside it.

    Args:
        model: the judge's name at its API.
        prompt: with `{completion}`, `{messages}` (the conversation as text), or columns of the dataset.
        scale: the lowest and the highest score that the prompt asks for.
        read: function from the reply's text to the score, in place of the number and its scale.
        name: name of the reward function.
        base_url, api_key: URL and key of the API; None takes `OPENAI_BASE_URL` and `OPENAI_API_KEY`.
        max_concurrent_requests: maximum number of requests in flight.
        requests_per_minute: maximum rate at which requests begin; None sets no limit.
        max_retries: maximum number of retries of a request.
        timeout_seconds: time limit of one try.
        cache_path: a file of JSON lines that keeps replies from run to run; None remembers them in this process.
        prices: prices of a million input and a million output tokens, for `usage.cost`.
        options: further arguments of a request, such as `{"temperature": 0}`.

    Raises:
        ValueError: if the prompt reads nothing or something without a name, if the scale has no extent, or if a
            number is not positive.

    Example:
        >>> judge = Judge("a-model", "Rate the answer to {query} from 0 to 10: {completion}", api_key="-")
        >>> judge.score_of("Clear, and right. 8")
        0.8
    """

    def __init__(
        self,
        model: str,
        prompt: str,
        *,
        scale: tuple[float, float] = (0.0, 10.0),
        read: Callable[[str], float] | None = None,
        name: str = "judge",
        base_url: str | None = None,
        api_key: str | None = None,
        max_concurrent_requests: int = 16,
        requests_per_minute: float | None = None,
        max_retries: int = 5,
        timeout_seconds: float = 60.0,
        cache_path: str | Path | None = None,
        prices: tuple[float, float] = (0.0, 0.0),
        options: Mapping[str, object] | None = None,
    ) -> None:
        fields = _fields_of(prompt)
        if not scale[0] < scale[1]:
            raise ValueError(f"scale is the lowest and the highest score, got {scale}.")
        for argument, value in (
            ("max_concurrent_requests", max_concurrent_requests),
            ("requests_per_minute", requests_per_minute),
            ("timeout_seconds", timeout_seconds),
        ):
            if value is not None and not value > 0:
                raise ValueError(f"{argument} must be positive, got {value}.")
        self.model = model
        self.prompt = prompt
        self.scale = scale
        self.read = read
        self.__name__ = name
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY) for field in fields]
        )
        self.max_concurrent_requests = max_concurrent_requests
        self.requests_per_minute = requests_per_minute
        self.cache_path = cache_path
        self.prices = prices
        self.options = dict(options or {})
        self.usage = JudgeUsage()
        """Usage so far, of all that share this judge in this process."""
        self.client_options: dict[str, object] = {
            "base_url": base_url, "api_key": api_key, "max_retries": max_retries, "timeout": timeout_seconds,
        }  # fmt: skip
        self._set_up()

    def _set_up(self) -> None:
        self._opening = threading.Lock()
        self._opened: _Questions | None = None

    def __getstate__(self) -> dict[str, object]:
        kept = {key: value for key, value in vars(self).items() if key not in ("_opening", "_opened")}
        return {**kept, "usage": JudgeUsage()}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._set_up()

    async def __call__(self, **inputs: object) -> float:
        """Return the score of an answer.

        Raises:
            ValueError: if the reply has no score.
            openai.OpenAIError: if there is no reply.
        """
        return self.score_of(await self.ask(**inputs))

    def score_of(self, reply: str) -> float:
        """Read the score from a reply.

        Raises:
            ValueError: if it has none, or one outside the scale.
        """
        if self.read is not None:
            return finite_number(self.read(reply), "the score that `read` returned")
        *_, (number, whole) = _NUMBER.findall(reply) or [("nan", "")]
        low, high = self.scale
        if not low <= float(number) <= high or (whole and float(whole) != high):
            raise ValueError(
                f"the last number of the judge's reply is none from {low:g} to {high:g}: {reply[-200:]!r}; say in the "
                "prompt how to end it, or pass read=."
            )
        return (float(number) - low) / (high - low)

    async def ask(self, **inputs: object) -> str:
        """Return the reply to the filled-in prompt; a remembered one if the same request was made before.

        Raises:
            ValueError: if the reply has no text.
            openai.OpenAIError: if there is no reply.
        """
        prompt = self.prompt.format_map({name: _text(value) for name, value in inputs.items()})
        request = {**self.options, "model": self.model, "messages": [{"role": "user", "content": prompt}]}
        with self._opening:  # environments and evaluations have threads of their own
            if self._opened is None:
                self._opened = _Questions(self)
                weakref.finalize(self, self._opened.loop.stop)
        return await self._opened.loop.wait(self._opened.ask(request))


class _Questions:
    """A judge's requests, all on one event loop, from any thread."""

    def __init__(self, judge: Judge) -> None:
        self.loop = BackgroundLoop("llmrl-judge")
        self._room = asyncio.Semaphore(judge.max_concurrent_requests)
        self._next_start = 0.0
        self._interval = 60 / judge.requests_per_minute if judge.requests_per_minute is not None else 0.0
        self._usage = judge.usage
        self._prices = judge.prices
        self._path = None if judge.cache_path is None else Path(judge.cache_path)
        self._replies = {} if self._path is None else read_replies(self._path)
        self._asked: dict[str, asyncio.Future[str]] = {}
        openai = require("openai", extra="judge")
        # With a client of one's own nothing is closed by the garbage collector, on whatever loop that runs.
        self._client = openai.AsyncOpenAI(**judge.client_options, http_client=openai.DefaultAsyncHttpxClient())

    async def ask(self, request: Mapping[str, object]) -> str:
        """Return the reply to a request, which is sent only once."""
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        known = self._replies.get(digest)
        asked = self._asked.get(digest)
        if known is not None or asked is not None:
            self._usage.num_cached += 1
        if known is not None:
            return known
        if asked is None:
            asked = self._asked[digest] = asyncio.ensure_future(self._request(request, digest))
            asked.add_done_callback(lambda task: self._asked.pop(digest, None))
            asked.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # its error reaches those who wait
        return await asyncio.shield(asked)  # others may wait for it, too

    async def _request(self, request: Mapping[str, object], digest: str) -> str:
        async with self._room:
            await asyncio.sleep(self.delay(time.monotonic()))
            answer = await self._client.chat.completions.create(**request)
        self._usage.num_requests += 1
        if answer.usage is not None:
            num_input = answer.usage.prompt_tokens
            num_output = answer.usage.completion_tokens
            self._usage.num_input_tokens += num_input
            self._usage.num_output_tokens += num_output
            self._usage.cost += (num_input * self._prices[0] + num_output * self._prices[1]) / 1e6
        text = answer.choices[0].message.content if answer.choices else None
        if not text:
            raise ValueError("the judge's reply has no text; a higher limit of its tokens may fix that.")
        self._replies[digest] = str(text)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"\n{json.dumps([digest, text])}")  # what a killed process wrote half of stays alone
        return str(text)

    def delay(self, now: float) -> float:
        """Reserve the next time slot of a request, and return the seconds until then."""
        start = max(now, self._next_start)
        self._next_start = start + self._interval
        return start - now


def read_replies(path: Path) -> dict[str, str]:
    """Return the replies that a file keeps, of requests by their digest."""
    replies = {}
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # half a line, of a process that was killed
                digest, reply = json.loads(line)
                replies[digest] = reply
    return replies


def _fields_of(prompt: str) -> list[str]:
    """Return the names that a prompt reads, each once."""
    fields = list(dict.fromkeys(field for _, field, _, _ in string.Formatter().parse(prompt) if field is not None))
    if not fields or not all(map(str.isidentifier, fields)):
        raise ValueError(
            f"prompt must read something by its name, such as {{completion}}, and nothing of it; it reads {fields}. "
            "Write {{ and }} for braces."
        )
    return fields


def _text(value: object) -> str:
    """Return an input as the judge reads it; a conversation with a paragraph per message."""
    if isinstance(value, tuple | list) and value and all(isinstance(one, Mapping) and "role" in one for one in value):
        return "\n\n".join(f"{one['role']}: {text_of(one.get('content'))}" for one in value)
    return str(value)

"""`Judge`: a reward function that asks a model behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import math
import re
import string
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrl._utils.arguments import check_least, check_positive
from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.imports import require
from llmrl._utils.numbers import finite_number
from llmrl.data import text_of

_NUMBER = re.compile(
    r"""(?<![\w.]) (-?\d+(?:\.\d+)?) (?![\w.]*\d) (?!\w)
    (?: \**\s*\(?\s* (?: / | (?:out\s+)?of | on\s+a\s+scale\s+(?:of|from)(?:\s+\d+(?:\.\d+)?\s*(?:to|-|–))? )
        \s*\** (\d+(?:\.\d+)?) )?""",
    re.IGNORECASE | re.VERBOSE,
)
"""A number, optionally with a maximum: "8/10", "8 (out of 10)", "8 on a scale from 0 to 10"."""


@dataclass(slots=True)
class JudgeUsage:
    """Number of a judge's requests, and their cost."""

    num_requests: int = 0
    """Number of answered requests, without retries."""
    num_cached: int = 0
    """Number of requests answered from the cache."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    cost: float = 0.0
    """Cost, in the currency of `prices`."""


class Judge:
    """A model behind an OpenAI-compatible API that scores answers; pass it to a `RewardFn` or a `Rubric`.

    Each name in braces in the prompt is an input, as are the parameters of a reward function. The score is the last
    number of the reply, mapped from `scale` to [0, 1]. If there is no reply or no number within `scale`, the rollout
    is not scored. The client retries after lost connections, rate limits and server errors. Equal requests are sent
    once, also if they are concurrent. A policy may learn to exploit its judge: track another metric, too.

    Args:
        model: the judge's model name at the API.
        prompt: contains `{completion}`, `{messages}` (the conversation as text), or columns of the dataset.
        scale: lowest and highest score in the judge's replies.
        read: function from the reply to the score, in place of the last number and `scale`.
        name: name of the reward function.
        base_url, api_key: URL and key of the API; by default `OPENAI_BASE_URL` and `OPENAI_API_KEY`.
        requests_per_minute: maximum rate of requests; None for no limit.
        timeout_seconds: time limit of one attempt.
        cache_path: JSON lines file of replies, shared between runs; by default they are cached in
            memory. Replies without a score are not kept.
        prices: prices of a million input and a million output tokens, for `usage.cost`.
        options: further arguments of a request, such as `{"temperature": 0}`.

    Raises ValueError if the prompt contains no names or invalid ones, if a number or the scale is
    invalid, or if `cache_path` cannot be written.

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
        check_positive(
            max_concurrent_requests=max_concurrent_requests,
            requests_per_minute=requests_per_minute,
            timeout_seconds=timeout_seconds,
        )
        check_least(0, max_retries=max_retries)
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
        """Usage so far in this process, of all users of this judge."""
        self.client_options: dict[str, object] = {
            "base_url": base_url, "api_key": api_key, "max_retries": max_retries, "timeout": timeout_seconds,
        }  # fmt: skip
        self._set_up()

    def _set_up(self) -> None:
        if self.cache_path is not None:  # before a request is paid for, in each process
            try:
                Path(self.cache_path).open("a").close()
            except OSError as error:
                raise ValueError(
                    f"cache_path must be a file that can be written, got {str(self.cache_path)!r}: {error}. Create its "
                    "folder, or choose another path."
                ) from error
        self._opening = threading.Lock()
        self._opened: _Questions | None = None

    def __getstate__(self) -> dict[str, object]:
        kept = {key: value for key, value in vars(self).items() if key not in ("_opening", "_opened")}
        return {**kept, "usage": JudgeUsage()}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._set_up()

    async def __call__(self, **inputs: object) -> float:
        """Return the score of an answer; see `ask` and `score_of` for the errors."""
        reply = await self.ask(**inputs)
        try:
            return self.score_of(reply)
        except Exception:  # the judge may answer otherwise if it is asked again
            assert self._opened is not None
            self._opened.keep(_digest(self._request(inputs)), None)
            raise

    def score_of(self, reply: str) -> float:
        """Return the score in a reply; raise ValueError if there is none within the scale."""
        if self.read is not None:
            return finite_number(self.read(reply), "the score that `read` returned")
        *_, (number, whole) = _NUMBER.findall(reply) or [("nan", "")]
        low, high = self.scale
        if not low <= float(number) <= high or (whole and float(whole) != high):
            raise ValueError(
                f"the last number of the judge's reply is not between {low:g} and {high:g}: {reply[-200:]!r}; ask "
                "in the prompt for a score at the end, or pass read=."
            )
        return (float(number) - low) / (high - low)

    async def ask(self, **inputs: object) -> str:
        """Return the reply to the filled-in prompt, from the cache if possible.

        ValueError is raised if the reply has no text, and openai.OpenAIError if the request fails.
        """
        request = self._request(inputs)
        with self._opening:  # environments and evaluations call from several threads
            if self._opened is None:
                self._opened = _Questions(self)
                weakref.finalize(self, self._opened.loop.stop)
        return await self._opened.loop.wait(self._opened.ask(request))

    def _request(self, inputs: Mapping[str, object]) -> dict[str, object]:
        prompt = self.prompt.format_map({name: _text(value) for name, value in inputs.items()})
        return {**self.options, "model": self.model, "messages": [{"role": "user", "content": prompt}]}


class _Questions:
    """A judge's requests, from any thread, on one event loop."""

    def __init__(self, judge: Judge) -> None:
        self._room = asyncio.Semaphore(judge.max_concurrent_requests)
        self._next_start = 0.0
        self._interval = 60 / (judge.requests_per_minute or math.inf)
        self._usage = judge.usage
        self._prices = judge.prices
        self._path = None if judge.cache_path is None else Path(judge.cache_path)
        self._replies: dict[str, str | None] = {} if self._path is None else read_replies(self._path)
        self._asked: dict[str, asyncio.Future[str]] = {}
        openai = require("openai", extra="judge")
        # A custom HTTP client, because the default one is closed at garbage collection, possibly on another event loop.
        self._client = openai.AsyncOpenAI(**judge.client_options, http_client=openai.DefaultAsyncHttpxClient())
        self.loop = BackgroundLoop("llmrl-judge")  # last, because each rollout tries again what is raised above

    async def ask(self, request: Mapping[str, object]) -> str:
        digest = _digest(request)
        known = self._replies.get(digest)
        asked = self._asked.get(digest)
        if known is not None or asked is not None:
            self._usage.num_cached += 1
        if known is not None:
            return known
        if asked is None:
            asked = self._asked[digest] = asyncio.ensure_future(self._request(request, digest))
            asked.add_done_callback(lambda task: self._asked.pop(digest, None))
            asked.add_done_callback(lambda task: task.cancelled() or task.exception())  # mark its error as retrieved
        return await asyncio.shield(asked)  # other callers may wait for it

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
            raise ValueError("the judge's reply has no text; a higher limit of tokens in options= may help.")
        self.keep(digest, str(text))
        return str(text)

    def keep(self, digest: str, reply: str | None) -> None:
        """Keep a reply to a request, also in the file; None forgets it."""
        self._replies[digest] = reply
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"\n{json.dumps([digest, reply])}")  # the last line may be partial

    def delay(self, now: float) -> float:
        """Reserve the next time slot of a request, and return the seconds until it starts."""
        start = max(now, self._next_start)
        self._next_start = start + self._interval
        return start - now


def _digest(request: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def read_replies(path: Path) -> dict[str, str | None]:
    """Return the replies in a cache file, by the digest of the request; None for one without a score."""
    replies = {}
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a partial line of a killed process
                digest, reply = json.loads(line)
                replies[digest] = reply
    return replies


def _fields_of(prompt: str) -> list[str]:
    """Return the distinct names in a prompt."""
    fields = list(dict.fromkeys(field for _, field, _, _ in string.Formatter().parse(prompt) if field is not None))
    if not fields or not all(map(str.isidentifier, fields)):
        raise ValueError(
            f"prompt must contain names of inputs in braces, such as {{completion}}, without attributes or indices; it "
            f"contains {fields}. Write {{{{ and }}}} for other braces."
        )
    return fields


def _text(value: object) -> str:
    """Return an input as text; a conversation has one paragraph per message."""
    if isinstance(value, tuple | list) and value and all(isinstance(one, Mapping) and "role" in one for one in value):
        return "\n\n".join(f"{one['role']}: {text_of(one.get('content'))}" for one in value)
    return str(value)

"""`ServerEngine`: an engine that lives elsewhere, behind an OpenAI-compatible `/v1/completions`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.imports import require
from llmrl.engines.base import Completion, EngineError, SamplingConfig, check_request, completion_budget
from llmrl.engines.server_messages import check_sampling, completion_request, is_plain, read_models, read_response

if TYPE_CHECKING:
    import aiohttp

_EVEN_TEMPERATURE = 1000.0
"""Far above any difference of logits."""
PROBE_INTERVAL_S = 1.0
"""How often a server that could not be reached is asked again."""
DEFAULT_REPLY_TIMEOUT_SECONDS = 600.0
"""As OpenAI's own client has it."""
_CONTROL_TIMEOUT_S = 30.0
"""Of what takes a server no time."""
# Of an answer; a token takes some hundred, with its text, its id and its log-prob.
_NUM_BASE_BYTES, _NUM_TOKEN_BYTES = 1 << 20, 1 << 12


class ServerEngine:
    """Token ids in, token ids and log-probs out, over HTTP: vLLM, or any server that returns both.

    With `vllm serve`, log-probs are those of the distribution sampled from only with
    `--logprobs-mode processed_logprobs`: the first request that is not plain sampling at temperature 1 checks it.
    The server's weights are its owner's affair: tokens carry the `policy_version` that held when they were asked for.
    Start one engine a server and put several into `EngineReplicas`.

    Args:
        base_url: such as `http://host:8000`, with or without `/v1`.
        model: as the server names it; its first when not given.
        api_key: sent as a bearer token.
        max_model_len: prompt and completion together; asked of the server when not given.
        vocab_size: number of token ids, which no server tells; ids beyond are refused. The tokenizer's where not given:
            give it for a model that has ids beyond its tokenizer's.
        policy_version: of the server's weights.
        reply_timeout_seconds: a request that is not answered by then, waiting in the server's queue included, fails
            with an `EngineError`, which is tried again like any other; None waits for ever. It has to be longer than
            the longest completion takes on a busy server.

    Raises:
        MissingExtraError: when aiohttp is not installed, naming the extra.
        EngineError: when the server cannot be reached.
        ValueError: when it has not that model, or does not say its `max_model_len`; for a number that is not positive.

    Example:
        >>> engine = ServerEngine("http://localhost:8000")                              # doctest: +SKIP
        >>> (await engine.generate([1, 2, 3], SamplingConfig())).token_ids              # doctest: +SKIP
        [4, 5]
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        policy_version: int = 0,
        reply_timeout_seconds: float | None = DEFAULT_REPLY_TIMEOUT_SECONDS,
    ) -> None:
        if reply_timeout_seconds is not None and not reply_timeout_seconds > 0:
            raise ValueError(
                f"reply_timeout_seconds must be positive, or None to wait for ever; got {reply_timeout_seconds}."
            )
        self.vocab_size = vocab_size
        """Number of token ids, where it was given."""
        self.reply_timeout_seconds = reply_timeout_seconds
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._is_reachable, self._is_closed = True, False
        self._is_distribution_known = False
        self._in_flight: dict[str, asyncio.Event] = {}
        self._num_requests = 0
        self._watch: asyncio.Task[None] | None = None
        self.policy_version = policy_version
        """Version of the server's weights; set it when they change."""
        self._background = BackgroundLoop("llmrl-server-engine")
        try:
            self._session: aiohttp.ClientSession = self._background.run(_open_session(api_key))
            self._finalizer = weakref.finalize(self, _close, self._session, self._background)
            served = read_models(self._background.run(self._request("GET", "/v1/models")), self._base_url)
            self.model = next(iter(served)) if model is None else model
            if self.model not in served:
                raise ValueError(f"model must be one that {self._base_url} serves, {sorted(served)}, got {model!r}.")
            limit = served[self.model].get("max_model_len") if max_model_len is None else max_model_len
            if type(limit) is not int or limit < 2:
                raise ValueError(
                    f"max_model_len must be given, 2 or more: {self._base_url} says {limit!r} of its own."
                    if max_model_len is None
                    else f"max_model_len must be 2 or more, got {max_model_len!r}."
                )
        except BaseException:
            self.shutdown()
            raise
        self.max_model_len: int = limit
        """Prompt and completion together, in tokens."""

    @property
    def is_alive(self) -> bool:
        """Whether the server could be reached when last tried; one that could not is tried every second."""
        return self._is_reachable and not self._is_closed

    @property
    def num_in_flight(self) -> int:
        """Requests that have not returned yet."""
        return len(self._in_flight)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """Sample one completion of `prompt_ids` ([num_prompt_tokens]); `routing_key` has no effect on one server.

        Raises:
            ValueError: for an empty prompt, one without room for a token, a `request_id` that is in flight, or a
                request that the server refuses.
            EngineError: when the server cannot be reached or does not answer in time, or returns tokens without their
                ids or log-probs, ids or log-probs that no model can have given, or log-probs of another distribution.
        """
        self._num_requests += 1
        request_id = f"{id(self):x}-{self._num_requests}" if request_id is None else request_id
        check_request(request_id, prompt_ids, self._in_flight)
        budget = completion_budget(len(prompt_ids), sampling, self.max_model_len)
        if self._is_closed:
            raise EngineError("The server engine was shut down.")
        version = self.policy_version
        aborted = self._in_flight[request_id] = asyncio.Event()
        try:
            return await self._background.wait(self._generate(list(prompt_ids), sampling, budget, version, aborted))
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            raise EngineError("The server engine was shut down.") from None
        finally:
            del self._in_flight[request_id]

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Refuse truncation of which a server cannot say what it kept.

        Raises:
            ValueError: for top-p or min-p without top-k.
        """
        check_sampling(sampling)

    async def abort(self, request_id: str) -> None:
        """End a request by hanging up; its `generate` returns an empty completion: what was sampled stays there."""
        aborted = self._in_flight.get(request_id)
        if aborted is not None and not self._is_closed:
            self._background.loop.call_soon_threadsafe(aborted.set)

    def shutdown(self) -> None:
        """Hang up; the server stays. May be called twice."""
        self._is_closed = True
        if hasattr(self, "_finalizer"):
            self._finalizer()
        self._background.close()

    def __enter__(self) -> ServerEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def _generate(
        self, prompt_ids: list[int], sampling: SamplingConfig, budget: int, version: int, aborted: asyncio.Event
    ) -> Completion:
        if not self._is_distribution_known and not is_plain(sampling):
            await self._check_distribution(prompt_ids)
        answer = asyncio.ensure_future(self._ask(prompt_ids, sampling, budget, version))
        abortion = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait((answer, abortion), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Completion([], [], [], "abort")
            return answer.result()
        finally:
            # Hanging up is what makes a server stop.
            answer.cancel()
            abortion.cancel()

    async def _ask(self, prompt_ids: list[int], sampling: SamplingConfig, budget: int, version: int) -> Completion:
        body = completion_request(self.model, prompt_ids, sampling, budget)
        answer = await self._request("POST", "/v1/completions", body, budget=budget)
        return read_response(
            answer,
            version=version,
            server=self._base_url,
            budget=budget,
            vocab_size=self.vocab_size,
            top_k=sampling.top_k if sampling.needs_sampling_mask else None,
        )

    async def _check_distribution(self, prompt_ids: list[int]) -> None:
        """Ask for two log-probs that the distribution sampled from has whatever the model makes of the prompt.

        Of one token left it is 0. Of two, and those that tie with the second, at a temperature that makes them alike it
        is that of a half, or of a few: the model's own is nowhere near where the first token is certain to it.
        """
        for top_k, temperature, least, most in ((1, 1.0, -1e-3, 0.0), (2, _EVEN_TEMPERATURE, -4.5, -0.5)):
            sampling = SamplingConfig(top_k=top_k, temperature=temperature, replay=False)
            log_probs = (await self._ask(prompt_ids, sampling, 1, 0)).log_probs
            if not log_probs or not least <= log_probs[0] <= most:
                raise EngineError(
                    f"{self._base_url} returns log-probs from before temperature, top-k, top-p and min-p; start it "
                    "with processed ones (vllm serve --logprobs-mode processed_logprobs), or sample at temperature 1 "
                    "without."
                )
        self._is_distribution_known = True

    async def _request(
        self, method: str, path: str, body: dict[str, object] | None = None, *, budget: int | None = None
    ) -> object:
        """Return the JSON that the server answers with; `budget` tokens are asked for, or what takes no time."""
        import aiohttp

        seconds = _CONTROL_TIMEOUT_S if budget is None else self.reply_timeout_seconds
        url, max_bytes = f"{self._base_url}{path}", _NUM_BASE_BYTES + _NUM_TOKEN_BYTES * (budget or 0)
        try:
            async with (
                asyncio.timeout(seconds) as deadline,
                self._session.request(method, url, json=body, allow_redirects=False) as response,
            ):
                text = await _read(response, max_bytes)
            if response.status == 200:
                return json.loads(text)
        except (aiohttp.ClientConnectionError, OSError) as error:
            self._lose()
            if deadline.expired():
                mend = "" if budget is None else "; reply_timeout_seconds says how long it may take"
                raise EngineError(f"{url} did not answer within {seconds:g} s{mend}.") from error
            raise EngineError(f"{self._base_url} cannot be reached: {error}") from error
        except (aiohttp.ClientError, ValueError, RecursionError) as error:
            raise EngineError(f"{url} did not answer as an OpenAI server: {error}") from error
        shown = text[:500].decode(errors="replace")
        if 400 <= response.status < 500 and response.status not in (408, 429):
            raise ValueError(f"{url} refused the request ({response.status}): {shown}")
        raise EngineError(f"{url} failed ({response.status}): {shown}")

    def _lose(self) -> None:
        """Take the server as one that cannot be reached, until it answers again."""
        self._is_reachable = False
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(_watch(weakref.ref(self)))


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of an answer.

    Raises:
        ValueError: when it is longer than `max_bytes`; the rest is not read.
    """
    parts, num_bytes = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise ValueError(f"its answer is longer than {max_bytes} bytes.")
    return b"".join(parts)


async def _watch(engine: weakref.ref[ServerEngine]) -> None:
    """Ask again until the server answers."""
    while True:
        await asyncio.sleep(PROBE_INTERVAL_S)
        one = engine()
        if one is None or one._is_closed:
            return
        with contextlib.suppress(EngineError, ValueError):
            await one._request("GET", "/v1/models")
            one._is_reachable = True
            return
        del one


async def _open_session(api_key: str | None) -> aiohttp.ClientSession:
    aiohttp = require("aiohttp", extra="server")
    return aiohttp.ClientSession(
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
    )


def _close(session: aiohttp.ClientSession, background: BackgroundLoop) -> None:
    if not background.is_closed:
        with contextlib.suppress(Exception):
            background.run(session.close(), timeout=10)
        background.close()

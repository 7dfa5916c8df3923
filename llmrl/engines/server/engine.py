"""`ServerEngine`: an engine behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import time
import uuid
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.imports import require
from llmrl.engines.base import Completion, EngineError, SamplingConfig, check_request, completion_budget, refuse_grammar
from llmrl.engines.scores import TokenScores, check_scored
from llmrl.engines.server.messages import (
    LostWeightsError,
    check_sampling,
    completion_request,
    entry_of,
    generate_request,
    is_plain,
    likeliest_distance,
    read_generated,
    read_models,
    read_response,
)
from llmrl.engines.server.scores import read_prompt_scores
from llmrl.engines.server.updates import ABORT_PATH, ABORT_PREFIX, GENERATE_PATH, ServerUpdates, tokens_so_far

if TYPE_CHECKING:
    import aiohttp

Result = TypeVar("Result")

PROBE_INTERVAL_S = 1.0
"""Seconds between probes of an unreachable server."""
DEFAULT_REPLY_TIMEOUT_SECONDS = 600.0
"""Default of OpenAI's client."""
_ABORT_TIMEOUT_S = 10.0
"""Time limit for the answer of an aborted request, after which its connection is closed."""
_KEEP_ALIVE_S = 1.0
"""Time for which an idle connection is used again: well below the 5 s after which vLLM closes it."""
# Limits of an answer's size; a token with its text, id and log-prob takes some hundred bytes.
_NUM_BASE_BYTES = 1 << 20
_NUM_TOKEN_BYTES = 1 << 12
_NUM_SCORES_A_TOKEN = 16
"""Number of scores with at most as much JSON as one sampled token."""


class ServerEngine(ServerUpdates):
    """Engine behind an HTTP server: vLLM, or any server that returns token ids and log-probs.

    `vllm serve` needs `--logprobs-mode processed_logprobs` to return log-probs of the sampled distribution; the first
    request that is not plain sampling at temperature 1 checks this. By default the server's owner manages its weights,
    and each token has the `policy_version` at the time of its request. With `weight_sync` the engine is used like an
    `AsyncVLLM`: the server must be a `vllm serve --enable-scale-out` with `VLLM_SERVER_DEV_MODE=1`,
    each token has the version that sampled it, and a restarted server serves after the next update.
    Use one engine per server, and `EngineReplicas` for several servers.

    Args:
        base_url: URL such as `http://host:8000`, with or without `/v1`.
        model: model name on the server; by default its first model.
        api_key: key sent as a bearer token.
        max_model_len: maximum number of tokens of prompt and completion together; by default the server's.
        vocab_size: number of token ids; larger ids are refused. Without it, policies use the number
            of their tokenizer, so pass it for a model that has more ids than its tokenizer.
        policy_version: version of the server's weights, if the server does not report it.
        weight_sync: whether to update the server's weights. vLLM's backend `llmrl` (which needs `pip install --no-deps
            llmrl` on the server) supports all modes of `VLLMWeightSyncScheme` and `VLLMDoubleBufferSyncScheme`; `nccl`
            and `ipc` are vLLM's own; without a backend, vLLM reads files.
        start_timeout_seconds: time to wait for a server that cannot be reached yet.
        reply_timeout_seconds: time limit of a request, including the server's queue; a later answer raises
            EngineError. Must exceed the longest completion on a busy server and, with `weight_sync`, a weight load.
            None waits forever. A server that was too slow serves again when it answers and has the current weights.

    Raises:
        MissingExtraError: if aiohttp is not installed.
        EngineError: if the server cannot be reached, or cannot take weights; the message names the missing options.
        ValueError: if the server lacks the model or a `max_model_len`, or a number is not positive.

    Example:
        >>> engine = ServerEngine("http://localhost:8000")                              # doctest: +SKIP
        >>> (await engine.generate([1, 2, 3], SamplingConfig())).token_ids              # doctest: +SKIP
        [4, 5]
    """

    control_timeout_seconds: float = 30.0
    """Time limit of requests that neither sample tokens nor transfer weights."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        policy_version: int = 0,
        weight_sync: bool = False,
        start_timeout_seconds: float = 0.0,
        reply_timeout_seconds: float | None = DEFAULT_REPLY_TIMEOUT_SECONDS,
    ) -> None:
        if reply_timeout_seconds is not None and not reply_timeout_seconds > 0:
            raise ValueError(
                f"reply_timeout_seconds must be positive, or None to wait forever; got {reply_timeout_seconds}."
            )
        self.vocab_size = vocab_size
        """Number of token ids, or None if it was not given."""
        self.reply_timeout_seconds = reply_timeout_seconds
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._is_reachable = True
        self._is_closed = False
        self._is_distribution_known = False
        self._deadlines: set[asyncio.Timeout] = set()
        self._in_flight: dict[str, asyncio.Event] = {}
        self._num_requests = 0
        self._watch: asyncio.Task[None] | None = None
        self._version = self._first_version = policy_version
        self._background = BackgroundLoop("llmrl-server-engine")
        try:
            self._api_key = api_key
            self._session: aiohttp.ClientSession = self._background.run(_open_session(api_key))
            call = self._background.call_outside
            self._finalizer = weakref.finalize(self, call, _close_session, self._session, self._background)
            served = read_models(self._first_answer(start_timeout_seconds), self._base_url)
            self.model = next(iter(served)) if model is None else model
            if self.model not in served:
                raise ValueError(f"model must be one that {self._base_url} serves, {sorted(served)}; got {model!r}.")
            limit = served[self.model].get("max_model_len") if max_model_len is None else max_model_len
            if type(limit) is not int or limit < 2:
                raise ValueError(
                    f"max_model_len must be given, 2 or more: {self._base_url} reports {limit!r}."
                    if max_model_len is None
                    else f"max_model_len must be 2 or more, got {max_model_len!r}."
                )
            if weight_sync:
                self._is_distribution_known = self._open_updates().has_processed_log_probs
        except BaseException:
            self.shutdown()
            raise
        self.max_model_len: int = limit
        """Maximum number of tokens of prompt and completion together."""

    @property
    def is_alive(self) -> bool:
        """Whether the server was reachable at the last attempt; an unreachable one is probed every second."""
        return self._is_reachable and not self._is_closed

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight."""
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

        Raises ValueError if the prompt is empty or leaves no room for a token, `request_id` is in
        flight, or the server refuses, and EngineError if the server cannot be reached, does not
        answer in time, or returns an invalid answer or log-probs of another distribution.
        """
        self._num_requests += 1
        request_id = f"{id(self):x}-{self._num_requests}" if request_id is None else request_id
        check_request(request_id, prompt_ids, self._in_flight)
        budget = completion_budget(len(prompt_ids), sampling, self.max_model_len)
        self._check_weights()
        aborted = self._in_flight[request_id] = asyncio.Event()
        try:
            return await self._answer(self._generate(list(prompt_ids), sampling, budget, request_id, aborted))
        finally:
            del self._in_flight[request_id]

    async def score(self, token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
        """Return token scores as `ScoresTokens.score` does; `top_k` is at most the server's `--max-logprobs`, or 20.

        Also raises ValueError if the server refuses, and EngineError if it cannot be reached or answers too late.
        """
        check_scored(token_ids, top_k, self.max_model_len)
        self._check_weights()
        body = {"model": self.model, "prompt": list(token_ids), "prompt_logprobs": top_k, "max_tokens": 1}
        budget = len(token_ids) * (1 + top_k // _NUM_SCORES_A_TOKEN)
        asked = self._request("POST", "/v1/completions", body | {"temperature": 0.0}, budget=budget)
        return read_prompt_scores(await self._answer(asked), token_ids, top_k, server=self._base_url)

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text by the server's tokenizer; special tokens in the text are parsed.

        Raises ValueError if the server refuses, and EngineError if it cannot be reached or returns no ids.
        """
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        asked = self._request("POST", "/tokenize", body, budget=len(text))
        answer = await self._answer(asked)
        ids = entry_of(answer, "tokens")
        if not isinstance(ids, list) or any(type(number) is not int for number in ids):
            raise EngineError(f"{self._base_url}/tokenize answered without token ids: {str(answer)[:200]}")
        return ids

    def _check_weights(self) -> None:
        if self.lacks_weights:
            raise EngineError(f"{self._base_url} lost the weights that it was sent; it serves after the next update.")

    async def _answer(self, asked: Coroutine[None, None, Result]) -> Result:
        """Return the result of a request. Raises EngineError if the engine was or is shut down."""
        if self._is_closed:
            asked.close()
            raise EngineError("The server engine was shut down.")
        try:
            return await self._background.wait(asked)
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            raise EngineError("The server engine was shut down.") from None

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise ValueError if a server cannot report the kept ids: with a grammar, or top-p or min-p without top-k."""
        refuse_grammar(self, sampling)
        check_sampling(sampling)

    async def abort(self, request_id: str) -> None:
        """Abort a request; its `generate` returns the tokens so far with `weight_sync`, otherwise none."""
        aborted = self._in_flight.get(request_id)
        if aborted is not None and not self._is_closed:
            self._background.loop.call_soon_threadsafe(aborted.set)

    async def progress(self) -> int | None:
        """Return a number that changes with every new token; None if idle, paused or unknown."""
        if self.info is None or self._is_paused or self._is_closed or not self._in_flight:
            return None
        fetching = self._fetch("GET", "/metrics", None, self.control_timeout_seconds, _NUM_BASE_BYTES)
        status, text = await self._background.wait(fetching)
        return tokens_so_far(text.decode(errors="replace")) if status == 200 else None

    def shutdown(self) -> None:
        """Close the connections; the server keeps running. May be called twice."""
        self._is_closed = True
        if hasattr(self, "_finalizer"):
            self._finalizer()
        self._background.close()

    def __enter__(self) -> ServerEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def _generate(
        self, prompt_ids: list[int], sampling: SamplingConfig, budget: int, request_id: str, aborted: asyncio.Event
    ) -> Completion:
        if not self._is_distribution_known and not is_plain(sampling):
            await self._check_distribution(prompt_ids)
        answer = asyncio.ensure_future(self._ask(prompt_ids, sampling, budget, request_id))
        abortion = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait((answer, abortion), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and self.info is not None:
                with contextlib.suppress(EngineError):
                    ids = {"request_ids": [f"{ABORT_PREFIX}{request_id}"]}
                    await self._fetch("POST", ABORT_PATH, ids, self.control_timeout_seconds, _NUM_BASE_BYTES)
                await asyncio.wait((answer,), timeout=_ABORT_TIMEOUT_S)
            if not answer.done():
                return Completion([], [], [], "abort")
            return answer.result()
        except LostWeightsError:
            self._lose()
            raise
        finally:
            # Cancelling closes the connection, which makes the server stop.
            answer.cancel()
            abortion.cancel()

    async def _ask(
        self, prompt_ids: list[int], sampling: SamplingConfig, budget: int, request_id: str = ""
    ) -> Completion:
        refuse_grammar(self, sampling)
        top_k = sampling.top_k if sampling.needs_sampling_mask else None
        if self.info is not None:
            asked = generate_request(self.model, prompt_ids, sampling, budget, request_id or uuid.uuid4().hex)
            answer = await self._request("POST", GENERATE_PATH, asked, budget=budget)
            return read_generated(answer, server=self._base_url, budget=budget, vocab_size=self.vocab_size, top_k=top_k)
        version = self.policy_version
        answer = await self._request(
            "POST", "/v1/completions", completion_request(self.model, prompt_ids, sampling, budget), budget=budget
        )
        return read_response(
            answer,
            version=version,
            server=self._base_url,
            budget=budget,
            vocab_size=self.vocab_size,
            top_k=top_k,
        )

    async def _check_distribution(self, prompt_ids: list[int]) -> None:
        """Raise EngineError if the server's log-probs are not those of the sampled distribution.

        The check uses values that are known for any prompt. With top-k 1 the log-prob is 0. Doubling the temperature
        halves the gap between the two likeliest tokens; if there is no gap, the first test is
        sufficient, because the model's own log-prob of the likeliest token is then not near 0.
        """
        [first] = (await self._ask(prompt_ids, SamplingConfig(top_k=1, replay=False), 1)).log_probs
        cool, warm = [await self._distance(prompt_ids, temperature) for temperature in (1.0, 2.0)]
        if first < -1e-3 or abs(2 * warm - cool) > 0.2 + 0.05 * cool:
            raise EngineError(
                f"{self._base_url} returns log-probs that leave out temperature, top-k, top-p and min-p; start the "
                "server with processed log-probs (vllm serve --logprobs-mode processed_logprobs), or sample at "
                "temperature 1 without top-k, top-p and min-p."
            )
        self._is_distribution_known = True

    async def _distance(self, prompt_ids: list[int], temperature: float) -> float:
        body = completion_request(self.model, prompt_ids, SamplingConfig(top_k=2, temperature=temperature), 1)
        answer = await self._request("POST", "/v1/completions", body, budget=1)
        return likeliest_distance(answer, self._base_url)

    def _first_answer(self, timeout_seconds: float) -> object:
        """Return the list of models, waiting for a server that is still starting."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return self._background.run(self._request("GET", "/v1/models"))
            except EngineError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(PROBE_INTERVAL_S)

    def hang_up(self) -> None:
        """Fail all calls and requests with EngineError; the server is used again once it answers."""
        self._is_reachable = False
        if not self._is_closed:
            self._background.loop.call_soon_threadsafe(self._expire_all)

    def _expire_all(self) -> None:
        self._lose()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(self._background.loop.time())

    def _call(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, takes_time: bool = False
    ) -> object:
        seconds = self.reply_timeout_seconds if takes_time else self.control_timeout_seconds

        async def call() -> object:
            try:
                # A server that was busy for longer than its keep-alive time closes an idle connection even if
                # a request has just arrived on it. These requests must not be sent twice: each opens its own.
                async with await _open_session(self._api_key) as session:
                    answer = self._fetch(method, path, body, seconds, _NUM_BASE_BYTES, session=session)
                    status, text = await answer
            except EngineError:
                self._is_left = True
                raise
            if status != 200:
                shown = text[:2000].decode(errors="replace")
                raise EngineError(f"{self._base_url}{path} refused ({status}): {shown}")
            return json.loads(text or b"null")

        try:
            return self._background.run(call())
        except ValueError as error:
            raise EngineError(f"{self._base_url}{path} did not answer with JSON: {error}") from error
        except (asyncio.CancelledError, concurrent.futures.CancelledError, RuntimeError) as error:
            if isinstance(error, EngineError) or not self._is_closed:
                raise
            raise EngineError("The server engine was shut down.") from error

    async def _request(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, budget: int | None = None
    ) -> object:
        """Return the server's JSON answer to a request for `budget` tokens, or to a control request if None."""
        seconds = self.control_timeout_seconds if budget is None else self.reply_timeout_seconds
        advice = "" if budget is None else "; reply_timeout_seconds limits the time of a request"
        max_bytes = _NUM_BASE_BYTES + _NUM_TOKEN_BYTES * (budget or 0)
        status, text = await self._fetch(method, path, body, seconds, max_bytes, advice=advice)
        url = f"{self._base_url}{path}"
        shown = text[:500].decode(errors="replace")
        try:
            if status == 200:
                return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{url} did not answer as an OpenAI server: {error}") from error
        if 400 <= status < 500 and status not in (408, 429):
            raise ValueError(f"{url} refused the request ({status}): {shown}")
        raise EngineError(f"{url} failed ({status}): {shown}")

    async def _fetch(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        seconds: float | None,
        max_bytes: int,
        *,
        advice: str = "",
        session: aiohttp.ClientSession | None = None,
    ) -> tuple[int, bytes]:
        """Return status and body of a response. Raises EngineError if the response is late or too long."""
        import aiohttp

        url = f"{self._base_url}{path}"
        try:
            async with asyncio.timeout(seconds) as deadline:
                self._deadlines.add(deadline)
                session = session or self._session
                async with session.request(method, url, json=body, allow_redirects=False) as response:
                    return response.status, await _read_body(response, max_bytes)
        except (aiohttp.ClientConnectionError, OSError) as error:
            self._lose()
            if deadline.expired():
                in_time = "in time" if seconds is None else f"within {seconds:g} s"
                raise EngineError(f"{url} did not answer {in_time}{advice}.") from error
            raise EngineError(f"{self._base_url} cannot be reached: {error}") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineError(f"{url} did not answer as an OpenAI server: {error}") from error
        finally:
            self._deadlines.discard(deadline)

    def _lose(self) -> None:
        self._is_reachable = False
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(_watch(weakref.ref(self)))


async def _watch(engine: weakref.ref[ServerEngine]) -> None:
    while True:
        await asyncio.sleep(PROBE_INTERVAL_S)
        one = engine()
        if one is None or one._is_closed:
            return
        with contextlib.suppress(EngineError, ValueError):
            await one._request("GET", "/v1/models")
            if one.info is not None:
                await asyncio.to_thread(one._take_back)
            one._is_reachable = True
            return
        del one


async def _open_session(api_key: str | None) -> aiohttp.ClientSession:
    """Open a session without a connection limit. Raises MissingExtraError if aiohttp is not installed."""
    aiohttp = require("aiohttp", extra="server")
    return aiohttp.ClientSession(
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
    )


def _close_session(session: aiohttp.ClientSession, background: BackgroundLoop) -> None:
    """Close a session and its event loop."""
    if not background.is_closed:
        with contextlib.suppress(Exception):
            background.run(session.close(), timeout=10)
        background.close()


async def _read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of a response. Raises ValueError if it exceeds `max_bytes`, without reading the rest."""
    parts = []
    num_bytes = 0
    async for part in response.content.iter_any():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise ValueError(f"its answer is longer than {max_bytes} bytes.")
    return b"".join(parts)

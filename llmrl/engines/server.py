"""`ServerEngine`: an engine that lives elsewhere, behind an OpenAI-compatible `/v1/completions`."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.imports import require
from llmrl.engines.base import Completion, EngineError, SamplingConfig, completion_budget
from llmrl.engines.server_messages import completion_request, is_plain, read_response

if TYPE_CHECKING:
    import aiohttp

_EVEN_TEMPERATURE = 1000.0
"""Far above any difference of logits."""
PROBE_INTERVAL_S = 1.0
"""How often a server that could not be reached is asked again."""


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
        policy_version: of the server's weights.

    Raises:
        MissingExtraError: when aiohttp is not installed, naming the extra.
        EngineError: when the server cannot be reached.
        ValueError: when it has not that model, or does not say its `max_model_len`.

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
        policy_version: int = 0,
    ) -> None:
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
            models = self._background.run(self._request("GET", "/v1/models"))["data"]
            served = {entry["id"]: entry for entry in models}
            self.model = next(iter(served)) if model is None else model
            if self.model not in served:
                raise ValueError(f"model must be one that {self._base_url} serves, {sorted(served)}, got {model!r}.")
            limit = served[self.model].get("max_model_len") if max_model_len is None else max_model_len
            if limit is None:
                raise ValueError(f"max_model_len must be given: {self._base_url} does not say its own.")
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
            EngineError: when the server cannot be reached, or returns tokens without their ids or log-probs, or
                log-probs of another distribution.
        """
        self._num_requests += 1
        request_id = f"{id(self):x}-{self._num_requests}" if request_id is None else request_id
        if request_id in self._in_flight:
            raise ValueError(f"request_id {request_id!r} is in flight already; ids must be unique.")
        if not prompt_ids:
            raise ValueError("prompt_ids is empty; an engine continues at least one token.")
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
        body = completion_request(self.model, prompt_ids, sampling, budget)
        answer = asyncio.ensure_future(self._request("POST", "/v1/completions", body))
        abortion = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait((answer, abortion), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Completion([], [], [], "abort")
            return read_response(answer.result(), version, self._base_url)
        finally:
            # Hanging up is what makes a server stop.
            answer.cancel()
            abortion.cancel()

    async def _check_distribution(self, prompt_ids: list[int]) -> None:
        """Ask for two log-probs that the distribution sampled from has whatever the model makes of the prompt.

        Of one token left it is 0. Of two, and those that tie with the second, at a temperature that makes them alike it
        is that of a half, or of a few: the model's own is nowhere near where the first token is certain to it.
        """
        for top_k, temperature, least, most in ((1, 1.0, -1e-3, 0.0), (2, _EVEN_TEMPERATURE, -4.5, -0.5)):
            body = completion_request(self.model, prompt_ids, SamplingConfig(top_k=top_k, temperature=temperature), 1)
            answer = await self._request("POST", "/v1/completions", body)
            [log_prob] = read_response(answer, 0, self._base_url).log_probs
            if not least <= log_prob <= most:
                raise EngineError(
                    f"{self._base_url} returns log-probs from before temperature, top-k, top-p and min-p; start it "
                    "with processed ones (vllm serve --logprobs-mode processed_logprobs), or sample at temperature 1 "
                    "without."
                )
        self._is_distribution_known = True

    async def _request(self, method: str, path: str, body: dict[str, object] | None = None) -> Any:
        import aiohttp

        try:
            async with self._session.request(method, f"{self._base_url}{path}", json=body) as response:
                if response.status == 200:
                    return await response.json()
                text = (await response.text())[:500]
        except (aiohttp.ClientConnectionError, OSError) as error:
            self._is_reachable = False
            if self._watch is None or self._watch.done():
                self._watch = asyncio.ensure_future(_watch(weakref.ref(self)))
            raise EngineError(f"{self._base_url} cannot be reached: {error}") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineError(f"{self._base_url}{path} did not answer as an OpenAI server: {error}") from error
        if 400 <= response.status < 500 and response.status not in (408, 429):
            raise ValueError(f"{self._base_url}{path} refused the request ({response.status}): {text}")
        raise EngineError(f"{self._base_url}{path} failed ({response.status}): {text}")


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

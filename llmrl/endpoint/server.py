"""`EndpointServer`: the policy behind HTTP, in several API dialects."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llmrl._utils.failure import describe
from llmrl._utils.imports import require
from llmrl.endpoint.agent import MODEL_NAME
from llmrl.endpoint.dialects import anthropic, chat, responses
from llmrl.endpoint.dialects.reading import Body, entry_of, parse_body
from llmrl.endpoint.dialects.stream import Event, ReplyStream
from llmrl.endpoint.exchange import Exchange
from llmrl.endpoint.requests import ASIDE, ModelReply, ModelRequest, RefusedRequest
from llmrl.endpoint.session import Session
from llmrl.rendering.tool_calls import Json

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_BYTES = 64 << 20
_LARGE_BYTES = 256 << 10
"""Size from which a body is parsed in a thread, so that other sessions are not delayed."""
_READ_SECONDS = 60.0
"""Time limit for the body of a request."""
_HEAD_SECONDS = 75.0
"""Time limit for the head of a request, and of idle connections."""
_CLIENT_HUNG_UP = 499  # nginx's status for it
_PING_SECONDS = 10.0
"""Maximum time, in seconds, between two events of a stream."""
_NO_RETRY = {"x-should-retry": "false"}
"""The collector has already retried failed requests; the clients of both APIs obey this header."""


class Sessions(Protocol):
    """The sessions of a server."""

    def __len__(self) -> int:
        """Return the number of open sessions."""
        ...

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        ...

    def check(self, api_key: str | None, session_id: str | None) -> None:
        """Check a client's key. Raises RefusedRequest if the client has no access."""
        ...

    def find(self, api_key: str | None, session_id: str | None, request: ModelRequest) -> Session:
        """Return the session of a request. Raises RefusedRequest if the client has no access."""
        ...

    def look_up(self, api_key: str | None, session_id: str | None, request: ModelRequest) -> Session:
        """Return the session that `find` would return, but do not keep a new one."""
        ...

    def named(self, api_key: str | None, session_id: str | None, reply_id: str = "") -> Session | None:
        """Return the open session that a client names by its key, its path or `X-Session-ID`, or None.

        If the key has several sessions, one for each role, return the one with the reply, or else the first.
        """
        ...

    def note_answers(self, session: Session, request: ModelRequest, reply: ModelReply) -> None:
        """Record which conversations a session has answered."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """Pure functions for the requests and answers of one API."""

    read: Callable[[Body], ModelRequest]
    write: Callable[[ModelReply], Json]
    stream: Callable[[ModelReply, ModelRequest], ReplyStream]
    error: Callable[[RefusedRequest], Json]
    error_event: str | None = None
    """Name of an error event."""


CHAT = Dialect(chat.read, chat.write, chat.Stream, chat.error)
RESPONSES = Dialect(responses.read, responses.write, responses.Stream, chat.error, "error")
ANTHROPIC = Dialect(anthropic.read, anthropic.write, anthropic.Stream, anthropic.error, "error")


class EndpointServer:
    """HTTP server of sessions, on the loop that starts it. Raises MissingExtraError without aiohttp.

    Args:
        sessions: sessions to serve.
        model_names: names of the models in requests; answers of `NAME:aside` are not recorded.
    """

    def __init__(self, sessions: Sessions, *, model_names: Iterable[str] = (MODEL_NAME,)) -> None:
        self.web = require("aiohttp.web", extra="server")
        self.sessions = sessions
        self.model_names = tuple(model_names)
        self.counts: Counter[str] = Counter()
        """Counts for `/metrics`, by Prometheus names and labels."""
        self._runner: web.AppRunner | None = None
        self._host = ""
        self.url = ""
        """URL of the server without a path; empty before `start`."""
        self.port = 0
        """Port of the server; 0 before `start`."""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen, by default on a free port of this machine. Raises OSError if the port is taken."""
        # aiohttp keeps chunks of a body up to this size; a larger body is refused by its length.
        app = self.web.Application(client_max_size=_MAX_BYTES)
        # A client with the address that ends in /v1 may add /v1 again; a path may name the session.
        routes = (
            ("POST", "/chat/completions", CHAT, self._answer),
            ("POST", "/responses", RESPONSES, self._answer),
            ("POST", "/messages", ANTHROPIC, self._answer),
            ("POST", "/messages/count_tokens", ANTHROPIC, self._count),
            ("POST", "/completions", CHAT, self._no_text),
            ("POST", "/rewards", CHAT, self._reward),
            ("GET", "/models", CHAT, self._models),
            ("GET", "/models/{model}", CHAT, self._model),
            ("GET", "/metrics", CHAT, self._metrics),
            ("GET", "/health", CHAT, self._health),
        )
        for method, path, dialect, answer in routes:
            handler = self._handler(path, dialect, answer)
            for prefix in ("", "/v1", "/v1/v1", "/s/{session}", "/s/{session}/v1", "/s/{session}/v1/v1"):
                for slash in ("", "/"):
                    app.router.add_route(method, f"{prefix}{path}{slash}", handler)
                    if method == "GET":
                        app.router.add_route("HEAD", f"{prefix}{path}{slash}", handler)
        app.router.add_route("OPTIONS", "/{path:.*}", self._handler("options", CHAT, self._options))
        app.router.add_route("*", "/{path:.*}", self._handler("elsewhere", CHAT, self._nowhere))
        self._runner = self.web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=1.0,
            access_log=None,
            keepalive_timeout=_HEAD_SECONDS,  # also limits the time of a connection's first request
        )
        await self._runner.setup()
        site = self.web.TCPSite(self._runner, host, port, backlog=4096)
        await site.start()
        self._host = host.lower()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://{host if ':' not in host else f'[{host}]'}:{self.port}"

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    # Requests

    def _handler(
        self, path: str, dialect: Dialect, answer: Callable[[Dialect, web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                self._check_page(request)
                response = await answer(dialect, request)
            except RefusedRequest as refused:
                self._note(request, refused)
                response = self._refusal(dialect, refused)
            except ConnectionError:  # the client is gone; aiohttp would log an error
                response = self.web.Response(status=_CLIENT_HUNG_UP)
            except Exception as error:
                logger.warning("a request at %s failed", request.path, exc_info=error)
                response = self._refusal(dialect, RefusedRequest(describe(error), status=500, code="server_error"))
            self.counts[f'llmrl_requests_total{{path="{path}",status="{response.status}"}}'] += 1
            return response

        return handle

    def _note(self, request: web.Request, refused: RefusedRequest) -> None:
        with contextlib.suppress(RefusedRequest):
            if (session := self.sessions.named(*self._asker(request))) is not None:
                session.note_refusal(refused)

    def _refusal(self, dialect: Dialect, refused: RefusedRequest) -> web.Response:
        return self.web.json_response(dialect.error(refused), status=refused.status, headers=_NO_RETRY)

    def _check_page(self, request: web.Request) -> None:
        """Without a key, refuse web pages: `Host` reveals DNS rebinding, `Origin` another site."""
        if self.sessions.needs_key:
            return
        host = request.headers.get("Host", "")
        origin = request.headers.get("Origin")
        name = re.sub(r":\d+$", "", host)
        if name.strip("[]").lower() not in (*LOOPBACK, self._host) or origin not in (None, f"http://{host}"):
            raise RefusedRequest(
                f"requests of web pages are refused without a key (Host {host!r:.80}, Origin {origin!r:.80}): send "
                f"them to {self.url}, or serve with a key.",
                status=403,
                code="forbidden",
            )

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        asked, digest = await self._read(dialect, request)
        session = self.sessions.find(*self._asker(request), asked)
        is_repeated = request.headers.get("x-stainless-retry-count", "0") != "0"
        exchange = session.begin(asked, digest, is_repeated=is_repeated)
        try:
            response = stream = None
            if asked.is_streamed:
                stream = dialect.stream(exchange.head, asked)
                response = await self._show(request, exchange, stream)
            else:
                await asyncio.wait({exchange.task})
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the client hung up.")
            try:
                reply = session.deliver(exchange)
            except RefusedRequest as refused:
                if response is None:
                    raise
                self._note(request, refused)
                await response.write(_lines([(dialect.error_event, dialect.error(refused))]))
                await response.write_eof()
                return response
            self.sessions.note_answers(session, asked, reply)
            self.counts['llmrl_tokens_total{kind="prompt"}'] += reply.num_prompt_tokens
            self.counts['llmrl_tokens_total{kind="completion"}'] += reply.num_completion_tokens
            if stream is None:
                return self.web.json_response(dialect.write(reply))
            response = response or await self._open_stream(request)
            await response.write(_lines(stream.end(reply)))
            await response.write_eof()
            return response
        finally:
            session.leave(exchange)

    async def _count(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        asked, _ = await self._read(dialect, request)
        session = self.sessions.look_up(*self._asker(request), asked)
        return self.web.json_response({"input_tokens": await session.count_tokens(asked)})

    async def _show(self, request: web.Request, exchange: Exchange, stream: ReplyStream) -> web.StreamResponse | None:
        """Send final text while the answers are sampled, or pings; return the response, if it is open."""
        response = None
        while not exchange.task.done():
            is_news = await exchange.wait(_PING_SECONDS)
            stream.head = exchange.head
            text = b"" if exchange.task.done() else _lines(stream.say(exchange.read()))
            if text or not is_news:
                response = response or await self._open_stream(request)
                await response.write(text or b": the answer is being sampled\n\n")
        return response

    async def _open_stream(self, request: web.Request) -> web.StreamResponse:
        response = self.web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        return response

    async def _read(self, dialect: Dialect, request: web.Request) -> tuple[ModelRequest, bytes]:
        """Return a request for a known model, and its digest."""
        self.sessions.check(*self._asker(request))  # before anything is read, or models are named
        text = await self._body(request)

        def read() -> tuple[ModelRequest, bytes]:
            path = request.raw_path.encode(errors="surrogateescape")
            return dialect.read(parse_body(text)), hashlib.blake2b(path + b"\0" + text, digest_size=16).digest()

        asked, digest = read() if len(text) < _LARGE_BYTES else await asyncio.to_thread(read)
        if asked.model.removesuffix(ASIDE) not in self.model_names:
            raise self._unknown_model(asked.model)
        return asked, digest

    async def _body(self, request: web.Request) -> bytes:
        too_long = RefusedRequest(f"the request's body is longer than {_MAX_BYTES} bytes.", status=413)
        if (request.content_length or 0) > _MAX_BYTES:
            raise too_long
        try:
            async with asyncio.timeout(_READ_SECONDS):
                return await request.read()
        except TimeoutError:
            raise RefusedRequest(f"the request's body did not arrive within {_READ_SECONDS:g} s.", status=408) from None
        except self.web.HTTPRequestEntityTooLarge:
            raise too_long from None

    @staticmethod
    def _asker(request: web.Request) -> tuple[str | None, str | None]:
        """Return the client's key and the name of its session."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        api_key = request.headers.get("x-api-key") or (key.strip() if scheme.lower() == "bearer" else None)
        session_id = request.match_info.get("session") or request.headers.get("X-Session-ID")
        if session_id is not None and not session_id.isprintable():  # also refuses bytes that are not UTF-8
            raise RefusedRequest(f"the session's name must be printable text, got {session_id!a:.80}.")
        return api_key, session_id

    async def _models(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        self.sessions.check(*self._asker(request))
        models = self._known_models()
        page = {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
        return self.web.json_response({"object": "list", "data": models, **page})

    async def _model(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        self.sessions.check(*self._asker(request))
        name = request.match_info["model"]
        for model in self._known_models():
            if model["id"] == name:
                return self.web.json_response(model)
        raise self._unknown_model(name)

    def _known_models(self) -> list[dict[str, Json]]:
        # Entries of both APIs
        openais = {"object": "model", "created": 0, "owned_by": "llmrl"}
        anthropics = {"type": "model", "created_at": "1970-01-01T00:00:00Z"}
        names = [name + suffix for name in self.model_names for suffix in ("", ASIDE)]
        return [{"id": name, "display_name": name, **openais, **anthropics} for name in names]

    def _unknown_model(self, name: str) -> RefusedRequest:
        return RefusedRequest(
            f"the model {name!r:.80} does not exist here; ask for {' or '.join(map(repr, self.model_names))}.",
            status=404,
            code="model_not_found",
        )

    async def _metrics(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        lines = [f"llmrl_sessions {len(self.sessions)}", *(f"{name} {count}" for name, count in self.counts.items())]
        return self.web.Response(text="\n".join(sorted(lines)) + "\n", content_type="text/plain")

    async def _health(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        return self.web.Response()

    async def _options(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        return self.web.Response(status=204, headers={"Allow": "GET, HEAD, OPTIONS, POST"})

    async def _reward(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        self.sessions.check(*self._asker(request))
        body = parse_body(await self._body(request))
        reply_id = entry_of(body, "id", str, default="")
        session = self.sessions.named(*self._asker(request), reply_id)
        if session is None:
            raise RefusedRequest("a reward must name its session, by key, path or X-Session-ID.", status=404)
        session.replies.reward(reply_id, entry_of(body, "reward", float), entry_of(body, "answer", int, default=0))
        return self.web.json_response({"id": reply_id})

    async def _no_text(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        self.sessions.check(*self._asker(request))
        raise RefusedRequest("raw text is not completed here: send messages to /v1/chat/completions.")

    async def _nowhere(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        raise RefusedRequest(f"there is no {request.method} {request.path} here.", status=404, code="not_found")


def _lines(events: Iterable[Event]) -> bytes:
    """Return events as the lines of a stream."""
    lines = []
    for name, data in events:
        if name is not None:
            lines.append(f"event: {name}\n")
        if not isinstance(data, str):
            data = json.dumps(data)
        lines.append(f"data: {data}\n\n")
    return "".join(lines).encode()

"""A small OpenAI-compatible server on this machine."""

from __future__ import annotations

import asyncio

import pytest

from llmrl._utils.background_loop import BackgroundLoop

web = pytest.importorskip("aiohttp.web")


REQUEST_FIELDS = {"token_ids": [7, 8], "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.25]}}


class LoopbackServer:
    """Answers every completion with `choice`, or as `status` says, after `latency_s`."""

    def __init__(self, port=0, model_entry=None):
        self.bodies, self.headers, self.num_hung_up = [], [], 0
        self.status, self.latency_s, self.answer = 200, 0.0, None
        self.body, self.headers_sent, self.is_trickled = None, {}, False
        self.choice = {"finish_reason": "stop", "stop_reason": None, **REQUEST_FIELDS}
        self.model_entry = {"id": "tiny", "max_model_len": 100} if model_entry is None else model_entry
        self._background = BackgroundLoop("loopback-server")
        self.port = self._background.run(self._start(port))
        self.url = f"http://127.0.0.1:{self.port}"

    async def _start(self, port):
        application = web.Application()
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(application, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, shutdown_timeout=0.1)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def _models(self, request):
        return web.json_response({"data": [self.model_entry]})

    async def _complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        try:
            await asyncio.sleep(self.latency_s)
        except asyncio.CancelledError:
            self.num_hung_up += 1
            raise
        if self.status != 200:
            return web.Response(status=self.status, text="no such luck", headers=self.headers_sent)
        if self.body is not None:
            return web.Response(body=self.body, content_type="application/json")
        if self.is_trickled:
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b" ")
                await asyncio.sleep(0.01)
        return web.json_response({"choices": [self.choice if self.answer is None else self.answer(body)]})

    def close(self):
        if not self._background.is_closed:
            self._background.run(self._runner.cleanup())
            self._background.close()

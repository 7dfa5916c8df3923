"""A server with vLLM's routes for token ids and for weights, without a model: it does what vLLM does with its label."""

from __future__ import annotations

import asyncio

import torch
from safetensors.torch import load_file

from llmrl._utils.background_loop import BackgroundLoop
from llmrl.weight_sync.buffers import PackedLayout, open_shared


class VLLMServer:
    """Answers each request with two tokens of the weights that it holds; `is_held` makes it wait before.

    `resets_old_connections` makes it close a connection that is used again for anything but completions.
    """

    def __init__(self, backend="llmrl", *, port=0, device="cuda", is_scaled_out=True, is_dev=True, parameters=()):
        self.backend, self.device, self.is_scaled_out, self.is_dev = backend, device, is_scaled_out, is_dev
        self.parameters = parameters
        self.fails_at = self.stalls_at = self.answer = None
        self.is_stalled = False
        self.is_held = self.resets_old_connections = False
        self.connections = set()
        self.calls, self.bodies, self.served, self.aborted = [], [], [], set()
        self.num_restarts = -1
        self.restart()
        self._late = []  # its engine does what was asked in the order of the requests, late ones too
        self._background = BackgroundLoop("vllm-server")
        self.port = self._background.run(self._start(port))
        self.url = f"http://127.0.0.1:{self.port}"

    def restart(self):
        """Forget what the process before held: its weights, their label, an update, and requests that it stalled."""
        self.num_restarts += 1
        self.label, self.is_paused, self.is_updating = "default", False, False
        self.taken, self.weights = None, {}

    async def _start(self, port):
        from aiohttp import web

        self._web = web
        application = web.Application(client_max_size=1 << 24)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, shutdown_timeout=0.1)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    def close(self):
        if not self._background.is_closed:
            self._background.run(self._runner.cleanup())
            self._background.close()

    async def _handle(self, request):
        path = request.match_info["path"]
        body = await request.json() if request.can_read_body else {}
        if path not in ("v1/models", "weight_info"):
            self.calls.append(path)
            self.bodies.append(body)
        is_old = request.transport in self.connections
        self.connections.add(request.transport)
        if self.resets_old_connections and is_old and not path.startswith(("v1/", "inference/")):
            request.transport.abort()
        if path == self.fails_at:
            return self._refuse(500, f"{path} went wrong")
        if path == self.stalls_at:
            self.is_stalled = True
        is_of_engine = path not in ("v1/models", "version")  # which the HTTP server itself answers
        if is_of_engine and (self.is_stalled or self._late):
            return await asyncio.shield(self._answer_late(path, body, request.query))
        if path == "v1/models":
            return self._json({"data": [{"id": "tiny", "max_model_len": 100}]})
        if path.startswith("inference/") and not self.is_scaled_out:
            return self._refuse(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out")
        if path == "inference/v1/generate":
            return await self._generate(body)
        if path == "inference/v1/abort_requests":
            self.aborted.update(body["request_ids"])
            return self._web.Response()
        if path == "version":
            return self._json({"version": "0.32.0"})
        if not self.is_dev:
            return self._refuse(404, "Not Found")
        return self._control(path, body, request.query)

    async def _answer_late(self, path, body, query):
        """Do what was asked when the engine goes on, also after the client hung up, unless its process ended."""
        num_restarts = self.num_restarts
        request = object()
        self._late.append(request)
        while self.is_stalled or self._late[0] is not request:
            await asyncio.sleep(0.01)
        del self._late[0]
        if self.num_restarts > num_restarts:
            return self._refuse(503, "the server starts")
        return await self._generate(body) if path == "inference/v1/generate" else self._control(path, body, query)

    async def _generate(self, body):
        if not body:
            return self._refuse(400, "token_ids: field required")
        identity = f"generate-tokens-{body['request_id']}"
        while self.is_held and identity not in self.aborted:
            await asyncio.sleep(0.01)
        self.served.append(self.label)
        if self.answer is not None:
            return self._json({"choices": [self.answer]})
        is_aborted = identity in self.aborted
        num_tokens = 1 if is_aborted else 2
        return self._json({"choices": [{
            "finish_reason": "abort" if is_aborted else "length",
            "token_ids": [7, 8][:num_tokens],
            "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1}][:num_tokens]},
            "weight_versions": [{"version": self.label, "start": 0, "end": num_tokens}],
        }]})  # fmt: skip

    def _control(self, path, body, query):
        if path == "server_info":
            model = {"dtype": "torch.float32", "quantization": None}
            transfer = None if self.backend is None else {"backend": self.backend}
            config = {
                "model_config": model,
                "device_config": {"device": self.device},
                "weight_transfer_config": transfer,
            }
            return self._json({"vllm_config": config})
        if path == "get_world_size":
            return self._json({"world_size": 1})
        if path == "weight_info":
            return self._json({"weight_version": self.label})
        if path == "weight_checker":
            return self._json({"checksums": dict.fromkeys(self.parameters, "0")})
        if path == "is_paused":
            return self._json({"is_paused": self.is_paused})
        if path in ("pause", "resume"):
            self.is_paused = path == "pause"
        if path == "update_weight_version":
            self.label = body["new_version"]
        if path == "reset_prefix_cache":
            assert query["reset_running_requests"] == "true"
            return self._json({"success": True})
        if path == "start_weight_update":
            if self.is_updating:
                return self._refuse(500, "start_weight_update called while a weight update is already active.")
            self.is_updating, self.taken = True, None
        if path == "update_weights":
            self.taken = self._read(body["update_info"])
        if path == "finish_weight_update":
            if not self.is_updating:
                return self._refuse(500, "finish_weight_update called without a matching start_weight_update.")
            self.is_updating, self.weights = False, self.taken or self.weights
            self.label = body.get("weight_version", self.label)
        if path == "collective_rpc":
            assert body["method"] == "reload_weights"
            self.weights = load_file(f"{body['kwargs']['weights_path']}/model.safetensors")
        return self._json({})

    def _read(self, info):
        if info.get("is_discarded"):
            return None
        if info.get("folder"):
            return load_file(f"{info['folder']}/{info['pointer']['slot']}/model.safetensors")
        layout = PackedLayout.from_plain(info["names"], info["dtype_names"], info["shapes"])
        buffer = open_shared(info["path"], info["num_bytes"])
        return {name: tensor.clone() for name, tensor in layout.views(buffer)}

    def _json(self, value):
        return self._web.json_response(value)

    def _refuse(self, status, message):
        return self._web.json_response({"error": {"message": message}}, status=status)


def model_of(value):
    """Weights that differ by their value."""
    return {"embed.weight": torch.full((3, 2), float(value)), "norm.weight": torch.full((2,), value + 0.5)}


def holds(server, value):
    """Whether the server's weights are `model_of(value)`."""
    expected = model_of(value)
    same = (torch.equal(server.weights[name], tensor) for name, tensor in expected.items() if name in server.weights)
    return server.weights.keys() == expected.keys() and all(same)

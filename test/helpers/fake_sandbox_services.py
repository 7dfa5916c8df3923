"""Services of sandboxes on this machine, with as much of the published APIs of Daytona and E2B as their SDKs use here.

Commands are run by this machine's shell, without a wall between sandboxes: each is given a folder of its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import uuid
from pathlib import Path
from urllib.parse import unquote

from aiohttp import MultipartWriter, web

_HEADER = struct.Struct(">BI")


class Service:
    """What both have: sandboxes by id, of which one that was deleted answers nothing."""

    def __init__(self):
        self.alive = set()
        self.created = []
        self.unknown = []

    def create(self, request):
        """Note what a sandbox was made with; return its id."""
        name = uuid.uuid4().hex[:20]
        self.alive.add(name)
        self.created.append(request)
        return name

    def check(self, name):
        """Refuse what concerns a sandbox that is not there."""
        if name not in self.alive:
            raise web.HTTPNotFound(
                text=json.dumps({"code": 404, "message": f"no sandbox {name}"}), content_type="application/json"
            )

    async def other(self, request):
        """Note a request that nothing here answers."""
        self.unknown.append(f"{request.method} {request.path}")
        raise web.HTTPNotFound()

    @contextlib.asynccontextmanager
    async def serving(self):
        """The address of the service."""
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([*self.routes(), web.route("*", "/{path:.*}", self.other)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self.url
        finally:
            await runner.cleanup()


class Daytona(Service):
    """Daytona's API: https://www.daytona.io/docs, and its toolbox."""

    def routes(self):
        box = "/toolbox/{name}"
        return [
            web.post("/api/sandbox", self.made),
            web.get("/api/sandbox/{name}", self.told),
            web.delete("/api/sandbox/{name}", self.deleted),
            web.post(f"{box}/process/execute", self.executed),
            web.post(f"{box}/files/bulk-upload", self.uploaded),
            web.post(f"{box}/files/bulk-download", self.downloaded),
        ]

    def about(self, name, state="started"):
        return web.json_response(
            {
                "id": name,
                "organizationId": "own",
                "name": name,
                "user": "daytona",
                "env": {},
                "labels": {},
                "public": False,
                "networkBlockAll": True,
                "kvm": False,
                "target": "us",
                "cpu": 1,
                "gpu": 0,
                "memory": 1,
                "disk": 3,
                "state": state,
                "toolboxProxyUrl": f"{self.url}/toolbox",
            }
        )

    async def made(self, request):
        assert request.headers["authorization"] == "Bearer a-key"
        return self.about(self.create(await request.json()))

    async def told(self, request):
        self.check(request.match_info["name"])
        return self.about(request.match_info["name"])

    async def deleted(self, request):
        self.check(request.match_info["name"])
        self.alive.discard(request.match_info["name"])
        return self.about(request.match_info["name"], "destroyed")

    async def executed(self, request):
        self.check(request.match_info["name"])
        asked = await request.json()
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", asked["command"], stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await asyncio.wait_for(process.communicate(), asked["timeout"])
        return web.json_response({"exitCode": process.returncode, "result": out.decode()})

    async def uploaded(self, request):
        self.check(request.match_info["name"])
        async for part in await request.multipart():
            if part.filename:
                Path(unquote(part.filename)).write_bytes(await part.read())
        return web.json_response({})

    async def downloaded(self, request):
        self.check(request.match_info["name"])
        with MultipartWriter("form-data") as writer:
            for path in (await request.json())["paths"]:
                part = writer.append(Path(path).read_bytes(), {"content-type": "application/octet-stream"})
                part.set_content_disposition("form-data", quote_fields=False, name="file", filename=path)
        return web.Response(body=writer, headers={"content-type": writer.content_type})


class E2B(Service):
    """E2B's API, and that of the daemon in a sandbox: Connect's protocol with JSON."""

    def routes(self):
        return [
            web.post("/v2/sandboxes", self.made),
            web.delete("/sandboxes/{name}", self.deleted),
            web.post("/process.Process/Start", self.started),
            web.post("/files", self.uploaded),
            web.get("/files", self.downloaded),
        ]

    def check_box(self, request):
        self.check(request.headers["e2b-sandbox-id"])

    async def made(self, request):
        assert request.headers["x-api-key"] == "a-key"
        name = self.create(await request.json())
        told = {"sandboxID": name, "templateID": "base", "clientID": "own", "envdVersion": "0.4.0"}
        return web.json_response(told, status=201)

    async def deleted(self, request):
        self.check(request.match_info["name"])
        self.alive.discard(request.match_info["name"])
        return web.Response(status=204)

    async def started(self, request):
        self.check_box(request)
        body = await request.read()
        _, size = _HEADER.unpack(body[: _HEADER.size])
        asked = json.loads(body[_HEADER.size : _HEADER.size + size])["process"]
        answer = web.StreamResponse(headers={"content-type": "application/connect+json"})
        await answer.prepare(request)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(asked["cmd"], *asked["args"], stdout=pipe, stderr=pipe)

        async def send(flags, message):
            text = json.dumps(message).encode()
            await answer.write(_HEADER.pack(flags, len(text)) + text)

        await send(0, {"event": {"start": {"pid": process.pid}}})
        out, err = await process.communicate()
        for name, data in (("stdout", out), ("stderr", err)):
            if data:
                await send(0, {"event": {"data": {name: base64.b64encode(data).decode()}}})
        await send(0, {"event": {"end": {"exitCode": process.returncode, "exited": True, "status": "done"}}})
        await send(2, {})
        return answer

    async def uploaded(self, request):
        self.check_box(request)
        if request.content_type.startswith("multipart/"):
            part = await (await request.multipart()).next()
            path, data = request.query.get("path") or part.filename, await part.read()
        else:
            path, data = request.query["path"], await request.read()
        Path(path).write_bytes(data)
        return web.json_response([{"name": Path(path).name, "type": "file", "path": path}])

    async def downloaded(self, request):
        self.check_box(request)
        return web.Response(body=Path(request.query["path"]).read_bytes())

"""Modal's service on this machine: as much of the protocol of its SDK as sandboxes use here.

The control plane creates and ends sandboxes; a router, here the same server, runs their commands. The messages are
those of the package `modal_proto`, which comes with the SDK. Commands are run by this machine's shell, without a wall
between sandboxes: each is given a folder of its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time

from fake_sandbox_services import Service
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_pb2, task_command_router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase


def signed(seconds):
    """A token that says when it expires, as the SDK reads it."""
    parts = ({"alg": "none"}, {"exp": time.time() + seconds})
    return ".".join([*(base64.urlsafe_b64encode(json.dumps(part).encode()).decode() for part in parts), "none"])


def refusing(base, own):
    """A service with these methods, each of which gets a request and returns a response; the others are refused."""

    def method(name):
        async def call(self, stream):
            request = await stream.recv_message()
            if name not in own:
                raise GRPCError(Status.UNIMPLEMENTED, f"{name} is not here")
            await own[name](self.service, request, stream)

        return call

    return type(base.__name__, (base,), {name: method(name) for name in base.__abstractmethods__})


class Modal(Service):
    """Modal's API."""

    def __init__(self):
        super().__init__()
        self.images = []
        self.processes = {}

    @contextlib.asynccontextmanager
    async def serving(self):
        """The address of the service."""
        services = (refusing(ModalClientBase, CONTROL)(), refusing(TaskCommandRouterBase, ROUTER)())
        for one in services:
            one.service = self
        server = Server(services)
        await server.start("127.0.0.1", 0)
        [socket] = server._server.sockets
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        try:
            yield self.url
        finally:
            server.close()
            await server.wait_closed()

    def check(self, task):
        """Refuse what concerns a sandbox that is not there."""
        if task.removeprefix("ta-sb-") not in self.alive:
            raise GRPCError(Status.NOT_FOUND, f"no sandbox {task}")

    async def token(self, request, stream):
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=signed(3600)))

    async def app(self, request, stream):
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id="ap-1"))

    async def environment(self, request, stream):
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata))

    async def image(self, request, stream):
        self.images.append(list(request.image.dockerfile_commands))
        done = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        metadata = api_pb2.ImageMetadata(image_builder_version="2025.06")
        await stream.send_message(api_pb2.ImageGetOrCreateResponse(image_id="im-1", result=done, metadata=metadata))

    async def make(self, request, stream):
        name = f"sb-{self.create(request.definition)}"
        access = api_pb2.CommandRouterAccess(url=self.url, jwt=signed(3600))
        await stream.send_message(
            api_pb2.SandboxCreateV2Response(sandbox_id=name, task_id=f"ta-{name}", command_router_access=access)
        )

    async def terminate(self, request, stream):
        self.alive.discard(request.sandbox_id.removeprefix("sb-"))
        await stream.send_message(api_pb2.SandboxTerminateResponse())

    async def start(self, request, stream):
        self.check(request.task_id)
        pipe = asyncio.subprocess.PIPE
        self.processes[request.exec_id] = await asyncio.create_subprocess_exec(
            *request.command_args, stdin=pipe, stdout=pipe, stderr=pipe
        )
        await stream.send_message(task_command_router_pb2.TaskExecStartResponse())

    async def read(self, request, stream):
        process = self.processes[request.exec_id]
        is_output = request.file_descriptor == task_command_router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        output = process.stdout if is_output else process.stderr
        while part := await output.read(65536):
            await stream.send_message(task_command_router_pb2.TaskExecStdioReadResponse(data=part))

    async def write(self, request, stream):
        stdin = self.processes[request.exec_id].stdin
        with contextlib.suppress(ConnectionError):  # the command may have ended without reading
            stdin.write(request.data)
            await stdin.drain()
        if request.eof:
            stdin.close()
        await stream.send_message(task_command_router_pb2.TaskExecStdinWriteResponse())

    async def wait(self, request, stream):
        code = await self.processes[request.exec_id].wait()
        await stream.send_message(task_command_router_pb2.TaskExecWaitResponse(code=code))


CONTROL = {
    "AuthTokenGet": Modal.token,
    "AppGetOrCreate": Modal.app,
    "EnvironmentGetOrCreate": Modal.environment,
    "ImageGetOrCreate": Modal.image,
    "SandboxCreateV2": Modal.make,
    "SandboxTerminateV2": Modal.terminate,
}
ROUTER = {
    "TaskExecStart": Modal.start,
    "TaskExecStdioRead": Modal.read,
    "TaskExecStdinWrite": Modal.write,
    "TaskExecWait": Modal.wait,
}

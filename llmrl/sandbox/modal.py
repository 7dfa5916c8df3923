"""`ModalSandbox`: a sandbox of Modal, through its SDK."""

from __future__ import annotations

import errno
import math
from typing import TYPE_CHECKING

from llmrl._utils.imports import require
from llmrl.sandbox.remote import RemoteSandbox

if TYPE_CHECKING:
    from modal import Sandbox
    from modal.container_process import ContainerProcess

_FILE_SECONDS = 600


class ModalSandbox(RemoteSandbox["Sandbox"]):
    """A sandbox of Modal (https://modal.com), without network unless it is allowed.

    The SDK reads the token from `MODAL_TOKEN_ID` and `MODAL_TOKEN_SECRET`, or from `~/.modal.toml`.

    Args:
        image: image in a registry; by default Modal's own Debian with Python.
        app: name of the app that the sandboxes belong to, which is created if it is missing.
        folder: working folder, which is created.
        network: whether the sandbox has a network.
        lifetime_seconds: time after which Modal ends the sandbox in any case.

    Raises:
        MissingExtraError: if the extra `modal` is not installed.

    Example:
        >>> sandboxes = Sandboxes(lambda: ModalSandbox("python:3.12-slim"))                 # doctest: +SKIP
    """

    def __init__(
        self,
        image: str | None = None,
        *,
        app: str = "llmrl",
        folder: str = "/tmp/work",
        network: bool = False,
        lifetime_seconds: int = 3600,
    ) -> None:
        super().__init__(folder)
        require("modal", extra="modal")
        self._image = image
        self._app = app
        self._has_network = network
        self._lifetime_seconds = lifetime_seconds

    async def _create(self) -> Sandbox:
        from modal import App, Image, Sandbox

        image = Image.debian_slim() if self._image is None else Image.from_registry(self._image)
        return await Sandbox.create.aio(
            app=await App.lookup.aio(self._app, create_if_missing=True),
            image=image,
            timeout=self._lifetime_seconds,
            block_network=not self._has_network,
        )

    async def _execute(self, line: str, timeout: float) -> str:
        process = await self._started.exec.aio("sh", "-c", line, timeout=math.ceil(timeout))
        return await process.stdout.read.aio()

    async def _upload(self, path: str, data: bytes) -> None:
        process = await self._started.exec.aio("sh", "-c", 'cat >"$0"', path, timeout=_FILE_SECONDS, text=False)
        process.stdin.write(data)
        process.stdin.write_eof()
        await process.stdin.drain.aio()
        await _check(process, path)

    async def _download(self, path: str) -> bytes:
        process = await self._started.exec.aio("cat", "--", path, timeout=_FILE_SECONDS, text=False)
        data = await process.stdout.read.aio()
        await _check(process, path)
        return data

    async def _delete(self, sandbox: Sandbox) -> None:
        await sandbox.terminate.aio()


async def _check(process: ContainerProcess[bytes], path: str) -> None:
    """Wait for a command that transfers a file. Raises OSError if the command fails."""
    if await process.wait.aio():
        raise OSError(errno.EIO, (await process.stderr.read.aio()).decode(errors="replace"), path)

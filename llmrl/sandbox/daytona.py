"""`DaytonaSandbox`: a sandbox of Daytona, through its SDK."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from llmrl._utils.imports import require
from llmrl.sandbox.remote import RemoteSandbox

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

_START_SECONDS = 600.0


class DaytonaSandbox(RemoteSandbox["AsyncSandbox"]):
    """A sandbox of Daytona (https://www.daytona.io), without network unless it is allowed.

    The SDK reads the key from `DAYTONA_API_KEY`, and the address from `DAYTONA_API_URL`.

    Args:
        image: Docker image; by default Daytona's own snapshot.
        folder: working folder, which is created.
        network: whether the sandbox has a network.

    Raises:
        MissingExtraError: if the extra `daytona` is not installed.

    Example:
        >>> sandboxes = Sandboxes(lambda: DaytonaSandbox("debian:12-slim"))                 # doctest: +SKIP
    """

    def __init__(self, image: str | None = None, *, folder: str = "/tmp/work", network: bool = False) -> None:
        super().__init__(folder)
        require("daytona", extra="daytona")
        self._image = image
        self._has_network = network
        self._client: AsyncDaytona | None = None

    async def _create(self) -> AsyncSandbox:
        from daytona import AsyncDaytona, CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams

        self._client = AsyncDaytona()
        # Delete the sandbox 0 minutes after it stops, so that a killed run leaves no sandbox behind.
        if self._image is None:
            snapshot = CreateSandboxFromSnapshotParams(network_block_all=not self._has_network, auto_delete_interval=0)
            return await self._client.create(snapshot, timeout=_START_SECONDS)
        made_from = CreateSandboxFromImageParams(
            image=self._image, network_block_all=not self._has_network, auto_delete_interval=0
        )
        return await self._client.create(made_from, timeout=_START_SECONDS)

    async def _execute(self, line: str, timeout: float) -> str:
        return (await self._started.process.exec(line, timeout=math.ceil(timeout))).result

    async def _upload(self, path: str, data: bytes) -> None:
        await self._started.fs.upload_file(data, path)

    async def _download(self, path: str) -> bytes:
        return await self._started.fs.download_file(path) or b""

    async def _delete(self, sandbox: AsyncSandbox) -> None:
        from daytona import DaytonaNotFoundError

        with contextlib.suppress(DaytonaNotFoundError):  # it may have been removed
            await sandbox.delete()

    async def close(self) -> None:
        """Remove the sandbox and close the client, even if no sandbox could be created."""
        client, self._client = self._client, None  # a concurrent call must not close it again
        try:
            await super().close()
        finally:
            if client is not None:
                await client.close()

"""`E2BSandbox`: a sandbox of E2B, through its SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrl._utils.imports import require
from llmrl.sandbox.remote import RemoteSandbox

if TYPE_CHECKING:
    from e2b import AsyncSandbox


class E2BSandbox(RemoteSandbox["AsyncSandbox"]):
    """A sandbox of E2B (https://e2b.dev), without network unless it is allowed.

    The SDK reads the key from `E2B_API_KEY`, and the domain from `E2B_DOMAIN`.

    Args:
        template: name of the template; by default E2B's own, which is Debian.
        folder: working folder, which is created.
        network: whether the sandbox has a network.
        lifetime_seconds: time after which E2B ends the sandbox in any case.

    Raises:
        MissingExtraError: if the extra `e2b` is not installed.

    Example:
        >>> sandboxes = Sandboxes(lambda: E2BSandbox())                                     # doctest: +SKIP
    """

    def __init__(
        self,
        template: str | None = None,
        *,
        folder: str = "/tmp/work",
        network: bool = False,
        lifetime_seconds: int = 3600,
    ) -> None:
        super().__init__(folder)
        require("e2b", extra="e2b")
        self._template = template
        self._has_network = network
        self._lifetime_seconds = lifetime_seconds

    async def _create(self) -> AsyncSandbox:
        from e2b import AsyncSandbox

        return await AsyncSandbox.create(
            self._template, timeout=self._lifetime_seconds, allow_internet_access=self._has_network
        )

    async def _execute(self, line: str, timeout: float) -> str:
        return (await self._started.commands.run(line, timeout=timeout)).stdout

    async def _upload(self, path: str, data: bytes) -> None:
        await self._started.files.write(path, data)

    async def _download(self, path: str) -> bytes:
        return bytes(await self._started.files.read(path, format="bytes"))

    async def _delete(self, sandbox: AsyncSandbox) -> None:
        await sandbox.kill()

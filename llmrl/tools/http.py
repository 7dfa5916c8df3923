"""`HttpTool` and `StopTool`: a request to hosts that are named, and the end of the conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from llmrl._utils.imports import require
from llmrl.tools.output import ToolResult
from llmrl.tools.tool import StopSignal, Tool, ToolError, function_tool


def HttpTool(
    *, allowed_hosts: Sequence[str], timeout: float = 10.0, max_response_bytes: int = 1 << 20, name: str = "http"
) -> Tool:
    """Return a tool that makes HTTP requests; redirects are shown, and not followed.

    Args:
        allowed_hosts: names, such as `api.example.org`, or with a port; to others nothing is sent. The browser's
            gateway is what keeps a model from machines near this one; here a name means whatever it resolves to.
        timeout: seconds that a request may take.
        max_response_bytes: of a body, after which it is cut.
        name: of the tool.

    Raises:
        ValueError: without a host.
        MissingExtraError: when aiohttp is not installed, naming the extra.

    Example:
        >>> HttpTool(allowed_hosts=["api.example.org"]).name
        'http'
    """
    if isinstance(allowed_hosts, str) or not allowed_hosts:
        raise ValueError(f"allowed_hosts must name the hosts that requests may go to, got {allowed_hosts!r}.")
    aiohttp = require("aiohttp", extra="server")

    async def http(
        url: str, method: str = "GET", headers: Mapping[str, str] | None = None, body: str | None = None
    ) -> ToolResult:
        """Make an HTTP request; the answer is its status and body.

        Args:
            url: with http:// or https://.
            method: such as GET or POST.
            headers: of the request.
            body: text that is sent.
        """
        try:
            parts = urlsplit(url)
            hosts = {parts.hostname, f"{parts.hostname}:{parts.port}"}
        except ValueError as error:
            raise ToolError(f"{url!r:.200} is no URL: {error}.") from None
        if parts.scheme not in ("http", "https") or hosts.isdisjoint(allowed_hosts):
            raise ToolError(f"requests go to {', '.join(allowed_hosts)} by http or https alone, got {url!r:.200}.")
        try:
            limits = aiohttp.ClientTimeout(total=timeout)
            async with (
                aiohttp.ClientSession(timeout=limits) as session,
                session.request(method, url, headers=headers, data=body, allow_redirects=False) as response,
            ):
                data = b""
                async for part in response.content.iter_any():
                    data += part
                    if len(data) >= max_response_bytes:
                        break
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ToolError(f"the request failed: {error}.") from error
        told = [f"[status {response.status}]", data[:max_response_bytes].decode(errors="replace")]
        if "Location" in response.headers:
            told.insert(1, f"[redirects to {response.headers['Location']}]")
        if len(data) >= max_response_bytes:
            told.append(f"[cut after {max_response_bytes} bytes]")
        return ToolResult.from_text("\n".join(told), is_error=response.status >= 400)

    return function_tool(http, name=name)


def StopTool(name: str = "stop") -> Tool:
    """Return a tool by which the model ends the conversation; what it says with the call is its last answer.

    Example:
        >>> StopTool().name
        'stop'
    """

    async def stop(reason: str = "done") -> None:
        """Say that you have finished.

        Args:
            reason: why.
        """
        raise StopSignal(reason)

    return function_tool(stop, name=name)

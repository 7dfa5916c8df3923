"""`HttpTool` and `StopTool`: a request to hosts that are named, and the end of the conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmrl._utils.imports import require
from llmrl.tools.output import ToolResult
from llmrl.tools.tool import StopSignal, Tool, ToolError, function_tool

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# None that says where a request goes, where it ends, or who sent it.
_HEADERS = frozenset(
    (
        "accept", "accept-language", "authorization", "cache-control", "content-language", "content-type", "cookie",
        "if-match", "if-modified-since", "if-none-match", "if-unmodified-since", "prefer", "range", "user-agent",
        "x-api-key",
    )
)  # fmt: skip


def HttpTool(
    *, allowed_hosts: Sequence[str], timeout: float = 10.0, max_response_bytes: int = 1 << 20, name: str = "http"
) -> Tool:
    """Return a tool that makes HTTP requests; redirects are shown, and not followed.

    Headers are those of a list, such as `Accept`, `Authorization` and `Content-Type`: not `Host`, which names another
    site of the same server, nor those that say where a body ends.

    Args:
        allowed_hosts: names, such as `api.example.org`, or with a port; to others nothing is sent. The browser's
            gateway is what keeps a model from machines near this one; here a name means whatever it resolves to.
        timeout: seconds that a request may take.
        max_response_bytes: most bytes of a body, after which it is cut.
        name: name of the tool.

    Raises:
        ValueError: if no host is named.
        MissingExtraError: if aiohttp is not installed.

    Example:
        >>> HttpTool(allowed_hosts=["api.example.org"]).name
        'http'
    """
    if isinstance(allowed_hosts, str) or not allowed_hosts:
        raise ValueError(f"allowed_hosts must name the hosts that requests may go to, got {allowed_hosts!r}.")
    aiohttp = require("aiohttp", extra="server")
    yarl = require("yarl", extra="server")

    async def http(
        url: str, method: str = "GET", headers: Mapping[str, str] | None = None, body: str | None = None
    ) -> ToolResult:
        """Make an HTTP request; the answer is its status and body.

        Args:
            url: with http:// or https://.
            method: such as GET or POST.
            headers: headers of the request.
            body: text that is sent.
        """
        try:
            parsed = yarl.URL(url)  # by which it is sent, too
        except ValueError as error:
            raise ToolError(f"{url!r:.200} is no URL: {error}.") from None
        hosts = {parsed.host, f"{parsed.host}:{parsed.port}"}
        if parsed.scheme not in ("http", "https") or hosts.isdisjoint(allowed_hosts):
            raise ToolError(f"requests go to {', '.join(allowed_hosts)} by http or https alone, got {url!r:.200}.")
        if method.upper() not in _METHODS:
            raise ToolError(f"method must be one of {', '.join(_METHODS)}, got {method!r:.40}.")
        if refused := [header for header in headers or () if header.lower() not in _HEADERS]:
            raise ToolError(f"headers may be {', '.join(sorted(_HEADERS))}, got {', '.join(refused)!r:.200}.")
        try:
            limits = aiohttp.ClientTimeout(total=timeout)
            async with (
                aiohttp.ClientSession(timeout=limits) as session,
                session.request(method.upper(), parsed, headers=headers, data=body, allow_redirects=False) as response,
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

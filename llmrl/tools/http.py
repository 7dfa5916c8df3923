"""`HttpTool` and `StopTool`: HTTP requests to allowed hosts, and the end of the conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmrl._utils.arguments import check_positive
from llmrl._utils.imports import require
from llmrl.tools.output import ToolResult
from llmrl.tools.tool import StopSignal, Tool, ToolError, function_tool

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# Leaves out the headers that determine the target, the end or the sender of a request.
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
    """Return a tool that makes HTTP requests, without following redirects.

    Only common headers such as `Accept` and `Authorization` are allowed; `Host` is not.

    Args:
        allowed_hosts: host names, such as `api.example.org`, optionally with a port. Names may resolve to any address:
            unlike the browser's gateway, this does not protect the local network.
        timeout: seconds per request.
        max_response_bytes: length at which a body is cut.

    Raises:
        ValueError: if there are no hosts, a host is a URL or a pattern, or a limit is not positive.
        MissingExtraError: if aiohttp is not installed.
    """
    if isinstance(allowed_hosts, str) or not allowed_hosts:
        raise ValueError(f"allowed_hosts must name the hosts that requests may go to, got {allowed_hosts!r}.")
    check_positive(timeout=timeout, max_response_bytes=max_response_bytes)
    for host in allowed_hosts:
        if {"/", "*"} & set(host):
            raise ValueError(
                f"allowed_hosts has {host!r}, which matches nothing; write the host's name, such as 'api.example.org'."
            )
    allowed = [host.lower() for host in allowed_hosts]
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
            parsed = yarl.URL(url)  # the parser that the request uses, too
        except ValueError as error:
            raise ToolError(f"{url!r:.200} is not a URL: {error}.") from None
        hosts = {parsed.host, f"{parsed.host}:{parsed.port}"}
        if parsed.scheme not in ("http", "https") or hosts.isdisjoint(allowed):
            raise ToolError(f"requests may go only to {', '.join(allowed)} by http or https, got {url!r:.200}.")
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
    """Return a tool that ends the conversation; the message with the call is the last answer."""

    async def stop(reason: str = "done") -> None:
        """Say that you have finished.

        Args:
            reason: why.
        """
        raise StopSignal(reason)

    return function_tool(stop, name=name)

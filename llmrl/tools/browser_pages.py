"""`BrowserPages`: a headless browser in which each conversation has a page of its own."""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from llmrl._utils.arguments import check_least
from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.imports import require
from llmrl.tools.browser_page import first_line
from llmrl.tools.gateway import Gateway, check_domains
from llmrl.tools.tool import ToolError

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page, Playwright, Route

Result = TypeVar("Result")

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Shares of an action's time for the page, and for checking whether the page responds afterwards.
_ACTION_SHARE = 0.6
_RESPONSE_SHARE = 0.35
# Time limit for closing a page; a page that exceeds it ends with the browser.
_CLOSE_SECONDS = 10.0
# Options against bypassing the proxy and against background traffic.
_FLAGS = (
    "--disable-quic",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--disable-gpu",
)


# A conversation has one page, so links and scripts that would open another page use this one.
_ONE_PAGE = """
window.open = address => { if (address) location.href = address; return null; };
addEventListener('click', event => {
  const link = event.target.closest && event.target.closest('a[target], area[target]');
  if (link) link.target = '_self';
}, true);
"""


async def _close_pop_up(page: Page) -> None:
    await page.close()


def _is_gone(page: Page) -> bool:
    browser = page.context.browser
    return page.is_closed() or browser is None or not browser.is_connected()


def find_chromium() -> str | None:
    """Return the path of the system's Chromium or Chrome, or None."""
    return next((path for name in _PROGRAMS if (path := shutil.which(name)) is not None), None)


class PageLost(ToolError):
    """Raised if the page of a conversation was closed; the next action opens a new page."""


class BrowserPages:
    """A headless browser that gives each conversation its own page and cookies.

    All requests of the browser, including redirects and what pages load, go through a gateway that
    allows only some domains. The browser runs on its own event loop and may be used from any other.
    After a crash it is started again for the next page.

    Args:
        allowed_domains: see `BrowserTransform`.
        timeout: seconds per action.
        max_pages: maximum number of open pages; further conversations wait for a page.
        executable_path: path of the browser; the system's by default.
        folders: folders of files, by host name, that are served as the host's pages without a network.

    Raises:
        MissingExtraError: if the `tools` extra is not installed.
        ValueError: if no domain is allowed, or a domain is a pattern or a URL.
        FileNotFoundError: if no Chromium is installed.
    """

    def __init__(
        self,
        allowed_domains: Sequence[str],
        *,
        timeout: float = 30.0,
        max_pages: int = 16,
        executable_path: str | None = None,
        folders: Mapping[str, Path] | None = None,
    ) -> None:
        require("playwright", extra="tools")
        check_least(1, max_pages=max_pages)
        self.allowed_domains = check_domains(allowed_domains)
        self.timeout = timeout
        program = executable_path or find_chromium()
        if program is None:
            raise FileNotFoundError(
                f"no browser found among {_PROGRAMS}; install Chromium (Debian: apt-get install chromium), "
                "or name one with executable_path."
            )
        self._program = program
        self._folders = {host: folder.resolve() for host, folder in (folders or {}).items()}
        self.loop = BackgroundLoop("llmrl-browser")
        self.pages: dict[str, asyncio.Task[Page]] = {}
        self._places = asyncio.Semaphore(max_pages)
        self._closing: set[asyncio.Task[None]] = set()
        self._opening: asyncio.Task[Browser] | None = None
        self._playwright: Playwright | None = None
        self.gateway: Gateway | None = None

    async def act(self, conversation_id: str, action: Callable[[Page], Awaitable[Result]]) -> Result:
        """Run an action on a conversation's page, which is opened if there is none.

        A page is closed if it does not respond, or if its action is cancelled.

        Raises ToolError if the action fails or the browser does not start, PageLost if the page is gone.
        """
        return await self.loop.wait(self._act(conversation_id, action))

    async def _act(self, conversation_id: str, action: Callable[[Page], Awaitable[Result]]) -> Result:
        from playwright.async_api import Error
        from playwright.async_api import TimeoutError as PageTimeout

        page = await self._page(conversation_id)
        try:
            try:
                return await action(page)
            except Error as error:
                if _is_gone(page):
                    reason = "the page was lost with the browser"
                elif not isinstance(error, PageTimeout) or await self._responds(page):
                    raise ToolError(first_line(error)) from error
                else:
                    reason = "the page does not respond and was closed"
                self._close_page(conversation_id)
                raise PageLost(f"{reason}; the next action opens a new one.") from error
        except asyncio.CancelledError:  # of the action, or of the check whether the page responds
            self._close_page(conversation_id)
            raise

    async def _responds(self, page: Page) -> bool:
        """Return whether scripts run in the page; an endless script would block the next action."""
        try:
            await asyncio.wait_for(page.evaluate("1"), self.timeout * _RESPONSE_SHARE)
        except Exception:
            return False
        return True

    # The browser and its pages; these methods run on the browser's loop.

    async def _browser(self) -> Browser:
        if self._opening is None:
            self._opening = asyncio.create_task(self._launch())
        try:
            browser = await asyncio.shield(self._opening)
        except Exception as error:
            self._opening = None
            raise ToolError(f"the browser does not start: {first_line(error)}") from error
        if not browser.is_connected():  # a crash, which ends all pages
            self._opening = None
            return await self._browser()
        return browser

    async def _launch(self) -> Browser:
        from playwright.async_api import async_playwright

        if self._playwright is None:
            self._playwright = await async_playwright().start()
        if self.gateway is None:
            self.gateway = Gateway(self.allowed_domains)
            self._port = await self.gateway.start()
        return await self._playwright.chromium.launch(
            executable_path=self._program,
            args=list(_FLAGS),
            chromium_sandbox=os.getuid() != 0,  # Chromium's sandbox does not work as root
            # Loopback addresses go through the gateway too.
            proxy={"server": f"http://127.0.0.1:{self._port}", "bypass": "<-loopback>"},
        )

    async def _page(self, conversation_id: str) -> Page:
        opening = self.pages.get(conversation_id)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            opening = self.pages[conversation_id] = asyncio.create_task(self._open_page())
        page = await asyncio.shield(opening)
        if _is_gone(page):
            self._close_page(conversation_id)
            return await self._page(conversation_id)
        return page

    async def _open_page(self) -> Page:
        await self._places.acquire()
        try:
            browser = await self._browser()
            context = await browser.new_context(service_workers="block", accept_downloads=False)
            context.set_default_timeout(self.timeout * _ACTION_SHARE * 1000)
            await context.add_init_script(_ONE_PAGE)
            await self._serve_folders(context)
            page = await context.new_page()
            context.on("page", _close_pop_up)
            return page
        except BaseException:
            self._places.release()
            raise

    async def _serve_folders(self, context: BrowserContext) -> None:
        async def answer(route: Route) -> None:
            address = urlsplit(route.request.url)
            folder = self._folders[str(address.hostname)]
            file = (folder / unquote(address.path).lstrip("/")).resolve()
            if file.is_file() and file.is_relative_to(folder):
                kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
                await route.fulfill(body=await asyncio.to_thread(file.read_bytes), content_type=kind)
            else:
                await route.fulfill(status=404, body="There is no such file.")

        for host in self._folders:
            await context.route(f"http://{host}/**", answer)

    def release(self, conversation_id: str) -> None:
        """Close a conversation's page, from any thread."""
        if not self.loop.is_closed:
            self.loop.post(self._close_page, conversation_id)

    def _close_page(self, conversation_id: str) -> None:
        opening = self.pages.pop(conversation_id, None)
        if opening is not None:
            closing = asyncio.create_task(self._end_page(opening))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _end_page(self, opening: asyncio.Task[Page]) -> None:
        if not opening.done():
            opening.cancel()  # it waits for a free page
        results = await asyncio.gather(opening, return_exceptions=True)
        if not isinstance(results[0], BaseException):
            self._places.release()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(results[0].context.close(), _CLOSE_SECONDS)

    def close(self) -> None:
        """Close the browser. May be called twice."""
        if not self.loop.is_closed:
            self.loop.run(self._close())
            self.loop.close()

    async def _close(self) -> None:
        for conversation_id in list(self.pages):
            self._close_page(conversation_id)
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._opening is not None:
            browser = (await asyncio.gather(self._opening, return_exceptions=True))[0]
            if not isinstance(browser, BaseException):
                await asyncio.gather(browser.close(), return_exceptions=True)
        if self._playwright is not None:
            await self._playwright.stop()
        if self.gateway is not None:
            await self.gateway.close()
        self._opening = self._playwright = self.gateway = None

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("a browser cannot be pickled: it is bound to its process; make one in each process.")

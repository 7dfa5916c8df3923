"""The model's actions on a page. It reads the docstrings and type hints here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from llmrl.tools.gateway import REFUSED_HEADER, is_allowed
from llmrl.tools.tool import ToolError

if TYPE_CHECKING:
    from playwright.async_api import Page

_PORTS = {"http": 80, "https": 443}


class PageActions:
    """The actions on one page; `screenshot_path` returns the path of the next screenshot."""

    def __init__(self, page: Page, allowed_domains: Sequence[str], screenshot_path: Callable[[], Path]) -> None:
        self._page = page
        self._domains = allowed_domains
        self._screenshot_path = screenshot_path

    async def navigate(self, url: str) -> str:
        """Open a web page; the answer is its title and text.

        Args:
            url: where to go, with http:// or https://.
        """
        address = urlsplit(url)
        if address.scheme not in _PORTS or not address.hostname:
            raise ToolError(f"{url!r:.200} does not begin with http:// or https://.")
        if not is_allowed(address.hostname, address.port or _PORTS[address.scheme], self._domains):
            raise self._refusal(address.netloc)
        response = await self._page.goto(url, wait_until="load")
        if response is not None and (refused := response.headers.get(REFUSED_HEADER)):
            await self._page.goto("about:blank")
            raise self._refusal(refused)
        return await self._loaded()

    async def click(self, selector: str) -> str:
        """Click on something in the page; the answer is the page that follows.

        Args:
            selector: a CSS selector, or text=WORDS for what shows these words.
        """
        await self._page.click(selector)
        return await self._loaded()

    async def type_text(self, selector: str, text: str, submit: bool = False) -> str:
        """Fill in a field of the page, or choose from a list; the answer is the page that follows.

        Args:
            selector: a CSS selector of the field.
            text: what to write into it, or which option of a <select> to choose.
            submit: whether to press Enter afterwards.
        """
        if await self._page.locator(selector).first.evaluate("field => field.tagName") == "SELECT":
            await self._page.select_option(selector, text)
        else:
            await self._page.fill(selector, text)
        if submit:
            await self._page.press(selector, "Enter")
        return await self._loaded()

    async def extract(self, selector: str = "body", links: bool = False) -> str:
        """Text of a part of the page.

        Args:
            selector: a CSS selector of the part.
            links: whether to list the links in it, too.
        """
        part = self._page.locator(selector).first
        text = await part.inner_text()
        if links:
            found = await part.evaluate("e => [...e.querySelectorAll('a[href]')].map(a => [a.innerText, a.href])")
            text += "".join(f"\n[{' '.join(words.split())}]({address})" for words, address in found)
        return text

    async def screenshot(self) -> str:
        """Save a picture of the page; the answer is the file's name."""
        path = self._screenshot_path()
        await self._page.screenshot(path=path)
        size = self._page.viewport_size
        assert size is not None  # set when the browser started
        return f"[screenshot: {path.name}, {size['width']} × {size['height']}]"

    async def _loaded(self) -> str:
        """Return title, address and text of the page after it has loaded."""
        await self._page.wait_for_load_state("load")
        text = await self._page.inner_text("body")
        if text.startswith("Refused: "):  # the gateway's response to a link or a form
            await self._page.goto("about:blank")
            raise self._refusal(text.split()[1])
        return f"{await self._page.title()}\n{self._page.url}\n\n{text}"

    def _refusal(self, host: str) -> ToolError:
        return ToolError(f"{host} is not allowed; allowed are {', '.join(self._domains)}.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

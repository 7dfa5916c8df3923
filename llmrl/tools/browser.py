"""`BrowserTransform`: a web browser for the model."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from llmrl.tools.browser_page import PageActions
from llmrl.tools.browser_pages import BrowserPages
from llmrl.tools.tool import Signature, Tool
from llmrl.tools.transform import OutputOptions, ToolTransform

if TYPE_CHECKING:
    from playwright.async_api import Page


class BrowserTransform(ToolTransform):
    """A headless browser: tools `navigate`, `click`, `type_text`, `extract` and `screenshot`.

    Each conversation has its own page and cookies. All requests of the browser, including redirects
    and what pages load, go through a gateway that allows only some domains.

    Args:
        allowed_domains: host names, optionally with a port; subdomains are allowed too. Names that resolve to an
            address of this machine or its network are refused, unless the address is listed.
        timeout: seconds per action.
        tool_name, **output: as for `ToolTransform`.
        max_pages: number of open pages; further conversations wait for one up to `timeout` seconds.
        screenshot_folder: where screenshots are saved; without it there is no `screenshot` tool.
        executable_path: path of the browser; the system's by default.

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
        tool_name: str = "tool",
        max_pages: int = 16,
        screenshot_folder: str | Path | None = None,
        executable_path: str | None = None,
        **output: Unpack[OutputOptions],
    ) -> None:
        super().__init__(tool_name=tool_name, timeout=timeout, **output)
        self.browser = BrowserPages(
            allowed_domains, timeout=timeout, max_pages=max_pages, executable_path=executable_path
        )
        self._home = self.browser.loop  # a call after a cancelled one must find its page closed
        self.allowed_domains = self.browser.allowed_domains
        self.screenshot_folder: Path | None = None
        self._screenshot_numbers = itertools.count()
        actions: list[Callable[..., Awaitable[str]]] = [
            PageActions.navigate,
            PageActions.click,
            PageActions.type_text,
            PageActions.extract,
        ]
        if screenshot_folder is not None:
            self.screenshot_folder = Path(screenshot_folder)
            self.screenshot_folder.mkdir(parents=True, exist_ok=True)
            actions.append(PageActions.screenshot)
        self._set_tools([self._tool(action) for action in actions])

    def _tool(self, action: Callable[..., Awaitable[str]]) -> Tool:
        signature = Signature(action, is_method=True)

        async def run(arguments: dict[str, object], conversation_id: str) -> str:
            valid = signature.validate(arguments)

            async def on_page(page: Page) -> str:
                return await action(PageActions(page, self.allowed_domains, self._screenshot_path), **valid)

            return await self.browser.act(conversation_id, on_page)

        return Tool(action.__name__, signature.description, signature.schema, run, release=self.browser.release)

    def _screenshot_path(self) -> Path:
        assert self.screenshot_folder is not None
        return self.screenshot_folder / f"screenshot-{next(self._screenshot_numbers):06d}.png"

    @property
    def num_pages(self) -> int:
        """Number of conversations that have a page or wait for one."""
        return len(self.browser.pages)

    def close(self) -> None:
        """Close the browser. May be called twice."""
        self.browser.close()
        super().close()

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("a BrowserTransform cannot be pickled: it is bound to its browser; make one in each process.")

"""`MiniWoBEnv`: the web tasks of MiniWoB++ (Liu et al. 2018, arXiv 1802.08802) in a browser."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, Unpack

from llmrl._utils.arguments import check_least, near_or_all
from llmrl._utils.numbers import finite_number
from llmrl._utils.types import Row
from llmrl.envs.hubs.virtual_env import python_with
from llmrl.envs.sampler import DrawOptions
from llmrl.envs.tasks.task import Split, first_seed
from llmrl.envs.tool_env import ToolEnv
from llmrl.tools import StopSignal
from llmrl.tools.browser_page import PageActions
from llmrl.tools.browser_pages import BrowserPages, PageLost

if TYPE_CHECKING:
    from playwright.async_api import Page

Result = TypeVar("Result")

_PACKAGE = "miniwob>=1.1,<1.2"
_HOST = "miniwob.test"
_MAX_HTML_CHARS = 6000
_SYSTEM_PROMPT = (
    "Do the task on the web page with your tools. Selectors are CSS selectors of the page's HTML, or text=WORDS. The "
    "task ends when the page judges it."
)
# A page's reward decreases with time, and an episode ends after 10 s. The time of an answer depends on the engine, not
# on the policy, so the limit is raised and the reward without the time discount is read.
_BEGIN = """([seed, mode]) => {
  Math.seedrandom(seed);
  core.setDataMode(mode);
  core.EPISODE_MAX_TIME = 2 ** 31 - 1;
  core.startEpisodeReal();
}"""
# The instruction is removed from the page, where the selector text=OK would match the words of "Click on OK.".
_READ = """() => {
  const said = core.getUtterance();
  const query = document.getElementById('query');
  query.style.height = `${query.clientHeight}px`;
  query.textContent = '';
  return typeof said === 'string' ? said : said.utterance;
}"""
_OUTCOME = "() => ({done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL})"
# Returns the HTML of what a person sees: visible elements with their attributes, and the values of fields.
_HTML = """most => {
  const parts = [];
  let size = 0;
  const hidden = ['reward-display', 'sync-task-cover', 'click-canvas'];
  const escaped = text => text.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/"/g, '&quot;');
  const write = text => { if (size <= most) { parts.push(text); size += text.length; } };
  const walk = node => {
    if (size > most) return;
    if (node.nodeType === Node.TEXT_NODE) return write(escaped(node.data.slice(0, most).replace(/\\s+/g, ' ')));
    if (node.nodeType !== Node.ELEMENT_NODE || ['SCRIPT', 'STYLE'].includes(node.tagName)) return;
    if (hidden.includes(node.id)) return;
    const box = node.getBoundingClientRect();
    const isOption = node.tagName === 'OPTION';
    if (!isOption && !box.width && !box.height && !node.children.length) return;
    if (!isOption && getComputedStyle(node).display === 'none') return;
    const tag = node.tagName.toLowerCase();
    write('<' + tag);
    for (const {name, value} of node.attributes)
      if (!name.startsWith('on') && !name.startsWith('data-wob') && name !== 'value')
        write(` ${name}="${escaped(value.slice(0, 200))}"`);
    if (['checkbox', 'radio'].includes(node.type)) { if (node.checked) write(' checked'); }
    else if (isOption) { if (node.selected) write(' selected'); }
    else if (typeof node.value === 'string' && node.value) write(` value="${escaped(node.value.slice(0, 1000))}"`);
    write('>');
    for (const child of node.childNodes) walk(child);
    if (!['input', 'br', 'img', 'hr'].includes(tag)) write(`</${tag}>`);
  };
  for (const child of document.body.childNodes) walk(child);
  return parts.join('').replace(/\\s+/g, ' ').slice(0, most);
}"""


class MiniWoBEnv(ToolEnv):
    """Tasks of MiniWoB++: a small web page with an instruction, which judges the actions on it.

    The model sees the instruction and the HTML of the visible elements, and has the tools `click` and `type_text`. The
    conversation ends when the page has judged the task, or with an answer that calls no tool. The reward is the page's
    reward without its time discount, at least 0: 1 for a completed task, or a fraction in tasks with partial credit. If
    the page is lost because the browser died or a script never ends, the rollout is not scored.

    Pages run in Chromium, one for each conversation, and have no access to a network.

    Args:
        tasks: name of a task, such as `click-button`, or names of several tasks, which alternate.
        pages: folder with the pages, `miniwob/TASK.html`, and the files that they load. By default that of the package
            `miniwob`, which is installed into its own virtual environment at the first use.
        num_problems: number of problems per epoch and task. A problem is a seed of the page, as in the package.
        split: `train` or `test`, which use different seeds. Tasks with few variants have the same problems in both.
        timeout: time limit of an action, in seconds.
        max_pages: maximum number of open pages; further conversations wait for one.
        **draws: see `DatasetChatEnv`.

    Raises:
        ValueError: if a task is unknown, `pages` has no task, or the package cannot be installed (`InstallError`).
        FileNotFoundError: if no Chromium is installed.

    Example:
        >>> MiniWoBEnv("click-button", pages="nowhere")
        Traceback (most recent call last):
        ValueError: pages must be a folder with miniwob/TASK.html, got 'nowhere'.
    """

    def __init__(
        self,
        tasks: str | Sequence[str],
        *,
        pages: str | Path | None = None,
        num_problems: int = 1000,
        split: Split = "train",
        timeout: float = 30.0,
        max_pages: int = 16,
        **draws: Unpack[DrawOptions],
    ) -> None:
        check_least(1, num_problems=num_problems)
        folder = package_pages() if pages is None else Path(pages)
        known = sorted(path.stem for path in folder.glob("miniwob/*.html"))
        if not known:
            raise ValueError(f"pages must be a folder with miniwob/TASK.html, got {str(folder)!r}.")
        self.tasks = (tasks,) if isinstance(tasks, str) else tuple(tasks)
        for task in self.tasks:
            if task not in known:
                hint = near_or_all(task, known, f"it has {', '.join(known)}.")
                raise ValueError(f"MiniWoB has no task {task!r}; {hint}")
        first = first_seed(split)
        rows: list[Row] = [
            {"prompt": [], "task": task, "problem": first + number, "mode": split}
            for number in range(num_problems)
            for task in self.tasks
        ]
        self._browser = BrowserPages([_HOST], timeout=timeout, max_pages=max_pages, folders={_HOST: folder})
        draws.setdefault("name", split)
        super().__init__(
            functools.partial(WebTask, self._browser), rows, system_prompt=_SYSTEM_PROMPT, timeout=timeout, **draws
        )

    def close(self, **kwargs: object) -> None:
        """Close the browser."""
        super().close(**kwargs)
        self._browser.close()


class WebTask:
    """A task's page, and the model's actions on it."""

    def __init__(self, browser: BrowserPages) -> None:
        self._browser = browser
        self._id = uuid.uuid4().hex
        self._page: Page | None = None
        self._outcome: Mapping[str, object] = {"done": False, "reward": 0.0}
        self._failure = ""

    async def reset(self, task: str, problem: int, mode: str) -> str:
        """Open the page; return its instruction and its HTML."""

        async def begin(page: Page) -> str:
            self._page = page
            await page.goto(f"http://{_HOST}/miniwob/{task}.html", wait_until="load")
            await page.evaluate(_BEGIN, [problem, mode])
            await page.wait_for_function("WOB_TASK_READY")
            instruction = str(await page.evaluate(_READ))[:_MAX_HTML_CHARS]
            return f"{instruction}\n\n{(await page.evaluate(_HTML, _MAX_HTML_CHARS)).strip()}"

        return await self._browser.act(self._id, begin)

    async def click(self, selector: str) -> str:
        """Click on something in the page; the answer is the page that follows.

        Args:
            selector: a CSS selector, or text=WORDS for what shows these words.
        """
        return await self._act(lambda actions: actions.click(selector))

    async def type_text(self, selector: str, text: str, submit: bool = False) -> str:
        """Fill in a field of the page, or choose from a list; the answer is the page that follows.

        Args:
            selector: a CSS selector of the field.
            text: what to write into it, or which option of a <select> to choose.
            submit: whether to press Enter afterwards.
        """
        return await self._act(lambda actions: actions.type_text(selector, text, submit))

    async def get_reward(self) -> float:
        """Return the page's reward; raise PageLost if the page is lost."""
        if not self._failure and not self._outcome["done"]:
            self._outcome = await self._read(lambda page: page.evaluate(_OUTCOME))
        if self._failure:
            raise PageLost(self._failure)
        return max(0.0, finite_number(self._outcome["reward"], "the page's reward"))

    def close(self) -> None:
        """Close the page."""
        self._browser.release(self._id)

    async def _act(self, action: Callable[[PageActions], Awaitable[object]]) -> str:
        async def on_page(page: Page) -> str:
            await action(PageActions(page, [_HOST], Path))
            self._outcome = await page.evaluate(_OUTCOME)
            return await page.evaluate(_HTML, _MAX_HTML_CHARS)

        try:
            html = await self._read(on_page)
        except PageLost as error:
            raise StopSignal(f"The page of the task is lost: {error}") from error
        if self._outcome["done"]:
            raise StopSignal("The task has ended.")
        return html

    async def _read(self, action: Callable[[Page], Awaitable[Result]]) -> Result:
        """Run an action on the page that `reset` opened; if that page is lost, store the reason and raise PageLost."""

        async def on_the_same(page: Page) -> Result:
            if page is not self._page:  # `act` replaced a closed page by a new one
                raise PageLost("the page was closed before this action.")
            return await action(page)

        try:
            return await self._browser.act(self._id, on_the_same)
        except PageLost as error:
            self._failure = str(error)
            raise


@functools.cache
def package_pages() -> Path:
    """Return the folder of the pages in the package `miniwob`, which is installed if needed."""
    python = python_with([_PACKAGE])
    return next(python.parent.parent.glob("lib/python*/site-packages/miniwob/html"))

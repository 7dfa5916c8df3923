"""A real browser on pages of loopback."""

from __future__ import annotations

import threading

import pytest
from tool_conversations import Chat
from waiting import patient

from llmrl.tools.browser_pages import find_chromium
from llmrl.transforms import BrowserTransform

pytest.importorskip("playwright")
pytestmark = [
    pytest.mark.usefixtures("own_programs"),
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed on this machine"),
]


def test_the_model_navigates_clicks_types_and_extracts(chat, sites, browser):
    home = f"http://{sites[0].address}/"
    assert {"navigate", "click", "type_text", "extract", "screenshot"} == set(chat.tool_names)
    assert chat.call("navigate", url=home).startswith(f"Home\n{home}\n\nWelcome")
    assert "[More](" in chat.call("extract", links=True)
    assert chat.call("extract", selector="h1") == "Welcome"
    assert "Hello Ada" in chat.call("type_text", selector="input", text="Ada", submit=True)
    chat.call("navigate", url=home)
    assert "More of it" in chat.call("click", selector="#more")
    name = chat.call("screenshot").split()[1].rstrip(",")
    assert (browser.screenshot_folder / name).read_bytes().startswith(b"\x89PNG")


def test_failures_are_reported_and_the_page_goes_on(sites):
    def attempt(limit):
        transform = BrowserTransform([sites[0].address], timeout=limit)
        try:
            chat = Chat(transform)
            chat.call("navigate", url=f"http://{sites[0].address}/")
            assert chat.call("click", selector="#absent").startswith("Error: ")
            assert "argument 'selector' is missing" in chat.call("click")
            return chat.call("extract", selector="h1") == "Welcome" or None
        finally:
            transform.close()
            transform.close()

    assert patient(attempt, (5.0, 60.0))


def test_a_conversation_waits_for_a_page_until_another_ends(sites):
    url = f"http://{sites[0].address}/more"
    transform = BrowserTransform([sites[0].address], max_pages=1, timeout=60.0)
    try:
        first, second = Chat(transform), Chat(transform)
        first.call("navigate", url=url)
        first_session = first.data["tool_state", "session"]
        threading.Timer(0.5, first_session.release).start()
        assert "More of it" in second.call("navigate", url=url)
    finally:
        transform.close()


def test_a_browser_that_crashed_is_started_again(sites):
    url = f"http://{sites[0].address}/more"
    transform = BrowserTransform([sites[0].address], timeout=60.0)
    try:
        chat = Chat(transform)
        chat.call("navigate", url=url)
        [page] = [task.result() for task in transform.browser.pages.values()]
        transform.browser.loop.run(page.context.browser.close())
        assert "More of it" in chat.call("navigate", url=url)
    finally:
        transform.close()

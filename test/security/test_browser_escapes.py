"""Pages that want out of the browser, on loopback: other hosts, schemes, datagrams, windows, time without end."""

from __future__ import annotations

import socket

import pytest
from tool_conversations import Chat
from waiting import patient, wait_until

from llmrl.tools.browser_pages import find_chromium
from llmrl.transforms import BrowserTransform

pytest.importorskip("playwright")
pytestmark = [
    pytest.mark.usefixtures("own_programs"),
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed on this machine"),
]


def test_another_domain_is_refused_however_it_is_reached(chat, sites):
    allowed, other = sites
    assert "is not allowed" in chat.call("navigate", url=f"http://{other.address}/")
    assert "is not allowed" in chat.call("navigate", url=f"http://localhost:{allowed.address.partition(':')[2]}/")
    assert "127.0.0.1 is not allowed" in chat.call("navigate", url=f"http://{allowed.address}/redirect")
    chat.call("navigate", url=f"http://{allowed.address}/")
    assert "127.0.0.1 is not allowed" in chat.call("click", selector="#off")
    assert "/redirect" in allowed.requested and other.requested == []


def test_what_a_page_loads_from_another_domain_is_refused(chat, sites, browser):
    allowed, other = sites
    before = browser.browser.gateway.num_refused
    answer = chat.call("navigate", url=f"http://{allowed.address}/loading")
    assert "Loads" in answer and "got" not in answer.replace("got Refused", "")
    assert browser.browser.gateway.num_refused >= before + 3
    assert other.requested == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "chrome://version", "javascript:alert(1)", "nonsense"])
def test_only_web_addresses_are_opened(chat, url):
    assert "begin with http://" in chat.call("navigate", url=url)


def test_conversations_share_no_cookies_and_their_pages_end_with_them(sites):
    url = f"http://{sites[0].address}/cookie"
    browser = BrowserTransform([sites[0].address])  # its own: no other test's pages end meanwhile
    try:
        first, second = Chat(browser), Chat(browser)
        first.call("navigate", url=url)
        assert "seen=1" in first.call("navigate", url=url)
        assert "cookie: none" in second.call("navigate", url=url)
        assert browser.num_pages == 2
        for chat in (first, second):
            chat.data["tool_state", "session"].release()
        wait_until(lambda: browser.num_pages == 0)
    finally:
        browser.close()


def test_a_page_that_never_ends_costs_its_call_and_not_the_next(sites):
    def attempt(limit):
        transform = BrowserTransform([sites[0].address], timeout=limit)
        try:
            chat = Chat(transform)
            assert chat.call("navigate", url=f"http://{sites[0].address}/loop").startswith("Error: ")
            return "More of it" in chat.call("navigate", url=f"http://{sites[0].address}/more") or None
        finally:
            transform.close()

    assert patient(attempt, (5.0, 60.0))


def test_pop_ups_open_in_the_one_page(chat, sites, browser):
    chat.call("navigate", url=f"http://{sites[0].address}/pop-ups")
    [page] = [task.result() for task in browser.browser.pages.values() if task.done()][-1:]
    assert "More of it" in chat.call("click", selector="#new")
    chat.call("navigate", url=f"http://{sites[0].address}/pop-ups")
    chat.call("click", selector="#many")
    assert len(page.context.pages) == 1


def test_no_datagram_leaves_by_webrtc(chat, sites):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.settimeout(3)
        sites[0].datagram_port = listening.getsockname()[1]
        assert "gathering" in chat.call("navigate", url=f"http://{sites[0].address}/webrtc")
        with pytest.raises(TimeoutError):
            listening.recv(100)

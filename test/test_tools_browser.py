"""A real browser on pages of loopback, and what its gateway lets through."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tool_conversations import Chat
from waiting import wait_until

from llmrl.tools.browser import find_chromium
from llmrl.transforms import BrowserTransform

pytest.importorskip("playwright")
pytestmark = [
    pytest.mark.usefixtures("own_programs"),
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed on this machine"),
]

HOME = """<title>Home</title><body><h1>Welcome</h1><a id=more href='/more'>More</a> <a id=off href='{other}/'>Off</a>
<form action='/greet'><input name=who></form></body>"""
LOADING = """<title>Loading</title><body>Loads <img src='{other}/pixel.png'><script src='{other}/script.js'></script>
<script>fetch('{other}/fetched').then(r => r.text()).then(t => document.body.append(' got ' + t))
.catch(() => document.body.append(' fetch failed'));
new WebSocket('{other}/socket'.replace('http', 'ws'));</script>
<iframe src='{other}/frame'></iframe></body>"""


POP_UPS = """<title>Pop-ups</title><body><a id=new href='/more' target=_blank>New</a>
<button id=many onclick="for (let i = 0; i < 20; i++) window.open('/more')">Many</button></body>"""
WEBRTC = """<title>WebRTC</title><body>gathering<script>
const peer = new RTCPeerConnection({{iceServers: [{{urls: 'stun:127.0.0.1:{port}'}}]}});
peer.createDataChannel('x'); peer.createOffer().then(offer => peer.setLocalDescription(offer));
</script></body>"""


class Site:
    """A web server that remembers what it was asked for."""

    def __init__(self):
        self.requested = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                site.requested.append(self.path)
                status, body, headers = site.answer(self.path, self.headers)
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("content-type", "text/html")
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        self.other = ""
        self.datagram_port = 0
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path, headers):
        if path == "/redirect":
            return 302, "", {"location": f"{self.other}/landing"}
        if path == "/cookie":
            return 200, f"<body>cookie: {headers.get('cookie', 'none')}</body>", {"set-cookie": "seen=1"}
        if path.startswith("/greet"):
            return 200, f"<title>Greeting</title><body>Hello {path.partition('=')[2]}</body>", {}
        if path == "/loop":
            return 200, "<title>Loop</title><body>loops<script>while (true) {}</script></body>", {}
        if path == "/pop-ups":
            return 200, POP_UPS, {}
        if path == "/webrtc":
            return 200, WEBRTC.format(port=self.datagram_port), {}
        page = {"/": HOME, "/loading": LOADING, "/more": "<title>More</title><body>More of it</body>"}.get(path)
        return (200, page.format(other=self.other), {}) if page else (404, "<body>none</body>", {})


@pytest.fixture(scope="module")
def sites():
    allowed, other = Site(), Site()
    allowed.other = f"http://{other.address}"
    yield allowed, other
    allowed.server.shutdown()
    other.server.shutdown()


@pytest.fixture(scope="module")
def browser(sites, tmp_path_factory):
    transform = BrowserTransform([sites[0].address], timeout=60.0, screenshot_folder=tmp_path_factory.mktemp("shots"))
    yield transform
    transform.close()


@pytest.fixture
def chat(browser, sites):
    for site in sites:
        site.requested.clear()
    chat = Chat(browser)
    yield chat
    chat.data["tool_state", "session"].release()


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
    before = browser._gateway.num_refused
    answer = chat.call("navigate", url=f"http://{allowed.address}/loading")
    assert "Loads" in answer and "got" not in answer.replace("got Refused", "")
    assert browser._gateway.num_refused >= before + 3
    assert other.requested == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "chrome://version", "javascript:alert(1)", "nonsense"])
def test_only_web_addresses_are_opened(chat, url):
    assert "begins with http://" in chat.call("navigate", url=url)


def test_failures_are_told_and_the_page_goes_on(sites):
    transform = BrowserTransform([sites[0].address], timeout=15.0)
    try:
        chat = Chat(transform)
        chat.call("navigate", url=f"http://{sites[0].address}/")
        assert chat.call("click", selector="#absent").startswith("Error: ")
        assert chat.call("extract", selector="h1") == "Welcome"
        assert "argument 'selector' is missing" in chat.call("click")
    finally:
        transform.close()
        transform.close()


def test_conversations_share_no_cookies_and_their_pages_end_with_them(sites):
    url = f"http://{sites[0].address}/cookie"
    browser = BrowserTransform([sites[0].address])  # one of its own: nobody else's pages end meanwhile
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
        browser = transform._opening.result()
        transform.loop.run(browser.close())
        assert "More of it" in chat.call("navigate", url=url)
    finally:
        transform.close()


def test_a_page_that_never_ends_costs_its_call_and_not_the_next(sites):
    transform = BrowserTransform([sites[0].address], timeout=10.0)
    try:
        chat = Chat(transform)
        assert chat.call("navigate", url=f"http://{sites[0].address}/loop").startswith("Error: ")
        assert "More of it" in chat.call("navigate", url=f"http://{sites[0].address}/more")
    finally:
        transform.close()


def test_pop_ups_open_in_the_one_page(chat, sites, browser):
    chat.call("navigate", url=f"http://{sites[0].address}/pop-ups")
    [page] = [task.result() for task in browser._pages.values() if task.done()][-1:]
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

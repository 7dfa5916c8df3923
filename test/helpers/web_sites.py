"""Web servers on loopback for tests of the browser, and pages that do harm."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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

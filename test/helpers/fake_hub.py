"""A Hugging Face hub that takes commits, as far as `huggingface_hub` asks for one."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import constants


class Hub(ThreadingHTTPServer):
    """Attributes: `created` (what was asked for), `commits` (message and files of each), `refuses` (a path's part)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.created, self.commits, self.refuses = [], [], "nothing"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.server.refuses in self.path:
            return self._answer({"error": "no"}, status=403)
        return self._answer({"id": "me/mine", "sha": "0" * 40, "siblings": [], "tags": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refuses in self.path:
            return self._answer({"error": "no"}, status=403)
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self._answer({"url": f"{self.server.url}/me/mine", "id": "me/mine", "name": "me/mine"})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            plain = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return self._answer({"files": plain})
        if "/commit/" in self.path:
            head, *parts = [json.loads(line)["value"] for line in body.splitlines()]
            files = {part["path"]: base64.b64decode(part["content"]) for part in parts}
            self.server.commits.append((head["summary"], files))
            url = f"{self.server.url}/me/mine/commit/{'1' * 40}"
            return self._answer({"success": True, "commitUrl": url, "commitOid": "1" * 40})
        return self._answer({"warnings": [], "errors": []})

    def _answer(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def running_hub(monkeypatch):
    """A hub that is the one that `huggingface_hub` knows."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()

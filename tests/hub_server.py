"""A hub on loopback: as much of the Hugging Face hub's interface as `huggingface_hub` needs for a download."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

COMMIT = "0123456789abcdef0123456789abcdef01234567"

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(tree|revision)/([^/]+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class HubServer:
    """Serves `repositories`: id -> path -> content, all on the branch `main`; `gated` ids are refused.

    Where content is None, the connection is dropped.

    `fetched` are the paths of the files whose content was sent, in order.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes | None]] = {}
        self.gated: set[str] = set()
        self.broken = False
        self.fetched: list[str] = []
        self.num_requests = 0
        self.url = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[HubServer]:
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        self.num_requests += 1
        path = urllib.parse.unquote(request.path.partition("?")[0])
        if self.broken:
            return _send(request, 500, b"out of order")
        match = _API.fullmatch(path) or _FILE.fullmatch(path)
        id = match[1] if match else ""
        files = self.repositories.get(id)
        revision = (match[3] or "main" if match.re is _API else match[2]) if match else ""
        if id in self.gated:
            return _send(request, 403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        if files is None:
            return _send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return _send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        if match.re is _FILE:
            content = files[match[3]]
            if content is None:
                request.close_connection = True
                return None
            if request.command == "GET":
                self.fetched.append(match[3])
            etag = hashlib.sha256(content).hexdigest()
            return _send(request, 200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        if match[2] == "tree":
            tree = [{"type": "file", "path": path, "size": len(files[path] or b""), "oid": "0" * 40} for path in files]
            return _send(request, 200, json.dumps(tree).encode())
        siblings = [{"rfilename": path} for path in files]
        return _send(request, 200, json.dumps({"id": id, "sha": COMMIT, "siblings": siblings}).encode())


def _send(
    request: http.server.BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str] | None = None
) -> None:
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(content)

"""Serves the report on 127.0.0.1 during a run. The server answers only requests for the report, and
only from this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rloo.addons.report.html.document import data_of, document

HOST = "127.0.0.1"
# The page of an active run loads its data every few seconds.
FOLLOWED_BYTES = 4_000_000


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, folders: Sequence[Path], *arguments: object) -> None:
        self._folders = folders
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer with the page, or with the page's present data."""
        port = self.connection.getsockname()[1]
        # Refuses DNS rebinding: a foreign host name that resolves to this address.
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._answer(403, "text/plain", "this report is for 127.0.0.1 alone\n")
        elif self.path not in ("/", "/data.json"):
            self._answer(404, "text/plain", "there is only the report: /\n")
        else:
            self._report()

    def _report(self) -> None:
        try:
            data = data_of(self._folders, FOLLOWED_BYTES)
        except ValueError as error:  # the run was moved away meanwhile
            self._answer(503, "text/plain", f"{error}\n")
            return
        if self.path == "/":
            self._answer(200, "text/html; charset=utf-8", document(data, follows=True))
        else:
            self._answer(200, "application/json", json.dumps(data))

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the page sends a request every few seconds."""


def server_of(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """An HTTP server of the report on 127.0.0.1; port 0 takes any free port. Raises OSError if the
    port is in use."""
    server = ThreadingHTTPServer((HOST, port), partial(_Handler, folders))
    server.daemon_threads = True
    return server

"""A receiver of notices: a real HTTP server of this machine that answers as a test wants it to."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECRET = "/services/T0PSECRETPATH/b0xOfSecrets"


class Webhook:
    """`answers` are taken one by one, each a status code with headers, and then 200 for ever. While `holds` is set, a
    request is taken and not answered."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}{SECRET}"
        self.payloads: list[Any] = []
        self.paths: list[str] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.released = threading.Event()
        self.released.set()

    @property
    def texts(self) -> list[str]:
        return [payload["text"] for payload in self.payloads]

    def hold(self) -> None:
        """Answer no more until `release`."""
        self.released.clear()

    def release(self) -> None:
        self.released.set()


@contextmanager
def webhook() -> Iterator[Webhook]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.paths.append(self.path)
            receiver.payloads.append(json.loads(body))
            receiver.released.wait(120)
            code, headers = receiver.answers.pop(0) if receiver.answers else (200, {})
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            receiver.paths.append(f"GET {self.path}")
            self.send_error(405)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that was killed closes its end: nothing to report."""

    with Server(("127.0.0.1", 0), Handler) as server:
        receiver = Webhook(server.server_port)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.release()
            server.shutdown()

"""A chat server on loopback: it takes messages, refuses them, or does not answer at all."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hook(ThreadingHTTPServer):
    """Answers with ``statuses`` one after the other, then with ``status``; hangs if ``hangs``.

    ``bodies`` is what it was sent, and ``paths`` where, whatever it said.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, status: int = 200, statuses: tuple[int, ...] = (), hangs: bool = False):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status, self.hangs = status, hangs
        self._first = list(statuses)
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.end = threading.Event()

    @property
    def address(self) -> str:
        """With a part that must be seen nowhere."""
        return f"http://127.0.0.1:{self.server_port}/secret-path"

    def next_status(self) -> int:
        """What it says now."""
        return self._first.pop(0) if self._first else self.status

    def __enter__(self) -> Hook:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        self.shutdown()
        self.server_close()


class _Answer(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.hangs:
            self.server.end.wait(60)
            return
        self.send_response(self.server.next_status())
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""

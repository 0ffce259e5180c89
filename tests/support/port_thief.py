"""A process of another user that has taken a port before our server came to it.

It answers as a judge's server and as vLLM would, lets everybody in, and keeps every key that it is
sent.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from infra.host.processes import free_port
from tests.support.command import wait_until
from tests.support.users import STRANGER, run_as

_HOST = "127.0.0.1"


class Thief:
    """``port`` is where it listens; ``keys`` what it was sent, once the block has ended."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.keys: list[str] = []


@contextmanager
def thief() -> Iterator[Thief]:
    """Another user listens at a port within the block."""
    made = Thief(free_port(_HOST))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_as, STRANGER, take, made.port, limit_s=120.0)
        try:
            wait_until(lambda: running.done() or _get(made.port, "/health"), "the thief")
            yield made
        finally:
            _get(made.port, "/end")
            made.keys = running.result()


def take(port: int) -> list[str]:
    """Listen until the end is requested; return all keys that were sent."""
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()
            if self.path == "/end":
                threading.Thread(target=server.shutdown).start()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer()

        def _answer(self) -> None:
            keys.extend(self.headers.get_all("Authorization") or [])
            choice = {"index": 0, "message": {"content": '{"score": 2}'}, "finish_reason": "stop"}
            body = json.dumps({"data": [], "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer((_HOST, port), Handler)
    server.serve_forever(0.05)
    return keys


def _get(port: int, route: str) -> bool:
    connection = HTTPConnection(_HOST, port, timeout=5)
    try:
        connection.request("GET", route)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()

"""A Hub on loopback that can be written to: the requests of the real client, over real git.

    with LoopbackHub(tmp_path / "hub") as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}

``log`` lists the requests with their bytes; ``faults`` says which of them fail, and how. Large
files (``*.safetensors``) take the LFS way and are refused where their SHA-256 is another.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from tests.support.git_hub_api import Answer, HubApi
from tests.support.git_store import GitStore

#: Tokens, as accounts of a Hub have them.
OWNER, ORG = "me", "lab"
VALID, READ_ONLY, EXPIRED, STRANGER = (
    "hf_" + name * 6 for name in ("Valid", "Reads", "Gone", "Else")
)


@dataclass
class Request:
    """One request as it came; ``status`` is 0 until (and unless) it was answered."""

    index: int
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes = field(repr=False)
    status: int = 0

    @property
    def bytes(self) -> int:
        """Of the body."""
        return len(self.body)

    @property
    def writes(self) -> bool:
        """Whether it may change something."""
        return self.method not in ("GET", "HEAD")


@dataclass
class Fault:
    """A failure of ``kind`` at request number ``at``, or at those that ``where`` selects.

    ``drop-before`` and ``drop-after`` cut the connection without an answer, before or after the
    effect, ``cut`` after so many bytes of a GET's answer; ``answer`` refuses with ``status``,
    ``headers`` and ``says``; ``corrupt`` flips a bit of the body; ``call`` only calls ``does``
    before the request has its effect.
    """

    kind: Literal["drop-before", "drop-after", "cut", "answer", "corrupt", "call"]
    at: int | None = None
    where: Callable[[Request], bool] = lambda _: True
    times: float = 1
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    says: str = "try again"
    after: int = 0
    does: Callable[[Request], object] = lambda _: None

    def meets(self, request: Request) -> bool:
        """Whether it is this request's turn."""
        if self.times < 1 or (self.at is not None and request.index != self.at):
            return False
        return self.where(request)


class LoopbackHub(HubApi):
    """A Hub that serves the folder ``root`` until the end of the block.

    Attributes
    ----------
    url, token
        For ``HF_ENDPOINT`` and ``HF_TOKEN``.
    log
        The requests so far.
    faults
        What is to go wrong; each is used up after its ``times``.

    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.token = self.account(VALID, OWNER, orgs={ORG: "write"})
        self.account(READ_ONLY, OWNER, role="read")
        self.account(EXPIRED, OWNER, expired=True)
        self.account(STRANGER, "else")
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add_folder(self, repo_id: str, folder: Path, *, private: bool = False) -> str:
        """A repository with the files of a folder; the commit's id."""
        self.create(repo_id, private=private)
        found = (p for p in sorted(folder.rglob("*")) if p.is_file())
        return self.add(repo_id, {p.relative_to(folder).as_posix(): p.read_bytes() for p in found})

    def copy(self, repo_id: str, other: str) -> None:
        """Another repository that has come as far as this one."""
        shutil.copytree(self.git(repo_id).folder, self.root / f"{other}.git")
        self.create(other, private=self.repos[repo_id].private)

    def git(self, repo_id: str) -> GitStore:
        """The repository behind an id."""
        return self.repos[repo_id].git

    def contents(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Path -> bytes of a revision."""
        git = self.git(repo_id)
        commit = git.resolve(revision)
        assert commit is not None, f"{repo_id} has no {revision}"
        return {path: git.content(blob) for path, blob in git.files(commit).items()}

    def refs(self, repo_id: str) -> dict[str, str]:
        """``heads/main`` and the like -> commit."""
        git = self.git(repo_id)
        return {f"{k}/{n}": c for k in ("heads", "tags") for n, c in git.refs(k).items()}

    def large_bytes(self, since: int = 0) -> int:
        """Bytes of weights that came with the requests from number ``since`` on."""
        return sum(r.bytes for r in self.log[since:] if r.method == "PUT")

    def note(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[Request, Fault | None]:
        """Log a request, and find out what goes wrong with it."""
        url = urlsplit(handler.path)
        headers = {k.lower(): v for k, v in handler.headers.items()}
        with self._lock:
            request = Request(
                len(self.log), handler.command, unquote(url.path), url.query, headers, body
            )
            self.log.append(request)
            fault = next((f for f in self.faults if f.meets(request)), None)
            if fault:
                fault.times -= 1
        return request, fault

    def __enter__(self) -> LoopbackHub:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is what these tests are about."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _handler(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: Any) -> None:
            """Quiet."""

        def handle_one(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(self._chunks())
            if len(body) < length:  # the client died on the way
                self.close_connection = True
                return None
            request, fault = hub.note(self, body)
            kind = fault.kind if fault else ""
            if fault and kind == "call":
                fault.does(request)
            if kind == "drop-before":
                return self._drop()
            if kind == "corrupt" and body:
                request.body = bytes([body[0] ^ 1]) + body[1:]
            if fault and kind == "answer":
                answer = Answer.error(fault.status, fault.says, headers=fault.headers)
            else:
                answer = hub.answer(request, f"http://{self.headers['Host']}")
            if kind == "drop-after":
                return self._drop()
            request.status = answer.status
            if fault and kind == "cut" and self.command == "GET":
                answer.headers.setdefault("Content-Length", str(len(answer.body)))
                answer.body = answer.body[: fault.after]
                self._send(answer)
                return self._drop()
            return self._send(answer)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_one

        def _chunks(self) -> Iterable[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        def _drop(self) -> None:
            self.close_connection = True
            self.connection.shutdown(2)

        def _send(self, answer: Answer) -> None:
            if "Date" in answer.headers:  # a clock of the test's own
                self.send_response_only(answer.status)
            else:
                self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if "Content-Length" not in answer.headers:
                self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

    return Handler

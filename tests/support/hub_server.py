"""A Hub on loopback to read from: folders on disk, served the way the Hub client asks for them.

    with HubServer({"owner/name": folder}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}

Every repository has one commit and the branch ``main``. ``requests`` lists what was asked for;
``fail_after`` cuts the connection once so many bytes of a file were sent.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(.*))?$")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


class HubServer:
    """Serves ``repositories`` (id -> folder) until the end of the block."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str]] = []
        self.fail_after: int | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def commit(self, repo_id: str) -> str:
        return hashlib.sha1(repo_id.encode()).hexdigest()

    def files(self, repo_id: str) -> dict[str, Path]:
        folder = self.repositories[repo_id]
        found = (p for p in sorted(folder.rglob("*")) if p.is_file())
        return {p.relative_to(folder).as_posix(): p for p in found}

    def downloads(self) -> list[str]:
        """Paths of the files whose content was sent."""
        return [path for method, path in self.requests if method == "GET" and "/resolve/" in path]

    def __enter__(self) -> HubServer:
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


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Quiet."""

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hub.requests.append(("POST", self.path))
            match = _API.match(urlsplit(self.path).path)
            if match and (match.group(3) or "").startswith("paths-info/"):
                wanted = json.loads(body)["paths"] if body.startswith(b"{") else []
                entries = {e["path"]: e for e in self._tree(match.group(2))}
                self._json([entries[p] for p in wanted if p in entries])
            else:
                self._missing("EntryNotFound")

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            if match := _API.match(path):
                self._api(match.group(2), match.group(3) or "")
            elif match := _FILE.match(path):
                self._file(match.group(2), match.group(3), match.group(4))
            else:
                self._missing("EntryNotFound")

        def _api(self, repo_id: str, rest: str) -> None:
            if repo_id not in hub.repositories:
                return self._missing("RepoNotFound")
            what, _, more = rest.partition("/")
            revision, _, folder = more.partition("/")
            if revision and revision not in ("main", hub.commit(repo_id)):
                return self._missing("RevisionNotFound")
            if what == "tree":
                entries = [e for e in self._tree(repo_id) if e["path"].startswith(folder)]
                return self._json(entries)
            siblings = [{"rfilename": name} for name in hub.files(repo_id)]
            sha = hub.commit(repo_id)
            return self._json({"id": repo_id, "sha": sha, "siblings": siblings, "private": False})

        def _tree(self, repo_id: str) -> list[dict[str, Any]]:
            return [
                {"type": "file", "path": n, "size": p.stat().st_size, "oid": _etag(p)}
                for n, p in hub.files(repo_id).items()
            ]

        def _file(self, repo_id: str, revision: str, name: str) -> None:
            if repo_id not in hub.repositories:
                return self._missing("RepoNotFound")
            if revision not in ("main", hub.commit(repo_id)):
                return self._missing("RevisionNotFound")
            path = hub.files(repo_id).get(name)
            if path is None:
                return self._missing("EntryNotFound")
            data = path.read_bytes()
            first = int(re.sub(r"\D", "", self.headers.get("Range", "bytes=0-").split("-")[0]))
            self.send_response(206 if first else 200)
            self.send_header("ETag", f'"{_etag(path)}"')
            self.send_header("X-Repo-Commit", hub.commit(repo_id))
            self.send_header("Content-Length", str(len(data) - first))
            self.send_header("Accept-Ranges", "bytes")
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if self.command == "HEAD":
                return None
            if hub.fail_after is not None and len(data) > hub.fail_after:
                self.wfile.write(data[first : first + hub.fail_after])
                self.close_connection = True
                return self.connection.close()
            self.wfile.write(data[first:])
            return None

        def _json(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _missing(self, code: str) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()

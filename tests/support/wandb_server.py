"""A W&B server on loopback, as far as `wandb sync` talks to one: it takes runs and remembers them.

>>> with WandbServer() as server:
...     monkeypatch.setenv("WANDB_BASE_URL", server.url)
>>> server.runs["grpo-0123"].history
"""

from __future__ import annotations

import base64
import gzip
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0" * 40


@dataclass
class TakenRun:
    """What a run was begun with, its files' lines by offset, and how often it was begun."""

    group: str = ""
    notes: str = ""
    job_type: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    lines: dict[str, dict[int, str]] = field(default_factory=dict)
    begun: int = 0

    @property
    def history(self) -> list[dict[str, Any]]:
        """Rows of metrics in the order of their place."""
        lines = self.lines.get("wandb-history.jsonl", {})
        return [json.loads(lines[place]) for place in sorted(lines)]


class WandbServer:
    """Answers until it is closed; a context manager."""

    def __init__(self) -> None:
        self.runs: dict[str, TakenRun] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> WandbServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    # ------------------------------------------------------------ what it is asked

    def graphql(self, asked: Mapping[str, Any], key: str = KEY) -> dict[str, Any]:
        values = asked.get("variables") or {}
        name = asked.get("operationName")
        if "viewer" in str(asked.get("query")) and "username" in str(asked.get("query")):
            return {"viewer": {"username": "me"} if key == KEY else None}
        if name == "UpsertBucket":
            return {"upsertBucket": self._begin(values)}
        if name == "CreateRunFiles":
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []}}
        return {}

    def _begin(self, values: Mapping[str, Any]) -> dict[str, Any]:
        run = self.runs.setdefault(str(values["name"]), TakenRun())
        run.begun += 1
        run.group = str(values.get("groupName") or run.group)
        run.notes = str(values.get("notes") or run.notes)
        run.job_type = str(values.get("jobType") or run.job_type)
        run.config = json.loads(values.get("config") or "{}") or run.config
        count = len(run.lines.get("wandb-history.jsonl", {}))
        project = {"id": "1", "name": values.get("project"), "entity": {"id": "1", "name": "me"}}
        bucket = {
            "id": "1",
            "name": values["name"],
            "displayName": values.get("displayName"),
            "config": "{}",
            "historyLineCount": count,
            "project": project,
        }
        return {"bucket": bucket, "inserted": run.begun == 1}

    def stream(self, run_id: str, sent: Mapping[str, Any]) -> None:
        run = self.runs.setdefault(run_id, TakenRun())
        for name, part in (sent.get("files") or {}).items():
            lines = run.lines.setdefault(name, {})
            for place, line in enumerate(part["content"]):
                lines[int(part["offset"]) + place] = line


def _handler(server: WandbServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/graphql":
                word = (self.headers.get("Authorization") or " ").split()[-1:]
                key = base64.b64decode("".join(word)).decode().partition(":")[2]
                self._answer({"data": server.graphql(json.loads(body), key)})
            elif self.path.endswith("/file_stream"):
                server.stream(self.path.split("/")[-2], json.loads(body))
                self._answer({})
            else:
                self._answer({})

        def _answer(self, value: Mapping[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler

"""A real Prefect server for tests, in a state folder of its own, and its REST API."""

from __future__ import annotations

import base64
import importlib.util
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from infra.prefect_server import ServerInfo, ensure_server, stop_server
from tests.support.require import require

T = TypeVar("T")


@contextmanager
def private_server(folder: Path) -> Iterator[None]:
    """Let everything in this process and below it use a server of our own; end it afterwards."""
    require("prefect", importlib.util.find_spec("prefect"), "prefect is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFINER_STATE_DIR", str(folder))
        patch.delenv("PREFECT_API_URL", raising=False)
        ensure_server(400)
        try:
            yield
        finally:
            stop_server()


class PrefectApi:
    """What tests ask of a server."""

    def __init__(self, info: ServerInfo) -> None:
        self.info = info

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._ask(path, json.dumps(body or {}).encode())

    def get(self, path: str) -> Any:
        return self._ask(path, None)

    def flow_run(self, run: str) -> dict[str, Any] | None:
        """The newest flow run with that run id as a tag."""
        found = self.post(
            "/flow_runs/filter",
            {"flow_runs": {"tags": {"all_": [run]}}, "sort": "EXPECTED_START_TIME_DESC"},
        )
        return found[0] if found else None

    def task_runs(self, flow_run_id: str) -> dict[str, dict[str, Any]]:
        """Task runs of a flow run by name."""
        found = self.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
        return {run["name"]: run for run in found}

    def artifacts(self, flow_run_id: str) -> dict[str, dict[str, Any]]:
        """Artifacts of a flow run by key, the newest of each."""
        wanted = {"flow_runs": {"id": {"any_": [flow_run_id]}}, "sort": "CREATED_DESC"}
        found = self.post("/artifacts/filter", wanted)
        return {artifact["key"]: artifact for artifact in reversed(found)}

    def events(self, resource: str) -> dict[str, dict[str, Any]]:
        """Events of a resource by name, the newest of each."""
        body = {"filter": {"resource": {"id": [resource]}, "order": "ASC"}, "limit": 50}
        return {e["event"]: e for e in self.post("/events/filter", body)["events"]}

    def edges(self, flow_run_id: str) -> set[tuple[str, str]]:
        """Arrows of the graph that the UI draws, as pairs of task run names."""
        nodes = dict(self.get(f"/flow_runs/{flow_run_id}/graph-v2")["nodes"])
        return {
            (parent_node["label"], node["label"])
            for node in nodes.values()
            for parent in node["parents"]
            for parent_node in [nodes[parent["id"]]]
        }

    def _ask(self, path: str, data: bytes | None) -> Any:
        key = base64.b64encode(self.info.auth.encode()).decode()
        headers = {"Authorization": f"Basic {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.info.api_url}{path}", data, headers)

        def once() -> Any:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return (json.load(answer),)
            except urllib.error.HTTPError as error:
                if error.code != 503:  # busy while its own services write, as its client knows
                    raise
                return None

        return eventually(once)[0]


def eventually(look: Callable[[], T], timeout_s: float = 240.0) -> T:
    """What ``look`` returns once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"still {found!r} after {timeout_s} s"
        time.sleep(0.2)
    return found

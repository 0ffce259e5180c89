"""`refiner serve` as a process, and what a person does with its deployments in Prefect's UI, over
the REST API."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.prefect_server import ensure_server
from tests.support.command import ROOT, environment
from tests.support.prefect_server import PrefectApi, eventually

FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Served:
    """What a person does in the UI."""

    def __init__(self, prefect: PrefectApi, folder: Path) -> None:
        self.prefect, self.folder = prefect, folder

    def launch(self, flow: str = "pipeline", name: str = "refiner", /, **parameters: Any) -> str:
        """Press Run; the flow run's id."""
        found = self.prefect.get(f"/deployments/name/{flow}/{name}")
        made = self.prefect.post(
            f"/deployments/{found['id']}/create_flow_run",
            {"parameters": parameters, "state": {"type": "SCHEDULED"}},
        )
        return str(made["id"])

    def set_state(self, flow_run: str, kind: str, name: str) -> None:
        """Press Cancel (CANCELLING, Cancelling) or Retry (SCHEDULED, AwaitingRetry)."""
        self.prefect.post(
            f"/flow_runs/{flow_run}/set_state", {"state": {"type": kind, "name": name}}
        )

    def suspend(self, flow_run: str) -> None:
        """Press Suspend, until the server takes it."""
        state = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
        path = f"/flow_runs/{flow_run}/set_state"
        eventually(lambda: self.prefect.post(path, {"state": state})["status"] == "ACCEPT")

    def state(self, flow_run: str) -> dict[str, Any]:
        return dict(self.prefect.get(f"/flow_runs/{flow_run}")["state"])

    def ends(self, flow_run: str, timeout_s: float = 300) -> dict[str, Any]:
        """The final state."""
        return eventually(
            lambda: (s := self.state(flow_run)) and s["type"] in FINAL and s, timeout_s
        )

    def call(self, flow_run: str) -> str:
        """The id of the run that the flow run shows."""
        return eventually(lambda: self.prefect.get(f"/flow_runs/{flow_run}")["parameters"]["run"])


@contextmanager
def served_in(folder: Path, *files: str, **env: str) -> Iterator[Served]:
    """`refiner serve FILES` in a folder, once it is ready; interrupted at the end."""
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli.main", "serve", *files],
            cwd=folder,
            env={**environment(), "PYTHONPATH": str(ROOT), **env},
            stdout=log,
            stderr=log,
        )
    prefect = PrefectApi(ensure_server(400))

    def ready() -> bool:
        text = (folder / "serve.log").read_text()
        assert process.poll() is None, text
        return "Ready" in text

    try:
        eventually(ready)
        yield Served(prefect, folder)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(400)

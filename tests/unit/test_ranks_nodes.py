"""The worker's meeting with other nodes: who comes, who is in the way, and who does not come."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Client
from pathlib import Path

import pytest

from infra.jobs.signals import SlurmJob
from infra.ranks import launch as nodes
from infra.ranks.launch import OtherNodes
from refiner_core.contract.errors import LaunchError


@contextmanager
def knocking(control: Path, *, silent: int, key: str = "") -> Iterator[threading.Event]:
    """A node at the worker's door, and connections before it that say nothing."""
    note = json.loads((control / "nodes.json").read_text())
    address, gone = (note["address"], note["port"]), threading.Event()
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        for _ in range(silent):
            stack.enter_context(socket.create_connection(address))

        def come() -> None:
            with Client(address, "AF_INET", authkey=bytes.fromhex(key or note["key"])) as client:
                client.send_bytes(json.dumps({"node": 1, "host": "n1"}).encode())
                assert gone.wait(60)

        coming = pool.submit(come)
        try:
            yield gone
        finally:
            gone.set()
        if not key:
            coming.result(60)


def test_silent_connections_delay_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scan, or a neighbour on the network, while the worker waits for its nodes."""
    monkeypatch.setattr(nodes, "_COME_S", 60.0)
    with OtherNodes(tmp_path, SlurmJob("1"), 1) as others, knocking(tmp_path, silent=3):
        others.start(["true", "true"], {})


def test_missing_nodes_exceed_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_COME_S", 1.0)
    with (
        OtherNodes(tmp_path, SlurmJob("1"), 1) as others,
        knocking(tmp_path, silent=2, key="00" * 32),
        pytest.raises(LaunchError, match="Only 0 of the job's 1 other nodes came within 1 s"),
    ):
        others.start(["true", "true"], {})

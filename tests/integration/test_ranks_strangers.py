"""Ranks of one node on a machine that others use: nothing runs what these say."""

from __future__ import annotations

import base64
import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist

from infra.ranks.launch import agent_command
from infra.ranks.messages import ORDER, rank_settings
from refiner_core.contract.placement import Placement
from refiner_core.training.ranks import TALK
from tests.support.command import ROOT, environment, wait_until
from tests.support.listening import beyond_loopback, listening
from tests.support.talking_rank import Planted
from tests.support.users import STRANGER, needs_users, run_as

_TALKING = [sys.executable, "-m", "tests.support.talking_rank"]


def plant(ports: Sequence[int], value: bytes) -> list[int]:
    """Ports of stores that let this user put a rendezvous of its own into them."""
    open_to_us: list[int] = []

    def try_one(port: int) -> None:
        with suppress(Exception):
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(0, 2)
            )
            store.set("torch.rendezvous.none", value)
            open_to_us.append(port)

    threads = [threading.Thread(target=try_one, args=(port,), daemon=True) for port in ports]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 5
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sorted(open_to_us)


def opened(pids: Sequence[int]) -> list[str]:
    """Files of these processes that this user can open."""
    found = []
    for pid, number in itertools.product(pids, range(64)):
        with suppress(OSError):
            os.close(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_NONBLOCK))
            found.append(f"{pid}/{number}")
    return found


def test_another_user_reaches_no_port_or_file_of_local_ranks(tmp_path: Path) -> None:
    needs_users()
    placement = Placement(nodes=1, nproc_per_node=2)
    command = f"{agent_command('tests.support.talking_rank', 0)} {tmp_path}"
    order = {"placement": vars(placement), "meet": "", "patience_s": 10}
    settings = {
        **environment(),
        **rank_settings(placement),
        TALK: "5a" * 32,
        ORDER: json.dumps(order),
    }
    settings |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(["/bin/sh", "-c", command], env=settings)
    try:
        for rank in range(2):
            ready = (tmp_path / f"ready-{rank}").exists
            wait_until(lambda ready=ready: ready() or process.poll() is not None, "ranks")
        assert process.poll() is None
        ports = [one.port for one in listening(process.pid)]
        assert ports, "gloo listens"
        assert beyond_loopback(process.pid) == []
        pids = [process.pid, *(p.pid for p in psutil.Process(process.pid).children(recursive=True))]
        assert run_as(STRANGER, opened, pids) == []
        value = base64.b64encode(pickle.dumps(Planted(tmp_path / "planted")))
        assert run_as(STRANGER, plant, ports, value) == []
        (tmp_path / "stop").touch()
        assert process.wait(400) == 0
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "planted").exists()


def test_a_rank_unpickles_nothing_without_the_key(tmp_path: Path) -> None:
    """A process that answers gloo faster than the real rank takes its place."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    around = {
        **{**os.environ, TALK: "5a" * 32, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
    }
    started = [
        subprocess.Popen(
            [*_TALKING, str(tmp_path), role],
            cwd=ROOT,
            env={**around, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, role in enumerate(("impostor", "listener"))
    ]
    try:
        said = started[1].communicate(timeout=400)[1]
        started[0].communicate(timeout=400)
    finally:
        for process in started:
            process.kill()
    assert not (tmp_path / "planted").exists(), "a pickle of nobody ran"
    assert started[1].returncode == 1
    assert "not from a rank of this stage" in said
    assert not (tmp_path / "heard").exists()

"""Launching ranks: how many, with which settings; and how the nodes of a job meet."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Client
from pathlib import Path

import pytest

from flows.ranks.training import engine_name, in_worker
from infra.jobs.signals import SlurmJob
from infra.ranks import launch as nodes
from infra.ranks.launch import OtherNodes, node_number
from infra.ranks.messages import rank_settings
from refiner_core.contract.config import RecipeConfig, Resources
from refiner_core.contract.errors import LaunchError
from refiner_core.contract.placement import Placement


def recipe(**sft: object) -> RecipeConfig:
    config = RecipeConfig()
    return replace(config, sft=replace(config.sft, **sft))


@pytest.mark.parametrize(
    ("sft", "here", "engine"),
    [
        ({}, True, "torch"),
        ({"deepspeed_stage": 0}, True, "torch"),
        ({"nproc_per_node": 2}, False, "torch"),
        ({"deepspeed_stage": 2}, False, "DeepSpeed ZeRO-2"),
        ({"resources": Resources(gpus=1)}, True, "torch"),
        ({"resources": Resources(gpus=2)}, False, "torch"),
        ({"resources": Resources(nodes=2)}, False, "torch"),
    ],
)
def test_one_process_is_the_worker_itself(sft: dict[str, object], here: bool, engine: str) -> None:
    config = recipe(**sft)
    assert in_worker(config, "sft") is here
    assert engine_name(config, "sft") == engine


def test_ranks_of_one_node_use_loopback() -> None:
    one = rank_settings(Placement(1, 2), {})
    assert (one["GLOO_SOCKET_IFNAME"], one["DS_ACCELERATOR"]) == ("lo", "cpu")
    assert rank_settings(Placement(1, 2, (0, 1)), {})["NCCL_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in rank_settings(Placement(1, 2), {"GLOO_SOCKET_IFNAME": "ib0"})
    several = rank_settings(Placement(2, 2, (0, 1)), {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & several.keys()
    assert "DS_ACCELERATOR" not in several
    assert several["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_node_knows_its_number_from_slurm_alone() -> None:
    assert node_number({}) == 0
    assert node_number({"SLURM_NODEID": "3"}) == 0
    assert node_number({"SLURM_JOB_ID": "7", "SLURM_NODEID": "3"}) == 3


# ---------------------------------------------------------------- other nodes come


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


def test_a_node_whose_connection_ends_without_a_last_message_is_lost(tmp_path: Path) -> None:
    with OtherNodes(tmp_path, SlurmJob("1"), 1) as others:
        with knocking(tmp_path, silent=0):
            others.start(["true", "true"], {})
            assert others.lost == {}
        list(others.last_lines())
        assert others.lost == {1: "n1"}


def test_missing_nodes_are_awaited_up_to_the_limit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(nodes, "_COME_S", 1.0)
    with (
        OtherNodes(tmp_path, SlurmJob("1"), 1) as others,
        knocking(tmp_path, silent=2, key="00" * 32),
        pytest.raises(LaunchError, match="Only 0 of the job's 1 other nodes connected in 1 s"),
    ):
        others.start(["true", "true"], {})

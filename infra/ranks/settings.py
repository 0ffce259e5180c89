"""The environment of the ranks of a stage, on its first node and on the others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from infra.ranks.gpus import trainer_settings
from refiner_core.contract.placement import Placement

#: Setting of ranks: what they are to do, as JSON.
ORDER = "REFINER_RANKS_ORDER"


def rank_settings(placement: Placement, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of ranks on this node, beside what the worker has."""
    settings = {
        # A hung or dead partner ends a NCCL rank, instead of keeping its GPU busy for ever.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": given.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "PYTHONUNBUFFERED": "1",
        **trainer_settings(placement.trainer_gpus, given),
    }
    if not placement.trainer_gpus:
        settings["DS_ACCELERATOR"] = "cpu"
    if placement.nodes == 1:  # nobody beyond this machine is to reach them
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        settings |= {name: "lo" for name in names if name not in given}
    return settings


def node_settings(order: Mapping[str, str]) -> dict[str, str]:
    """:func:`rank_settings` on a node that has only the order of its ranks."""
    told = json.loads(order[ORDER])["placement"]
    gpus, servers = tuple(told["trainer_gpus"]), tuple(map(tuple, told["server_gpus"]))
    return rank_settings(Placement(told["nodes"], told["nproc_per_node"], gpus, servers))

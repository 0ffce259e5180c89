"""Environment of the ranks of a stage, on its first node and on the others; which GPUs they see.

Placements count GPUs within what the job was given on a node, which is what
``CUDA_VISIBLE_DEVICES`` says; ranks see those of the trainer, all alike and in order, so that a
rank's local number is its GPU's. What the job was given is kept (:data:`JOB_GPUS`) for the servers
that a rank starts beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.placement import Placement

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: What ``CUDA_VISIBLE_DEVICES`` was for the whole job; unset where it was.
JOB_GPUS = "REFINER_JOB_GPUS"

#: Setting of ranks: what they are to do, as JSON.
ORDER = "REFINER_RANKS_ORDER"


def trainer_settings(gpus: Sequence[int], given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Settings of a node's ranks; without ``gpus`` they train on the CPU.

    Raises
    ------
    UnsupportedError
        The job was given fewer.
    """
    if not gpus:
        return {}
    before = {JOB_GPUS: given[VISIBLE]} if VISIBLE in given else {}
    return {VISIBLE: visible(gpus, given), **before}


def visible(gpus: Sequence[int], given: Mapping[str, str] = os.environ) -> str:
    """``CUDA_VISIBLE_DEVICES`` for some of a job's GPUs, in the job or in one of its ranks.

    Raises
    ------
    UnsupportedError
        The job was given fewer.
    """
    names = given.get(JOB_GPUS, given.get(VISIBLE))
    if names is None:
        return ",".join(map(str, gpus))
    known = [name.strip() for name in names.split(",") if name.strip()]
    if max(gpus, default=-1) >= len(known):
        raise UnsupportedError(
            f"This job uses GPU number {max(gpus)} of its node, and was given {len(known)} "
            f"({VISIBLE}={names})",
            expected="as many GPUs as the stage's resources.gpus says",
            fix=f"unset {VISIBLE}, or lower resources.gpus",
        )
    return ",".join(known[number] for number in gpus)


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

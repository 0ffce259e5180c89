"""Which GPUs the processes of a job see.

In: a :class:`~refiner_core.contract.placement.Placement` and the environment of a job on one node.
Out: settings. Placements count within what the job was given there, which is what
``CUDA_VISIBLE_DEVICES`` says; ranks see those of the trainer, all alike and in order, so that a
rank's local number is its GPU's. What the job was given is kept (:data:`JOB_GPUS`) for the servers
that a rank starts beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from refiner_core.contract.errors import UnsupportedError

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: What ``CUDA_VISIBLE_DEVICES`` was for the whole job; unset where it was.
JOB_GPUS = "REFINER_JOB_GPUS"


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

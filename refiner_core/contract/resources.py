"""What a job asks for."""

from __future__ import annotations

from dataclasses import dataclass

from refiner_core.contract.marks import execution


@dataclass(frozen=True)
class Resources:
    """What a stage's job asks for. Execution only: the same numbers come out of any of it."""

    gpus: int = execution(0, ge=0, doc="GPUs per node")
    nodes: int = execution(1, ge=1, doc="number of nodes")
    cpus: int = execution(1, ge=1, doc="CPU cores per node")
    memory_gb: int = execution(4, ge=1, doc="host memory per node, GiB")
    time_limit_min: int = execution(60, ge=1, doc="wall-clock limit of one attempt, minutes")

"""What the machine offers to who begins: a Slurm with partitions and accounts, GPUs.

In: what `sinfo`, `sacctmgr` and `nvidia-smi` print, where they are installed and answer. Out:
:class:`Surroundings`, from which `refiner init` takes its defaults and what it offers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

_TIMEOUT_S = 10
_GPU = re.compile(r"\bgpu:(?:(?P<type>[A-Za-z][\w.-]*):)?(?P<count>\d+)")
_LIMIT = re.compile(r"(?:(?:(?P<days>\d+)-)?(?P<hours>\d+):)?(?P<minutes>\d+):\d\d")


@dataclass(frozen=True)
class Partition:
    """One partition; ``gpus`` of its largest node, ``max_time_min`` where it has a limit."""

    name: str
    is_default: bool
    gpus: int
    gpu_type: str = ""
    max_time_min: int | None = None


@dataclass(frozen=True)
class Surroundings:
    """What is there. ``partitions`` are empty where no Slurm answers."""

    partitions: tuple[Partition, ...] = ()
    accounts: tuple[str, ...] = ()
    gpus: int = 0

    @property
    def has_slurm(self) -> bool:
        """Whether a Slurm answers."""
        return bool(self.partitions)

    def partition(self, name: str) -> Partition | None:
        """The partition of that name."""
        return next((p for p in self.partitions if p.name == name), None)

    def best_partition(self) -> str:
        """The cluster's default where it has GPUs, else the first that has, else the default."""
        ordered = sorted(self.partitions, key=lambda p: (p.gpus == 0, not p.is_default))
        return ordered[0].name if ordered else ""


def look_around() -> Surroundings:
    """Ask what is installed; a command that is not there, or does not answer, says nothing."""
    partitions = read_partitions(_said("sinfo", "-h", "-o", "%P|%G|%l"))
    accounts: tuple[str, ...] = ()
    if partitions:
        user = os.environ.get("USER", "")
        told = _said("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account")
        accounts = tuple(dict.fromkeys(line.strip() for line in told.splitlines() if line.strip()))
    return Surroundings(partitions, accounts, _said("nvidia-smi", "-L").count("GPU "))


def read_partitions(text: str) -> tuple[Partition, ...]:
    """The partitions that ``sinfo -h -o '%P|%G|%l'`` lists, in its order."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, gres, limit = (*line.strip().split("|"), "", "")[:3]
        if not name:
            continue
        match = _GPU.search(gres)
        gpus = int(match["count"]) if match else 0
        plain = name.removesuffix("*")
        known = found.get(plain)
        if known is None or gpus > known.gpus:
            kind = (match["type"] or "") if match else ""
            found[plain] = Partition(plain, name.endswith("*"), gpus, kind, _minutes(limit))
    return tuple(found.values())


def _minutes(limit: str) -> int | None:
    match = _LIMIT.fullmatch(limit)
    if match is None:  # `infinite`, or nothing
        return None
    return (int(match["days"] or 0) * 24 + int(match["hours"] or 0)) * 60 + int(match["minutes"])


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # what does not answer offers nothing
    return done.stdout if done.returncode == 0 else ""

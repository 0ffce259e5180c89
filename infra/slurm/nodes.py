"""GPUs of a cluster's nodes, as `sinfo` lists them.

In: a profile. Out: the GPUs of each node that its jobs may use. Nothing is known without `sinfo`,
or if it does not answer soon: plans are made on other machines, too.
"""

from __future__ import annotations

import re
import subprocess

from infra.host.processes import run_program
from infra.slurm.profiles import Profile
from refiner_core.contract.config import Resources

_TIMEOUT_S = 5.0
_GPUS = re.compile(r"\bgpu:(?:(?P<type>[A-Za-z][\w.-]*):)?(?P<count>\d+)")


def gpus_of_nodes(profile: Profile) -> tuple[int, ...] | None:
    """GPUs of each node for the profile's jobs with GPUs; None if Slurm does not tell."""
    place = profile.place_for(Resources(gpus=1))
    options = [f"--partition={place.partition}"] if place.partition else []
    options += [f"--nodes={place.nodelist}"] if place.nodelist else []
    try:
        done = run_program(["sinfo", "-h", "-N", *options, "-o", "%P|%n|%G"], _TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    rows = [line.strip().split("|") for line in done.stdout.splitlines() if line.count("|") == 2]
    if not place.partition:
        rows = [row for row in rows if row[0].endswith("*")] or rows
    nodes = {node: offered for _, node, offered in rows if node not in place.exclude}
    found = (count_gpus(offered, profile.gpu_type) for offered in nodes.values())
    return tuple(count for count in found if count)


def count_gpus(offered: str, kind: str | None = None) -> int:
    """GPUs of a node, all or of one type, from the words of `sinfo`: ``gpu:h100:8(S:0-1)``."""
    parts = _GPUS.finditer(offered)
    return sum(int(p["count"]) for p in parts if kind is None or p["type"] == kind)

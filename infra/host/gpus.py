"""GPUs of this machine: those that jobs may use, and who uses them.

In: ``CUDA_VISIBLE_DEVICES``, or else the driver's list. Out: names for a job's
``CUDA_VISIBLE_DEVICES``, so that no two jobs of this machine share a GPU, whichever run, workspace
or user they belong to.

A GPU is leased by binding a Unix socket to an abstract address with its UUID. The kernel lets one
process bind it, and frees it when the last process that has the socket ends, also after kill -9:
there is no file that a cleaner of temporary folders could delete, and no lease of a dead process.
A job inherits its sockets. A second address names the holder, for messages.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from infra.host.processes import run_program, user_name
from infra.host.terminal import printable
from refiner_core.contract.errors import SystemOutage, UnsupportedError

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: CUDA counts by speed unless this is set; `nvidia-smi`, and so a lease, counts by bus.
ORDER_OF_GPUS = "CUDA_DEVICE_ORDER"
_LEASE, _TAKING, _HOLDER = "refiner-gpu/", "refiner-gpus", "="
_LONGEST = 107  # bytes of an address, without its leading zero
_TABLE = Path("/proc/net/unix")
_SMI_S, _TAKE_S = 15.0, 2.0
_WHOLE = len("GPU-12345678-1234-1234-1234-123456789012")
_GPU = re.compile(r"GPU (?P<number>\d+): .*\(UUID: (?P<uuid>[^)\s]+)\)")
_MIG = re.compile(r"\s+MIG .*\(UUID: (?P<uuid>[^)\s]+)\)")
_NAME = re.compile(r"\d+|(?:GPU|MIG)-[\w/-]+")


class Gpu(NamedTuple):
    """A GPU, or a MIG part of one: its name in ``CUDA_VISIBLE_DEVICES``, and its UUID (its name,
    if the driver does not list it)."""

    name: str
    uuid: str


class FreeGpus(NamedTuple):
    """GPUs of this machine at a moment: their number; how many no other process has; and who has
    the others, in words."""

    total: int
    free: int
    users: str = ""


def gpus_here(given: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """GPUs that jobs of this process may use: those that ``CUDA_VISIBLE_DEVICES`` names, up to the
    first invalid name as in CUDA; if it is unset, all of this machine."""
    if VISIBLE not in given:
        return driver_gpus()
    found: dict[str, str] = {}
    for name in (word.strip() for word in given[VISIBLE].split(",")):
        if not _NAME.fullmatch(name):
            break
        found.setdefault(_uuid_of(name), name)
    return tuple(Gpu(name, uuid) for uuid, name in found.items())


def driver_gpus() -> tuple[Gpu, ...]:
    """GPUs that the driver lists, a divided one as its MIG parts; without `nvidia-smi`, one for
    each device file."""
    found: list[Gpu] = []
    for gpu, parts in read_gpus(_listed()):
        found += [Gpu(part, part) for part in parts] or [gpu]
    return tuple(found) or tuple(Gpu(number, number) for number in _device_numbers())


def read_gpus(listed: str) -> list[tuple[Gpu, list[str]]]:
    """GPUs in the output of ``nvidia-smi -L``, each with the UUIDs of its MIG parts."""
    found: list[tuple[Gpu, list[str]]] = []
    for line in listed.splitlines():
        if match := _GPU.match(line):
            found.append((Gpu(match["number"], match["uuid"]), []))
        elif (match := _MIG.match(line)) and found:
            found[-1][1].append(match["uuid"])
    return found


def _uuid_of(name: str) -> str:
    """The UUID that a name stands for. UUIDs may be cut short, and of a divided GPU CUDA takes the
    first part."""
    try:
        known = read_gpus(_listed())
    except SystemOutage:
        if len(name) >= _WHOLE:
            return name
        raise
    for gpu, parts in known:
        if name == gpu.name or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return parts[0] if parts else gpu.uuid
    found = [part for _, parts in known for part in parts if part.startswith(name)]
    return found[0] if len(found) == 1 else name


@functools.cache
def _listed() -> str:
    """The driver's list; empty without `nvidia-smi`. An error is not remembered: names by number
    here and by UUID in another process would be two leases of one GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = run_program(["nvidia-smi", "-L"], _SMI_S)
        said = (done.stderr + done.stdout).strip()
    except subprocess.TimeoutExpired:
        said, done = f"no answer in {_SMI_S:.0f} s", None
    if done is None or done.returncode != 0:
        raise SystemOutage(
            f"`nvidia-smi -L` does not list this machine's GPUs: {said[:200] or 'it failed'}",
            expected="a list of the GPUs that jobs may use",
            fix="repair the driver, or name GPUs by their whole UUIDs in CUDA_VISIBLE_DEVICES",
        )
    return done.stdout


def _device_numbers() -> list[str]:
    numbers = (p.name.removeprefix("nvidia") for p in Path("/dev").glob("nvidia[0-9]*"))
    return sorted((n for n in numbers if n.isdigit()), key=int)


class GpuPool:
    """The GPUs of this machine that this process holds, by the stage that they are for."""

    def __init__(self) -> None:
        self._held: dict[str, dict[Gpu, tuple[socket.socket, ...]]] = {}

    def available(self) -> FreeGpus:
        """GPUs now; those that this process holds count as free."""
        gpus, mine = gpus_here(), {gpu.uuid for held in self._held.values() for gpu in held}
        taken = {uuid: by for uuid, by in leases().items() if uuid not in mine}
        users: dict[str, list[str]] = {}
        for gpu in gpus:
            if gpu.uuid in taken:
                users.setdefault(taken[gpu.uuid], []).append(gpu.name)
        texts = [f"{spans(names)} used by {who}" for who, names in users.items()]
        free = len(gpus) - sum(map(len, users.values()))
        return FreeGpus(len(gpus), free, ", ".join(texts))

    def share(self, wanted: Mapping[str, int]) -> bool:
        """Hold so many GPUs for each of these stages, and none for any other. False, and nothing
        new is held, if another process has taken some in the meantime."""
        for stage_id in [i for i in self._held if wanted.get(i) != len(self._held[i])]:
            self.release(stage_id)
        new = [i for i, count in wanted.items() if count and i not in self._held]
        if not new:
            return True
        with _taking() as alone:
            if alone and all(self._take(stage_id, wanted[stage_id]) for stage_id in new):
                return True
        for stage_id in new:
            self.release(stage_id)
        return False

    def release(self, stage_id: str) -> None:
        """Give the GPUs of a stage up; a job that has inherited them keeps them."""
        for pair in self._held.pop(stage_id, {}).values():
            for lease in pair:
                lease.close()

    def names(self, stage_id: str) -> tuple[str, ...]:
        """Names of a stage's GPUs, in order."""
        return tuple(gpu.name for gpu in self._held.get(stage_id, {}))

    def descriptors(self, stage_id: str) -> tuple[int, ...]:
        """File descriptors that a job inherits, so that its GPUs are taken until its end."""
        held = self._held.get(stage_id, {})
        return tuple(lease.fileno() for pair in held.values() for lease in pair)

    def _take(self, stage_id: str, count: int) -> bool:
        held = self._held.setdefault(stage_id, {})
        taken, holder = leases(), f"{stage_id} of {user_name()}"
        for gpu in gpus_here():
            if len(held) == count:
                break
            if gpu.uuid not in taken and (lease := _bound(f"{_LEASE}{gpu.uuid}")) is not None:
                name = _bound(f"{_LEASE}{gpu.uuid}{_HOLDER}{holder}")
                held[gpu] = (lease,) if name is None else (lease, name)
        return len(held) == count


def leases() -> dict[str, str]:
    """UUIDs of the leased GPUs of this machine, each with its holder in words."""
    try:
        lines = _TABLE.read_text(errors="replace").splitlines()
    except OSError:  # not on Linux, which alone has such addresses
        return {}
    names = [name for _, mark, name in (line.partition(f"@{_LEASE}") for line in lines) if mark]
    holders = {uuid: by for uuid, mark, by in (n.partition(_HOLDER) for n in names) if mark}
    return {n: printable(holders.get(n, "another process")) for n in names if _HOLDER not in n}


def spans(names: Sequence[str]) -> str:
    """Names of GPUs, with consecutive numbers as spans: ``0-3, 6``."""
    parts: list[tuple[str, str]] = []
    for name in names:
        first, last = parts[-1] if parts else ("", "")
        if name.isdigit() and last.isdigit() and int(name) == int(last) + 1:
            parts[-1] = (first, name)
        else:
            parts.append((name, name))
    return ", ".join(first if first == last else f"{first}-{last}" for first, last in parts)


def too_many_gpus(asked: Mapping[str, int], there: int) -> UnsupportedError | None:
    """The refusal of stages (name -> GPUs) that must run at the same time, if this machine has too
    few GPUs for them."""
    total = sum(asked.values())
    if total <= there:
        return None
    first, *services = asked
    parts = " and ".join(f"{count} for {name}" for name, count in asked.items() if count)
    together = f" at the same time ({parts})" if services else ""
    named = f"CUDA_VISIBLE_DEVICES names {there}" if VISIBLE in os.environ else f"it has {there}"
    smaller = f"lower {first.partition('-')[0]}.resources.gpus"
    smaller += " or judge.resources.gpus" if services else ""
    return UnsupportedError(
        f"{first} needs {total} GPUs of this machine{together}, and {named}",
        expected=f"at most {there} GPUs, or a larger machine",
        fix=f"{smaller}, or set dispatch.executor=slurm and dispatch.profile=PROFILE",
    )


def _bound(name: str) -> socket.socket | None:
    """A socket at an abstract address; None if another process has it."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.bind(b"\0" + name.encode(errors="replace")[:_LONGEST])
    except OSError:
        made.close()
        return None
    return made


@contextlib.contextmanager
def _taking() -> Iterator[bool]:
    """One process at a time, so that no two take half of what both need; False if it lasts."""
    deadline = time.monotonic() + _TAKE_S
    while (lock := _bound(_TAKING)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()

"""The real code on real files, with every operation that changes something seen by the world.

In: a :class:`~tests.simulation.world.World`, a disk, a watcher. Out: a context in which each
rename, link, write and removal is a point at which its process may stall or die, fails where the
disk is full, and is told to the watcher afterwards. Processes, host names and signals are the
simulated ones; fsync costs nothing; heartbeats beat in virtual time.
"""

import contextlib
import errno
import functools
import itertools
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any
from unittest import mock

import infra.attempt.attempt
import infra.store.atomic
import infra.store.workspace
from infra.attempt import attempt as room
from infra.attempt import stage_io as heartbeat
from infra.disk import manager, usage
from infra.disk.manager import DiskManager
from infra.host import processes
from infra.host.processes import ProcessId
from infra.jobs.signals import SlurmJob
from infra.store import atomic, checkpoints
from tests.simulation.disk import SimDisk
from tests.simulation.invariants import Watch
from tests.simulation.slurm import Cluster
from tests.simulation.world import World
from tests.support import probing

BEAT_S = 100.0


@contextlib.contextmanager
def simulated_machine(
    world: World, disk: SimDisk, watcher: Watch, scheduler: Cluster
) -> Iterator[None]:
    """Real code called within runs on the simulated machine."""
    numbers = itertools.count(1)

    def token(size: int = 8) -> str:
        return f"{next(numbers):0{2 * size}x}"

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with contextlib.ExitStack() as stack:

        def put(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        _file_operations(put, world, disk, watcher)
        _processes(put, world)
        _jobs(put, world, scheduler)
        _space(put, world, disk)
        put(secrets, "token_hex", token)
        put(PurePath, "__truediv__", functools.cache(PurePath.__truediv__))
        put(infra.attempt.attempt, "Heartbeat", functools.partial(_Heartbeat, world))
        put(infra.attempt.attempt, "LAST_WORD_S", 0.0)  # real seconds; the world has none
        put(infra.attempt.attempt, "job_provenance", lambda _config: {})
        try:
            yield
        finally:
            logging.disable(before)


Put = Callable[[Any, str, Any], None]


def _file_operations(put: Put, world: World, disk: SimDisk, watcher: Watch) -> None:
    def nothing(*_: Any) -> None:
        return None

    for target, name in ((os, "fsync"), (atomic, "sync_file"), (atomic, "sync_folder")):
        put(target, name, nothing)
    put(atomic, "sync_tree", nothing)

    def seen(operation: str, real: Callable[..., Any], pick: Callable[..., Any]) -> Any:
        @functools.wraps(real)
        def call(*args: Any, **named: Any) -> Any:
            path = Path(pick(*args))
            label = f"{operation} {_short(path)}"
            world.point(label)
            result = real(*args, **named)
            watcher.done(operation, path)
            world.point(f"after {label}")
            return result

        return call

    def first(path: Any, *_: Any) -> Any:
        return path

    def second(_: Any, path: Any, *__: Any) -> Any:
        return path

    write = atomic._write_new

    def write_new(path: Path, data: bytes, **how: Any) -> None:
        world.point(f"write {_short(path)}")
        disk.small_write(path)
        write(path, data, **how)

    def read_json(path: Path) -> Any:
        world.point("read")
        return real_read(path)

    real_read = atomic.read_json

    def hash_of(path: Path) -> str:
        """Checkpoints of this world are holes of many GB: their size is all there is to them."""
        return f"{path.stat().st_size:064x}"

    put(checkpoints, "hash_of", hash_of)
    put(atomic, "_write_new", write_new)
    put(atomic, "read_json", read_json)
    put(os, "link", seen("link", os.link, second))
    put(Path, "rename", seen("rename", Path.rename, second))
    put(Path, "replace", seen("rename", Path.replace, second))
    put(Path, "unlink", seen("unlink", Path.unlink, first))
    put(shutil, "rmtree", seen("rmtree", shutil.rmtree, first))


def _short(path: Path) -> str:
    """What a file is, without what differs from stage to stage."""
    return re.split(r"[-.]", path.name.removeprefix(atomic.TEMPORARY))[0]


def _processes(put: Put, world: World) -> None:
    def of(pid: int | None = None) -> ProcessId:
        process = world.current if pid is None else world.processes[pid]
        if process is None:
            return ProcessId("outside", 1, 1.0)
        return ProcessId(process.host, process.pid, float(process.pid))

    def here(self: ProcessId) -> bool:
        return world.current is not None and self.host == world.current.host

    def alive(self: ProcessId) -> bool:
        return here(self) and self.pid in world.processes

    def handle(number: int, handler: Any) -> Any:
        process = world.current
        if process is None:
            return None
        before, process.handlers[number] = process.handlers.get(number), handler
        return before

    put(ProcessId, "of", staticmethod(of))
    put(ProcessId, "here", property(here))
    put(ProcessId, "alive", property(alive))
    put(processes, "host_name", lambda: world.current.host if world.current else "outside")
    put(signal, "signal", handle)


def _jobs(put: Put, world: World, scheduler: Cluster) -> None:
    def from_environment(*_: Any) -> SlurmJob | None:
        process = world.current
        if process is None or process.job is None:
            return None
        return SlurmJob(process.job.id, "", process.job.restarts, process.host)

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        world.point(command[0])
        printed = scheduler.answer(command)
        return subprocess.CompletedProcess(command, 0 if printed else 1, printed, "")

    put(SlurmJob, "from_environment", staticmethod(from_environment))
    put(subprocess, "run", run)


def _space(put: Put, world: World, disk: SimDisk) -> None:
    for module in (infra.store.atomic, probing, infra.store.workspace):
        put(module, "has_room", disk.has_room)

    def refusal(folder: Path, size: int) -> int | None:
        return None if disk.has_room(folder, size) else errno.EDQUOT

    put(manager, "refusal", refusal)
    put(room, "time", SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep))
    put(manager, "Prober", lambda *_, **__: disk)
    put(manager, "sync_file_system", lambda _folder: None)
    put(manager, "random", SimpleNamespace(Random=lambda: world.random))
    put(usage, "_size", lambda status, _seen: usage.DiskSize(status.st_size, 1, status.st_size))
    simulated = functools.partial(DiskManager, clock=lambda: world.now, sleep=world.sleep)
    put(manager, "DiskManager", simulated)


class _Heartbeat(heartbeat.Heartbeat):
    """The real one, with a timer of the world instead of a thread."""

    def __init__(self, world: World, path: Path, began: float, *rest: Any, **more: Any) -> None:
        super().__init__(path, began, *rest, **more)
        self._world, self._of = world, world.current

    def start(self) -> None:
        self._write()
        self._world.at(BEAT_S, self._beat)

    def _beat(self) -> None:
        process = self._of
        if self._ended.is_set() or process is None or not process.alive:
            return
        if not process.frozen:
            self._write()
            self._on_beat()
        self._world.at(BEAT_S, self._beat)

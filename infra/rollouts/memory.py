"""A folder in memory that does not outlive its process.

In: where memory is a folder (``/dev/shm``). Out: a folder of this process's own. It is removed at
the end of its ``with`` block; by a process beside (:mod:`infra.rollouts.sweeper`) when this one is
killed; and by the next one that comes to this node when all of them were killed at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from infra.host.processes import ProcessId, host_name
from infra.rollouts import sweeper
from refiner_core.contract.errors import ConfigurationError

log = logging.getLogger(__name__)

_PREFIX = "refiner-rollouts"
_NAME = re.compile(rf"{_PREFIX}-(?P<where>.+)-(?P<pid>\d+)-(?P<started>\d+(?:\.\d+)?)")


@contextmanager
def memory_folder(parent: Path) -> Iterator[Path]:
    """A new folder below ``parent`` that only its owner can read; what others left is removed.

    Raises
    ------
    ConfigurationError
        There can be no folder there.
    """
    remove_leftovers(parent)
    me = ProcessId.of()
    started = f"{me.started:.0f}" if me.boot else f"{me.started:.2f}"
    folder = parent / f"{_PREFIX}-{_where()}-{me.pid}-{started}"
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigurationError(
            f"Weights for rollout servers cannot be put into {parent} ({error})",
            expected="a folder in memory that can be written to",
            fix="set grpo.rollout_server.weights_dir",
        ) from error
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(sweeper.__file__)), str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        sweeper.remove(str(folder))
        assert watcher.stdin is not None
        watcher.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            watcher.wait(10)


def remove_leftovers(parent: Path) -> None:
    """Remove folders of processes of this user on this machine that are no more."""
    for folder in parent.glob(f"{_PREFIX}-{_where()}-*"):
        found = _NAME.fullmatch(folder.name)
        if found is None or not sweeper.is_private(str(folder)):
            continue
        # Ticks since this boot, which memory does not outlive; older versions wrote a time.
        boot = "" if "." in found["started"] else ProcessId.of().boot
        owner = ProcessId(host_name(), int(found["pid"]), float(found["started"]), boot)
        if not owner.alive:
            log.warning("removing %s, which a process that is gone has left", folder)
            sweeper.remove(str(folder))


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Shared memory that these processes have mapped: what a kill -9 would leave for ever.

    Files are known by their number: a semaphore is mapped under a name that it no longer has.
    """
    numbers: set[int] = set()
    for process in processes:
        with contextlib.suppress(OSError):  # gone, or another system than Linux
            for line in Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{sweeper.MEMORY}/"):
                    numbers.add(int(fields[4]))
    found: set[Path] = set()
    if numbers:
        for path in Path(sweeper.MEMORY).iterdir():
            with contextlib.suppress(OSError):
                if path.lstat().st_ino in numbers and sweeper.is_own_file(str(path)):
                    found.add(path)
    return found


def note_shared(folder: Path, paths: Iterable[Path]) -> None:
    """See that these files go with the folder, whoever removes it."""
    with (folder / sweeper.SHARED).open("a") as file:
        file.writelines(f"{path}\n" for path in paths)


def _where() -> str:
    """This user on this machine, and in which world of process numbers (containers have theirs)."""
    try:
        world = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # another system than Linux
        world = 0
    return f"{host_name()}-{os.getuid()}-{world}"

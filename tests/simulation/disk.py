"""A quota that other people fill and empty.

In: how large a checkpoint is, and what others take. Out: whether the next save, or even the next
control file, fits, and what a quota tool would say; what is used is counted from the files of the
real workspace.
"""

import contextlib
import errno
import os
from pathlib import Path

from infra.disk.probe import FreeSpace
from infra.store.atomic import PROBE_BYTES
from infra.store.layout import Layout
from tests.simulation.world import World

GIB = 1 << 30
#: A control file's worth.
SMALL = 4096


class SimDisk:
    """One quota for the whole workspace.

    ``others`` are the bytes of other people; with ``small_too``, control files do not fit either
    when nothing is free.
    """

    def __init__(self, world: World, layout: Layout, limit: int, checkpoint: int) -> None:
        self.world, self.layout = world, layout
        self.limit, self.checkpoint = limit, checkpoint
        self.others = 0
        self.small_too = False

    def used(self) -> int:
        """Bytes of checkpoints, also half-written ones, and of others."""
        total = self.others
        for stage_id in _names(self.layout.stages):
            folder = self.layout.stage(stage_id).checkpoints
            for name in _names(folder):
                with contextlib.suppress(FileNotFoundError):
                    total += (folder / name / "state.bin").stat().st_size
        return total

    def free(self) -> int:
        """Bytes that still fit."""
        return max(0, self.limit - self.used())

    def observe(self) -> FreeSpace:
        """What a quota tool prints: see :class:`infra.disk.probe.Prober`."""
        return FreeSpace(self.free(), self.used(), self.limit, source="simulated", knows_quota=True)

    def has_room(self, folder: Path, size: int = PROBE_BYTES) -> bool:
        """Whether a probe write goes through: see :func:`infra.store.atomic.has_room`."""
        return self.free() >= size or not (self.small_too or size > SMALL)

    def save(self, folder: Path, content: bytes, seconds: float) -> None:
        """Write a checkpoint's file, which takes time; it may end in the middle.

        Raises
        ------
        OSError
            Disk quota exceeded; half of the file is there.
        """
        path = folder / "state.bin"
        for share in (0.5, 1.0):  # a file with a hole: large for who asks, and nothing in memory
            self.world.point("save")
            if self.free() < self.checkpoint / 2:
                self._refuse(path)
            path.write_bytes(content)
            os.truncate(path, int(self.checkpoint * share))
            self.world.sleep(seconds / 2)
        self.world.point("saved")

    def small_write(self, path: Path) -> None:
        """Fail if not even a control file fits."""
        if self.small_too and self.free() < SMALL:
            self._refuse(path)

    def _refuse(self, path: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))


def read_state(folder: Path) -> str:
    """The state in a checkpoint."""
    with (folder / "state.bin").open("rb") as file:
        return file.read(64).rstrip(b"\0").decode()


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []

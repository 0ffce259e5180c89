"""What is left, as one value: from quotas and from a file system's own figures. The tightest wins.

In: :class:`~infra.disk.parsers.Quota` values, or a folder. Out: :class:`Room`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from infra.disk.parsers import Limit, Quota
from infra.host.mounts import Mount

log = logging.getLogger(__name__)

UNLIMITED = 2**62
#: Free figures of these are the truth about what a write can do.
HONEST = ("tmpfs", "ramfs")


class ToolFailed(Exception):
    """A tool is not there, failed, or said what cannot be meant."""


@dataclass(frozen=True)
class Room:
    """What is left for writing into a folder.

    Attributes
    ----------
    free_bytes
        Bytes that can still be written.
    used_bytes, limit_bytes
        Against which limit; None where nothing says.
    free_inodes, used_inodes, limit_inodes
        The same for files and folders.
    source
        What said so: ``quota user 1000``, ``btrfs qgroup 0/256``, ``file system`` …
    note
        What a person should know: a soft limit and its grace, doubts of the tool.
    knows_quota
        Whether quotas are part of the figures.
    """

    free_bytes: int
    used_bytes: int | None = None
    limit_bytes: int | None = None
    free_inodes: int | None = None
    used_inodes: int | None = None
    limit_inodes: int | None = None
    source: str = ""
    note: str = ""
    knows_quota: bool = False

    @property
    def share(self) -> float:
        """The larger of the used shares of bytes and inodes, 0 to 1."""
        return max(self._shares)

    @property
    def inodes_are_scarcer(self) -> bool:
        """Whether more of the inodes than of the bytes is used."""
        of_bytes, of_inodes = self._shares
        return of_inodes > of_bytes

    @property
    def _shares(self) -> tuple[float, float]:
        pairs = ((self.used_bytes, self.limit_bytes), (self.used_inodes, self.limit_inodes))
        of_bytes, of_inodes = (
            used / most if used is not None and most else 0.0 for used, most in pairs
        )
        return of_bytes, of_inodes


def quota_room(name: str, quota: Quota) -> Room | None:
    """A quota as room; None where it limits nothing.

    Raises
    ------
    ToolFailed
        Its numbers cannot be meant.
    """
    space, inodes = quota.bytes, quota.inodes
    for limit in (space, inodes):
        if limit is not None and (limit.used < 0 or limit.soft < 0 or limit.hard < 0):
            raise ToolFailed(f"negative numbers ({quota})")
    free_inodes = None if inodes is None else inodes.free
    if space.free is None and free_inodes is None:
        return None
    return Room(
        free_bytes=UNLIMITED if space.free is None else space.free,
        used_bytes=None if space.free is None else space.used,
        limit_bytes=space.effective,
        free_inodes=free_inodes,
        used_inodes=None if inodes is None or free_inodes is None else inodes.used,
        limit_inodes=None if inodes is None else inodes.effective,
        source=f"{name} {quota.whose}".strip(),
        note=", ".join(filter(None, (_grace("", space), _grace("inode ", inodes), quota.doubt))),
        knows_quota=name != "disk.limit_gb",
    )


def _grace(what: str, limit: Limit | None) -> str:
    if limit is None or limit.soft <= 0 or limit.used <= limit.soft:
        return ""
    if limit.over:
        return f"the {what}soft limit is passed and its grace is over: it counts as hard"
    left = f", {limit.grace} left" if limit.grace else ""
    return f"above the {what}soft limit{left}"


def statvfs_room(folder: Path, mount: Mount) -> Room | None:
    """The file system's own free figures; None where it gives none."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        log.debug("no free figures of %s: %s", folder, error)
        return None
    total, unused = status.f_blocks * status.f_frsize, status.f_bfree * status.f_frsize
    has_inodes = status.f_files > 0
    return Room(
        free_bytes=status.f_bavail * status.f_frsize,
        used_bytes=total - unused,
        limit_bytes=total - unused + status.f_bavail * status.f_frsize,
        free_inodes=status.f_favail if has_inodes else None,
        used_inodes=status.f_files - status.f_ffree if has_inodes else None,
        limit_inodes=status.f_files if has_inodes else None,
        source=f"file system ({mount.type})",
        knows_quota=mount.type in HONEST,
    )


def tightest(rooms: Sequence[Room]) -> Room:
    """The room with the fewest free bytes; inodes of whichever has the fewest of these."""
    if not rooms:
        return Room(free_bytes=UNLIMITED, source="nothing", note="nothing says how much is free")
    space = min(rooms, key=lambda r: r.free_bytes)
    counted = [r for r in rooms if r.free_inodes is not None]
    inodes = min(counted, key=lambda r: r.free_inodes or 0, default=space)
    notes = dict.fromkeys(filter(None, (r.note for r in rooms)))
    return replace(
        space,
        free_inodes=inodes.free_inodes,
        used_inodes=inodes.used_inodes,
        limit_inodes=inodes.limit_inodes,
        note="; ".join(notes),
        knows_quota=any(r.knows_quota for r in rooms),
    )

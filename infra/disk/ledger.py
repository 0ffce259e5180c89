"""Room that saves in progress will need: one small file per attempt that saves.

In: an attempt and what it is about to write. Out: how much others have announced and not yet
written. Entries lie in ``disk/reservations/``, or in a folder that several workspaces on one quota
share; each has one writer. An entry whose attempt can no longer make anything visible (closed,
superseded, its stage done) counts for nothing and is swept: no clock decides.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from infra.disk.usage import size_of
from infra.host.reading import exists, make_folder, names_in
from infra.jobs.protocol import AttemptRef
from infra.store import atomic
from infra.store.workspace import Workspace

log = logging.getLogger(__name__)


class Need(NamedTuple):
    """Room that is asked for."""

    bytes: int
    inodes: int = 0


class Reservation(NamedTuple):
    """One entry: whose, how much, and how much of it has been written already (bytes)."""

    path: Path
    workspace: Path
    ref: AttemptRef
    need: Need
    written: int

    @property
    def outstanding(self) -> int:
        """Bytes that are still to come."""
        return max(0, self.need.bytes - self.written)


class Ledger:
    """The reservations of one folder, as one workspace sees them.

    Parameters
    ----------
    workspace
        Whose attempts this process writes entries for.
    folder
        Where entries lie; the workspace's own ``disk/reservations`` by default.
    """

    def __init__(self, workspace: Workspace, folder: Path | None = None) -> None:
        self.workspace = workspace
        self.folder = folder or workspace.layout.disk / "reservations"

    def write(self, ref: AttemptRef, need: Need) -> None:
        """Announce what the attempt is about to write; replaces what it announced before.

        Raises
        ------
        OSError
            Not even that fits, or the folder refuses.
        """
        make_folder(self.folder)
        layout = self.workspace.layout
        value = {
            "workspace": str(layout.control),
            "data": str(layout.data),
            "stage_id": ref.stage_id,
            "attempt": ref.number,
            "bytes": need.bytes,
            "inodes": need.inodes,
        }
        atomic.write_json(self._path(ref), value)

    def remove(self, ref: AttemptRef) -> None:
        """It is written, or was given up."""
        atomic.remove_quietly(self._path(ref))

    def others(self, ref: AttemptRef | None = None) -> list[Reservation]:
        """Entries that count, all but that of ``ref``."""
        own = None if ref is None else self._path(ref)
        return [r for r in self._entries() if r.path != own and not self._is_stale(r)]

    def sweep(self) -> list[Path]:
        """Delete entries that count for nothing any more; which they were."""
        gone = [r.path for r in self._entries() if self._is_stale(r)]
        for path in gone:
            atomic.remove_quietly(path)
        return gone

    def _path(self, ref: AttemptRef) -> Path:
        root = hashlib.sha256(str(self.workspace.layout.control).encode()).hexdigest()[:8]
        return self.folder / f"{ref.stage_id}-{ref.number:04d}-{root}.json"

    def _entries(self) -> Iterator[Reservation]:
        try:
            paths = [self.folder / n for n in names_in(self.folder) if n.endswith(".json")]
        except OSError:
            return
        for path in paths:
            if path.name.startswith(atomic.TEMPORARY):
                continue
            try:
                value = atomic.read_json(path)
                if value is not None:
                    yield _reservation(path, value)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("the reservation %s cannot be read and is left out: %s", path, error)

    def _is_stale(self, entry: Reservation) -> bool:
        own = self.workspace
        owner = own if entry.workspace == own.layout.control else Workspace(entry.workspace)
        paths = owner.layout.stage(entry.ref.stage_id)
        try:
            if exists(paths.result) or not exists(paths.attempt(entry.ref.number).intent):
                return True
            return owner.is_stale(*entry.ref)
        except OSError as error:  # somebody else's workspace, closed to us
            log.debug("%s counts: %s", entry.path, error)
            return False


def _reservation(path: Path, value: dict[str, Any]) -> Reservation:
    ref = AttemptRef(str(value["stage_id"]), int(value["attempt"]))
    folder = Path(value["data"]) / "stages" / ref.stage_id / "checkpoints"
    written = 0
    try:
        for part in folder.glob(f"{atomic.TEMPORARY}step-*-a{ref.number}"):
            written += size_of(part).bytes
    except OSError as error:  # it has just become visible, or was swept
        log.debug("%s: %s", folder, error)
    need = Need(int(value["bytes"]), int(value["inodes"]))
    return Reservation(path, Path(value["workspace"]), ref, need, written)

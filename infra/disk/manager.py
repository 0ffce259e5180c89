"""The disk for the orchestrator and running attempts: checks, frees and reserves space.

In: a workspace and the ``disk`` section. Out: a :class:`DiskManager`. It combines quota tools, the
reservations of others and a probe write: where the tools are blind, the write decides. Checks never
raise; only :meth:`DiskManager.reserve` does, when nothing fits.

Space for saves in progress is reserved by one small file per saving attempt, in
``disk/reservations/``, or in a folder that several workspaces on one quota share; each file has one
writer. An entry is void and removed once its attempt can no longer publish files (closed,
superseded, its stage done): no clock decides.

:class:`DiskWatch` checks while something runs, for the orchestrator and for jobs alike: it warns,
reclaims, and reports when there is space again, each once per crossing and not once per check.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from infra.disk.forecast import STATE_BYTES, largest_checkpoint, model_size
from infra.disk.garbage_collection import Candidate, ReclaimedBytes, carry_out, plan_reclaim
from infra.disk.inventory import CopyCheck, Inventory, read_inventory
from infra.disk.probe import FreeSpace, Prober
from infra.disk.usage import measure, size_of
from infra.host.files import existing, exists, make_folder, sync_file_system
from infra.jobs.dispatcher import AttemptRef
from infra.store import atomic
from infra.store.atomic import PROBE_BYTES, no_space_error, refusal
from infra.store.workspace import Workspace, doubtful_folder
from refiner_core.contract.config import DiskConfig
from refiner_core.contract.errors import NoSpaceError, RefinerError
from refiner_core.contract.placement import STAGES
from refiner_core.report.printing import size

log = logging.getLogger(__name__)
#: Files and folders of a save; free inodes below which they are reported.
SAVE_INODES, _FEW_INODES = 16, 1000


class _Reservation(NamedTuple):
    """One entry: its owner, its bytes, and how many of them have been written already."""

    path: Path
    workspace: Path
    ref: AttemptRef
    bytes: int
    written: int

    @property
    def outstanding(self) -> int:
        """Bytes still to be written."""
        return max(0, self.bytes - self.written)


class Reservations:
    """The reservations of one folder, as one workspace sees them.

    Parameters
    ----------
    workspace
        The workspace of this process's attempts.
    folder
        Folder of the entries; the workspace's own ``disk/reservations`` by default.
    """

    def __init__(self, workspace: Workspace, folder: Path | None = None) -> None:
        self.workspace = workspace
        self.folder = folder or workspace.layout.disk / "reservations"

    def write(self, ref: AttemptRef, need_bytes: int) -> None:
        """Announce the attempt's next write, in place of an earlier announcement.

        Raises
        ------
        OSError
            Not even the entry fits, or the folder refuses.
        """
        make_folder(self.folder)
        layout = self.workspace.layout
        value = {
            "workspace": str(layout.control),
            "data": str(layout.data),
            "stage_id": ref.stage_id,
            "attempt": ref.number,
            "bytes": need_bytes,
            "inodes": SAVE_INODES,
        }
        atomic.write_json(self._path(ref), value)

    def remove(self, ref: AttemptRef) -> None:
        """Remove the entry: the data are written, or given up."""
        atomic.remove_quietly(self._path(ref))

    def others(self, ref: AttemptRef | None = None) -> list[_Reservation]:
        """Valid entries, except that of ``ref``."""
        own = None if ref is None else self._path(ref)
        return [r for r in self._entries() if r.path != own and not self._is_stale(r)]

    def sweep(self) -> list[Path]:
        """Delete void entries, and return them."""
        gone = [r.path for r in self._entries() if self._is_stale(r)]
        for path in gone:
            atomic.remove_quietly(path)
        return gone

    def _path(self, ref: AttemptRef) -> Path:
        root = hashlib.sha256(str(self.workspace.layout.control).encode()).hexdigest()[:8]
        return self.folder / f"{ref.stage_id}-{ref.number:04d}-{root}.json"

    def _entries(self) -> Iterator[_Reservation]:
        try:
            paths = atomic.json_files(self.folder)
        except OSError:
            return
        for path in paths:
            try:
                value = atomic.read_json(path)
                if value is None:
                    continue
                ref = AttemptRef(str(value["stage_id"]), int(value["attempt"]))
                folder = Path(value["data"]) / "stages" / ref.stage_id / "checkpoints"
                parts = folder.glob(f"{atomic.TEMPORARY}step-*-a{ref.number}")
                written = 0
                with contextlib.suppress(OSError):  # renamed just now, or removed
                    written = sum(size_of(part).bytes for part in parts)
                where = Path(value["workspace"])
                yield _Reservation(path, where, ref, int(value["bytes"]), written)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("the reservation %s is unreadable and ignored: %s", path, error)

    def _is_stale(self, entry: _Reservation) -> bool:
        owner = self.workspace
        if entry.workspace != owner.layout.control:
            owner = Workspace(entry.workspace)
        paths = owner.layout.stage(entry.ref.stage_id)
        try:
            if exists(paths.result) or not exists(paths.attempt(entry.ref.number).intent):
                return True
            return owner.is_stale(*entry.ref)
        except OSError as error:  # another user's workspace, closed to this one
            log.debug("%s counts: %s", entry.path, error)
            return False


_GIB = 2**30
#: Assumed size of a save without known figures.
FLOOR_BYTES = 4 << 20
_LONGEST_CACHE_S = 10.0
_WRITE_CACHE_S = 2.0
_ROUNDS = 3  # of reclaiming: it may free less than was counted


class DiskManager:
    """The disk space of one workspace. Thread-safe.

    Parameters
    ----------
    workspace, config
        The workspace, and the ``disk`` section.
    clock, sleep
        Seconds, monotonic; how to wait.
    stop_requested_by
        Whether this process was asked to end: waiting for space then ends at once.

    Raises
    ------
    ConfigurationError
        ``disk.probe`` is unknown.
    """

    def __init__(
        self,
        workspace: Workspace,
        config: DiskConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.workspace, self.config = workspace, config
        ledger = None if config.ledger is None else Path(config.ledger).expanduser().absolute()
        self.ledger = Reservations(workspace, ledger)
        self._clock, self._sleep, self._stop_asked = clock, sleep, stop_requested
        layout, tools = workspace.layout, _known_tools(workspace, config)
        self._prober = Prober(layout.data, tools, measure=lambda: measure(layout))
        self._look = CopyCheck(clock)
        self._lock = threading.RLock()
        self._cached: tuple[FreeSpace, float] | None = None  # with its time
        #: Time and size of the last successful probe write.
        self._wrote: tuple[float, int] | None = None
        self._read_only = False  # by the last probe write
        self._random = random.Random()
        self._good_for_s = min(config.watch_s / 4, _LONGEST_CACHE_S)

    # ------------------------------------------------------------ checking

    def available(self, *, fresh: bool = False) -> FreeSpace:
        """The free space, measured again after a quarter of ``watch_s`` (10 s at most), or with
        ``fresh``."""
        with self._lock:
            now = self._clock()
            if fresh or self._cached is None or now - self._cached[1] >= self._good_for_s:
                self._cached = (self._prober.observe(), now)
            return self._cached[0]

    def reserved(self, ref: AttemptRef | None = None) -> int:
        """Bytes that attempts other than ``ref`` have announced and not yet written."""
        return sum(r.outstanding for r in self.ledger.others(ref))

    def shortage(
        self, need_bytes: int, ref: AttemptRef | None = None, *, fresh: bool = False
    ) -> int:
        """Bytes missing for ``need_bytes``, after the margin and the reservations of others; 0 if
        it fits. A lack of inodes counts as bytes too."""
        self._read_only = False
        space = self.available(fresh=fresh)
        margin = int(self.config.margin_gb * _GIB)
        missing = need_bytes + margin + self.reserved(ref) - space.free_bytes
        if missing > 0:
            return missing
        fits = not self._missing_inodes(space, ref) and self._write_goes_through(need_bytes, fresh)
        return 0 if fits else max(1, need_bytes)

    def need_of(self, stage_id: str) -> int:
        """Bytes that the stage's next save will need: the largest of its checkpoints, else an
        estimate from the model's size, else a small floor."""
        known = largest_checkpoint(self.workspace, stage_id)
        return max(known or self._estimate(stage_id), FLOOR_BYTES)

    def lacking(self, need_bytes: int, ref: AttemptRef | None = None) -> str:
        """Text for what is missing for ``need_bytes``: bytes, or inodes."""
        inodes = self._missing_inodes(self.available(), ref)
        if inodes:
            return f"{inodes} more files and folders (inodes)"
        return size(need_bytes)

    def status_line(self) -> str:
        """Text for people: ``12.3 of 100.0 GiB used, 3.0 GiB reserved``; or few free inodes."""
        space, reserved = self.available(), self.reserved()
        if space.free_inodes is not None and space.free_inodes < _FEW_INODES:
            text = f"{space.free_inodes:,} more files and folders (inodes) possible"
        elif space.used_bytes is None or space.limit_bytes is None:
            text = f"{size(space.free_bytes)} free"
        else:
            used, limit = space.used_bytes / _GIB, space.limit_bytes / _GIB
            digits = 1 if limit >= 1 else 3
            text = f"{used:,.{digits}f} of {limit:,.{digits}f} GiB used"
        return f"{text}, {size(reserved)} reserved" if reserved else text

    # ------------------------------------------------------------ freeing space

    def inventory(self, *, as_if_dropped: bool = False) -> Inventory:
        """Inventory of the workspace; ``as_if_dropped``: without idle holds."""
        return read_inventory(self.workspace, as_if_dropped=as_if_dropped)

    def candidates(self) -> list[Candidate]:
        """All that may go."""
        return plan_reclaim(self.inventory(), None)

    def carry_out(self, candidates: list[Candidate]) -> ReclaimedBytes:
        """Delete candidates, and let the file system return the space."""
        done = carry_out(self.workspace, candidates, self._look)
        self._settle()
        return done

    def reclaim(self, need_bytes: int, ref: AttemptRef | None = None) -> ReclaimedBytes:
        """Delete by the policy until ``need_bytes`` fit, or nothing more may go."""
        self.ledger.sweep()
        total = ReclaimedBytes()
        for _ in range(_ROUNDS):
            missing = self.shortage(need_bytes, ref, fresh=True)
            if not missing or self._read_only:
                break  # on a read-only disk the problem is not space
            inodes = self._missing_inodes(self.available(), ref)
            try:
                wanted = plan_reclaim(self.inventory(), missing, inodes)
                done = self.carry_out(wanted) if wanted else ReclaimedBytes()
            except (OSError, ValueError, RefinerError) as error:
                log.warning("nothing was reclaimed: %s", error)
                break
            if not done.items:
                break
            total = ReclaimedBytes(total.bytes + done.bytes, (*total.items, *done.items))
        return total

    def free_space(self, need_bytes: int, ref: AttemptRef | None = None) -> ReclaimedBytes | None:
        """Reclaim if ``need_bytes`` do not fit, where ``disk.reclaim`` allows it; None if they
        still do not."""
        if not self.shortage(need_bytes, ref, fresh=True):
            return ReclaimedBytes()
        self._settle()  # space freed just now may not be returned yet
        done = self.reclaim(need_bytes, ref) if self.config.reclaim else ReclaimedBytes()
        return None if self.shortage(need_bytes, ref, fresh=True) else done

    @contextlib.contextmanager
    def reserve(self, ref: AttemptRef, need_bytes: int) -> Iterator[None]:
        """Announce a save of ``need_bytes`` for the duration of the block.

        The entry is written first and checked next, so that of two writers that do not fit
        together never both continue; one that does not fit withdraws and retries for ``hold_s``.

        Raises
        ------
        NoSpaceError
            It did not fit, even after all permitted reclaiming.
        """
        deadline, said = self._clock() + self.config.hold_s, False
        while not self._announced_and_fits(ref, need_bytes):
            made = self.free_space(need_bytes, ref)
            if made is not None and self._announced_and_fits(ref, need_bytes):
                break
            self.ledger.remove(ref)
            left_s = deadline - self._clock()
            if left_s <= 0 or self._stop_asked():
                raise self._no_space(need_bytes, ref)
            if not said:
                log.warning("waiting for space: %d bytes (%s)", need_bytes, self.status_line())
                said = True
            pause_s = min(1.0, self.config.watch_s / 4)
            self._sleep(min(left_s, pause_s * (0.5 + self._random.random())))
        try:
            yield
        finally:
            self.ledger.remove(ref)

    # ------------------------------------------------------------ parts

    def _announced_and_fits(self, ref: AttemptRef, need_bytes: int) -> bool:
        """Write the entry, and check. If the entry is refused for another reason than a lack of
        space, the save continues without it, unknown to others."""
        try:
            self.ledger.write(ref, need_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False
            log.warning("the reservation of %d bytes cannot be written: %s", need_bytes, error)
        return not self.shortage(need_bytes, ref, fresh=True)

    def _estimate(self, stage_id: str) -> int:
        """Bytes of a checkpoint of a training stage that has never saved; 0 if unknown."""
        paths = self.workspace.layout.stage(stage_id)
        numbers = paths.attempt_numbers()
        if stage_id.rpartition("-")[0] not in STAGES or not numbers:
            return 0
        try:
            config = self.workspace.part(paths.attempt(numbers[-1]), "config")
            name, dtype = str(config["model"]["name_or_path"]), str(config["model"]["dtype"])
        except (RefinerError, KeyError, TypeError) as error:
            log.debug("the size of a checkpoint of %s is unknown: %s", stage_id, error)
            return 0
        parameters = model_size(Path(name).expanduser(), name).parameters or 0
        return parameters * STATE_BYTES.get(dtype, max(STATE_BYTES.values()))

    def _missing_inodes(self, space: FreeSpace, ref: AttemptRef | None) -> int:
        if space.free_inodes is None:
            return 0
        saves = 1 + len(self.ledger.others(ref))
        return max(0, SAVE_INODES * saves - space.free_inodes)

    def _write_goes_through(self, need_bytes: int, fresh: bool) -> bool:
        """Test by writing, which also finds quotas that no tool shows. A success holds for two
        seconds."""
        probe = max(4096, min(need_bytes, PROBE_BYTES))
        now = self._clock()
        at, wrote = self._wrote or (now, 0)
        if not fresh and wrote >= probe and now - at < _WRITE_CACHE_S:
            return True
        layout = self.workspace.layout
        roots = {existing(layout.control): 4096, existing(layout.data): probe}
        refused = {refusal(folder, bytes_) for folder, bytes_ in roots.items()}
        self._read_only = errno.EROFS in refused
        self._wrote = (now, probe) if refused == {None} else None
        return refused == {None}

    def _settle(self) -> None:
        """Sync after deleting: btrfs, for one, returns quota only then."""
        for root in {existing(self.workspace.layout.data), existing(self.workspace.layout.control)}:
            sync_file_system(root)
        self._cached = self._wrote = None

    def _no_space(self, need_bytes: int, ref: AttemptRef) -> NoSpaceError:
        space = self.available()
        if self._read_only:
            why = OSError(errno.EROFS, os.strerror(errno.EROFS))
            return no_space_error(self.workspace.layout.data, "waiting for space", why)
        missing = self.lacking(self.shortage(need_bytes, ref), ref)
        return NoSpaceError(
            f"No space for {size(need_bytes)} in {self.workspace.layout.data}: {missing} are "
            f"missing ({self.status_line()}, by {space.source})",
            expected="free space on the disk, and in the quota of the user or group",
            fix="see `refiner disk`, free some space and run the same command again",
        )


def _known_tools(workspace: Workspace, config: DiskConfig) -> DiskConfig:
    """The configuration without a probe program if the workspace is another user's."""
    if not config.probe.startswith("command:") or doubtful_folder(workspace.layout)[0] is None:
        return config
    log.warning("disk.probe is ignored: it names a program, and %s is another's", workspace.root)
    return replace(config, probe="auto")


EventKind = Literal[
    "warn",  # more than `disk.warn_share` is used
    "reclaimed",  # something was deleted to free space
    "short",  # the next saves do not fit, and nothing more may be deleted
    "room",  # they fit again
]


class DiskEvent(NamedTuple):
    """An event for people, or an event log."""

    kind: EventKind
    message: str
    room: FreeSpace
    bytes: int = 0  # reclaimed, or missing


class DiskWatch:
    """Checks every ``watch_s``.

    Parameters
    ----------
    disk_manager
        Has the free space, and the ``disk`` section.
    need
        Bytes that the next saves of all running stages need.
    on_event
        Receives events, from the watching thread.
    """

    def __init__(
        self,
        disk_manager: DiskManager,
        need: Callable[[], int],
        on_event: Callable[[DiskEvent], None],
    ) -> None:
        self.disk_manager, self._need, self._on_event = disk_manager, need, on_event
        self._warned = self._short = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk watch", daemon=True)

    def __enter__(self) -> DiskWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread; repetition is harmless."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def observe(self) -> None:
        """Check once, and act on the result."""
        space = self.disk_manager.available(fresh=True)
        above = space.share >= self.disk_manager.config.warn_share
        if above and not self._warned:
            self._tell("warn", f"{space.share:.0%} used: {self.disk_manager.status_line()}", 0)
        self._warned, need = above, self._need()
        if need <= 0:
            return
        missing = self.disk_manager.shortage(need)
        if missing and self.disk_manager.config.reclaim:
            done = self.disk_manager.reclaim(need)
            if done.items:
                text = f"{size(done.bytes)} reclaimed ({len(done.items)} items)"
                self._tell("reclaimed", text, done.bytes)
            missing = self.disk_manager.shortage(need)
        if bool(missing) == self._short:
            return
        self._short = bool(missing)
        if missing:
            what = self.disk_manager.lacking(missing)
            self._tell("short", f"{what} are missing for the next saves", missing)
        else:
            self._tell("room", f"there is space again: {self.disk_manager.status_line()}", 0)

    def _tell(self, kind: EventKind, message: str, bytes_: int) -> None:
        log.log(logging.INFO if kind == "room" else logging.WARNING, "disk: %s", message)
        self._on_event(DiskEvent(kind, message, self.disk_manager.available(), bytes_))

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.observe()
            except Exception:  # a dead watcher would be noticed only when it is too late
                log.exception("checking the disk failed")
            self._ended.wait(self.disk_manager.config.watch_s)

"""Processes that work on runs, and the leases that keep shared servers alive.

The process that works on a run, as far as it is visible from here: a process of this host can be
checked; of one on another host only its own records of its start and end are known. Turns ensure
that of several processes that take over a run at once, exactly one does.

A server lives while there is a lease, and some time longer: one file per holder,
``leases/<holder>.json``, renewed by a counter that its holder moves. No clocks are compared:
observers time by their own clock how long a counter has not moved. Holders are attempts at stages
that use the server (``grpo-0123…-0001``) and calls that wait for the server or for a queued job
that will use it (``run-…``). A lease of an ended attempt, or of a call without an orchestrator, is
void whatever its counter does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.host.files import exists, make_folder
from infra.host.processes import ProcessId
from infra.store import atomic
from infra.store.layout import call_title
from infra.store.records import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError

Standing = Literal[
    "none",  # never taken over
    "running",
    "elsewhere",  # it runs on another host, or was cut off there: it cannot be checked from here
    "ended",  # by itself: every stage was in a final state, or an error came
    "gone",  # killed, or its host was restarted
]


@dataclass(frozen=True)
class OrchestratorProcess:
    """The newest process that took a run over.

    ``job`` is the Slurm job that it is, if any; ``turn`` counts the takeovers so far.
    """

    standing: Standing
    turn: int = 0
    pid: int = 0
    host: str = ""
    job: str = ""
    exit_code: int | None = None
    at: str = ""

    @property
    def works(self) -> bool:
        """Tell whether it works on the run, or may."""
        return self.standing in ("running", "elsewhere")

    @property
    def where(self) -> str:
        """``process 4711 on node7 (job 99)``."""
        job = f" (job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


def orchestrator_of(workspace: Workspace, run_id: str) -> OrchestratorProcess:
    """The process that works on a run."""
    number, turn = workspace.newest_turn(run_id)
    said = workspace.read_orchestrator(run_id) or {}
    text = str(turn.get("process") or said.get("process") or "")
    if not text:
        return OrchestratorProcess("none", number)
    process = ProcessId.parse(text)
    own = said if said.get("process") == text else {}
    standing: Standing = "elsewhere"
    if own.get("state") == "ended":
        standing = "ended"
    elif process.here:
        standing = "running" if process.alive else "gone"
    job, at = str(turn.get("job") or ""), str(own.get("at") or turn.get("at") or "")
    code = own.get("exit_code")
    return OrchestratorProcess(standing, number, process.pid, process.host, job, code, at)


def wanted_by_others(workspace: Workspace, ours: AbstractSet[str]) -> dict[str, str]:
    """Stage id -> another run that a process of this host works on and that has the stage.

    A run that is recorded as worked on from another host is left out, since it may be long gone.
    """
    found: dict[str, str] = {}
    for other in workspace.runs():
        if other.run not in ours and orchestrator_of(workspace, other.run).standing == "running":
            found |= dict.fromkeys(other.stages.values(), other.run)
    return found


def take_up(workspace: Workspace, run_id: str, *, regardless: bool = False) -> None:
    """Take a run over in this process.

    Parameters
    ----------
    regardless
        Even if it is recorded as worked on from another host, which cannot be checked.

    Raises
    ------
    ConfigurationError
        Another process works on it.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    before = require_idle(workspace, run_id, regardless=regardless, job=job)
    if not take_turn(workspace, run_id, before.turn):
        raise busy_error(run_id, orchestrator_of(workspace, run_id))


def take_turn(workspace: Workspace, run_id: str, after: int) -> bool:
    """Take a call over as turn ``after`` + 1; False if another process was faster."""
    job = os.environ.get("SLURM_JOB_ID", "")
    mine = {"process": str(ProcessId.of()), "job": job, "at": now_text()}
    return workspace.take_turn(run_id, after, mine)


def require_idle(
    workspace: Workspace, run_id: str, *, regardless: bool = False, job: str = ""
) -> OrchestratorProcess:
    """Refuse a call that another process works on; ``regardless`` as in :func:`take_up`. A process
    of the Slurm ``job`` that this one is does not count: the job has been restarted.

    Raises
    ------
    ConfigurationError
        Another process works on it.
    """
    who = orchestrator_of(workspace, run_id)
    gone = regardless or (bool(job) and who.job == job)
    if who.standing == "running" or (who.works and not gone):
        raise busy_error(run_id, who)
    return who


def busy_error(run_id: str, who: OrchestratorProcess) -> ConfigurationError:
    """Error for a run that cannot be taken over now, with alternatives."""
    title = call_title(run_id)
    name = title.partition(" ")[2]
    fix = f"check with `refiner status {name}`, or end it with `refiner cancel {name}`"
    if who.standing == "elsewhere":
        fix += (
            f"; if you know that it is gone: `refiner resume {name} --take-over`, which continues "
            "without it"
        )
    return ConfigurationError(
        f"{title[0].upper()}{title[1:]} is worked on already, by {who.where}.",
        expected=f"a {title.partition(' ')[0]} that no process works on",
        fix=fix,
    )


log = logging.getLogger(__name__)

#: Interval of a holder's counter, and the limit of its standstill, seconds. File systems of
#: clusters show a change to other nodes up to a minute late.
RENEW_S = 5.0
LOST_AFTER_S = 180.0
_ATTEMPT = re.compile(r"(?P<stage>.+)-(?P<number>\d{4,})")
_RUN = "run-"
_HAND = "hand-"


def attempt_holder(stage_id: str, number: int) -> str:
    """The holder name of an attempt."""
    return f"{stage_id}-{number:04d}"


def hand_holder() -> str:
    """The holder name of this process, for a command by hand. Its end is not recorded: it has ended
    when it stops renewing."""
    return f"{_HAND}{socket.gethostname()}-{os.getpid()}"


class Lease:
    """One holder's lease. A failure on a full disk is retried at the next renewal."""

    def __init__(
        self, folder: Path, holder: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = folder / "leases" / f"{holder}.json"
        self._clock, self._counter = clock, 0
        self._renewed_at: float | None = None
        self._complaints = atomic.WarningLog()

    def renew(self) -> None:
        """Move the counter if it is due."""
        now = self._clock()
        if self._renewed_at is not None and now - self._renewed_at < RENEW_S:
            return
        self._renewed_at, self._counter = now, self._counter + 1
        try:
            make_folder(self._path.parent)
            atomic.write_json(self._path, {"counter": self._counter}, sync=False)
        except OSError as error:
            text = "the lease %s cannot be renewed: %s"
            self._complaints.warn("renew", text, self._path, error)

    def release(self) -> None:
        """Return the lease; repetition is harmless."""
        if self._renewed_at is not None:
            atomic.remove_quietly(self._path)
        self._renewed_at = None

    def __enter__(self) -> Lease:
        """Renew it in a thread."""
        self.renew()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.release()

    def _run(self) -> None:
        while not self._ended.wait(RENEW_S):
            self.renew()


class CallLeases:
    """The leases of one call: of servers that it waits for, or that its queued jobs need.

    Jobs have leases of their own as soon as they run.
    """

    def __init__(
        self, workspace: Workspace, run_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workspace, self._run_id, self._clock = workspace, run_id, clock
        self._leases: dict[str, Lease] = {}

    def keep(self, wanted: Collection[str]) -> None:
        """Hold leases of these services (by id) and of no others."""
        for service_id in [i for i in self._leases if i not in wanted]:
            self._leases.pop(service_id).release()
        for service_id in wanted:
            folder = self._workspace.layout.service(service_id)
            lease = Lease(folder, f"{_RUN}{self._run_id}", self._clock)
            self._leases.setdefault(service_id, lease).renew()


class LeaseWatch:
    """The server's side: the present holders, and since when there are none."""

    def __init__(
        self, workspace: Workspace, service_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workspace, self._service_id, self._clock = workspace, service_id, clock
        self._signs: dict[str, tuple[int, float]] = {}  # a counter, and since when it is unchanged
        self._idle_since = clock()

    def observe(self) -> list[str]:
        """Names of the holders of valid leases, in order; void leases are removed."""
        now, valid = self._clock(), []
        for holder in _names(self._workspace, self._service_id):
            if _has_ended(self._workspace, holder) or self._is_lost(holder, now):
                log.info("the lease of %s is void", holder)
                atomic.remove_quietly(_path(self._workspace, self._service_id, holder))
            else:
                valid.append(holder)
        if valid:
            self._idle_since = now
        return valid

    @property
    def idle_s(self) -> float:
        """Seconds without any holder, as of the last check."""
        return self._clock() - self._idle_since

    def _is_lost(self, holder: str, now: float) -> bool:
        counter = _counter(_path(self._workspace, self._service_id, holder))
        before, since = self._signs.get(holder, (None, now))
        if before != counter:
            since = now
        self._signs[holder] = (counter, since)
        return now - since > LOST_AFTER_S


def holders(workspace: Workspace, service_id: str) -> list[str]:
    """Recorded holders of a lease, without those that have ended."""
    return [n for n in _names(workspace, service_id) if not _has_ended(workspace, n)]


def held_by_others(workspace: Workspace, service_id: str, ours: Collection[str]) -> str:
    """A holder that is not in ``ours`` (ids of stages and calls); empty if there is none."""
    for holder in holders(workspace, service_id):
        found = _ATTEMPT.fullmatch(holder)
        names = {holder.removeprefix(_RUN), found["stage"] if found else ""}
        if not names & set(ours):
            return holder
    return ""


def _names(workspace: Workspace, service_id: str) -> list[str]:
    return [p.stem for p in atomic.json_files(workspace.layout.service(service_id) / "leases")]


def _counter(path: Path) -> int:
    """A lease's counter; 0 if a power cut or a full disk has left a file without one, so that it
    counts as lost unless it is renewed."""
    with contextlib.suppress(ValueError, AttributeError):
        counter = (atomic.read_json(path) or {}).get("counter")
        return counter if isinstance(counter, int) else 0
    return 0


def _has_ended(workspace: Workspace, holder: str) -> bool:
    if holder.startswith(_RUN):
        return not orchestrator_of(workspace, holder.removeprefix(_RUN)).works
    if holder.startswith(_HAND):
        return False
    found = _ATTEMPT.fullmatch(holder)
    if found is None:
        return True
    paths = workspace.layout.attempt(found["stage"], int(found["number"]))
    return exists(paths.outcome) or exists(workspace.layout.stage(found["stage"]).result)


def _path(workspace: Workspace, service_id: str, holder: str) -> Path:
    return workspace.layout.service(service_id) / "leases" / f"{holder}.json"

"""Slurm's commands, each with a time-out and an explicit format; nothing here judges.

In: job ids, names, users. Out: what the commands print, as rows of named fields. Fields are parted
by a control character that no name contains, so a job called ``a|b c=d`` breaks nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from infra.host.environment import environment
from refiner_core.contract.errors import SystemOutage, UnsupportedError

#: ASCII "unit separator".
_PART = "\x1f"
_QUEUE = {
    "id": "%i",
    "state": "%T",
    "reason": "%r",
    "node": "%N",
    "user": "%U",
    "name": "%j",
}
_ACCOUNT = {
    "id": "JobID",
    "state": "State",
    "exit_code": "ExitCode",
    "reason": "Reason",
    "node": "NodeList",
    "user": "UID",
    "name": "JobName",
}
_CONTROL = {
    "raw_id": "JobId",
    "array_id": "ArrayJobId",
    "array_index": "ArrayTaskId",
    "name": "JobName",
    "user": "UserId",
    "state": "JobState",
    "reason": "Reason",
    "restarts": "Restarts",
    "exit_code": "ExitCode",
    "preempted_at": "PreemptTime",
    "node": "NodeList",
}
_NO_JOB = re.compile(r"invalid job id", re.IGNORECASE)
_NO_ACCOUNTING = re.compile(
    r"accounting storage is disabled|slurm_persist_conn_open|unable to connect to database"
    r"|problem talking to the database|connection refused",
    re.IGNORECASE,
)
_NOT_THERE = re.compile(
    r"invalid job id|already completing or completed|job/step already complet"
    r"|no such process|job is pending execution",
    re.IGNORECASE,
)
#: `sacct --name` asks for a window of time; a job that is older is long found or given up.
_SINCE = "now-30days"

Row = Mapping[str, str]


class SlurmUnavailable(SystemOutage):
    """A command gave no answer: the controller is away or overloaded, or no process could be
    started to ask it. A state, not a failure."""


@dataclass(frozen=True)
class Accounts:
    """What sacct knows; ``available`` is False where accounting is off or does not answer."""

    available: bool
    rows: tuple[Row, ...] = ()


class SlurmCommands(Protocol):
    """What is asked of a scheduler; every method may raise :class:`SlurmUnavailable`."""

    def queue(self, users: Iterable[str]) -> list[Row]:
        """Jobs of these users (numbers) that are not over, one row per task of an array: ``id``,
        ``state``, ``reason``, ``node``, ``user`` (a number), ``name``."""
        ...

    def shown(self, ids: Sequence[str], names: Sequence[str] = ()) -> list[Row]:
        """What the controller still knows of these jobs, over or not, some minutes long: as above,
        and ``restarts``, ``exit_code``, ``preempted_at``."""
        ...

    def accounts(self, ids: Sequence[str], names: Sequence[str] = ()) -> Accounts:
        """What accounting knows of jobs and their steps, by id or by name."""
        ...

    def cancel(self, job_id: str) -> None:
        """End a job; one that is over already is no error."""
        ...

    def signal(self, job_id: str, name: str) -> bool:
        """Send a signal to the processes of a running job's steps; False if it runs none."""
        ...

    def release(self, job_id: str) -> None:
        """Let a held job start."""
        ...


class RealSlurm:
    """The commands of this machine; see :class:`SlurmCommands`.

    Raises
    ------
    UnsupportedError
        There are none.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._accounting = _found("sacct")
        absent = [c for c in ("sbatch", "srun", "squeue", "scontrol", "scancel") if not _found(c)]
        if absent:
            raise UnsupportedError(
                f"This machine has no {', '.join(f'`{c}`' for c in absent)}",
                expected="Slurm's commands on PATH, as on a login node",
                fix="run refiner on a login node of the cluster, or set dispatch.executor=local",
            )

    def queue(self, users: Iterable[str]) -> list[Row]:
        """Live jobs; see :class:`SlurmCommands`."""
        printed = self._answer(
            *("squeue", "--noheader", "--array", "--all", f"--user={','.join(sorted(users))}"),
            f"--format={_PART.join(_QUEUE.values())}",
        )
        return _rows(printed, _QUEUE)

    def shown(self, ids: Sequence[str], names: Sequence[str] = ()) -> list[Row]:
        """Jobs that the controller remembers; see :class:`SlurmCommands`."""
        # `scontrol` takes one id, or prints all jobs.
        one = ids[:1] if len(ids) == 1 and not names else ()
        code, printed, said = self._run("scontrol", "--oneliner", "show", "job", *one)
        if code and not _NO_JOB.search(said):
            raise _unavailable("scontrol", said)
        found = (_control_row(line) for line in printed.splitlines() if line.startswith("JobId="))
        wanted_ids, wanted_names = set(ids), set(names)
        return [r for r in found if r["id"] in wanted_ids or r["name"] in wanted_names]

    def accounts(self, ids: Sequence[str], names: Sequence[str] = ()) -> Accounts:
        """What sacct prints; see :class:`SlurmCommands`."""
        if not self._accounting:
            return Accounts(False)
        rows: list[Row] = []
        for select in _selections(ids, names):
            code, printed, said = self._run(
                *("sacct", "--noheader", "--parsable2", f"--delimiter={_PART}", "--allusers"),
                *(f"--format={','.join(_ACCOUNT.values())}", *select),
            )
            if code and _NO_ACCOUNTING.search(said):
                return Accounts(False)
            if code:
                raise _unavailable("sacct", said)
            rows += _rows(printed, _ACCOUNT)
        return Accounts(True, tuple(rows))

    def cancel(self, job_id: str) -> None:
        """``scancel``."""
        code, _, said = self._run("scancel", job_id)
        if code and not _NOT_THERE.search(said):
            raise _unavailable("scancel", said)

    def signal(self, job_id: str, name: str) -> bool:
        """``scancel --signal``: to the steps, not to the batch script."""
        code, _, said = self._run("scancel", "--verbose", f"--signal={name}", job_id)
        if code and not _NOT_THERE.search(said):
            raise _unavailable("scancel", said)
        return code == 0 and not _NOT_THERE.search(said)

    def release(self, job_id: str) -> None:
        """``scontrol release``."""
        code, _, said = self._run("scontrol", "release", job_id)
        if code and not _NOT_THERE.search(said):
            raise _unavailable("scontrol", said)

    def _answer(self, *command: str) -> str:
        code, printed, said = self._run(*command)
        if code:
            raise _unavailable(command[0], said)
        return printed

    def _run(self, *command: str) -> tuple[int, str, str]:
        # Site settings of these would change what is printed.
        prefixes = ("SQUEUE_", "SACCT_", "SLURM_TIME_FORMAT", "SCONTROL_", "SCANCEL_")
        env = {k: v for k, v in environment().items() if not k.startswith(prefixes)}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                stdin=subprocess.DEVNULL,
                env={**env, "LC_ALL": "C"},
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _unavailable(command[0], f"no answer in {self._timeout_s:.0f} s") from error
        except OSError as error:  # not there for a moment, or no more processes may be started
            raise _unavailable(command[0], str(error)) from error
        return done.returncode, done.stdout, done.stderr.strip()


def _found(command: str) -> bool:
    return shutil.which(command) is not None


def _unavailable(command: str, said: str) -> SlurmUnavailable:
    lines = said.splitlines() or ["it printed nothing"]
    return SlurmUnavailable(
        f"`{command}` gave no answer: {lines[-1]}",
        expected="a controller that answers",
        fix="nothing: it is asked again; `scontrol ping` shows how Slurm is",
    )


def _rows(printed: str, fields: Mapping[str, str]) -> list[Row]:
    """Rows of as many parts as were asked for; a name with a line break in it makes others."""
    # Not splitlines(): the separator counts as a line break for it.
    parts = (line.split(_PART) for line in printed.split("\n"))
    return [dict(zip(fields, p, strict=True)) for p in parts if len(p) == len(fields)]


def _control_row(line: str) -> Row:
    row = {}
    for name, key in _CONTROL.items():
        found = re.search(rf"(?:^| ){key}=(\S*)", line)
        value = found[1] if found else ""
        row[name] = "" if value in ("(null)", "None", "N/A", "Unknown") else value
    array, index = row.pop("array_id"), row.pop("array_index")
    # name(number); who has put another one into a job's name is not believed any.
    one = line.count(" UserId=") == 1
    row["user"] = row["user"].rpartition("(")[2].rstrip(")") if one else ""
    row["id"] = f"{array}_{index}" if array and index else row["raw_id"]
    return row


def _selections(ids: Sequence[str], names: Sequence[str]) -> Iterable[list[str]]:
    """Arguments of `sacct`, in commands of a length that every system takes."""
    for start in range(0, len(ids), 500):
        yield [f"--jobs={','.join(ids[start : start + 500])}"]
    for start in range(0, len(names), 500):
        yield [f"--name={','.join(names[start : start + 500])}", f"--starttime={_SINCE}"]

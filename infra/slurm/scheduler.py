"""The scheduler: Slurm's commands, and one query for all jobs of an orchestrator.

Every command has a time-out and an explicit format. Fields are separated by a control character
that no name contains, so a job called ``a|b c=d`` breaks nothing.

In: the wanted jobs, by id or (after a crash before the id was recorded) by their unique name.
Out: an answer for each, by few queries, and never a wrong "dead". At most one round of queries per
``poll_s``: squeue for live jobs, and only for jobs that it no longer lists the controller's memory
(scontrol) and accounting (sacct). In between, the last answer counts. A scheduler that does not
answer is asked less and less often, and no job's state follows from its silence.

Accounting lags behind, a controller forgets, and both are empty right after a start: a job that is
missing from all counts as lost only after several answers in a row, some seconds apart by our own
clock.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from infra.host.processes import environment, run_program
from infra.slurm.states import JobFacts, facts_of, facts_of_accounts
from refiner_core.contract.errors import SystemOutage, UnsupportedError

#: ASCII "unit separator".
_PART = "\x1f"
_QUEUE = {"id": "%i", "state": "%T", "reason": "%r", "node": "%N", "user": "%U", "name": "%j"}
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
_FAILED_NODE = re.compile(r"DOWN|FAIL|NOT_RESPONDING|\*")
#: `sacct --name` needs a window of time; an older job has been found or given up long ago.
_SINCE = "now-30days"

Row = Mapping[str, str]


class SlurmUnavailable(SystemOutage):
    """A command gave no answer: the controller is down or overloaded, or no process could be
    started to ask it. A state, not a failure."""


class RealSlurm:
    """The commands of this machine; every method may raise :class:`SlurmUnavailable`.

    Raises
    ------
    UnsupportedError
        The commands are not installed.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        needed = ("sbatch", "srun", "squeue", "scontrol", "scancel")
        absent = [f"`{command}`" for command in needed if shutil.which(command) is None]
        if absent:
            raise UnsupportedError(
                f"This machine has no {', '.join(absent)}",
                expected="Slurm's commands on PATH, as on a login node",
                fix="run refiner on a login node of the cluster, or set dispatch.executor=local",
            )

    def queue(self, users: Iterable[str]) -> list[Row]:
        """Active jobs of these users (numbers), one row per task of an array: ``id``,
        ``state``, ``reason``, ``node``, ``user`` (a number), ``name``."""
        done = self._run(
            *("squeue", "--noheader", "--array", "--all", f"--user={','.join(sorted(users))}"),
            f"--format={_PART.join(_QUEUE.values())}",
        )
        return _rows(done.stdout, _QUEUE)

    def shown(self, ids: Sequence[str], names: Sequence[str] = ()) -> list[Row]:
        """The controller's memory of these jobs, ended or not, some minutes long: fields as above,
        and ``restarts``, ``exit_code``, ``preempted_at``."""
        # `scontrol` takes one id, or prints all jobs.
        one = ids[:1] if len(ids) == 1 and not names else ()
        done = self._run("scontrol", "--oneliner", "show", "job", *one, passing=_NO_JOB)
        lines = (line for line in done.stdout.splitlines() if line.startswith("JobId="))
        found = map(_control_row, lines)
        wanted_ids, wanted_names = set(ids), set(names)
        return [r for r in found if r["id"] in wanted_ids or r["name"] in wanted_names]

    def accounts(self, ids: Sequence[str], names: Sequence[str] = ()) -> list[Row] | None:
        """Accounting of jobs and their steps, by id or by name; None if it is off."""
        if shutil.which("sacct") is None:
            return None
        rows: list[Row] = []
        # Commands of a length that every system accepts.
        parts = [("jobs", ids[n : n + 500]) for n in range(0, len(ids), 500)]
        parts += [("name", names[n : n + 500]) for n in range(0, len(names), 500)]
        for option, part in parts:
            done = self._run(
                *("sacct", "--noheader", "--parsable2", f"--delimiter={_PART}", "--allusers"),
                f"--format={','.join(_ACCOUNT.values())}",
                f"--{option}={','.join(part)}",
                *([f"--starttime={_SINCE}"] if option == "name" else []),
                passing=_NO_ACCOUNTING,
            )
            if done.returncode:
                return None
            rows += _rows(done.stdout, _ACCOUNT)
        return rows

    def failed_nodes(self, nodes: str) -> list[str]:
        """Those of a job's nodes that are down, or do not answer (``n[1-3]``)."""
        done = self._run("scontrol", "--oneliner", "show", "node", nodes)
        found = re.findall(r"^NodeName=(\S+).*? State=(\S+)", done.stdout, re.MULTILINE)
        return [name for name, state in found if _FAILED_NODE.search(state)]

    def cancel(self, job_id: str) -> None:
        """End a job; no error if it has already ended."""
        self._run("scancel", job_id, passing=_NOT_THERE)

    def signal(self, job_id: str, name: str) -> bool:
        """Send a signal to the processes of a running job's steps, not to the batch script; False
        if it runs none."""
        command = ("scancel", "--verbose", f"--signal={name}", job_id)
        done = self._run(*command, passing=_NOT_THERE)
        return done.returncode == 0 and not _NOT_THERE.search(done.stderr)

    def release(self, job_id: str) -> None:
        """Let a held job start."""
        self._run("scontrol", "release", job_id, passing=_NOT_THERE)

    def _run(
        self, *command: str, passing: re.Pattern[str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; a failure with a message that matches ``passing`` is none."""
        # Site settings of these would change the output.
        prefixes = ("SQUEUE_", "SACCT_", "SLURM_TIME_FORMAT", "SCONTROL_", "SCANCEL_")
        env = {k: v for k, v in environment().items() if not k.startswith(prefixes)}
        try:
            done = run_program(command, self._timeout_s, {**env, "LC_ALL": "C"})
        except subprocess.TimeoutExpired as error:
            raise _unavailable(command[0], f"no answer in {self._timeout_s:.0f} s") from error
        except OSError as error:  # missing for a moment, or the limit of processes is reached
            raise _unavailable(command[0], str(error)) from error
        if done.returncode and not (passing and passing.search(done.stderr)):
            raise _unavailable(command[0], done.stderr.strip())
        return done


def _unavailable(command: str, said: str) -> SlurmUnavailable:
    lines = said.splitlines() or ["it printed nothing"]
    return SlurmUnavailable(
        f"`{command}` gave no answer: {lines[-1]}",
        expected="a controller that answers",
        fix="nothing: it is asked again; `scontrol ping` shows Slurm's state",
    )


def _rows(printed: str, fields: Mapping[str, str]) -> list[Row]:
    """Rows with the expected number of parts; a name with a line break in it makes others."""
    # Not splitlines(): it treats the separator as a line break.
    parts = (line.split(_PART) for line in printed.split("\n"))
    return [dict(zip(fields, p, strict=True)) for p in parts if len(p) == len(fields)]


def _control_row(line: str) -> Row:
    row = {}
    for name, key in _CONTROL.items():
        found = re.search(rf"(?:^| ){key}=(\S*)", line)
        value = found[1] if found else ""
        row[name] = "" if value in ("(null)", "None", "N/A", "Unknown") else value
    array, index = row.pop("array_id"), row.pop("array_index")
    # name(number); a row with a second one in the job's name is not trusted.
    one = line.count(" UserId=") == 1
    row["user"] = row["user"].rpartition("(")[2].rstrip(")") if one else ""
    row["id"] = f"{array}_{index}" if array and index else row["raw_id"]
    return row


log = logging.getLogger(__name__)

#: Longest pause between queries while the scheduler does not answer, seconds.
LONGEST_PAUSE_S = 120.0
#: Accounting that was off is tried again after this time, seconds.
_ACCOUNTING_AGAIN_S = 600.0


class JobQuery(NamedTuple):
    """A job to query.

    ``job_id`` is None if it was not recorded; then the job is found by ``name``, and by ``task``
    within an array. ``user`` is the number of its submitter.
    """

    job_id: str | None
    name: str
    task: int | None
    user: str

    @property
    def key(self) -> Hashable:
        """Key that stays the same from query to query."""
        return self.job_id or (self.name, self.task)


#: Facts of a job, or that it is certainly lost, or nothing.
Answer = JobFacts | Literal["lost"] | None
#: A job that is missing everywhere is lost after so many answers, over so many seconds.
PATIENCE = (3, 15.0)


class SchedulerView:
    """Caches the last answers; one per orchestrator.

    Parameters
    ----------
    commands
        Slurm's commands.
    poll_s
        Least seconds between rounds of queries.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        commands: RealSlurm,
        poll_s: float = 10.0,
        *,
        patience: tuple[int, float] = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._commands, self._poll_s, self._clock = commands, poll_s, clock
        self._patience = patience
        self._live: dict[str, JobFacts] = {}
        self._over: dict[Hashable, JobFacts] = {}
        self._lost: set[Hashable] = set()
        #: Since when a missing job has been queried, and the number of answers.
        self._missing: dict[Hashable, tuple[float, int]] = {}
        self._new: dict[str, JobFacts] = {}
        self._next_at = float("-inf")
        self._failures = 0
        self._accounting_at = float("-inf")

    # ------------------------------------------------------------ asking

    def submitted(self, job_id: str, name: str) -> None:
        """Note a job submitted just now: it is live until an answer says otherwise."""
        self._new[job_id] = JobFacts(job_id, "PENDING", name=name, source="sbatch")

    def released(self, job_id: str) -> None:
        """Note a job released just now: it is not held until an answer says so again."""
        if job_id in self._live:
            self._live[job_id] = replace(self._live[job_id], reason="released")

    def observe(self, wanted: Sequence[JobQuery]) -> dict[Hashable, Answer]:
        """Answers by :attr:`JobQuery.key`; queries the scheduler if it is time to."""
        if wanted and self._clock() >= self._next_at:
            self._ask(wanted)
        return {w.key: self._answer(w) for w in wanted}

    def known(self, job_id: str) -> JobFacts | None:
        """A job that was alive at the last query."""
        return self._live.get(job_id)

    def _answer(self, wanted: JobQuery) -> Answer:
        over = self._over.get(wanted.key)
        if over is not None:
            return over
        if wanted.key in self._lost:
            return "lost"
        if wanted.job_id in self._new:
            return self._new[wanted.job_id]
        return None if self._failures else self._in_queue(wanted)

    def _in_queue(self, wanted: JobQuery) -> JobFacts | None:
        if wanted.job_id is not None:
            return self._live.get(wanted.job_id)
        return _pick(self._live.values(), wanted)

    # ------------------------------------------------------------ one round of queries

    def _ask(self, wanted: Sequence[JobQuery]) -> None:
        asked_at = self._clock()
        try:
            rows = self._commands.queue({w.user for w in wanted})
            jobs = [facts_of(row, "squeue") for row in rows]
            self._live = {j.job_id: j for j in jobs if not j.rule.over}
            self._new.clear()
            self._query_remaining(wanted)
        except SlurmUnavailable as error:
            self._failures += 1
            pause = min(self._poll_s * 2**self._failures, max(LONGEST_PAUSE_S, self._poll_s))
            self._next_at = self._clock() + pause
            if self._failures == 1:
                log.warning("%s Jobs continue; their state is unknown until it answers.", error)
            return
        if self._failures:
            log.info("Slurm answers again")
        self._failures, self._next_at = 0, asked_at + self._poll_s

    def _query_remaining(self, wanted: Sequence[JobQuery]) -> None:
        """Query ended jobs, and those without a recorded id."""
        open_ = []
        for w in wanted:
            if self._in_queue(w) is not None:  # an ended job may be requeued by hand
                self._over.pop(w.key, None)
                self._lost.discard(w.key)
                self._missing.pop(w.key, None)
            elif w.key not in self._over and w.key not in self._lost:
                open_.append(w)
        if not open_:
            return
        ids = [w.job_id for w in open_ if w.job_id is not None]
        names = sorted({w.name for w in open_ if w.job_id is None})
        remembered = [facts_of(r, "scontrol") for r in self._commands.shown(ids, names)]
        recorded = list(facts_of_accounts(self._accounts(ids, names)).values())
        for w in open_:
            self._settle(w, _pick(remembered, w), _pick(recorded, w))

    def _settle(self, wanted: JobQuery, answer: JobFacts | None, noted: JobFacts | None) -> None:
        """Combine controller and accounting: the former is fresher; only the latter has steps and
        the user who cancelled."""
        found = answer or (noted if noted is not None and noted.rule.over else None)
        if found is not None and noted is not None:
            found = replace(found, steps=noted.steps, by=noted.by)
        if found is not None:
            self._missing.pop(wanted.key, None)
            if found.rule.over:
                self._over[wanted.key] = found
            else:  # it came back between two queries
                self._live[found.job_id] = found
            return
        since, answers = self._missing.get(wanted.key, (self._clock(), 0))
        self._missing[wanted.key] = (since, answers + 1)
        enough, seconds = self._patience
        if answers + 1 >= enough and self._clock() - since >= seconds:
            del self._missing[wanted.key]
            self._lost.add(wanted.key)

    def _accounts(self, ids: Sequence[str], names: Sequence[str]) -> list[Row]:
        if self._clock() < self._accounting_at:
            return []
        try:
            found = self._commands.accounts(ids, names)
        except SlurmUnavailable as error:
            log.debug("%s", error)
            return []
        if found is None:
            log.debug("accounting is off; only the controller's memory is used")
            self._accounting_at = self._clock() + _ACCOUNTING_AGAIN_S
        return found or []


def _pick(jobs: Iterable[JobFacts], wanted: JobQuery) -> JobFacts | None:
    """The job itself, or the task of an array. Names are public and can be reused, so it must be
    a job of the same user."""
    if wanted.job_id is not None:
        return next((j for j in jobs if j.job_id == wanted.job_id), None)
    number = "" if wanted.task is None else str(wanted.task)
    named = (wanted.name, wanted.user, number)
    return next((j for j in jobs if (j.name, j.user, j.job_id.partition("_")[2]) == named), None)

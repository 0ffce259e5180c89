"""Meaning of Slurm's words: a table of states, a table of reasons, and the class of a job's end.

In: rows of Slurm's commands. Out: :class:`JobFacts`, and from these
:class:`~infra.jobs.dispatcher.JobStatus` values. Pure functions, no queries.

A job is over only in a state that Slurm never leaves by itself; a state that is not in this table
is live. The failure class of an end comes from the state where that is clear (TIMEOUT, NODE_FAIL),
from Slurm's other facts (steps out of memory, a preemption), from the exit code, and last from the
job's output.
"""

from __future__ import annotations

import contextlib
import pwd
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from infra.jobs.dispatcher import JobStatus
from infra.jobs.failures import classify_silent_end, outcome_of
from refiner_core.contract.records import AttemptOutcome, FailureClass, picked


class StateRule(NamedTuple):
    """Meaning of one of Slurm's job states.

    ``over``: no process of the job runs any more, and Slurm will not restart it by itself.
    ``running``: its processes make progress. ``failure``: the class of such an end; None if the
    state alone does not decide. ``words``: for people.
    """

    over: bool
    running: bool
    failure: FailureClass | None
    words: str


STATES: dict[str, StateRule] = {
    "PENDING": StateRule(False, False, None, "waits in the queue"),
    "CONFIGURING": StateRule(False, False, None, "its nodes boot"),
    "POWER_UP_NODE": StateRule(False, False, None, "its nodes boot"),
    "RUNNING": StateRule(False, True, None, ""),
    "RESIZING": StateRule(False, True, None, "changes its size"),
    "SIGNALING": StateRule(False, True, None, "is sent a signal"),
    "SUSPENDED": StateRule(False, False, None, "suspended; it continues by itself"),
    "STOPPED": StateRule(False, False, None, "stopped by a signal, its nodes kept"),
    "COMPLETING": StateRule(False, False, None, "its processes are being ended"),
    "STAGE_OUT": StateRule(False, False, None, "its files are being copied out"),
    "REQUEUED": StateRule(False, False, None, "put back into the queue"),
    "REQUEUE_FED": StateRule(False, False, None, "put back into the federation's queue"),
    "REQUEUE_HOLD": StateRule(False, False, None, "put back into the queue and held"),
    "SPECIAL_EXIT": StateRule(False, False, None, "put back into the queue and held"),
    "RESV_DEL_HOLD": StateRule(False, False, None, "held: its reservation was deleted"),
    "COMPLETED": StateRule(True, False, None, "ended with exit code 0"),
    "FAILED": StateRule(True, False, None, "failed"),
    "CANCELLED": StateRule(True, False, "cancelled", "was cancelled"),
    "TIMEOUT": StateRule(True, False, "time_limit", "reached its time limit"),
    "DEADLINE": StateRule(True, False, "time_limit", "reached its deadline"),
    "NODE_FAIL": StateRule(True, False, "node_failure", "lost its node"),
    "BOOT_FAIL": StateRule(True, False, "launch_failure", "its node did not boot"),
    "OUT_OF_MEMORY": StateRule(True, False, "out_of_memory", "ran out of host memory"),
    "PREEMPTED": StateRule(True, False, "preempted", "was preempted"),
    "REVOKED": StateRule(True, False, "launch_failure", "was withdrawn by its federation"),
}
_UNKNOWN_STATE = StateRule(False, False, None, "a state that this version does not know")

#: Reasons for waiting that do not pass by themselves, with their fix where the word does not
#: give it.
NEVER: dict[str, str] = {
    "BadConstraints": "no node fits the constraints; check `constraint`, `nodelist`, `exclude`",
    "ReqNodeNotAvail": "required nodes are down, drained or reserved",
    "PartitionNodeLimit": "more nodes than the partition allows",
    "PartitionTimeLimit": "its time limit is longer than the partition's; lower `time_limit_min`",
    "InvalidAccount": "the account may not run jobs; set `account` in the profile",
    "InvalidQOS": "the account may not use this QOS; set `qos` in the profile",
    "DependencyNeverSatisfied": "a job that it depends on has failed",
    "JobHoldMaxRequeue": "it was requeued too often; `scontrol release` lets it continue",
    "JobHeldUser": "held by a user; `scontrol release` lets it continue",
    "JobHeldAdmin": "held by an administrator; only an administrator can release it",
}
#: Limits of an account or QOS: on one job; on all its jobs in total; on all its jobs at a time.
_LIMITS = (
    (r"(Assoc|QOS)Max\w+PerJob(Limit)?", "more than is allowed for one job; lower its `resources`"),
    (
        r"(Assoc|QOS)Grp\w*(?<!Run)(Minutes|Wall)(Limit)?",
        "the account or QOS has used up its budget; waiting does not restore it; request more",
    ),
    (
        r"(Assoc|QOS)Grp\w*",
        "the account or QOS is at its limit; it passes when its other jobs end, or never if this "
        "job alone requests more: then lower its `resources`",
    ),
)
_LAUNCH_HELD = re.compile(r"launch[ _]failed[ _]requeued[ _]held", re.IGNORECASE)
_LAUNCH_FAILED = re.compile(r"JobLaunchFailure|launch[ _]failed", re.IGNORECASE)
_NODE_REASON = re.compile(r"NodeDown|NodeFail|SystemFailure|Node_?failure", re.IGNORECASE)
_CANCELLED_BY = re.compile(r"CANCELLED by (\d+)")
_PRINTED: tuple[tuple[re.Pattern[str], FailureClass], ...] = (
    (re.compile(r"oom[-_ ]?kill|: Out Of Memory"), "out_of_memory"),
    (re.compile(r"CANCELLED AT \S+ DUE TO TIME LIMIT"), "time_limit"),
    (re.compile(r"CANCELLED AT \S+ DUE TO PREEMPTION"), "preempted"),
    (re.compile(r"CANCELLED AT \S+ DUE TO NODE FAILURE"), "node_failure"),
    (re.compile(r"could not find submitted jobs in path"), "launch_failure"),
)
#: slurmd's report that it could not open the job's log files.
_NO_LAUNCH = (0, 53)


@dataclass(frozen=True)
class JobFacts:
    """One job's facts from Slurm.

    ``user`` is the number of its owner; ``exit_code`` and ``signal`` are the two halves of
    Slurm's ``a:b``; ``steps`` maps a step's name to its state; ``preempted``: Slurm had asked it to
    end for another job; ``source`` is the command that printed the facts.
    """

    job_id: str
    state: str
    reason: str = ""
    node: str = ""
    name: str = ""
    user: str = ""
    exit_code: int = 0
    signal: int = 0
    restarts: int = 0
    preempted: bool = False
    by: str = ""
    steps: Mapping[str, str] | None = None
    source: str = ""

    @property
    def rule(self) -> StateRule:
        """Rule of its state."""
        return STATES.get(self.state, _UNKNOWN_STATE)

    @property
    def out_of_memory(self) -> bool:
        """Tell whether the job, or a step of it (often only the step), ran out of host memory."""
        return "OUT_OF_MEMORY" in (self.state, *(self.steps or {}).values())

    def as_text(self) -> dict[str, str]:
        """For the record."""
        found: dict[str, object] = {
            **picked(self, "job_id", "state", "reason", "node", "restarts", "source"),
            "exit_code": f"{self.exit_code}:{self.signal}",
            "preempted": "yes" * self.preempted,
            "cancelled_by": self.by,
            "steps": ", ".join(f"{k} {v}" for k, v in (self.steps or {}).items()),
        }
        return {k: str(v) for k, v in found.items() if v}


# ---------------------------------------------------------------- reading rows


def facts_of(row: Mapping[str, str], source: str) -> JobFacts:
    """A job from one row of squeue, scontrol or sacct."""
    code, _, number = row.get("exit_code", "").partition(":")
    by = _CANCELLED_BY.search(row["state"])
    return JobFacts(
        job_id=row["id"],
        state=_state(row["state"]),
        reason=row.get("reason", "").strip().replace("None", ""),
        node=row.get("node", "").replace("None assigned", ""),
        name=row.get("name", ""),
        user=row.get("user", ""),
        exit_code=int(code) if code.isdigit() else 0,
        signal=int(number) if number.isdigit() else 0,
        restarts=int(row.get("restarts") or 0),
        preempted=bool(row.get("preempted_at")),
        by=by[1] if by else "",
        source=source,
    )


def facts_of_accounts(rows: Iterable[Mapping[str, str]]) -> dict[str, JobFacts]:
    """Jobs by id from rows of sacct, their steps within them."""
    jobs: dict[str, JobFacts] = {}
    steps: dict[str, dict[str, str]] = {}
    for row in rows:
        job, _, step = row["id"].partition(".")
        if step:
            steps.setdefault(job, {})[step] = _state(row["state"])
        else:
            jobs[job] = facts_of(row, "sacct")
    return {i: replace(job, steps=steps.get(i)) for i, job in jobs.items()}


def _state(text: str) -> str:
    """``CANCELLED by 1000`` and ``CANCELLED+`` are CANCELLED."""
    words = text.split()
    return words[0].rstrip("+").upper() if words else ""


# ---------------------------------------------------------------- judging


def job_status_of(job: JobFacts, started: bool, printed: Callable[[], str]) -> JobStatus:
    """The sight of a job that Slurm knows.

    ``started``: its worker took the attempt; ``printed`` reads the end of its output, and is
    called for ended jobs only.
    """
    if job.rule.over:
        end, facts = end_of(job, started, printed()), job.as_text()
        status = JobStatus("dead", running=False, reason=job.reason, end=end, facts=facts)
    else:
        held = bool(_LAUNCH_HELD.search(job.reason))
        running = job.rule.running
        status = JobStatus("live", running=running, reason=waiting_for(job), held=held)
    return replace(status, state=job.state, node=job.node)


def waiting_for(job: JobFacts) -> str:
    """Reason why a live job does not run: Slurm's word, with its fix if the reason does not pass by
    itself."""
    key = job.reason.split(",")[0]
    if job.rule.running or _LAUNCH_HELD.search(job.reason):
        return key
    hint = NEVER.get(key) or next((words for p, words in _LIMITS if re.fullmatch(p, key)), "")
    hint = hint or ("" if job.state == "PENDING" else job.rule.words)
    return ": ".join(filter(None, (key, hint)))


def end_of(job: JobFacts, started: bool, printed: str) -> AttemptOutcome:
    """End of a job whose worker recorded no outcome."""
    where = f" on {job.node}" if job.node else ""
    prefix = f"Slurm says {job.state}{where}"
    if job.out_of_memory:
        return outcome_of("out_of_memory", f"{prefix}: more host memory than it requested")
    if job.preempted and job.state != "TIMEOUT":
        return outcome_of("preempted", f"{prefix}: preempted for another job")
    if job.rule.failure == "cancelled":
        whom = "somebody"
        if job.by:
            whom = f"user {job.by}"
            with contextlib.suppress(KeyError, OverflowError):
                whom = pwd.getpwuid(int(job.by)).pw_name
        return outcome_of("cancelled", f"{prefix}: cancelled by {whom}")
    if job.rule.failure is not None:
        return outcome_of(job.rule.failure, f"{prefix}: it {job.rule.words}")
    return _end_by_trace(job, started, printed, prefix)


def _end_by_trace(job: JobFacts, started: bool, printed: str, prefix: str) -> AttemptOutcome:
    """End of a FAILED or COMPLETED job without an outcome, from exit code, reason and output."""
    code = (job.exit_code, job.signal)
    if code == _NO_LAUNCH or (_LAUNCH_FAILED.search(job.reason) and not started):
        why = "it could not be started; often the disk or quota of its log folder was full"
        return outcome_of("launch_failure", f"{prefix} ({code[0]}:{code[1]}): {why}")
    if _NODE_REASON.search(job.reason):
        return outcome_of("node_failure", f"{prefix}: {job.reason}")
    silent = f"{prefix} ({_ending(*code)}), and the worker recorded no outcome"
    return _end_by_print(started, printed, prefix, silent)


def lost_end(job_id: str | None, started: bool, printed: str) -> AttemptOutcome:
    """End of a job that Slurm does not know any more, or that was never submitted."""
    if job_id is None:
        why = "Slurm knows no such job: it was never submitted, since sbatch gave no answer"
        return outcome_of("system_outage", why)
    silent = f"Slurm does not know job {job_id} any more; it recorded no outcome"
    return _end_by_print(started, printed, f"job {job_id} is gone", silent)


def _end_by_print(started: bool, printed: str, prefix: str, silent: str) -> AttemptOutcome:
    if (spoken := printed_end(printed)) is not None:
        return outcome_of(spoken, f"{prefix}; its output says so")
    end = classify_silent_end(started, printed)
    return end if end.failure != "killed" else outcome_of("killed", silent)


def printed_end(printed: str) -> FailureClass | None:
    """Class of a job's end from Slurm's own lines in its log; the last one counts, because a
    requeued job appends to it."""
    hits = [(m.start(), kind) for pattern, kind in _PRINTED for m in pattern.finditer(printed)]
    return max(hits)[1] if hits else None


def _ending(code: int, number: int) -> str:
    if not number and code > 128:
        number = code - 128
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(number).name}"
    return f"signal {number}" if number else f"exit code {code}"

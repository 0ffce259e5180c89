"""Meaning of Slurm's words: states, reasons, and how a job's end is named.

In: rows that Slurm's commands print. Out: :class:`JobFacts`, and from these
:class:`~infra.jobs.protocol.JobSight` values. Pure: asks nobody, remembers nothing.

A job counts as over only in a state that Slurm never leaves by itself; any other state is live. The
failure class of an end comes from the state where that is clear (TIMEOUT, NODE_FAIL), from what
Slurm notes beside it (steps out of memory, a preemption), from the exit code, and last from what
the job has printed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from infra.jobs.failures import classify_silent_end, outcome_of
from infra.jobs.protocol import JobSight
from refiner_core.contract.records import FailureClass, Outcome, picked

#: States in which a job's processes make progress.
RUNNING = frozenset({"RUNNING", "RESIZING", "SIGNALING"})
#: States that Slurm never leaves by itself: the class of such an end, none where it takes more than
#: the state to tell, and the words for people. All others are live.
ENDS: Mapping[str, tuple[FailureClass | None, str]] = {
    "COMPLETED": (None, ""),
    "FAILED": (None, ""),
    "CANCELLED": ("cancelled", ""),
    "TIMEOUT": ("time_limit", "reached its time limit"),
    "DEADLINE": ("time_limit", "reached its deadline"),
    "NODE_FAIL": ("node_failure", "lost its node"),
    "BOOT_FAIL": ("launch_failure", "found no node that booted"),
    "OUT_OF_MEMORY": ("out_of_memory", "ran out of host memory"),
    "PREEMPTED": ("preempted", "was preempted"),
    "REVOKED": ("launch_failure", "was withdrawn by its federation"),
}
#: Reasons for waiting that do not pass by themselves, and what mends them.
_NEVER = (
    (r"BadConstraints", "check `constraint`, `nodelist` and `exclude` in the profile"),
    (r"PartitionTimeLimit", "lower `resources.time_limit_min`"),
    (r"PartitionNodeLimit|(Assoc|QOS)Max\w+PerJob(Limit)?", "lower the stage's `resources`"),
    (r"Invalid(Account|QOS)", "correct it in the profile"),
    (r"(Assoc|QOS)Grp\w*(?<!Run)(Minutes|Wall)(Limit)?", "the budget is used up; ask for more"),
    (r"JobHeld\w+|JobHoldMaxRequeue", "`scontrol release` lets it go on"),
)
_LAUNCH_HELD = re.compile(r"launch[ _]failed[ _]requeued[ _]held", re.IGNORECASE)
_LAUNCH_FAILED = re.compile(r"JobLaunchFailure|launch[ _]failed", re.IGNORECASE)
_NODE_REASON = re.compile(r"NodeDown|NodeFail|SystemFailure|Node_?failure", re.IGNORECASE)
_CANCELLED_BY = re.compile(r"CANCELLED by (\d+)")
#: How slurmd reports that it could not even open the job's log files.
_NO_LAUNCH = (0, 53)


@dataclass(frozen=True)
class JobFacts:
    """One job as Slurm tells it.

    ``user`` is the number of whose it is; ``exit_code`` and ``signal`` are the two halves of
    Slurm's ``a:b``; ``steps`` maps a step's name to its state; ``preempted`` says that Slurm had
    asked it to make room; ``source`` is the command that told.
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
    def over(self) -> bool:
        """Tell whether nothing of it runs any more, and Slurm will not start it again by itself."""
        return self.state in ENDS

    @property
    def running(self) -> bool:
        """Tell whether its processes make progress."""
        return self.state in RUNNING

    @property
    def out_of_memory(self) -> bool:
        """Tell whether it, or a step of it (often only that says so), ran out of host memory."""
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


def sight_of(job: JobFacts, started: bool, printed: Callable[[], str]) -> JobSight:
    """A job that Slurm knows, as a sight.

    ``started`` says whether its worker ever took the attempt; ``printed`` reads the end of what it
    printed, and is called for ended jobs only.
    """
    if job.over:
        end, facts = end_of(job, started, printed()), job.as_text()
        sight = JobSight("dead", running=False, reason=job.reason, end=end, facts=facts)
    else:
        held = bool(_LAUNCH_HELD.search(job.reason))
        sight = JobSight("live", running=job.running, reason=_waiting_for(job), held=held)
    return replace(sight, state=job.state, node=job.node)


def _waiting_for(job: JobFacts) -> str:
    """Reason why a live job does not run, in Slurm's word and, where that does not pass by itself,
    what to do about it."""
    key = job.reason.split(",")[0]
    hint = next((words for pattern, words in _NEVER if re.fullmatch(pattern, key)), "")
    return f"{key}: {hint}" if hint else key


def end_of(job: JobFacts, started: bool, printed: str) -> Outcome:
    """End of a job whose worker left no word."""
    where = f" on {job.node}" if job.node else ""
    told = f"Slurm says {job.state}{where}"
    if job.out_of_memory:
        return outcome_of("out_of_memory", f"{told}: more host memory than it asked for")
    if job.preempted and job.state != "TIMEOUT":
        return outcome_of("preempted", f"{told}: it had to make room for another job")
    failure, words = ENDS[job.state]
    if failure == "cancelled":
        return outcome_of("cancelled", f"{told}: cancelled by user {job.by or '?'}")
    if failure is not None:
        return outcome_of(failure, f"{told}: it {words}")
    return _end_by_trace(job, started, printed, told)


def _end_by_trace(job: JobFacts, started: bool, printed: str, told: str) -> Outcome:
    """FAILED, or COMPLETED without a word: what exit code, reason and print say."""
    code = (job.exit_code, job.signal)
    if code == _NO_LAUNCH or (_LAUNCH_FAILED.search(job.reason) and not started):
        why = "it could not be started; often the disk or quota of its log folder was full"
        return outcome_of("launch_failure", f"{told} ({code[0]}:{code[1]}): {why}")
    if _NODE_REASON.search(job.reason):
        return outcome_of("node_failure", f"{told}: {job.reason}")
    silent = f"{told} (exit {code[0]}:{code[1]}), and the worker left no word"
    return _end_by_print(started, printed, silent)


def lost_end(job_id: str | None, started: bool, printed: str) -> Outcome:
    """End of a job that nobody knows any more, or that never came to be."""
    if job_id is None:
        why = "Slurm knows no such job: it was never submitted, for sbatch gave no answer"
        return outcome_of("system_outage", why)
    silent = f"Slurm does not know job {job_id} any more; it left no word"
    return _end_by_print(started, printed, silent)


def _end_by_print(started: bool, printed: str, silent: str) -> Outcome:
    end = classify_silent_end(started, printed)
    return end if end.failure != "killed" else outcome_of("killed", silent)

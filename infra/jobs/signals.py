"""Requests to stop, their origin, and jobs that the scheduler has restarted.

In: SIGTERM, SIGINT, SIGUSR1 and SIGUSR2; a note beside the attempt (``stop.json``); Slurm's facts
about the job. Out: a flag that the stage checks between two steps (handlers never save: that hangs
now and then), and the failure class of the request. Slurm sends a job nothing but a number, so the
job asks: ``scontrol show job`` once, when it ends. The answers in each case were measured on
Slurm 22.05.

Slurm starts a requeued job with its *original* command, which always names the first attempt:
:func:`attempt_to_run` returns the attempt to run instead. It closes the attempt of the last start,
with the scheduler's reason, and claims the next one for the same orchestrator, even if none is
alive. An orchestrator may claim it at the same moment; exactly one wins, and the loser exits.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

from infra.host.processes import ProcessId, host_name, run_program
from infra.jobs.failures import outcome_of
from infra.store.atomic import no_space_guard
from infra.store.workspace import Workspace
from refiner_core.contract.errors import Interrupted
from refiner_core.contract.records import FailureClass

log = logging.getLogger(__name__)

#: SIGUSR1 and SIGUSR2 come ahead of a time limit, or where a site warns before a preemption.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
ASK_TIMEOUT_S = 5.0
#: Setting of a job: how long before the time limit Slurm was asked to warn it, seconds.
SIGNAL_LEAD = "REFINER_SIGNAL_LEAD_S"
#: A plain SIGTERM counts as the time limit this close to it, or as close as the warning comes.
_LIMIT_SHARE, _LIMIT_MIN_S, _LIMIT_MAX_S = 0.05, 5.0, 60.0
_EARLY_S = 60.0
_NO_TIME = (None, "", "None", "Unknown", "N/A")


class StopReason(NamedTuple):
    """Reason why a job was asked to stop, or ended.

    ``comes_back``: the scheduler has requeued the job, and it will continue by itself.
    """

    failure: FailureClass
    message: str
    comes_back: bool = False


@dataclass(frozen=True)
class SlurmJob:
    """The Slurm job that this process is part of.

    Attributes
    ----------
    id
        Slurm's id of the job (``123``).
    array_id
        Its id as part of an array (``120_3``); empty outside of one.
    restart
        Number of restarts by Slurm.
    node
        The node's name in Slurm.
    """

    id: str
    array_id: str = ""
    restart: int = 0
    node: str = ""

    @classmethod
    def from_environment(cls) -> SlurmJob | None:
        """The job that the environment names; None outside of Slurm."""
        values = os.environ
        if not values.get("SLURM_JOB_ID"):
            return None
        array, task = values.get("SLURM_ARRAY_JOB_ID"), values.get("SLURM_ARRAY_TASK_ID")
        return cls(
            id=values["SLURM_JOB_ID"],
            array_id=f"{array}_{task}" if array and task else "",
            restart=int(values.get("SLURM_RESTART_COUNT") or 0),
            node=values.get("SLURMD_NODENAME") or host_name(),
        )

    def is_called(self, name: object) -> bool:
        """Tell whether ``name`` is an id of this job."""
        return bool(name) and str(name) in (self.id, self.array_id)


class StopFlag:
    """Notes a signal; a context manager that restores the old handlers."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        for number in STOP_SIGNALS:
            self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number


# ---------------------------------------------------------------- asking Slurm

#: Runs a command of the scheduler and returns its output, empty if it fails.
Ask = Callable[[Sequence[str]], str]


def ask_scheduler(command: Sequence[str]) -> str:
    """Output of a command of the scheduler; empty, and a line in the log, if it fails."""
    try:
        done = run_program(command, ASK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("%s does not answer: %s", command[0], error)
        return ""
    if done.returncode != 0:
        log.info("%s says: %s", command[0], done.stderr.strip()[:300])
    return done.stdout


def why_stopped(
    job: SlurmJob | None,
    number: int | None,
    asked: Mapping[str, Any] | None,
    ask: Ask = ask_scheduler,
) -> StopReason:
    """Reason why a worker that ends on request was asked to end.

    Parameters
    ----------
    job
        The Slurm job, if it is one.
    number
        The signal, if there was one.
    asked
        The content of ``stop.json``: refiner records its reason before it sends a signal.
    ask
        Runs Slurm's commands.
    """
    if asked is not None:
        cancelled = asked.get("failure") == "cancelled"
        reason = str(asked.get("reason", "stopped on request"))
        return StopReason("cancelled" if cancelled else "interrupted", reason)
    name = signal.Signals(number).name if number is not None else "a request"
    if job is None:
        return StopReason("interrupted", f"stopped by {name}")
    facts = job_facts(ask(("scontrol", "show", "job", "-o", job.id)), job.id)
    if int(facts.get("Restarts") or 0) > job.restart:
        # Slurm forgets PreemptTime when it requeues, before the signal arrives.
        why = _end_of_start(job, job.restart, ask) or _ENDS["REQUEUED"]
        why = why._replace(comes_back=True)
    else:
        why = _why(number, facts)
    return why._replace(message=f"{why.message} (job {job.array_id or job.id}, {name})")


def job_facts(text: str, job_id: str) -> dict[str, str]:
    """The fields of one job in the output of ``scontrol show job -o``.

    The last task of an array has the array's own number: Slurm prints all tasks then.
    """
    for line in text.splitlines():
        facts = dict(part.split("=", 1) for part in line.split() if "=" in part)
        if facts.get("JobId") == job_id:
            return facts
    return {}


def _why(number: int | None, facts: Mapping[str, str]) -> StopReason:
    state = facts.get("JobState", "")
    if facts.get("PreemptTime") not in _NO_TIME or state == "PREEMPTED":
        return StopReason("preempted", "Slurm preempts the job")
    if state == "NODE_FAIL":
        return StopReason("node_failure", "the node failed")
    if state in ("TIMEOUT", "DEADLINE") or _time_is_up(number, facts):
        return StopReason(
            "time_limit", f"the job's time limit ({facts.get('TimeLimit', '?')}) is near"
        )
    if state in ("CANCELLED", "COMPLETING"):  # it still runs, so it is ended from outside
        return StopReason("cancelled", "the job was cancelled (scancel)")
    return StopReason("interrupted", "stopped on request")


def _time_is_up(number: int | None, facts: Mapping[str, str]) -> bool:
    limit, ran = _seconds(facts.get("TimeLimit", "")), _seconds(facts.get("RunTime", ""))
    if limit is None or ran is None:
        return False
    if number in (signal.SIGUSR1, signal.SIGUSR2):
        return True  # our own warning ahead of the limit (sbatch --signal)
    near_s = min(_LIMIT_MAX_S, max(_LIMIT_MIN_S, _LIMIT_SHARE * limit))
    lead = os.environ.get(SIGNAL_LEAD, "")
    # Slurm checks limits only every half minute or so, and may warn that much earlier.
    lead_s = float(lead) + _EARLY_S if lead.replace(".", "", 1).isdigit() else 0.0
    return limit - ran <= max(near_s, lead_s)


def _seconds(text: str) -> float | None:
    """Slurm's ``[days-]hours:minutes:seconds``; None for UNLIMITED and the like."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    try:
        total = float(days or 0) * 86400
        for part, unit in zip(reversed(parts), (1, 60, 3600), strict=False):
            total += float(part) * unit
    except ValueError:
        return None
    return total


# ---------------------------------------------------------------- after a restart

#: States of a start after which the scheduler restarts a job.
_ENDS: Mapping[str, StopReason] = {
    "PREEMPTED": StopReason("preempted", "Slurm preempted the job"),
    "REQUEUED": StopReason("preempted", "Slurm put the job back into its queue"),
    "NODE_FAIL": StopReason("node_failure", "the node failed"),
    "BOOT_FAIL": StopReason("node_failure", "the node failed"),
    "TIMEOUT": StopReason("time_limit", "the job's time limit was reached"),
}


def why_restarted(job: SlurmJob, ask: Ask = ask_scheduler) -> StopReason:
    """Reason why the scheduler has restarted this job: accounting's state of its last start.

    Without accounting the reason is lost; then it counts as a preemption.
    """
    why = _end_of_start(job, job.restart - 1, ask) or StopReason("preempted", "the job ended")
    return StopReason(
        why.failure, f"{why.message}; Slurm has started it again (restart {job.restart})"
    )


def _end_of_start(job: SlurmJob, start: int, ask: Ask) -> StopReason | None:
    """End of the job's start number ``start`` (from 0); None if accounting does not have it, or not
    yet. It keeps one line for each, oldest first."""
    name = job.array_id or job.id
    printed = ask(("sacct", "-D", "-X", "-n", "-P", "-j", name, "-o", "State"))
    states = [line.split()[0] for line in printed.splitlines() if line.strip()]
    return _ENDS.get(states[start]) if start < len(states) else None


#: Ends after which the same job simply continues. Others need an orchestrator, which counts them,
#: pauses, frees space or avoids the node.
_GOES_ON: frozenset[FailureClass] = frozenset(
    {"preempted", "time_limit", "node_failure", "interrupted", "killed"}
)


class AttemptClosed(Interrupted):
    """This attempt was given up, or a later one exists: it must not publish any file."""


def job_of(workspace: Workspace, stage_id: str, number: int) -> SlurmJob | None:
    """The Slurm job that this process is, if the attempt was submitted to Slurm.

    A local worker may run inside an allocation, which is not its own job.
    """
    attempt = workspace.read_attempt(stage_id, number)
    is_slurm = attempt is not None and attempt.executor == "slurm"
    return SlurmJob.from_environment() if is_slurm else None


def attempt_to_run(
    workspace: Workspace,
    stage_id: str,
    number: int,
    job: SlurmJob | None = None,
    ask: Ask = ask_scheduler,
) -> int:
    """The attempt that this process is to run: ``number`` at the first start of a job.

    Raises
    ------
    AttemptClosed
        There is nothing left to do for this job: the stage is done, was stopped, or continues in
        another job.
    NoSpaceError
        The next attempt could not be claimed.
    """
    named = workspace.layout.attempt(stage_id, number)
    if job is None or workspace.read_control(named.started) is None:
        return number
    newest = max(workspace.layout.stage(stage_id).attempt_numbers(), default=number)
    if workspace.read_result(stage_id) is not None:
        raise _nothing_to_do(stage_id, newest, "it is done")
    paths = workspace.layout.attempt(stage_id, newest)
    started = workspace.read_control(paths.started)
    # Only the job of the newest attempt may continue it.
    said = (started or {}, workspace.read_control(paths.job) or {})
    if not any(job.is_called(file.get("job_id")) for file in said):
        raise _nothing_to_do(stage_id, newest, "it is another job's")
    attempt = workspace.read_attempt(stage_id, newest)
    if started is not None and started.get("void"):
        raise _nothing_to_do(stage_id, newest, "an orchestrator gave it up")
    if attempt is not None and attempt.outcome is None and started is None:
        return newest  # an earlier restart claimed it and made no progress
    # Slurm restarts a job only when it has ended all processes of the last start, so a lower count
    # of restarts means that the holder is gone, or so nearly that its fence keeps it from harm.
    restarted = int((started or {}).get("restart") or 0) < job.restart
    holder = None if restarted or not started else ProcessId.parse(str(started["process"]))
    lives = holder is not None and (not holder.here or holder.alive)
    if attempt is None or (attempt.outcome is None and lives):
        raise _nothing_to_do(stage_id, newest, "another process of this job works on it")
    if workspace.stop_requested(stage_id, newest) is not None:
        raise _nothing_to_do(stage_id, newest, "it was asked to stop")
    if attempt.outcome is None:
        _close(workspace, stage_id, newest, job, ask)
        attempt = workspace.read_attempt(stage_id, newest) or attempt
    outcome = attempt.outcome
    if outcome is not None and (outcome.decision != "resume" or outcome.failure not in _GOES_ON):
        raise _nothing_to_do(stage_id, newest, f"it ended ({outcome.failure})")
    again = {"job_id": job.array_id or job.id, "restart": job.restart}
    claimed = workspace.claim_restart(stage_id, newest, again)
    if claimed is None:
        raise _nothing_to_do(stage_id, newest, "another process continued it first")
    log.info("restart %d of job %s: attempt %d", job.restart, job.id, claimed.number)
    return claimed.number


def _close(workspace: Workspace, stage_id: str, number: int, job: SlurmJob, ask: Ask) -> None:
    why = why_restarted(job, ask)
    beat = workspace.read_heartbeat(stage_id, number) or {}
    step = (beat.get("progress") or {}).get("done")
    outcome = replace(outcome_of(why.failure, why.message), step=step)
    with no_space_guard(workspace.root, "closing the attempt of the last start"):
        workspace.close_attempt(stage_id, number, outcome, beat.get("seconds"))


def _nothing_to_do(stage_id: str, number: int, why: str) -> AttemptClosed:
    return AttemptClosed(
        f"This job has nothing left to do for {stage_id}: of attempt {number}, {why}",
        fix="nothing; the stage continues elsewhere",
    )

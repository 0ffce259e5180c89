"""Jobs on Slurm: submitted through submitit, judged by refiner.

In: requests, open attempts. Out: jobs and their statuses. Before sbatch is called, ``batch.json``
beside the attempt records the job's unique name; afterwards ``job.json`` records its id. A crash
in between loses nothing: the job is found by its name, its id is recorded, and submitit's missing
file is written. Slurm may restart a job under the same id; several attempts may then share it.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.jobs.dispatcher import (
    AttemptRef,
    JobRequest,
    JobStatus,
    OpenAttempt,
    WorkerCommand,
    tail_of,
)
from infra.jobs.failures import outcome_of
from infra.jobs.signals import SIGNAL_LEAD
from infra.slurm.profiles import Profile
from infra.slurm.scheduler import (
    PATIENCE,
    Answer,
    JobQuery,
    RealSlurm,
    SchedulerView,
    SlurmUnavailable,
)
from infra.slurm.states import JobFacts, job_status_of, lost_end
from infra.slurm.submission import Submission, SubmissionUnknown, Submitter, write_missing_pickle
from infra.store import atomic
from infra.store.layout import AttemptPaths
from infra.store.workspace import Workspace
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import from_json, to_json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Batch:
    """Name and array position under which a job was submitted (part ``batch`` of its file).
    ``folder`` is relative to the workspace."""

    comment: str
    index: int | None
    user: str
    folder: str
    command: tuple[str, ...]


class SlurmDispatcher:
    """Runs jobs on a cluster; see :class:`~infra.jobs.dispatcher.Dispatcher`.

    Parameters
    ----------
    workspace
        Must be visible to compute nodes.
    profile
        The cluster.
    scheduler_poll_s
        Seconds between rounds of queries.
    worker
        Command of jobs; the interpreter is the profile's, if it names one.
    commands
        Slurm's commands; those of this machine by default.
    adopt
        Record the ids of jobs that are found by name. False for read-only callers.

    Raises
    ------
    UnsupportedError
        This machine has no Slurm.
    """

    executor = "slurm"

    def __init__(
        self,
        workspace: Workspace,
        profile: Profile,
        *,
        scheduler_poll_s: float = 10.0,
        worker: WorkerCommand | None = None,
        commands: RealSlurm | None = None,
        patience: tuple[int, float] = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
        adopt: bool = True,
    ) -> None:
        self.workspace, self.profile = workspace, profile
        given = worker or WorkerCommand(workspace.root)
        python = profile.python or given.python or sys.executable
        self.worker = replace(given, python=python)
        self._submitter = Submitter(profile, python)
        self._commands = RealSlurm() if commands is None else commands
        self._view = SchedulerView(self._commands, scheduler_poll_s, patience=patience, clock=clock)
        self._adopt = adopt
        self._ended_by_us: set[str] = set()
        # Cached: a batch never changes once a job has an id.
        self._batches: dict[AttemptRef, _Batch] = {}
        self._submitted_as: dict[AttemptRef, _Batch | None] = {}

    # ------------------------------------------------------------ submitting

    def check(self, stage: PlannedStage) -> None:
        """Refuse a stage that can never run on this cluster.

        Raises
        ------
        ConfigurationError
            Its time limit, GPUs or network exceed the profile.
        """
        self.profile.check(stage.resources, stage.title, needs_network=stage.needs_network)

    def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        """Start jobs, those of one shape as an array if there are enough; errors by attempt."""
        failed: dict[AttemptRef, Exception] = {}
        for work in self._submissions(requests):
            try:
                for one in work.requests:  # all of one shape
                    self.profile.check(one.resources, one.stage_id, needs_network=one.needs_network)
                self._submit(work)
            except SubmissionUnknown as error:
                log.warning("%s The job is looked for by its name.", error)
            except Exception as error:  # reported with these jobs, not with the others
                failed |= {request.ref: error for request in work.requests}
        return failed

    def _submissions(self, requests: Sequence[JobRequest]) -> Iterator[Submission]:
        groups: dict[str, list[JobRequest]] = defaultdict(list)
        for request in requests:
            groups[self._submitter.shape(request)].append(request)
        for group in groups.values():
            for start in range(0, len(group), self.profile.array_size):
                members = tuple(group[start : start + self.profile.array_size])
                alone = len(members) < self.profile.array_min
                for together in [(m,) for m in members] if alone else [members]:
                    first, layout = together[0], self.workspace.layout
                    name, folder = first.comment, layout.attempt(*first.ref).submitit
                    if len(together) > 1:
                        name = f"refiner-array-{secrets.token_hex(8)}"
                        folder = layout.batches / name
                    yield Submission(name, folder, together, tuple(map(self.command, together)))

    def command(self, request: JobRequest) -> list[str]:
        """The job's argument list."""
        words = self.worker.arguments(request, offline=not self.profile.network)
        lead_s = self.profile.lead_s(request.resources, request.save_s)
        values = {**self.profile.env, SIGNAL_LEAD: lead_s}
        settings = [f"{name}={value}" for name, value in values.items()]
        return [words[0], *settings, *words[1:]]

    def _submit(self, work: Submission) -> None:
        work.folder.mkdir(parents=True, exist_ok=True)
        count = len(work.requests)
        tasks: list[int | None] = [None] if count == 1 else [*range(count)]
        for request, task, command in zip(work.requests, tasks, work.commands, strict=True):
            folder = os.path.relpath(work.folder, self.workspace.layout.control)
            batch = _Batch(work.name, task, str(os.getuid()), folder, tuple(command))
            atomic.write_json(self._paths(request.ref).job, {"batch": to_json(batch)})
            self._batches.pop(request.ref, None)
        ids = self._submitter.submit(work)
        for request, task, job_id in zip(work.requests, tasks, ids, strict=True):
            self._note_job(request.ref, job_id, request.comment, task)
            self._view.submitted(job_id, work.name)

    def _note_job(self, ref: AttemptRef, job_id: str, comment: str, task: int | None) -> None:
        note: dict[str, Any] = {"job_id": job_id, "executor": self.executor, "comment": comment}
        note["user"] = str(os.getuid())
        if task is not None:
            note["array"] = job_id.partition("_")[0]
        if batch := self.workspace.part(self._paths(ref), "batch"):
            note["batch"] = batch
        atomic.write_json(self._paths(ref).job, note)

    # ------------------------------------------------------------ observing

    def observe(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
        """All jobs by one round of queries, or by the last round if it is recent enough."""
        copied = {a.ref: other for a in attempts if (other := self._original(a.ref))}
        wanted = {a.ref: self._wanted(a) for a in attempts if a.ref not in copied}
        answers = self._view.observe(list(wanted.values()))
        seen = {}
        for ref, other in copied.items():
            why = f"this workspace is a copy of {other}, where its job works; here it starts anew"
            end = outcome_of("interrupted", why)
            seen[ref] = JobStatus("dead", running=False, state="not ours", reason=why, end=end)
        for attempt in (a for a in attempts if a.ref not in copied):
            answer = answers[wanted[attempt.ref].key]
            noted = wanted[attempt.ref].job_id is not None
            if isinstance(answer, JobFacts) and self._adopt and not noted:
                self._adopt_job(attempt, answer.job_id)
            seen[attempt.ref] = self._status_of(attempt, wanted[attempt.ref], answer)
        return seen

    def _wanted(self, attempt: OpenAttempt) -> JobQuery:
        job_id = attempt.attempt.job_id
        batch = self._batch(attempt.ref) if job_id is None else self._batch_of_job(attempt.ref)
        name, task, user = attempt.attempt.comment, None, str(os.getuid())
        if batch is not None:
            name, task, user = batch.comment, batch.index, batch.user
        return JobQuery(job_id, name, task, user)

    def _status_of(self, attempt: OpenAttempt, wanted: JobQuery, answer: Answer) -> JobStatus:
        started = attempt.begun
        if isinstance(answer, JobFacts):
            status = job_status_of(
                answer, started, lambda: self._printed(attempt.ref, answer.job_id)
            )
            if status.end is not None and status.end.failure == "node_failure":
                failed = self._failed_nodes(answer.node)
                status = replace(status, end=replace(status.end, node=failed))
            if answer.job_id not in self._ended_by_us or status.end is None:
                return status
            # Ended by this process, not cancelled by a person.
            return replace(status, end=outcome_of("killed", "refiner has ended the job"))
        if answer is not None:
            printed = self._printed(attempt.ref, wanted.job_id) if wanted.job_id else ""
            end = lost_end(wanted.job_id, started, printed)
            why = "its heartbeat shows its state" if started else ""
            return JobStatus(
                "dead", running=False, state="unknown to Slurm", reason=why, end=end, lost=True
            )
        return JobStatus("unknown", running=started, reason="no answer from Slurm yet")

    def _failed_nodes(self, nodes: str) -> str:
        """Those of a job's nodes that have failed, with commas; empty if Slurm does not tell."""
        try:
            return ",".join(self._commands.failed_nodes(nodes)) if nodes else ""
        except SlurmUnavailable as error:
            log.warning("the failed node among %s is unknown: %s", nodes, error)
            return ""

    def _printed(self, ref: AttemptRef, job_id: str) -> str:
        """The end of a job's output outside its worker's log."""
        batch = self._batch_of_job(ref)
        folder = self._paths(ref).submitit
        if batch is not None:
            folder = self.workspace.layout.control / batch.folder
        return tail_of([folder / f"{job_id}_0_log.out", folder / f"{job_id}_0_log.err"])

    # ------------------------------------------------------------ acting

    def stop(self, attempt: OpenAttempt) -> bool:
        """SIGTERM to the processes of the job's steps. False for a job that does not run (yet)."""
        job_id = self._id_of(attempt)
        if job_id is None:
            return False
        self._view.observe([self._wanted(attempt)])
        found = self._view.known(job_id)
        if found is None or not found.rule.running:
            return False
        return self._told("asked to end", job_id, lambda: self._commands.signal(job_id, "TERM"))

    def kill(self, attempt: OpenAttempt) -> bool:
        """``scancel``: ends a job that runs, withdraws one that queues."""
        job_id = self._id_of(attempt)
        if job_id is None:
            return True
        self._ended_by_us.add(job_id)
        return self._told("ended", job_id, lambda: self._commands.cancel(job_id))

    def release(self, attempt: OpenAttempt) -> None:
        """``scontrol release``."""
        job_id = self._id_of(attempt)
        if job_id and self._told("released", job_id, lambda: self._commands.release(job_id)):
            self._view.released(job_id)

    def _told(self, what: str, job_id: str, order: Callable[[], bool | None]) -> bool:
        """Give the scheduler an order; a failure is logged."""
        try:
            return order() is not False
        except SlurmUnavailable as error:
            log.warning("job %s could not be %s: %s", job_id, what, error)
            return False

    def _id_of(self, attempt: OpenAttempt) -> str | None:
        """The recorded id, or that of the job with this name; None for a job that is not ours to
        end."""
        if self._original(attempt.ref):
            return None
        if attempt.attempt.job_id is not None:
            return attempt.attempt.job_id
        noted = self.workspace.read_control(self._paths(attempt.ref).job) or {}
        if noted.get("job_id") is not None:
            return str(noted["job_id"])
        wanted = self._wanted(attempt)
        answer = self._view.observe([wanted])[wanted.key]
        return answer.job_id if isinstance(answer, JobFacts) else None

    def _adopt_job(self, attempt: OpenAttempt, job_id: str) -> None:
        """Record the id of a job after a crash between sbatch and the record."""
        log.info("job %s is that of %s", job_id, attempt.attempt.comment)
        batch = self._batch(attempt.ref)
        if batch is not None:
            folder = self.workspace.layout.control / batch.folder
            write_missing_pickle(folder, job_id, batch.command)
        task = None if batch is None else batch.index
        self._note_job(attempt.ref, job_id, attempt.attempt.comment, task)

    def _original(self, ref: AttemptRef) -> Path | None:
        """The workspace that this one was copied from while the attempt's job was running: the job
        works there, and its results will not appear here. None if this is no copy.

        The same folder under another name, or a folder that is not visible here, is no copy.
        """
        batch = self._batch_of_job(ref)
        words = () if batch is None else batch.command
        if "--workspace" not in words:
            return None
        named = Path(words[words.index("--workspace") + 1])
        if named == self.workspace.root or not named.exists():
            return None
        return None if named.samefile(self.workspace.root) else named

    def _batch_of_job(self, ref: AttemptRef) -> _Batch | None:
        """The batch of the attempt that submitted the job: Slurm may have restarted it since, for
        attempts that were never submitted themselves."""
        if ref not in self._submitted_as:
            earlier = (AttemptRef(ref.stage_id, n) for n in range(ref.number, 0, -1))
            found = next((b for b in map(self._batch, earlier) if b is not None), None)
            self._submitted_as[ref] = found
        return self._submitted_as[ref]

    def _batch(self, ref: AttemptRef) -> _Batch | None:
        if ref not in self._batches:
            note = self.workspace.part(self._paths(ref), "batch")
            if not note:
                return None
            self._batches[ref] = from_json(_Batch, note)
        return self._batches[ref]

    def _paths(self, ref: AttemptRef) -> AttemptPaths:
        return self.workspace.layout.attempt(*ref)

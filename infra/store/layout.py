"""Layout of a workspace. Pure: makes paths, accesses no files.

    WORKSPACE/
      workspace.json                          format of this folder
      stages/<stage id>/
        spec.json                             definition of the stage
        result.json                           written last: the stage is done
        checkpoints/step-00000010/            complete ones only; half-written ones start with .tmp-
        work/                                 another trainer's own folder, shared by all attempts
        attempts/0001/
          intent.json                         by the orchestrator that claimed it: owner, purpose,
                                              its configuration, its inputs
          job.json                            by its submitter: its place in an array, its id,
                                              and the scheduler's facts about its end
          started.json                        by the worker: that it runs, and the checkpoint it
                                              resumed from
          heartbeat.json log.txt metrics.jsonl rollouts/ output/ tracking/    by the worker
          room                                created with the claim; deleted while its disk is full
          endpoint.json                       address of a server, by its worker, once it answers
          stop.json                           request to save and end; once
          outcome.json                        by the worker, or by its finder if it is dead; once
          submitit/                           submitit's own files, of a job on Slurm
          printed.log                         a local worker's output beside its log
      runs/<run id>/run.json events.jsonl dirty.diff
                    orchestrator.json         the process that works on it, by itself
                    orchestrator.log          its output when it works in the background
                    people.json               people's labels (`refiner reward label`)
                    turns/0001.json           processes that took the run over, in order; exclusive
                    cancel/                   requests to end it, or stages of it
      disk/reservations/ pins/                space for saves in progress; protected stages
      services/<service id>/                  a shared server: its key and its leases
      judgements/                             the store of judgements, one file per writer
      code/<digest>/                          code snapshots
      batches/<comment>/                      submitit's files of an array of jobs
      rescores/<id>/                          results of `refiner rescore`
      judge-reports/<id>/                     results of `refiner judge report`
      rubric-reports/<run id>/                results of `refiner rubrics report`
      forms/<id>/form.jsonl key.json          a form for people's labels, and what its rows are
      attacks/<reward>.json                   newest result of `refiner reward attack` for a reward
      sweeps/<name>/                          a sweep: its versions, the runs of its trials
      reports/<name>/                         results of `refiner report`
      proofs/<stage id>/proof.json            result of `refiner prove-resume` for a stage
      proofs/scratch/                         its workspaces
      certificates/<node>.json                result of `refiner certify` for a machine
      nightly/<name>/                         a nightly evaluation: its nights, its alerts
      published/                              folder target of publishing
      adopted/                                recipes that `refiner adopt` has written

The parts ``config`` and ``inputs`` (of intent), ``batch`` and ``scheduler`` (of job) and
``resumed`` (of started) were separate files before, and are still read: ``RecordFiles.part``.

``control`` holds the small files, ``data`` the large ones (checkpoints, metrics.jsonl, rollouts,
output, tracking, published, judgements, rescores, reports, scratch of proofs). They may be
different file systems, and are the same folder unless the workspace was created with another
``data_root``. A separate data root has ``refiner-data.json``, which names its workspace.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.host.files import names_in

_ATTEMPT = re.compile(r"\d{4,}")

#: Prefixes that no run id has.
_SWEEP_CALL, _NIGHT_CALL = "sweep:", "night:"


def sweep_call(name: str) -> str:
    """Pseudo run id of the work on a sweep: orchestrator, turns, requests to end and events are
    stored as for a run."""
    return f"{_SWEEP_CALL}{name}"


def night_call(name: str, night: str) -> str:
    """Pseudo run id of the work on one night of a nightly evaluation."""
    return f"{_NIGHT_CALL}{name}/nights/{night}"


def is_sweep(call: str) -> bool:
    """Tell whether a call id names the work on a sweep."""
    return call.startswith(_SWEEP_CALL)


def call_title(call: str) -> str:
    """``sweep NAME`` or ``run ID``, for people."""
    if is_sweep(call):
        return f"sweep {call.removeprefix(_SWEEP_CALL)}"
    return f"run {call}"


class _FixedPath:
    """A path with a fixed name below one of its owner's folders."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = folder, name

    def __get__(self, paths: Any, _kind: type) -> Path:
        folder: Path = getattr(paths, self._folder)
        return folder / self._name


@dataclass(frozen=True)
class AttemptPaths:
    """The files of one attempt."""

    control: Path
    data: Path

    #: The :class:`Attempt` as it was claimed, the whole recipe configuration of the claiming
    #: call, and its inputs (role -> stage id).
    intent = _FixedPath("control", "intent.json")
    #: The job's id, and for local jobs its process.
    job = _FixedPath("control", "job.json")
    #: The token that lets the attempt run: taken by the worker, or by a process that gave it up.
    started = _FixedPath("control", "started.json")
    #: Counter, progress and times, replaced every few seconds.
    heartbeat = _FixedPath("control", "heartbeat.json")
    #: Request to save and end, with the reason.
    stop = _FixedPath("control", "stop.json")
    #: Address of a server, once it answers.
    endpoint = _FixedPath("control", "endpoint.json")
    #: Deleted while its worker lacks disk space: deletion works on a full disk, too.
    room = _FixedPath("control", "room")
    #: Its end.
    outcome = _FixedPath("control", "outcome.json")
    #: All output of the worker.
    log = _FixedPath("control", "log.txt")
    #: A local worker's output beside its log.
    printed = _FixedPath("control", "printed.log")
    #: submitit's folder.
    submitit = _FixedPath("control", "submitit")
    #: The tracker's files.
    tracker = _FixedPath("data", "tracking")
    #: One JSON line per logged step.
    metrics = _FixedPath("data", "metrics.jsonl")
    #: One Parquet file per step.
    rollouts = _FixedPath("data", "rollouts")
    #: The stage's output for other stages.
    output = _FixedPath("data", "output")


@dataclass(frozen=True)
class StagePaths:
    """The files of one stage."""

    control: Path
    data: Path

    #: The definition of the stage.
    spec = _FixedPath("control", "spec.json")
    #: Exists exactly when the stage is done.
    result = _FixedPath("control", "result.json")
    #: One folder per attempt.
    attempts = _FixedPath("control", "attempts")
    #: Resume checkpoints, shared by all attempts.
    checkpoints = _FixedPath("data", "checkpoints")
    #: One file per stage that waits for a checkpoint of this one.
    holds = _FixedPath("control", "holds")

    def attempt(self, number: int) -> AttemptPaths:
        """The files of one attempt, counted from 1."""
        name = f"attempts/{number:04d}"
        return AttemptPaths(self.control / name, self.data / name)

    def attempt_numbers(self) -> list[int]:
        """Attempts that exist, in order (reads the folder)."""
        return sorted(int(n) for n in names_in(self.attempts) if _ATTEMPT.fullmatch(n))


@dataclass(frozen=True)
class RunPaths:
    """The files of one call of `refiner run`."""

    folder: Path

    #: The :class:`RunRecord`.
    record = _FixedPath("folder", "run.json")
    #: Events, one JSON line each.
    events = _FixedPath("folder", "events.jsonl")
    #: The process that works on it, its output, and its end.
    orchestrator = _FixedPath("folder", "orchestrator.json")
    #: Output of the process that works on it in the background.
    log = _FixedPath("folder", "orchestrator.log")
    #: submitit's folder of an orchestrator that is a job itself.
    job_folder = _FixedPath("folder", "submitit")
    #: One file per process that has taken it over, created exclusively.
    turns = _FixedPath("folder", "turns")
    #: One file per request to end it, or stages of it.
    cancel = _FixedPath("folder", "cancel")
    #: Note and tags that were given later.
    label = _FixedPath("folder", "label.json")
    #: People's labels of its answers, and the means that they correct.
    people = _FixedPath("folder", "people.json")
    #: Uncommitted changes of the code, if it came from a checkout.
    diff = _FixedPath("folder", "dirty.diff")


@dataclass(frozen=True)
class Layout:
    """All paths of a workspace."""

    control: Path
    data: Path

    #: Marks a workspace, and its format.
    format_file = _FixedPath("control", "workspace.json")
    #: Names the workspace of a separate data root.
    data_mark = _FixedPath("data", "refiner-data.json")
    #: One folder per stage.
    stages = _FixedPath("control", "stages")
    #: One folder per call.
    runs = _FixedPath("control", "runs")
    #: One folder per code snapshot.
    code = _FixedPath("control", "code")
    #: submitit's folders of arrays, one each.
    batches = _FixedPath("control", "batches")
    #: Reservations and pins.
    disk = _FixedPath("control", "disk")
    #: One folder per removal of runs in progress; the second for large files.
    trash = _FixedPath("control", "trash")
    data_trash = _FixedPath("data", "trash")
    #: Folder target of publishing.
    published = _FixedPath("data", "published")
    #: One folder per query of `refiner rescore`.
    rescores = _FixedPath("data", "rescores")
    #: One folder per judge and material that `refiner judge report` has measured.
    judge_reports = _FixedPath("data", "judge-reports")
    #: One folder per run whose criteria `refiner rubrics report` has measured.
    rubric_reports = _FixedPath("data", "rubric-reports")
    #: One folder per form for people's labels, with its key.
    forms = _FixedPath("data", "forms")
    #: One file per reward that `refiner reward attack` has attacked.
    attacks = _FixedPath("data", "attacks")
    #: The store of judgements.
    judgements = _FixedPath("data", "judgements")
    #: One folder per sweep, by its name.
    sweeps = _FixedPath("control", "sweeps")
    #: One folder per report of a sweep.
    reports = _FixedPath("data", "reports")
    #: One folder per nightly evaluation.
    nightly = _FixedPath("control", "nightly")
    #: Workspaces of proofs in progress.
    proof_scratch = _FixedPath("data", "proofs/scratch")
    #: One folder per shared server.
    services = _FixedPath("control", "services")

    def proof(self, stage_id: str) -> Path:
        """The newest proof that a stage resumes exactly."""
        return self.control / "proofs" / stage_id / "proof.json"

    def certificate(self, host: str) -> Path:
        """The newest certificate of a node; ``host`` is a valid file name."""
        return self.control / "certificates" / f"{host}.json"

    def service(self, service_id: str) -> Path:
        """Key and leases of a shared server."""
        return self.services / service_id

    def stage(self, stage_id: str) -> StagePaths:
        """The files of one stage."""
        return StagePaths(self.control / "stages" / stage_id, self.data / "stages" / stage_id)

    def attempt(self, stage_id: str, number: int) -> AttemptPaths:
        """The files of one attempt."""
        return self.stage(stage_id).attempt(number)

    def run(self, run_id: str) -> RunPaths:
        """The files of one call; for a sweep's, see :func:`sweep_call`."""
        if is_sweep(run_id):
            return RunPaths(self.sweeps / run_id.removeprefix(_SWEEP_CALL))
        if run_id.startswith(_NIGHT_CALL):
            return RunPaths(self.nightly / run_id.removeprefix(_NIGHT_CALL))
        return RunPaths(self.runs / run_id)

"""Where everything lies in a workspace. Pure: makes paths, touches nothing.

    WORKSPACE/
      workspace.json                          format of this folder
      stages/<stage id>/
        spec.json                             what the stage is
        result.json                           written last: the stage is done
        checkpoints/step-00000010/            complete ones only; half-written ones start with .tmp-
        work/                                 another trainer's own folder, shared by all attempts
        attempts/0001/
          intent.json                         by the orchestrator that claimed it: who, for what,
                                              its configuration, its inputs
          job.json                            by what submitted it: its place in an array, its id,
                                              and what the scheduler said in the end
          started.json                        by the worker: that it runs, and which checkpoint it
                                              went on from
          heartbeat.json log.txt metrics.jsonl rollouts/ output/ tracking/    by the worker
          room                                claimed with it, and there while its worker has room
          endpoint.json                       where a server answers, by its worker, once it does
          stop.json                           somebody wants it to save and end; once
          outcome.json                        by the worker, or by who found it dead; once
          submitit/                           submitit's own files, of a job on Slurm
          printed.log                         what a local worker prints beside its log
      runs/<run id>/run.json events.jsonl dirty.diff
                    orchestrator.json         the process that works on it, by itself
                    orchestrator.log          what it prints when it works in the background
                    turns/0001.json           who has taken the run up, in order; exclusive
                    cancel/                   somebody wants it, or stages of it, to end
      disk/reservations/ pins/                room that saves in progress will need; what must stay
      services/<service id>/                  a server that is shared: its key and its leases
      judgements/                             the store of judgements, one file per writer
      code/<digest>/                          code snapshots
      batches/<comment>/                      submitit's files of an array of jobs
      rescores/<id>/                          what `refiner rescore` has found
      judge-reports/<id>/                     what `refiner judge report` has found
      sweeps/<name>/                          a sweep: its versions, the runs of its trials
      reports/<name>/                         what `refiner report` has made of it
      proofs/<stage id>/proof.json            what `refiner prove-resume` has found of a stage
      proofs/scratch/                         what it runs meanwhile
      certificates/<node>.json                what `refiner certify` has found of a machine
      nightly/<name>/                         a nightly evaluation: its nights, its alerts
      published/                              folder target of publishing
      adopted/                                recipes that `refiner adopt` has written

An attempt's parts ``config`` and ``inputs`` (of intent), ``batch`` and ``scheduler`` (of job) and
``resumed`` (of started) were files of their own before, and still are read: ``RecordFiles.part``.

``control`` holds the small files, ``data`` the large ones (checkpoints, metrics.jsonl, rollouts,
output, tracking, published, judgements, rescores, reports, scratch of proofs); they may be
different file systems, and are the same folder unless the workspace was made with another
``data_root``. A data root of its own carries ``refiner-data.json``: whose it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from infra.host.files import names_in

_ATTEMPT = re.compile(r"\d{4,}")

#: No run's id begins so.
_SWEEP_CALL = "sweep:"


def sweep_call(name: str) -> str:
    """What the work on a sweep is called where runs are called by their id: orchestrator, turns,
    wishes to end and events are kept in the same way."""
    return f"{_SWEEP_CALL}{name}"


def is_sweep(call: str) -> bool:
    """Whether this is what the work on a sweep is called."""
    return call.startswith(_SWEEP_CALL)


def call_title(call: str) -> str:
    """``sweep NAME`` or ``run ID``, for people."""
    if is_sweep(call):
        return f"sweep {call.removeprefix(_SWEEP_CALL)}"
    return f"run {call}"


@dataclass(frozen=True)
class AttemptPaths:
    """The files of one attempt."""

    control: Path
    data: Path

    @property
    def intent(self) -> Path:
        """The :class:`Attempt` as it was claimed, the whole recipe configuration of the call that
        claimed it, and its inputs (role -> stage id)."""
        return self.control / "intent.json"

    @property
    def job(self) -> Path:
        """The job's id, and for local jobs its process."""
        return self.control / "job.json"

    @property
    def started(self) -> Path:
        """The token that lets the attempt run: by the worker, or by who gave the attempt up."""
        return self.control / "started.json"

    @property
    def heartbeat(self) -> Path:
        """Counter, progress and times, replaced every few seconds."""
        return self.control / "heartbeat.json"

    @property
    def stop(self) -> Path:
        """Somebody wants it to save and end, and why."""
        return self.control / "stop.json"

    @property
    def endpoint(self) -> Path:
        """Where a server answers, once it does."""
        return self.control / "endpoint.json"

    @property
    def room(self) -> Path:
        """There while its worker has room to write: deleting it works on a full disk, too."""
        return self.control / "room"

    @property
    def outcome(self) -> Path:
        """How it ended."""
        return self.control / "outcome.json"

    @property
    def log(self) -> Path:
        """Everything that the worker printed."""
        return self.control / "log.txt"

    @property
    def printed(self) -> Path:
        """What a local worker prints beside its log."""
        return self.control / "printed.log"

    @property
    def submitit(self) -> Path:
        """submitit's folder."""
        return self.control / "submitit"

    @property
    def tracker(self) -> Path:
        """The tracker's files."""
        return self.data / "tracking"

    @property
    def metrics(self) -> Path:
        """One JSON line per logged step."""
        return self.data / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """One Parquet file per step."""
        return self.data / "rollouts"

    @property
    def output(self) -> Path:
        """What the stage makes for other stages."""
        return self.data / "output"


@dataclass(frozen=True)
class StagePaths:
    """The files of one stage."""

    control: Path
    data: Path

    @property
    def spec(self) -> Path:
        """What the stage is."""
        return self.control / "spec.json"

    @property
    def result(self) -> Path:
        """Present exactly when the stage is done."""
        return self.control / "result.json"

    @property
    def attempts(self) -> Path:
        """One folder per attempt."""
        return self.control / "attempts"

    @property
    def checkpoints(self) -> Path:
        """Resume checkpoints, shared by all attempts."""
        return self.data / "checkpoints"

    @property
    def holds(self) -> Path:
        """One file per stage that waits for a checkpoint of this one."""
        return self.control / "holds"

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

    @property
    def record(self) -> Path:
        """The :class:`RunRecord`."""
        return self.folder / "run.json"

    @property
    def events(self) -> Path:
        """What happened, one JSON line each."""
        return self.folder / "events.jsonl"

    @property
    def orchestrator(self) -> Path:
        """Which process works on it, with what output, and how it ended."""
        return self.folder / "orchestrator.json"

    @property
    def log(self) -> Path:
        """What the process that works on it in the background prints."""
        return self.folder / "orchestrator.log"

    @property
    def job_folder(self) -> Path:
        """submitit's folder of an orchestrator that is a job itself."""
        return self.folder / "submitit"

    @property
    def turns(self) -> Path:
        """One file for each process that has taken it up, created exclusively."""
        return self.folder / "turns"

    @property
    def cancel(self) -> Path:
        """One file for each time that somebody wanted it, or stages of it, to end."""
        return self.folder / "cancel"

    @property
    def diff(self) -> Path:
        """Uncommitted changes of the code, where it came from a checkout."""
        return self.folder / "dirty.diff"


@dataclass(frozen=True)
class Layout:
    """All paths of a workspace."""

    control: Path
    data: Path

    @property
    def format_file(self) -> Path:
        """Says that this is a workspace, and of which format."""
        return self.control / "workspace.json"

    @property
    def data_mark(self) -> Path:
        """Says whose data lie in a data root of its own."""
        return self.data / "refiner-data.json"

    @property
    def stages(self) -> Path:
        """One folder per stage."""
        return self.control / "stages"

    @property
    def runs(self) -> Path:
        """One folder per call."""
        return self.control / "runs"

    @property
    def code(self) -> Path:
        """One folder per code snapshot."""
        return self.control / "code"

    @property
    def batches(self) -> Path:
        """submitit's folders of arrays, one each."""
        return self.control / "batches"

    @property
    def disk(self) -> Path:
        """Reservations and pins."""
        return self.control / "disk"

    @property
    def published(self) -> Path:
        """Folder target of publishing."""
        return self.data / "published"

    @property
    def rescores(self) -> Path:
        """One folder per question that `refiner rescore` was asked."""
        return self.data / "rescores"

    @property
    def judge_reports(self) -> Path:
        """One folder per judge and material that `refiner judge report` has measured."""
        return self.data / "judge-reports"

    @property
    def judgements(self) -> Path:
        """The store of judgements."""
        return self.data / "judgements"

    @property
    def sweeps(self) -> Path:
        """One folder per sweep, by its name."""
        return self.control / "sweeps"

    @property
    def reports(self) -> Path:
        """One folder per report of a sweep."""
        return self.data / "reports"

    @property
    def nightly(self) -> Path:
        """One folder per nightly evaluation."""
        return self.control / "nightly"

    def proof(self, stage_id: str) -> Path:
        """The newest proof that a stage resumes exactly."""
        return self.control / "proofs" / stage_id / "proof.json"

    def certificate(self, host: str) -> Path:
        """The newest certificate of a node, by a name that is fit for a file."""
        return self.control / "certificates" / f"{host}.json"

    @property
    def proof_scratch(self) -> Path:
        """Workspaces of proofs in progress."""
        return self.data / "proofs" / "scratch"

    @property
    def services(self) -> Path:
        """One folder per server that is shared."""
        return self.control / "services"

    def service(self, service_id: str) -> Path:
        """Key and leases of a server that is shared."""
        return self.services / service_id

    def stage(self, stage_id: str) -> StagePaths:
        """The files of one stage."""
        return StagePaths(self.control / "stages" / stage_id, self.data / "stages" / stage_id)

    def attempt(self, stage_id: str, number: int) -> AttemptPaths:
        """The files of one attempt."""
        return self.stage(stage_id).attempt(number)

    def run(self, run_id: str) -> RunPaths:
        """The files of one call; of a sweep, that is worked on like one, by :func:`sweep_call`."""
        if is_sweep(run_id):
            return RunPaths(self.sweeps / run_id.removeprefix(_SWEEP_CALL))
        return RunPaths(self.runs / run_id)

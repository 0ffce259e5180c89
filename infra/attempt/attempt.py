"""An attempt from the inside: what the worker process uses to run one stage once.

In: a workspace, a stage id and an attempt number. Out: the stage's configuration and inputs to work
with, and on disk its start, heartbeat, log, outcome and, once, its result:

    with AttemptRun(workspace, stage_id, number) as attempt:
        try:
            report = run_the_stage(attempt.config, attempt.inputs, attempt.output_dir, attempt.io)
            attempt.finish(report)
        except BaseException as error:
            outcome = attempt.fail(error)

A kill -9 at any moment leaves a loadable workspace: every file is there whole or not at all, and
the result comes after all that it names.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from infra.attempt.heartbeat import Heartbeat
from infra.attempt.stage_io import AttemptIO
from infra.host.processes import ProcessId, host_name
from infra.jobs.failures import classify, detailed, outcome_of
from infra.jobs.protocol import AttemptRef
from infra.jobs.restart import AttemptClosed as AttemptClosed
from infra.jobs.signals import SlurmJob, StopFlag, why_stopped
from infra.store import atomic
from infra.store.checkpoints import CheckpointStore, checkpoint_to_export, tree_bytes
from infra.store.holds import held_steps
from infra.store.provenance import job_provenance
from infra.store.room import is_no_space, no_space_guard
from infra.store.workspace import Workspace, now_text
from infra.tracking.tracker import TrackedRun, Tracker, without_paths
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.records import (
    RECORD_VERSION,
    FailureClass,
    Outcome,
    OutputFile,
    StageResult,
    StageSpec,
    from_json,
    to_json,
)

if TYPE_CHECKING:
    from infra.disk.keeper import DiskKeeper

log = logging.getLogger(__name__)


#: How long a worker tries to leave its last word on a full disk, seconds (`disk.hold_s` at most).
LAST_WORD_S = 15.0
#: Errors that, right after a request to stop, are taken for its consequence: what else was told to
#: stop (a judge, data workers, another rank) may have gone first.
_FOLLOWS_FROM_STOPPING: frozenset[FailureClass] = frozenset(
    {"interrupted", "bug", "gpu_error", "judge_outage", "environment_outage"}
)


class AttemptRun:
    """One attempt at work; a context manager.

    Parameters
    ----------
    workspace, stage_id, number
        Which one.
    job
        The Slurm job that runs it, if one does.
    own_log
        Whether all that this process prints goes to the attempt's log.

    Attributes
    ----------
    spec, config
        What the stage is, and the whole configuration of the call that claimed the attempt.
    inputs, input_reports
        By role: the absolute output folder of the finished input stage, and its report.
    input_stages
        By role: the input's stage id.
    output_dir
        Where the stage writes what other stages read.
    io
        The :class:`StageIO` of this attempt.
    """

    def __init__(
        self,
        workspace: Workspace,
        stage_id: str,
        number: int,
        job: SlurmJob | None = None,
        *,
        own_log: bool = True,
    ) -> None:
        self.workspace, self.stage_id, self.number = workspace, stage_id, number
        self.job, self._own_log = job, own_log
        self.stage_paths = workspace.layout.stage(stage_id)
        self.paths = workspace.layout.attempt(stage_id, number)
        self.spec = from_json(StageSpec, self._need(self.stage_paths.spec))
        self.config = from_json(RecipeConfig, self._need(self.paths.config))
        self.input_stages: dict[str, str] = dict(self._need(self.paths.inputs))
        self.inputs: dict[str, Path] = {}
        self.input_reports: dict[str, Mapping[str, Any]] = {}
        self._read_inputs()
        self.output_dir = self.paths.output
        self._flag, self._stop_noted = StopFlag(), False
        self._keeper: DiskKeeper | None = None
        self._began = time.monotonic()
        self.heartbeat = Heartbeat(self.paths.heartbeat, self._began, on_beat=self._look_for_stop)
        self.tracker = Tracker(self.config.tracking, self._tracked_run())
        store = CheckpointStore(
            self.stage_paths.checkpoints,
            number,
            keep=getattr(getattr(self.config, self.spec.kind, None), "keep", 2),
            fence=self.check_fence,
            before_commit=lambda: self.io.flush(),
            held=lambda: held_steps(self.stage_paths),
            reserve=self._reserve,
            watch=self.heartbeat.saving,
            elapsed=lambda: self.seconds,
        )
        self.io = AttemptIO(
            self.stage_paths,
            number,
            store,
            on_progress=self.heartbeat.tell,
            stop_asked=lambda: self.stop_asked,
            sinks=(self.tracker,),
            wait_for_room=self._wait_for_room,
        )

    @property
    def stop_asked(self) -> bool:
        """Whether a signal, or a note beside the attempt, has asked to save and end."""
        return self._flag.signal is not None or self._stop_noted

    @property
    def seconds(self) -> float:
        """Since the worker began."""
        return time.monotonic() - self._began

    # ------------------------------------------------------------ begin and end

    def __enter__(self) -> AttemptRun:
        # Handlers first: whoever sees the start may ask to stop at once.
        self._flag.__enter__()
        try:
            self._begin()
        except BaseException as error:
            self.fail(error)
            self._flag.__exit__()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.heartbeat.stop()
        self.tracker.finish(0 if error is None else 1)
        self._flag.__exit__()

    def finish(self, report: Mapping[str, Any]) -> StageResult:
        """Publish the result: hash the output, check the fence, write ``result.json`` last.

        Raises
        ------
        AttemptClosed
            The attempt is stale; nothing was published.
        NoSpaceError
            The result did not fit; the stage is as it was.
        """
        with no_space_guard(self.paths.data, "publishing the result"):
            self.io.close()
            atomic.sync_tree(self.output_dir)
            result = StageResult(
                version=RECORD_VERSION,
                attempt=self.number,
                output_dir=self.output_dir.relative_to(self.stage_paths.data).as_posix(),
                files=hash_files(self.output_dir),
                report=self._finite_report(report),
                provenance=job_provenance(self.config),
                seconds=self.seconds,
                finished_at=now_text(),
            )
            self.check_fence()
            if not self.workspace.publish_result(self.stage_id, result):
                raise AttemptClosed(
                    f"{self.stage_id} was finished by another attempt",
                    fix="nothing; that result is used",
                )
        self._after_result()
        return result

    def rest(self, message: str) -> None:
        """End without a result, as a server does that nobody needs: it is never done, and may be
        wanted again. What a full disk keeps from being written, the exit code says."""
        self.io.close()
        try:
            self._close_patiently(Outcome("none", "finish", message))
        except OSError as error:
            log.error("the outcome could not be written: %s", error)

    def fail(self, error: BaseException) -> Outcome:
        """Record why the attempt ends; the traceback goes to the log. Never raises for a full disk:
        then the exit code alone tells the orchestrator."""
        outcome = classify(error, self.paths.data)
        if isinstance(error, AttemptClosed):
            log.warning("attempt %d ends: %s", self.number, outcome.message)
            return outcome  # the outcome file is somebody else's by now
        comes_back = False
        if self.stop_asked or outcome.failure == "interrupted":
            outcome, comes_back = self._stopped(outcome)
        outcome = detailed(outcome, error, self.step)
        number = _number_text(outcome.errno)
        log.error("attempt %d ends: %s%s", self.number, outcome.message, number, exc_info=error)
        if comes_back:
            # It stays open: the job keeps its place in the queue, and its next start closes it. An
            # outcome now would have an orchestrator submit a second job beside it.
            self.heartbeat.stop()
            return outcome
        try:
            if outcome.failure == "disk_full" and not self.stage_paths.result.exists():
                # Half an output is of no use to anybody, and the outcome needs a little room.
                written = max(tree_bytes(self.output_dir), self.io.checkpoints.lost_bytes)
                outcome = replace(outcome, need_bytes=written or None)
                shutil.rmtree(self.output_dir, ignore_errors=True)
            if self._close_patiently(outcome):  # the log was as full when it was told first
                log.error("attempt %d ended: %s%s", self.number, outcome.message, number)
        except OSError as second:
            log.error("the outcome could not be written: %s", second)
        return outcome

    @property
    def step(self) -> int | None:
        """The last step that is known to be finished; None before the stage has said anything."""
        progress, resumed = self.heartbeat.progress, self.io.resumed_step
        return resumed if progress is None else max(progress.done, resumed or 0)

    def check_inputs(self) -> None:
        """Raise if what an input stage has made is not there any more; of an input of which a
        checkpoint is read, its output does not matter.

        Raises
        ------
        WorkspaceError
            Names the file, and the folder to delete so that it is made again.
        """
        for role, stage_id in self.input_stages.items():
            if role not in self.spec.at_step:
                self.workspace.check_output(stage_id)

    def check_fence(self) -> None:
        """Raise if this attempt may no longer make anything visible."""
        if self.workspace.is_stale(self.stage_id, self.number):
            raise AttemptClosed(
                f"Attempt {self.number} of {self.stage_id} is no longer the newest, so it "
                "publishes nothing",
                fix="nothing; the newer attempt goes on",
            )

    # ------------------------------------------------------------ parts

    def _begin(self) -> None:
        self._take_token()
        self.check_fence()
        if self._own_log:
            self._redirect_output()
        with no_space_guard(self.paths.data, "starting the attempt"):
            self.output_dir.mkdir(parents=True, exist_ok=True)
        self.heartbeat.start()

    def _take_token(self) -> None:
        token: dict[str, Any] = {"process": str(ProcessId.of()), "started_at": now_text()}
        token |= {"node": host_name(), "provenance": job_provenance(self.config)}
        if self.job is not None:
            name = self.job.array_id or self.job.id
            token |= {"node": self.job.node, "job_id": name, "restart": self.job.restart}
        with no_space_guard(self.paths.control, "starting the attempt"):
            if not self.workspace.start_attempt(self.stage_id, self.number, token):
                raise AttemptClosed(
                    f"Attempt {self.number} of {self.stage_id} was given up before it started, or "
                    "has another worker",
                    fix="nothing; whoever gave it up goes on",
                )

    def _look_for_stop(self) -> None:
        """Where no signal gets through (another host, a wrapper that swallows it)."""
        self._stop_noted = self._stop_noted or self.paths.stop.exists()

    def _stopped(self, outcome: Outcome) -> tuple[Outcome, bool]:
        """With what class a request to stop counts, and whether the job goes on by itself."""
        asked = self.workspace.stop_asked(self.stage_id, self.number)
        why = why_stopped(self.job, self._flag.signal, asked)
        if why.failure != "cancelled" and outcome.failure not in _FOLLOWS_FROM_STOPPING:
            return outcome, False  # only a person's word counts for more than what came in between
        return outcome_of(why.failure, f"{why.message}: {outcome.message}"), why.comes_back

    def _reserve(self) -> AbstractContextManager[object]:
        """Room for the next save, kept free of other jobs."""
        need = self.keeper.need_of(self.stage_id)
        return self.keeper.reserve(AttemptRef(self.stage_id, self.number), need)

    def _wait_for_room(self) -> bool:
        """Make room, or wait for it as long as a running job may (`disk.hold_s`)."""
        ref, deadline = (
            AttemptRef(self.stage_id, self.number),
            time.monotonic() + self.config.disk.hold_s,
        )
        while time.monotonic() < deadline and not self.stop_asked:
            if self.keeper.make_room(self.keeper.need_of(self.stage_id), ref) is not None:
                return True
            time.sleep(min(1.0, self.config.disk.watch_s / 4))
        return False

    @property
    def keeper(self) -> DiskKeeper:
        """The room of the workspace, as this attempt asks for it."""
        from infra.disk.keeper import DiskKeeper

        if self._keeper is None:
            self._keeper = DiskKeeper(
                self.workspace, self.config.disk, stop_asked=lambda: self.stop_asked
            )
        return self._keeper

    def _need(self, path: Path) -> dict[str, Any]:
        value = self.workspace.read_control(path)
        if value is None:
            raise WorkspaceError(
                f"{path} is missing",
                expected="an attempt that an orchestrator has claimed",
                fix="start it with `refiner run`, not by hand",
            )
        return value

    def _read_inputs(self) -> None:
        for role, stage_id in self.input_stages.items():
            if role in self.spec.at_step:
                store = self.workspace.layout.stage(stage_id).checkpoints
                self.inputs[role] = checkpoint_to_export(store, self.spec.at_step[role])
                continue
            folder = self.workspace.output_dir(stage_id)
            result = self.workspace.read_result(stage_id)
            if folder is None or result is None:
                raise WorkspaceError(
                    f"Input {role} ({stage_id}) of {self.stage_id} is not done",
                    expected="finished inputs",
                    fix="run the recipe again: it makes what is missing",
                )
            self.inputs[role], self.input_reports[role] = folder, result.report

    def _tracked_run(self) -> TrackedRun:
        return TrackedRun(
            run_id=self.stage_id,
            name=f"{self.spec.name}-{self.spec.fingerprint[:8]}",
            group=self.config.tracking.group or self.config.recipe,
            job_type=self.spec.kind,
            folder=self.paths.tracker,
            config=without_paths(self.spec.identity),
        )

    def _redirect_output(self) -> None:
        """Everything that this process and its children print goes to the attempt's log."""
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor = os.open(self.paths.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)

    def _finite_report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """A number that is not finite is recorded as missing, not as text that JSON refuses."""
        kept: dict[str, Any] = atomic.finite(to_json(report))
        if kept != to_json(report):
            log.warning("numbers of the report that are not finite are recorded as missing")
        return kept

    def _after_result(self) -> None:
        """The stage is done; what is left to do may fail without undoing that."""
        for number in self.stage_paths.attempt_numbers():
            if number != self.number:  # the result names this attempt's output and no other
                shutil.rmtree(self.stage_paths.attempt(number).output, ignore_errors=True)
        try:
            self._close(Outcome("none", "finish"))
        except OSError as error:
            log.warning("the stage is done, but the outcome could not be written: %s", error)

    def _close_patiently(self, outcome: Outcome) -> bool:
        """Close, and on a full disk wait a little for room: what was half-written has just been
        removed, and a worker without a last word looks as if it had been killed. True if it took
        more than one try.
        """
        deadline = time.monotonic() + min(LAST_WORD_S, self.config.disk.hold_s)
        tries = 0
        while True:
            tries += 1
            try:
                self._close(outcome)
            except OSError as error:
                if not is_no_space(error, self.paths.control) or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return tries > 1

    def _close(self, outcome: Outcome) -> None:
        self.heartbeat.stop()
        self.workspace.close_attempt(self.stage_id, self.number, outcome, self.seconds)


def _number_text(number: int | None) -> str:
    """A system error's number for the log: `` [errno 122, EDQUOT]``."""
    return "" if number is None else f" [errno {number}, {errno.errorcode.get(number, 'unknown')}]"


def hash_files(folder: Path) -> tuple[OutputFile, ...]:
    """Every file below ``folder`` with size and SHA-256, sorted by path; each is read once."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name = path.relative_to(folder).as_posix()
        found.append(OutputFile(name, path.stat().st_size, digest))
    return tuple(found)

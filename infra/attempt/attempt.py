"""An attempt from the inside: the worker's tools to run one stage once.

In: a workspace, a stage id and an attempt number. Out: the stage's configuration and inputs, and
on disk its start, heartbeat, log, outcome and, once, its result:

    with AttemptRun(workspace, stage_id, number) as attempt:
        try:
            report = run_the_stage(attempt.config, attempt.inputs, attempt.output_dir, attempt.io)
            attempt.finish(report)
        except BaseException as error:
            outcome = attempt.fail(error)

A kill -9 at any moment leaves a loadable workspace: every file is complete or missing, and the
result is written after all files that it names.

The worker waits for space for its writes, and announces that: by a reservation, or later by a
retry; and by the file ``room`` beside the attempt. On a full disk nothing can be written, not even
an outcome, and the job's output and the scheduler's logs are on the same disk; but a file can
always be deleted. So the missing file shows that a worker waits, or, if it ended in silence, that
the disk was the reason.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from infra.attempt.rank_watch import STACKS
from infra.attempt.stage_io import AttemptIO, Heartbeat, redirect_output
from infra.attempt.stalls import (
    LEARNED,
    PhaseTimes,
    RankState,
    Stall,
    StallClock,
    find_laggard,
    merged,
    times_of,
)
from infra.disk.manager import DiskManager
from infra.host.files import PASSING, exists, make_folder
from infra.host.processes import ProcessId, host_name
from infra.jobs.dispatcher import AttemptRef
from infra.jobs.failures import CLASSES, classify, detailed, outcome_of
from infra.jobs.signals import AttemptClosed, SlurmJob, StopFlag, why_stopped
from infra.process.stacks import offer_stacks
from infra.store import atomic
from infra.store.atomic import is_no_space, is_read_only, no_space_guard
from infra.store.checkpoints import (
    CheckpointStore,
    checkpoint_to_export,
    hash_files,
    retained_steps,
    tree_bytes,
)
from infra.store.provenance import job_provenance
from infra.store.workspace import Workspace, now_text
from infra.tracking import TrackedRun, Tracker, without_paths
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import (
    HungError,
    NodeLost,
    RefinerError,
    SystemOutage,
    WorkspaceError,
)
from refiner_core.contract.kinds import TRAINED_HERE
from refiner_core.contract.records import (
    RECORD_VERSION,
    AttemptOutcome,
    FailureClass,
    StageResult,
    StageSpec,
    from_json,
    to_json,
)

log = logging.getLogger(__name__)

#: What lacks space: a checkpoint, metrics or rollouts, a heartbeat; or the attempt ends for lack of
#: it, or its outcome could not be written.
Part = Literal["save", "write", "heartbeat", "end"]

#: Most other stages whose times are read.
_OTHERS = 16
#: How long a worker tries to write its outcome on a full disk, seconds (`disk.hold_s` at most).
LAST_WORD_S = 15.0
#: Errors that, right after a request to stop, count as its consequence: others that were told to
#: stop (a judge, data workers, another rank) may have ended first.
_FOLLOWS_FROM_STOPPING: frozenset[FailureClass] = frozenset(
    {
        *("interrupted", "bug", "gpu_error", "node_failure"),
        *("judge_outage", "judge_unusable", "environment_outage"),
    }
)


class AttemptRun:
    """A running attempt; a context manager.

    Parameters
    ----------
    workspace, stage_id, number
        The attempt.
    job
        Its Slurm job, if any.
    own_log
        Whether all output of this process goes to the attempt's log.

    Attributes
    ----------
    spec, config
        The stage's definition, and the whole configuration of the call that claimed the attempt.
    inputs, input_reports
        By role: the absolute output folder of the finished input stage, and its report.
    input_stages
        By role: the input's stage id.
    output_dir
        Folder of the stage's output for other stages.
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
        self._need(self.paths.intent)
        self.config = from_json(RecipeConfig, workspace.part(self.paths, "config"))
        self.input_stages: dict[str, str] = workspace.part(self.paths, "inputs")
        self.inputs: dict[str, Path] = {}
        self.input_reports: dict[str, Mapping[str, Any]] = {}
        self._read_inputs()
        self.output_dir = self.paths.output
        self._flag, self._stop_noted = StopFlag(), False
        self._is_done: bool | None = False  # None: unknown
        self._ref = AttemptRef(stage_id, number)
        self._lacking: set[Part] = set()
        self._began = time.monotonic()
        kind = stage_id.rpartition("-")[0]
        self.clock = stall_clock(self.config, kind, self._began)
        self.heartbeat = Heartbeat(
            self.paths.heartbeat, self._began, on_beat=self._after_beat, clock=self.clock
        )
        tracked = TrackedRun(
            run_id=stage_id,
            name=f"{self.spec.name}-{self.spec.fingerprint[:8]}",
            group=self.config.tracking.group or self.config.recipe,
            job_type=self.spec.kind,
            folder=self.paths.tracker,
            config=without_paths(self.spec.identity),
        )
        self.tracker = Tracker(self.config.tracking, tracked)
        store = CheckpointStore(
            self.stage_paths.checkpoints,
            number,
            keep=getattr(getattr(self.config, self.spec.kind, None), "keep", 2),
            fence=self.check_fence,
            before_commit=lambda: self.io.flush(),
            held=lambda: retained_steps(self.stage_paths),
            reserve=self._reserve,
            watch=self.heartbeat.saving,
            elapsed=lambda: self.seconds,
        )
        self.io = AttemptIO(
            self.stage_paths,
            number,
            store,
            on_progress=self.heartbeat.tell,
            stop_requested=lambda: self.stop_requested,
            also_log=self.tracker.log,
            wait_for_space=self._wait_for_space,
        )

    @property
    def stop_requested(self) -> bool:
        """Tell whether a signal, or a note beside the attempt, has asked to save and end."""
        return self._flag.signal is not None or self._stop_noted

    @property
    def seconds(self) -> float:
        """Seconds since the worker began."""
        return time.monotonic() - self._began

    # ------------------------------------------------------------ begin and end

    def __enter__(self) -> AttemptRun:
        # Handlers first: a stop may be requested as soon as the start is visible.
        self._flag.__enter__()
        try:
            self._begin()
        except BaseException as error:
            self.fail(error)
            self._flag.__exit__()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
            The result did not fit; the stage is unchanged.
        """
        # NaN and infinity are recorded as missing: JSON has no text for them.
        kept: dict[str, Any] = atomic.finite(to_json(report))
        if kept != to_json(report):
            log.warning("NaN and infinite numbers of the report are recorded as missing")
        with no_space_guard(self.paths.data, "publishing the result", waits=True):
            self.io.close()
            atomic.sync_tree(self.output_dir)
            result = StageResult(
                version=RECORD_VERSION,
                attempt=self.number,
                output_dir=self.output_dir.relative_to(self.stage_paths.data).as_posix(),
                files=hash_files(self.output_dir),
                report=kept,
                provenance=job_provenance(self.config),
                seconds=self.seconds,
                finished_at=now_text(),
            )
            self.check_fence()
            self._is_done = None
            self._is_done = self.workspace.publish_result(self.stage_id, result)
            if not self._is_done:
                raise AttemptClosed(
                    f"{self.stage_id} was finished by another attempt",
                    fix="nothing; that result is used",
                )
        # The stage is done; the rest may fail without undoing that.
        for number in self.stage_paths.attempt_numbers():
            if number != self.number:  # the result names only this attempt's output
                shutil.rmtree(self.stage_paths.attempt(number).output, ignore_errors=True)
        self._close_done()
        return result

    def rest(self, message: str) -> None:
        """End without a result, as an unneeded server does: it is never done, and may be needed
        again. If a full disk prevents the outcome, the exit code shows it."""
        self.io.close()
        with self._last_word():
            self._close_patiently(AttemptOutcome("none", "finish", message))

    def fail(self, error: BaseException) -> AttemptOutcome:
        """Record why the attempt ends; the traceback goes to the log. Never raises for a full disk:
        then a deleted file informs the orchestrator (:mod:`infra.attempt.attempt`)."""
        outcome = classify(error, self.paths.data)
        if isinstance(error, AttemptClosed):
            log.warning("attempt %d ends: %s", self.number, outcome.message)
            return outcome  # the outcome file belongs to another attempt by now
        if self._is_done is None:
            self._is_done = self._result_is_there()
        if self._is_done:
            log.warning("the stage is done; a later action failed", exc_info=error)
            return self._close_done()
        if self._is_done is None:
            log.error("attempt %d ends; whether it is done is unknown", self.number)
            return outcome
        comes_back, failure = False, outcome.failure
        if self.stop_requested or outcome.failure == "interrupted":
            outcome, comes_back = self._stopped(outcome)
        outcome = detailed(outcome, error, self.step)
        if CLASSES[outcome.failure].avoids_node:
            # Slurm's word about a node: the error may be that of a rank elsewhere.
            rank = outcome.rank if outcome.failure == failure else None
            outcome = replace(outcome, node=self.io.ranks.node_of(rank))
        number, name = outcome.errno, errno.errorcode.get(outcome.errno or 0, "unknown")
        number_text = "" if number is None else f" [errno {number}, {name}]"
        text = "attempt %d ends: %s%s"
        log.error(text, self.number, outcome.message, number_text, exc_info=error)
        if comes_back:
            # It stays open: the job keeps its place in the queue, and its next start closes it.
            # With an outcome now, an orchestrator would submit a second job beside it.
            self.heartbeat.stop()
            return outcome
        if outcome.failure == "disk_full":
            self._report_space("end", there=False)
        with self._last_word():
            if outcome.failure == "disk_full" and not exists(self.stage_paths.result):
                # Half an output is useless, and the outcome needs a little space.
                written = max(tree_bytes(self.output_dir), self.io.checkpoints.lost_bytes)
                outcome = replace(outcome, need_bytes=written or None)
                shutil.rmtree(self.output_dir, ignore_errors=True)
            if self._close_patiently(outcome):  # at the first message, the log was full, too
                log.error("attempt %d ended: %s%s", self.number, outcome.message, number_text)
        return outcome

    @property
    def step(self) -> int | None:
        """The last step known to be finished; None before the first progress."""
        progress, resumed = self.heartbeat.progress, self.io.resumed_step
        return resumed if progress is None else max(progress.done, resumed or 0)

    def check_inputs(self) -> None:
        """Raise if an output of an input stage is missing; it does not matter if a checkpoint of
        that stage is read instead.

        Raises
        ------
        WorkspaceError
            Names the file, and the folder to delete so that it is made again.
        """
        for role, stage_id in self.input_stages.items():
            if role not in self.spec.at_step:
                self.workspace.check_output(stage_id)

    def check_fence(self) -> None:
        """Raise if this attempt may no longer publish files."""
        if self.workspace.is_stale(self.stage_id, self.number):
            raise AttemptClosed(
                f"Attempt {self.number} of {self.stage_id} is no longer the newest, so it "
                "publishes nothing",
                fix="nothing; the newer attempt continues",
            )

    # ------------------------------------------------------------ disk space

    def _report_space(self, part: Part, *, there: bool) -> None:
        """Record whether a part of the worker has space: the file exists while no part lacks any.
        Never raises; a failed or overtaken update is repeated with the next heartbeat."""
        (self._lacking.discard if there else self._lacking.add)(part)
        try:
            self.workspace.note_space(*self._ref, there=not self._lacking)
        except OSError as error:
            log.debug("the state of the disk space cannot be recorded: %s", error)

    @contextlib.contextmanager
    def _reserve(self) -> Iterator[None]:
        """Reserve space for the next save.

        Raises
        ------
        NoSpaceError
            There was none within a running job's limit (`disk.hold_s`).
        """
        with self._disk_manager.reserve(self._ref, self._disk_manager.need_of(self.stage_id)):
            self._report_space("save", there=True)
            yield

    def _wait_for_space(self) -> bool:
        """Free space, or wait for it within a running job's limit; True if there is some."""
        disk = self.config.disk
        deadline = time.monotonic() + disk.hold_s
        while time.monotonic() < deadline and not self.stop_requested:
            need = self._disk_manager.need_of(self.stage_id)
            if self._disk_manager.free_space(need, self._ref) is not None:
                self._report_space("write", there=True)
                return True
            self._report_space("write", there=False)
            time.sleep(min(1.0, disk.watch_s / 4))
        return False

    @functools.cached_property
    def _disk_manager(self) -> DiskManager:
        """The disk manager of the workspace, for this attempt."""

        def sleep(seconds: float) -> None:
            self._report_space("save", there=False)
            time.sleep(seconds)

        return DiskManager(
            self.workspace,
            self.config.disk,
            sleep=sleep,
            stop_requested=lambda: self.stop_requested,
        )

    # ------------------------------------------------------------ parts

    def _begin(self) -> None:
        token: dict[str, Any] = {"process": str(ProcessId.of()), "started_at": now_text()}
        token |= {"node": host_name(), "provenance": job_provenance(self.config)}
        if self.job is not None:
            name = self.job.array_id or self.job.id
            token |= {"node": self.job.node, "job_id": name, "restart": self.job.restart}
        with no_space_guard(self.paths.control, "starting the attempt", waits=True):
            if not self.workspace.start_attempt(self.stage_id, self.number, token):
                raise AttemptClosed(
                    f"Attempt {self.number} of {self.stage_id} was given up before it started, or "
                    "has another worker",
                    fix="nothing; another process continues it",
                )
        self.check_fence()
        if self._own_log:
            redirect_output(self.paths.log)
        with no_space_guard(self.paths.data, "starting the attempt", waits=True):
            make_folder(self.output_dir)
        offer_stacks()
        self.clock.learn(earlier_times(self.workspace, self.spec, self.stage_id, self.number))
        self.heartbeat.start()

    def _after_beat(self) -> None:
        """Record whether the heartbeat had space, and read requests to stop, for cases where no
        signal arrives (another host, a wrapper that swallows it)."""
        refused = self.heartbeat.refused
        self._report_space("heartbeat", there=refused is None or not is_no_space(refused))
        self._stop_noted = self._stop_noted or exists(self.paths.stop)
        if self._own_log:  # should nothing of Python run any more, the log gets the stacks
            later_s = self.config.dispatch.heartbeat_timeout_s / 2
            faulthandler.dump_traceback_later(later_s, file=2)
        self.heartbeat.pulse(self.io.ranks.counts())
        stall = self.clock.stall(time.monotonic())
        if stall is None or self._lacking:
            return
        if not self.clock.is_excused(stall, works_on_files=self.io.ranks.works_on_files()):
            self._end_stalled(stall)

    def _end_stalled(self, stall: Stall) -> None:
        """End this process, whose stage stands still: name the cause, record it, and exit. The
        ranks end with it."""
        log.error(
            "no sign of life in phase %s for %.0f s (limit %.0f s); collecting stacks", *stall
        )
        self.heartbeat.stalled = stall
        code = 1
        try:
            states = self.io.ranks.states(self.paths.control)
            code = self.fail(stall_error(stall, states, self.paths.control / STACKS)).exit_code
        finally:
            os._exit(code)

    def _stopped(self, outcome: AttemptOutcome) -> tuple[AttemptOutcome, bool]:
        """The class of a requested stop, and whether the job continues by itself."""
        asked = self.workspace.stop_requested(self.stage_id, self.number)
        why = why_stopped(self.job, self._flag.signal, asked)
        if why.failure != "cancelled" and outcome.failure not in _FOLLOWS_FROM_STOPPING:
            return outcome, False  # only a person's request outranks the error
        return outcome_of(why.failure, f"{why.message}: {outcome.message}"), why.comes_back

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
                    fix="run the recipe again: it makes the missing stages",
                )
            self.inputs[role], self.input_reports[role] = folder, result.report

    def _close_done(self) -> AttemptOutcome:
        outcome = AttemptOutcome("none", "finish")
        try:
            self._close(outcome)
        except OSError as error:
            log.warning("the stage is done, but the outcome could not be written: %s", error)
        return outcome

    def _result_is_there(self) -> bool | None:
        """Tell whether this attempt has published its result after all: a network file system may
        report an error for a successful write. None if that cannot be read either."""
        try:
            result = self.workspace.read_result(self.stage_id)
        except OSError as error:
            log.warning("%s", error)
            return None
        return result is not None and result.attempt == self.number

    @contextlib.contextmanager
    def _last_word(self) -> Iterator[None]:
        """Around the write of the outcome; if it fails, a deleted file shows that."""
        try:
            yield
        except OSError as error:
            self._report_space("end", there=False)
            log.error("the outcome could not be written: %s", error)

    def _close_patiently(self, outcome: AttemptOutcome) -> bool:
        """Close the attempt; on a full or unresponsive disk, wait a little first: half-written
        files have just been removed, and a worker without an outcome looks killed. True if it took
        more than one try.
        """
        deadline = time.monotonic() + min(LAST_WORD_S, self.config.disk.hold_s)
        again = False
        while True:
            try:
                self._close(outcome)
                return again
            except OSError as error:
                waits = is_no_space(error, self.paths.control) or is_read_only(error)
                if not (waits or error.errno in PASSING) or time.monotonic() > deadline:
                    raise
            again = True
            time.sleep(0.5)

    def _close(self, outcome: AttemptOutcome) -> None:
        self.heartbeat.stop()
        self.workspace.close_attempt(self.stage_id, self.number, outcome, self.seconds)


# ---------------------------------------------------------------- stalls


def stall_clock(config: RecipeConfig, kind: str, now: float) -> StallClock:
    """The clock of an attempt. Phases that wait for something outside, which has limits of its own,
    are always allowed the most, and so are all phases of a stage that does not train in refiner: a
    trainer of one's own may print nothing for an hour."""
    acts, dispatch = bool(config.environment.name), config.dispatch
    asks = acts or config.judge.kind != "lexical"
    patient = (*(("judge",) if asks else ()), *(("generate",) if acts else ()))
    if kind not in TRAINED_HERE:
        patient = LEARNED
    return StallClock(now, dispatch.hung_after_s, dispatch.hung_floor_s, patient)


def earlier_times(
    workspace: Workspace, spec: StageSpec, stage_id: str, number: int
) -> dict[str, PhaseTimes]:
    """Times of phases in earlier attempts of the stage and in some stages of its kind and model."""
    if spec.kind not in TRAINED_HERE:
        return {}
    beats = [workspace.read_heartbeat(stage_id, n) or {} for n in range(1, number)]
    found = [times_of(beat, stalled=True) for beat in beats]
    others = [i for i in workspace.stage_ids() if i.startswith(f"{spec.kind}-") and i != stage_id]
    for other in others[:_OTHERS]:
        paths = workspace.layout.stage(other)
        known = workspace.glance(paths.spec) or {}
        if (known.get("kind"), known.get("model")) == (spec.kind, spec.model):
            last = max(paths.attempt_numbers(), default=0)
            found.append(times_of(workspace.read_heartbeat(other, last) or {}, stalled=False))
    return merged(found)


def stall_error(stall: Stall, states: Sequence[RankState], stacks: Path) -> RefinerError:
    """The error that ends a stage which stands still; it names the ranks that lag."""
    laggard = find_laggard(states)
    lagging = [state for state in states if state.rank in laggard.ranks]
    names = " and ".join(str(rank) for rank in laggard.ranks)
    many = len(states) > 1
    who = f"rank{'s' if len(laggard.ranks) > 1 else ''} {names} lags: it " if names and many else ""
    step = max(state.step for state in states)
    text = (
        f"No sign of life in phase {stall.phase} after step {step} for {stall.silent_s:.0f} s: "
        f"{who}{laggard.why if who or many else f'it {laggard.why}'}"
    )
    if laggard.waiting:
        waiting = ", ".join(str(rank) for rank in laggard.waiting)
        text += f"; waiting for it: rank{'s' if len(laggard.waiting) > 1 else ''} {waiting}"
    kind: type[RefinerError] = NodeLost if laggard.is_gone else HungError
    if lagging and all(state.on_disk for state in lagging):
        kind, text = SystemOutage, f"{text}; the kernel waits for its file system"
    error = kind(
        text,
        expected=f"one within {stall.limit_s:.0f} s, by earlier times of this phase",
        fix=f"nothing, if that was an accident: the next attempt resumes from the last checkpoint; "
        f"else look at the stacks in {stacks}, or raise dispatch.hung_after_s",
    )
    if many and lagging:
        error.rank = lagging[0].rank
    return error

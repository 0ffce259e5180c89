"""Sweeps over small plans, with jobs that do one thing at each look.

A job's script is a list of words: ``step`` (a line of metrics), ``save`` (a checkpoint), ``done``,
or the name of a failure class. Whatever is not in the script of its trial and stage just ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flows.running.calls import CodeSnapshot
from flows.running.foreground import LaunchOptions
from flows.sweeping.admission import Admission, find_canary
from flows.sweeping.budget import Budget, UsageReader
from infra.host.processes import ProcessId
from infra.jobs.dispatch import Router
from infra.jobs.dispatcher import AttemptRef, JobRequest, JobStatus, OpenAttempt
from infra.jobs.failures import outcome_of
from infra.orchestrator.orchestrator import Orchestrator
from infra.store import atomic
from infra.store.checkpoints import MARKER, step_name
from infra.store.workspace import Workspace
from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import StageResult
from sweeps.forecast import ExceededLimit, SweepForecast
from sweeps.planning import plan_sweep
from sweeps.values import Limits, SweepFile, SweepPlan
from tests.support.plans import SOURCES, small_config
from tests.support.probing import ProbingKeeper

TRAINED = ("step", "step", "save", "done")


def small_sweep(
    *stages: str,
    betas: Sequence[float] = (0.1, 0.2),
    limits: Limits | None = None,
    judge: JudgeConfig | None = None,
    **changes: Any,
) -> SweepPlan:
    """``data → sft → grpo`` by KL coefficient and seed; SFT is shared by the arms of a seed."""
    changes.setdefault("seeds", (1, 2))
    sweep = SweepFile(
        name="small",
        recipe="tiny",
        factors={"grpo.beta": {str(b): b for b in betas}},
        limits=limits or Limits(),
        **changes,
    )
    base = small_config(*(stages or ("data", "sft", "grpo")))
    base = base if judge is None else replace(base, judge=judge)
    return plan_sweep(sweep, base, lambda _: SOURCES)


@dataclass
class Jobs:
    """A dispatcher whose jobs play scripts; ``script`` maps ``TRIAL/STAGE`` or ``STAGE`` to words.

    ``begun`` lists what was submitted, by the first trial that has the stage.
    """

    workspace: Workspace
    plan: SweepPlan
    script: Mapping[str, Sequence[str]] = field(default_factory=dict)
    executor: str = "local"
    seconds: float = 3600.0
    begun: list[str] = field(default_factory=list)
    most: int = 0
    stopped: list[AttemptRef] = field(default_factory=list)
    _live: dict[AttemptRef, list[str]] = field(default_factory=dict)
    _steps: dict[AttemptRef, int] = field(default_factory=dict)

    def check(self, stage: PlannedStage) -> None:
        """Everything can run here."""

    def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        """Begin, each with its script."""
        for request in requests:
            name = self.name_of(request.stage_id)
            self.begun.append(name)
            words = self.script.get(name) or self.script.get(name.rpartition("/")[2]) or ("done",)
            self._live[request.ref] = list(words)
            note = {"process": str(ProcessId.of()), "started_at": "2026-11-21T00:00:00+00:00"}
            self.workspace.start_attempt(*request.ref, note)
            paths = self.workspace.layout.attempt(*request.ref)
            atomic.write_json(paths.job, {"job_id": str(len(self.begun)), **note})
            self._beat(request.ref)
        self.most = max(self.most, len(self._live))
        return {}

    def observe(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
        """Each does one thing."""
        return {a.ref: self._play(a.ref) for a in attempts}

    def stop(self, attempt: OpenAttempt) -> bool:
        """It ends at the next look."""
        self.stopped.append(attempt.ref)
        self._live[attempt.ref] = ["interrupted"]
        return True

    def kill(self, attempt: OpenAttempt) -> bool:
        """At once."""
        self._live.pop(attempt.ref, None)
        return True

    def release(self, attempt: OpenAttempt) -> None:
        """Nothing is held."""

    def name_of(self, stage_id: str) -> str:
        """``TRIAL/STAGE``, by the first trial that has it."""
        return next(
            f"{t.name}/{s.name}"
            for t in self.plan.trials
            for s in t.plan.stages
            if s.id == stage_id
        )

    def _play(self, ref: AttemptRef) -> JobStatus:
        words = self._live.get(ref)
        if not words:
            return JobStatus("dead", local=True, running=False)
        word = words.pop(0)
        if word == "step":
            self._step(ref)
        elif word == "save":
            folder = self.workspace.layout.stage(ref.stage_id).checkpoints / step_name(2)
            folder.mkdir(parents=True, exist_ok=True)
            marker = {"step": 2, "attempt": ref.number, "files": {}, "seconds": 1.5}
            atomic.write_json(folder / MARKER, {**marker, "elapsed_s": 30.0})
        elif word != "wait":
            self._end(ref, word)
            return JobStatus("dead", local=True, running=False)
        return JobStatus("live", local=True)

    def _step(self, ref: AttemptRef) -> None:
        self._steps[ref] = step = self._steps.get(ref, 0) + 1
        path = self.workspace.layout.attempt(*ref).metrics
        path.parent.mkdir(parents=True, exist_ok=True)
        metrics = {"time/step_s": 5.0, "tokens_per_second": 100.0, "memory/host_peak_gib": 2.0}
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "metrics": metrics}) + "\n")

    def _beat(self, ref: AttemptRef) -> None:
        path = self.workspace.layout.attempt(*ref).heartbeat
        atomic.write_json(path, {"counter": 1, "seconds": self.seconds})

    def _end(self, ref: AttemptRef, word: str) -> None:
        del self._live[ref]
        if word != "done":
            outcome = outcome_of(word, f"told to end as {word}")
            self.workspace.close_attempt(*ref, outcome, self.seconds)
            return
        result = StageResult(
            1, ref.number, "output", (), {}, {}, self.seconds, "2026-11-21T01:00:00+00:00"
        )
        self.workspace.publish_result(ref.stage_id, result)
        self.workspace.close_attempt(*ref, outcome_of("none", ""), self.seconds)


@dataclass
class Bench:
    """A sweep ready to be stepped by a test."""

    orchestrator: Orchestrator
    admission: Admission
    jobs: Jobs
    workspace: Workspace
    said: list[str]

    def run(self, rounds: int = 400) -> dict[str, str]:
        """Step to the end; how each trial stands."""
        self.orchestrator.begin()
        return self.finish(rounds)

    def begin(self, until: Callable[[], bool]) -> None:
        """Begin, and step until a condition holds."""
        self.orchestrator.begin()
        for _ in range(400):
            if until():
                return
            assert not self.orchestrator.step(), f"ended: {self.states()}"
        raise AssertionError(f"still at work: {self.states()}")

    def finish(self, rounds: int = 400) -> dict[str, str]:
        """Step to the end of what has begun; how each trial stands."""
        for _ in range(rounds):
            if self.orchestrator.step():
                return self.states()
        raise AssertionError(f"still at work: {self.states()}")

    def states(self) -> dict[str, str]:
        """Trial -> state."""
        return {name: word.state for name, word in self.admission.standing().items()}


def bench(
    workspace: Workspace,
    plan: SweepPlan,
    script: Mapping[str, Sequence[str]] | None = None,
    *,
    forecast: Callable[[], SweepForecast] | None = None,
    passed: Callable[[SweepForecast], Sequence[ExceededLimit]] = lambda _: (),
    past_canary: bool = False,
    jobs: Jobs | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Bench:
    """An orchestrator of trials over real records and told jobs."""
    jobs = jobs or Jobs(workspace, plan, script or {})
    router = Router({jobs.executor: jobs}, lambda _: jobs.executor)
    said: list[str] = []
    empty = SweepForecast((), (), 0.0, 0.0, 0, 0.0, "")
    make = forecast or (lambda: empty)
    launch, config = LaunchOptions(past_canary=past_canary), plan.config
    config = replace(config, dispatch=replace(config.dispatch, poll_s=0.0))
    admission = Admission(
        plan=plan,
        workspace=workspace,
        pin=lambda _: CodeSnapshot("", ("refiner", "sweep"), {"code": ""}),
        budget=Budget(plan.sweep.limits, UsageReader(workspace)),
        canary=find_canary(plan, workspace),
        forecast=make(),
        corrected=lambda canary: replace(make(), canary=tuple(canary)),
        passed=passed,
        past_canary=launch.past_canary,
        poll_s=0.0,
        tell=said.append,
    )
    orchestrator = Orchestrator(
        admission, workspace, router, config, disk_manager=ProbingKeeper(workspace), clock=clock
    )
    admission.clock = clock
    return Bench(orchestrator, admission, jobs, workspace, said)

"""An attempt from its claim to its end, in one process, on a disk whose operations may fail."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infra.attempt.attempt import AttemptRun
from infra.disk import manager
from infra.host import files
from infra.jobs.signals import attempt_to_run, job_of
from infra.store import provenance
from infra.store.checkpoints import CheckpointStore
from infra.store.traces import list_rollouts, read_metrics, read_rollouts
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.config import DiskConfig
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import AttemptOutcome
from tests.support.fake_worker import work
from tests.support.faulty_disk import FaultyDisk
from tests.support.plans import OWNER, small_plan

#: Three checkpoints of which two are kept, so that one is deleted.
TOLD = {"steps": 3, "step_s": 0.0, "bytes": 100}
PLAN = small_plan("data", "sft", disk=DiskConfig(probe="statvfs", hold_s=0.0))
STAGE: PlannedStage = PLAN.by_name["data"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pauses, no list of distributions, small probes, no log lines; signals restored."""
    monkeypatch.setattr(provenance, "versions", dict)
    monkeypatch.setattr(manager, "FLOOR_BYTES", 4096)
    monkeypatch.setattr(files, "_PAUSES_S", (0.0, 0.0, 0.0))
    logging.disable(logging.CRITICAL)
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    logging.disable(logging.NOTSET)
    for number, handler in before.items():
        signal.signal(number, handler)


def one_life(
    root: Path, after: int = 0, stage: PlannedStage = STAGE, told: Mapping[str, Any] = TOLD
) -> int | None:
    """Open, claim, work, finish; the exit code, None if the claim was not made.

    Raises
    ------
    RefinerError
        It ended before the worker had anything to say.
    """
    workspace = Workspace.open(root)
    claim = StageClaim(OWNER, "local", after)
    inputs = {role: PLAN.by_name[name].id for role, name in stage.inputs.items()}
    attempt = workspace.claim_attempt(stage, PLAN.config, inputs, claim)
    if attempt is None:
        return None
    job = job_of(workspace, stage.id, attempt.number)
    number = attempt_to_run(workspace, stage.id, attempt.number, job)
    run = AttemptRun(workspace, stage.id, number, job, own_log=False)
    with run:
        try:
            run.check_inputs()
            run.finish(work(run, told))
        except BaseException as error:
            return run.fail(error).exit_code
    return 0


class Story(NamedTuple):
    """What a finished stage has left."""

    metrics: list[tuple[int, dict[str, float | None]]]
    rollouts: list[list[dict[str, object]]]
    output: dict[str, str]
    steps: list[int]


def story(root: Path, stage: PlannedStage = STAGE) -> Story:
    """The story of a stage that is done."""
    workspace = Workspace.read_only(root)
    result = workspace.read_result(stage.id)
    paths = workspace.layout.attempt(stage.id, result.attempt)
    return Story(
        [tuple(line) for line in read_metrics(paths.metrics)],
        [read_rollouts(p) for p in list_rollouts(paths.rollouts)],
        {f.path: f.sha256 for f in result.files},
        [c.step for c in store(workspace, stage).complete()],
    )


def store(workspace: Workspace, stage: PlannedStage = STAGE) -> CheckpointStore:
    """The stage's checkpoints, for reading."""
    return CheckpointStore(workspace.layout.stage(stage.id).checkpoints, 0)


def go_on(root: Path, stage: PlannedStage = STAGE) -> None:
    """What an orchestrator does next: close what is open, claim the next attempt, run it."""
    with FaultyDisk(root).mounted():
        workspace = Workspace.open(root)
        record = workspace.read_record(stage.id)
        if record is not None and record.result is not None:
            return
        attempts = record.attempts if record is not None else ()
        if attempts and attempts[-1].outcome is None:
            workspace.void_attempt(stage.id, attempts[-1].number)
            workspace.close_attempt(
                stage.id, attempts[-1].number, AttemptOutcome("killed", "resume")
            )
        before = store(workspace, stage).latest()
        assert one_life(root, len(attempts), stage) == 0
        newest = workspace.read_attempt(stage.id, len(attempts) + 1)
        assert newest.resumed_from_step == (None if before is None else before.step)

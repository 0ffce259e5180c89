"""What a publication rests on, from records: stages, attempts, the call that asked for it.

In: a `publish` or `card` stage, at work or long finished. Out: :class:`Behind`. Nothing in it
changes once the weights are there: of a training that goes on, only what came before the checkpoint
counts, whatever happens to it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flows.stages.work import StageWork
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, WorkspaceError
from refiner_core.contract.kinds import KINDS, TRAINED
from refiner_core.contract.records import (
    Attempt,
    RunRecord,
    StageRecord,
    StageResult,
    StageSpec,
    from_json,
)

#: Kinds of stages that a model rests on, in their order.
BEHIND = tuple(
    name for name in KINDS if name in TRAINED or any(KINDS[t].learns_from == name for t in TRAINED)
)


@dataclass(frozen=True)
class Subject:
    """A `publish` or `card` stage: what it is, what it reads, the configuration of its attempt.

    ``decided`` is what the stage has decided once and recorded (``made_with`` of its report, or of
    the `publish` stage whose card it writes); empty before.
    """

    workspace: Workspace
    stage_id: str
    attempt: int
    spec: StageSpec
    config: RecipeConfig
    inputs: Mapping[str, str]
    decided: Mapping[str, Any]

    def path(self, stage_id: str, rest: str) -> str:
        """A record's path, relative to the workspace."""
        return f"stages/{stage_id}/{rest}"

    def attempt_path(self, stage_id: str, number: int) -> str:
        """The folder of an attempt, relative to the workspace."""
        return self.path(stage_id, f"attempts/{number:04d}")


@dataclass(frozen=True)
class Behind:
    """Where weights come from.

    Attributes
    ----------
    weights
        The stage whose output is published: the training itself, or an export of a checkpoint.
    trained
        The stage that trained them.
    records
        That stage and those before it, by name, in order.
    reports
        What is told of each, by name; of the trained one up to the checkpoint.
    attempts
        By name, the attempts that took part, the last one as it was when the weights were there.
    step
        The optimiser step of the weights.
    whole
        Whether they are what the training ended with.
    """

    weights: str
    trained: str
    records: Mapping[str, StageRecord]
    reports: Mapping[str, Mapping[str, Any]]
    attempts: Mapping[str, tuple[Attempt, ...]]
    step: int
    whole: bool

    @property
    def ids(self) -> dict[str, str]:
        """Stage ids by name."""
        return {n: f"{r.spec.kind}-{r.spec.fingerprint[:12]}" for n, r in self.records.items()}

    @property
    def model(self) -> StageRecord:
        """The record of the stage that trained them."""
        return next(r for n, r in self.records.items() if self.ids[n] == self.trained)


def subject_at_work(work: StageWork) -> Subject:
    """The stage that is being carried out."""
    inputs = dict(work.input_stages)
    return Subject(
        work.workspace,
        work.stage_id,
        work.workspace.layout.stage(work.stage_id).attempt_numbers()[-1],
        work.spec,
        work.config,
        inputs,
        _decided_before(work.workspace, inputs),
    )


def recorded_subject(workspace: Workspace, stage_id: str) -> Subject:
    """A finished `publish` or `card` stage.

    Raises
    ------
    ConfigurationError
        There is no such stage, or it is not done.
    """
    record = workspace.read_record(stage_id)
    if record is None or record.spec.kind not in ("publish", "card") or record.result is None:
        raise ConfigurationError(
            f"{stage_id} is no finished publication in {workspace.root}.",
            expected="a `publish` or `card` stage that is done",
            fix="see `refiner status`",
        )
    paths = workspace.layout.attempt(stage_id, record.result.attempt)
    inputs = workspace.part(paths, "inputs")
    decided = record.result.report.get("made_with") or _decided_before(workspace, inputs)
    config = from_json(RecipeConfig, workspace.part(paths, "config"))
    return Subject(workspace, stage_id, record.result.attempt, record.spec, config, inputs, decided)


def _decided_before(workspace: Workspace, inputs: Mapping[str, str]) -> Mapping[str, Any]:
    """What the publication has decided whose card is written again."""
    published = workspace.read_result(inputs["publish"]) if "publish" in inputs else None
    return (published.report.get("made_with") or {}) if published is not None else {}


def weights_of(subject: Subject) -> dict[str, str]:
    """Role -> stage id of all weights that a publication may be about; one unless it is the best
    that is published."""
    inputs: Mapping[str, str] = subject.inputs
    if "publish" in inputs:
        inputs = inputs_of(subject.workspace, inputs["publish"])
    return {role: i for role, i in inputs.items() if role.partition("-")[0] == "weights"}


def behind(workspace: Workspace, weights: str) -> Behind:
    """All that weights rest on.

    Parameters
    ----------
    weights
        The stage whose output they are; it is done.
    """
    made = need_result(workspace, weights)
    exported = weights.startswith("export-")
    trained = str(made.report["stage"]) if exported else weights
    records = _chain(workspace, trained)
    reports = {n: r.result.report for n, r in records.items() if r.result is not None}
    attempts = {name: _until_done(record) for name, record in records.items()}
    name = next(n for n, r in records.items() if trained.endswith(r.spec.fingerprint[:12]))
    if exported:
        hidden = ("stage", "attempt", "elapsed_s")
        reports[name] = {k: v for k, v in made.report.items() if k not in hidden}
        attempts[name] = _until_checkpoint(records[name], made.report)
    order = {kind: position for position, kind in enumerate(BEHIND)}
    names = sorted(records, key=lambda n: order.get(records[n].spec.kind, len(order)))
    return Behind(
        weights=weights,
        trained=trained,
        records={n: records[n] for n in names},
        reports={n: reports[n] for n in names if n in reports},
        attempts={n: attempts[n] for n in names},
        step=int(made.report["steps"]),
        whole=not exported,
    )


def need_result(workspace: Workspace, stage_id: str) -> StageResult:
    """The result of a stage that must be done.

    Raises
    ------
    WorkspaceError
        It is not.
    """
    result = workspace.read_result(stage_id)
    if result is None:
        raise WorkspaceError(
            f"{stage_id} is not done, though what was made from it is",
            expected="all records of a run in one workspace",
            fix="bring its folder back, or run the recipe again",
        )
    return result


def _chain(workspace: Workspace, trained: str) -> dict[str, StageRecord]:
    """Records of a training stage and of those that it rests on, by name."""
    found: dict[str, StageRecord] = {}
    waiting = [trained]
    while waiting:
        stage_id = waiting.pop()
        record = workspace.read_record(stage_id)
        if record is None or record.spec.name in found or record.spec.kind not in BEHIND:
            continue
        found[record.spec.name] = record
        waiting += inputs_of(workspace, stage_id).values()
    if not found:
        need_result(workspace, trained)  # refuses
    return found


def inputs_of(workspace: Workspace, stage_id: str) -> dict[str, str]:
    """Role -> stage id of a stage's inputs; the same in all its attempts."""
    result = workspace.read_result(stage_id)
    numbers = workspace.layout.stage(stage_id).attempt_numbers()
    number = result.attempt if result is not None else (numbers or [1])[-1]
    return workspace.part(workspace.layout.attempt(stage_id, number), "inputs")


def _until_done(record: StageRecord) -> tuple[Attempt, ...]:
    """The attempts that led to a result, the last one as its result tells of it."""
    result = record.result
    if result is None:
        return record.attempts
    return tuple(
        _ended(a, result.seconds, result.finished_at) if a.number == result.attempt else a
        for a in record.attempts
        if a.number <= result.attempt
    )


def _until_checkpoint(record: StageRecord, export: Mapping[str, Any]) -> tuple[Attempt, ...]:
    """The attempts that led to a checkpoint. How the one that saved it goes on is not theirs."""
    last, elapsed_s = export.get("attempt"), export.get("elapsed_s")
    if last is None:  # of a version that did not say
        return tuple(a for a in record.attempts if a.outcome is not None)
    return tuple(
        _ended(a, elapsed_s, None) if a.number == last else a
        for a in record.attempts
        if a.number <= last
    )


def _ended(attempt: Attempt, seconds: float | None, ended_at: str | None) -> Attempt:
    return replace(attempt, outcome=None, seconds=seconds, ended_at=ended_at)


# ---------------------------------------------------------------- the calls


def runs_of(subject: Subject, trained: str) -> tuple[RunRecord | None, RunRecord | None]:
    """The call that asked for the publication, and the first one that the training belongs to."""
    known = subject.decided.get("runs")
    if known is not None:
        asked, began = (None if r is None else subject.workspace.read_run(str(r)) for r in known)
        return asked, began
    runs = list(subject.workspace.runs())
    asked = next((r for r in runs if subject.stage_id in r.stages.values()), None)
    began = next((r for r in runs if trained in r.stages.values()), asked)
    return asked, began

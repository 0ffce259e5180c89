"""Lineage of published weights, from records: stages, attempts, the call, their cost.

In: a `publish` or `card` stage, running or finished. Out: :class:`Lineage`. It never changes once
the weights exist: of a continuing training, only the part before the checkpoint counts. Facts that
are known only at the time (the checked command, the texts of files that may change, the calls that
may be joined by others) are decided once, and recorded as ``made_with`` in the stage's report.

Lost work is what another attempt repeated: for an attempt from step 0 that ended at step 120,
followed by one that resumed from step 100, one sixth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.cards.reproduction import CheckpointOrigin, reproduce
from flows.stages.work import StageWork
from infra.host.processes import ProcessId
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig, Resources
from refiner_core.contract.errors import ConfigurationError, StageFailed, WorkspaceError
from refiner_core.contract.kinds import KINDS, TRAINED
from refiner_core.contract.records import (
    Attempt,
    RunRecord,
    StageRecord,
    StageResult,
    StageSpec,
    from_json,
)
from refiner_core.rubrics import load_rubric_set

#: Kinds of stages behind a model, in their order.
BEHIND = tuple(
    name for name in KINDS if name in TRAINED or any(KINDS[t].learns_from == name for t in TRAINED)
)


@dataclass(frozen=True)
class Subject:
    """A `publish` or `card` stage: its inputs, and the configuration of its attempt.

    ``decided`` is what the stage has decided once and recorded (``made_with`` in its report, or in
    that of the `publish` stage whose card it updates); empty before.
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
class Lineage:
    """Origin of weights.

    Attributes
    ----------
    weights
        The stage with the published output: the training itself, or an export of a checkpoint.
    trained
        The stage that trained them.
    records
        That stage and those before it, by name, in order.
    reports
        Report of each, by name; of the training up to the checkpoint.
    attempts
        By name, the attempts involved, the last one in its state when the weights were finished.
    step
        The optimiser step of the weights.
    whole
        True if they are the training's final weights.
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

    @property
    def last_attempt(self) -> int:
        """The number of the attempt that made them."""
        attempts = self.attempts[self.model.spec.name]
        return attempts[-1].number if attempts else 1


def subject_at_work(work: StageWork) -> Subject:
    """The running stage."""
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
    """Decisions of the publication whose card is updated."""
    published = workspace.read_result(inputs["publish"]) if "publish" in inputs else None
    return (published.report.get("made_with") or {}) if published is not None else {}


def weights_of(subject: Subject) -> dict[str, str]:
    """Role -> stage id of all weights that a publication may use; several only if the best one is
    published."""
    inputs: Mapping[str, str] = subject.inputs
    if "publish" in inputs:
        inputs = inputs_of(subject.workspace, inputs["publish"])
    return {role: i for role, i in inputs.items() if role.partition("-")[0] == "weights"}


def lineage_of(workspace: Workspace, weights: str) -> Lineage:
    """Origin of weights.

    Parameters
    ----------
    weights
        The stage with the weights as its output; it is done.
    """
    made = need_result(workspace, weights)
    exported = weights.startswith("export-")
    trained = str(made.report["stage"]) if exported else weights
    chain = _chain(workspace, trained)
    records = dict(sorted(chain.items(), key=lambda item: BEHIND.index(item[1].spec.kind)))
    reports = {n: r.result.report for n, r in records.items() if r.result is not None}
    attempts = {name: _until_done(record) for name, record in records.items()}
    name = next(n for n, r in records.items() if trained.endswith(r.spec.fingerprint[:12]))
    if exported:
        hidden = ("stage", "attempt", "elapsed_s")
        reports[name] = {k: v for k, v in made.report.items() if k not in hidden}
        attempts[name] = _until_checkpoint(records[name], made.report)
    step = int(made.report["steps"])
    return Lineage(weights, trained, records, reports, attempts, step, not exported)


def need_result(workspace: Workspace, stage_id: str) -> StageResult:
    """The result of a stage that must be done.

    Raises
    ------
    WorkspaceError
        It is not done.
    """
    result = workspace.read_result(stage_id)
    if result is None:
        raise WorkspaceError(
            f"{stage_id} is not done, but stages made from it are",
            expected="all records of a run in one workspace",
            fix="restore its folder, or run the recipe again",
        )
    return result


def _chain(workspace: Workspace, trained: str) -> dict[str, StageRecord]:
    """Records of a training stage and of those before it, by name."""
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
    """The attempts that led to a result, the last one by its result."""
    if (result := record.result) is None:
        return record.attempts
    return _until(record, result.attempt, result.seconds, result.finished_at)


def _until_checkpoint(record: StageRecord, export: Mapping[str, Any]) -> tuple[Attempt, ...]:
    """The attempts that led to a checkpoint, up to that checkpoint."""
    if (last := export.get("attempt")) is None:  # of a version without this record
        return tuple(a for a in record.attempts if a.outcome is not None)
    return _until(record, last, export.get("elapsed_s"), None)


def _until(
    record: StageRecord, last: int, seconds: float | None, ended_at: str | None
) -> tuple[Attempt, ...]:
    end: dict[str, Any] = {"outcome": None, "seconds": seconds, "ended_at": ended_at}
    until = (a for a in record.attempts if a.number <= last)
    return tuple(replace(a, **end) if a.number == last else a for a in until)


# ---------------------------------------------------------------- the calls


def runs_of(subject: Subject, trained: str) -> tuple[RunRecord | None, RunRecord | None]:
    """The call that requested the publication, and the first call of the training."""
    known = subject.decided.get("runs")
    if known is not None:
        asked, began = (None if r is None else subject.workspace.read_run(str(r)) for r in known)
        return asked, began
    runs = list(subject.workspace.runs())
    asked = next((r for r in runs if subject.stage_id in r.stages.values()), None)
    began = next((r for r in runs if trained in r.stages.values()), asked)
    return asked, began


def decide(
    subject: Subject, made: Lineage, runs: tuple[RunRecord | None, RunRecord | None]
) -> dict[str, Any]:
    """All of it.

    Raises
    ------
    StageFailed
        No command makes the model again, or the template has changed.
    """
    (asked, began), config = runs, subject.config
    return {
        "runs": [None if r is None else r.run for r in (asked, began)],
        **(_checked_before(subject.workspace, asked, made) or _checked(config, asked, made)),
        "template": _template(config, subject.spec.sources.get("card_template")),
        "static_rubrics": _static_rubrics(config, made),
        "stopped": _stopped(subject, made),
    }


#: Decisions shared by all publications of a run from one training.
_OF_COMMANDS = ("makes", "command", "recipe_file", "not_the_shipped_recipe", "sources")


def _checked_before(
    workspace: Workspace, asked: RunRecord | None, made: Lineage
) -> dict[str, Any] | None:
    """The command that was checked for another publication of the run."""
    for name, stage_id in asked.stages.items() if asked else ():
        result = workspace.read_result(stage_id) if name.startswith("publish") else None
        told = (result.report.get("made_with") or {}) if result is not None else {}
        if told.get("makes") == made.model.spec.fingerprint:
            return {key: told[key] for key in _OF_COMMANDS}
    return None


def _checked(config: RecipeConfig, asked: RunRecord | None, made: Lineage) -> dict[str, Any]:
    return reproduce(
        CheckpointOrigin(
            recipe=str(asked.provenance.get("recipe") or asked.recipe) if asked else "",
            overrides=asked.overrides if asked else (),
            config=config,
            trained=made.model.spec.name,
            specs={name: record.spec for name, record in made.records.items()},
        )
    )


def _stopped(subject: Subject, made: Lineage) -> dict[str, Any]:
    """Current end of the training behind a checkpoint, if it ended and was not resumed; empty if it
    continues or is done. Later the records may show another attempt."""
    attempts = made.model.attempts
    if made.whole or made.model.result is not None or not attempts:
        return {}
    last = attempts[-1]
    if last.outcome is not None:
        found = {"failure": last.outcome.failure, "step": last.outcome.step}
        return {**found, "ended_at": last.ended_at}
    workspace = subject.workspace
    started = workspace.read_control(workspace.layout.attempt(made.trained, last.number).started)
    worker = ProcessId.parse(str((started or {}).get("process") or ""))
    if started is None or not worker.here or worker.alive:
        return {}
    beat = workspace.read_heartbeat(made.trained, last.number) or {}
    return {"failure": "killed", "step": (beat.get("progress") or {}).get("done")}


def _template(config: RecipeConfig, digest: str | None) -> str | None:
    if config.publish.card_template is None:
        return None
    path = Path(config.publish.card_template).expanduser()
    try:
        data = path.read_bytes()
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise StageFailed(
            f"publish.card_template {path} cannot be read ({error})",
            expected="a Jinja file in UTF-8",
            fix="restore it, and run the same command again",
        ) from error
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise StageFailed(
            f"publish.card_template {path} has changed since the run was begun",
            expected="the template that the publication was planned with",
            fix="give the same `refiner run` command again: it plans with the current file",
        )
    return text


def _static_rubrics(config: RecipeConfig, made: Lineage) -> list[tuple[str, float]]:
    """Titles and signed weights of the static rubrics of the reward; none if their file has
    changed."""
    reward = config.reward
    if "static" not in reward.rubric_source or reward.instance_rubrics_only:
        return []
    try:
        rubrics = load_rubric_set(reward.static_rubrics)
    except ConfigurationError:
        return []
    used = {r.spec.sources["rubrics"] for r in made.records.values() if "rubrics" in r.spec.sources}
    if used and used != {rubrics.digest()}:
        return []
    return [(r.title, r.signed_weight) for r in rubrics.rubrics]


_HOUR_S = 3600.0
_DIGITS = 6


def cost_of(workspace: Workspace, made: Lineage, config: RecipeConfig) -> dict[str, Any]:
    """Cost of a model, as in :class:`refiner_core.cards.CardFacts`; empty if unknown (adopted
    weights). If the duration of one attempt is unknown (a checkpoint of an old version), its stage
    has no cost, and there is no total.

    Parameters
    ----------
    config
        Has the price of a GPU-hour.
    """
    hours = dict.fromkeys(("gpu_hours", "core_hours", "lost_gpu_hours", "lost_core_hours"), 0.0)
    seconds: dict[str, float] = {}
    unknown: set[str] = set()
    for name, attempts in made.attempts.items():
        if made.reports.get(name, {}).get("adopted"):
            continue
        stage_id, kind = made.ids[name], made.records[name].spec.kind
        for place, attempt in enumerate(attempts):
            if attempt.seconds is None:
                if attempt.started_at is not None:
                    unknown.add(name)
                continue
            # By the configuration that was recorded with it.
            paths = workspace.layout.attempt(stage_id, attempt.number)
            recorded = from_json(RecipeConfig, workspace.part(paths, "config"))
            asked: Resources = getattr(recorded, kind).resources
            used = {"gpu_hours": asked.gpus * asked.nodes, "core_hours": asked.cpus * asked.nodes}
            lost = _lost_share(attempt, attempts[place + 1 :])
            for unit, count in used.items():
                hours[unit] += count * attempt.seconds / _HOUR_S
                hours[f"lost_{unit}"] += lost * count * attempt.seconds / _HOUR_S
            seconds[name] = seconds.get(name, 0.0) + attempt.seconds
    known = {name: round(value, 3) for name, value in seconds.items() if name not in unknown}
    if unknown or not known:
        return {"seconds": known} if known else {}
    found: dict[str, Any] = {key: round(value, _DIGITS) for key, value in hours.items()}
    found["seconds"] = known
    if config.publish.price_per_gpu_hour is not None:
        found["price"] = config.publish.price_per_gpu_hour
        found["currency"] = config.publish.currency
    return found


def _lost_share(attempt: Attempt, later: Sequence[Attempt]) -> float:
    """Share of an attempt's work that the next one repeated."""
    if attempt.outcome is None or attempt.outcome.failure == "none" or not later:
        return 0.0
    start, end = attempt.resumed_from_step or 0, attempt.outcome.step
    again_from = max(later[0].resumed_from_step or 0, start)
    if again_from <= start:
        return 1.0  # nothing of it was kept
    if end is None or end <= again_from:
        return 0.0
    return (end - again_from) / (end - start)

"""Evaluations of a night: the runs that make them, the lines of the history that they become.

In: plans, and which checkpoint each is of. Out: the last views of their stages; rows, and watched
metrics prompt by prompt, since outputs of old stages may be reclaimed. The canary's run comes
first, so it has the first slot. Ctrl-C asks all of them to save and stop.

Nights that nobody has worked on, or not to the end, are completed as far as that is honest:

- Weights that are frozen have the same numbers in every night, so those that are there hold, late.
- What was newest then is known only where a call of that night has recorded it; that call is
  finished now, and its numbers belong to the conditions of the night that is now.
- The canary of a past night cannot be measured any more: how the judge and the machines were then,
  nobody can ask. Unless it had been measured, it is recorded as missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from flows.nightly.checkpoints import (
    Resolved,
    evaluations_in,
    is_done,
    night_overrides,
    night_plan,
    resolve,
)
from flows.running.calls import pin_code, plan_of_run, record_pinned_run
from flows.running.showing import orchestrate
from infra.jobs.dispatch import make_router
from infra.orchestrator.members import Given, Member
from infra.store import atomic
from infra.store.nightly_records import NightlyRecords
from infra.store.orchestrators import orchestrator_of
from infra.store.records import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import RunRecord, StageResult
from refiner_core.contract.types import StageView
from refiner_core.nightly.changes import per_prompt
from refiner_core.nightly.definition import ROW_VERSION, Checkpoint, Nightly, Row, Schedule

Tell = Callable[[str], None]


@dataclass(frozen=True)
class At:
    """Context of a night. ``current`` is the newest night that has begun, ``base`` the recipe."""

    nightly: Nightly
    schedule: Schedule
    workspace: Workspace
    records: NightlyRecords
    current: str
    base: RecipeConfig
    tell: Tell


class Job(NamedTuple):
    """One checkpoint of one night, to be evaluated."""

    found: Resolved
    plan: Plan
    run: RunRecord


def begin_jobs(
    nightly: Nightly,
    night: str,
    wanted: Sequence[tuple[Resolved, Plan]],
    workspace: Workspace,
    records: NightlyRecords,
) -> list[Job]:
    """A recorded call for each plan; one that was begun in this night and not finished goes on."""
    pinned, jobs = None, []
    for found, plan in wanted:
        run = _begun(night, found, plan, workspace, records)
        if run is None:
            pinned = pinned or pin_code(workspace)
            words = night_overrides(nightly, found, night)
            of_night = {"name": nightly.name, "night": night, "checkpoint": found.checkpoint.name}
            more = {"nightly": of_night}
            run = record_pinned_run(plan, workspace, nightly.recipe, words, pinned, more)
            if pinned.diff:
                atomic.write_text(workspace.layout.run(run.run).diff, pinned.diff)
            workspace.write_run(run)
            records.note_run(night, found.checkpoint.name, run.run, found.digest)
        jobs.append(Job(found, plan, run))
    return jobs


def _begun(
    night: str, found: Resolved, plan: Plan, workspace: Workspace, records: NightlyRecords
) -> RunRecord | None:
    wanted = {s.name: s.id for s in plan.stages}
    for noted in reversed(records.runs_of(night, found.checkpoint.name)):
        run = workspace.read_run(noted["run"])
        if dict(run.stages) == wanted and not orchestrator_of(workspace, run.run).works:
            return run
    return None


def carry_out(
    jobs: Sequence[Job], workspace: Workspace, tell: Tell
) -> dict[str, Mapping[str, StageView]]:
    """Work on all calls to their end; views by checkpoint.

    Raises
    ------
    KeyboardInterrupt
        A second Ctrl-C, a while later: what runs goes on by itself.
    """
    if not jobs:
        return {}
    config = jobs[0].plan.config
    members = []
    for job in jobs:
        member = Member(job.plan, job.run, workspace, job.found.checkpoint.name)
        member.take_up()
        members.append(member)
    source = Given(members, lambda member: tell(f"{member.name}: {_words(member.views())}"))
    router = make_router(config.dispatch, workspace)
    orchestrate(source, workspace, router, config, console=_Teller(tell))
    return {member.name: member.views() for member in members}


class _Teller:
    """Shows a night's work in messages alone; a :class:`flows.running.showing.Shows`."""

    def __init__(self, tell: Tell) -> None:
        self.note = self.warn = tell

    def show(self, views: Mapping[str, StageView]) -> None:
        """Each checkpoint is told of when it has ended."""

    def finish(self, views: Mapping[str, StageView]) -> None:
        """All of them have been."""

    def close(self) -> None:
        """Nothing is open."""


def _words(views: Mapping[str, StageView]) -> str:
    bad = [v for v in views.values() if v.state in ("failed", "interrupted")]
    if bad:
        return "; ".join(f"{v.name} {v.state}: {v.message}" for v in bad)
    return "evaluated"


_NUMBER = ("value", "low", "high", "n", "protocol")


@dataclass(frozen=True)
class Occasion:
    """For which night, and how.

    Attributes
    ----------
    measured
        Whether an evaluation that no earlier night knows was made in ``measured_in``; else it was
        made elsewhere, and nobody knows under which conditions.
    """

    nightly: Nightly
    night: str
    measured_in: str
    late: bool = False
    run: str = ""
    measured: bool = True


def harvest(
    plan: Plan,
    found: Resolved,
    occasion: Occasion,
    workspace: Workspace,
    records: NightlyRecords,
    known: Sequence[Row],
) -> list[Row]:
    """Write what the evaluations of a checkpoint say into the history; the lines that are new.

    ``known`` are the lines so far.
    """
    before = {row.stage: row.measured_in for row in known}
    written = []
    for stage in evaluations_in(plan):
        result = workspace.read_result(stage.id)
        if result is None:
            continue
        facts = _facts(plan, stage, result)
        for entries in _by_protocol(result.report["evaluations"]):
            row = _row(stage, entries, found, occasion, before, facts)
            _keep_values(row, entries, occasion.nightly, workspace, records)
            if records.add_row(row):
                written.append(row)
    return written


def _by_protocol(entries: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    for decoding in dict.fromkeys(e["decoding"] for e in entries):
        yield [e for e in entries if e["decoding"] == decoding]


def _row(
    stage: PlannedStage,
    entries: Sequence[Mapping[str, Any]],
    found: Resolved,
    occasion: Occasion,
    before: Mapping[str, str],
    facts: Mapping[str, str],
) -> Row:
    main = next((e for e in entries if e["metric"] != "reward"), entries[0])
    nightly = occasion.nightly
    return Row(
        version=ROW_VERSION,
        nightly=nightly.name,
        night=occasion.night,
        checkpoint=found.checkpoint.name,
        canary=found.checkpoint == nightly.canary,
        protocol=str(main["protocol"]),
        protocol_name=str(main["protocol_name"]),
        protocol_set=stage.protocol,
        decoding=str(main["decoding"]),
        digest=found.digest,
        source=found.what,
        stage=stage.id,
        samples=str(main["samples_file"]),
        run=occasion.run,
        fresh=stage.id not in before and occasion.measured,
        late=occasion.late,
        measured_in=before.get(stage.id, occasion.measured_in if occasion.measured else ""),
        evaluated_at=now_text(),
        numbers={e["metric"]: {k: e.get(k) for k in _NUMBER} for e in entries},
        facts=facts,
    )


def _keep_values(
    row: Row,
    entries: Sequence[Mapping[str, Any]],
    nightly: Nightly,
    workspace: Workspace,
    records: NightlyRecords,
) -> None:
    there = {e["metric"] for e in entries}
    wanted = [
        metric
        for metric in nightly.alerts.metrics
        if metric in there and records.values(row.stage, row.protocol, metric) is None
    ]
    output = workspace.output_dir(row.stage)
    if not wanted or output is None or not (output / row.samples).exists():
        return
    from refiner_core.evaluation.metrics import load_samples

    samples = load_samples(output / row.samples)
    found = {metric: per_prompt(samples, metric) for metric in wanted}
    records.keep_values(row.stage, row.protocol, found)


def _facts(plan: Plan, stage: PlannedStage, result: StageResult) -> dict[str, str]:
    """What may have changed beside the weights."""
    judge, said = plan.config_of(stage).judge, result.provenance
    host = said.get("host") or {}
    found = {
        "judge.kind": judge.kind,
        "judge.model": judge.model,
        "judge.revision": judge.revision or "",
        "judge.served": ", ".join(sorted(_usage(result).get("served") or {})),
        "code": said.get("code") or "",
        "python": said.get("python") or "",
        "host.name": host.get("name") or "",
        "host.cpu": host.get("cpu") or "",
        "host.gpus": ", ".join(host.get("gpus") or ()),
        **{f"versions.{k}": v for k, v in (said.get("versions") or {}).items()},
    }
    return {name: str(value) for name, value in found.items() if value}


def _usage(result: StageResult) -> Mapping[str, Any]:
    usage: Mapping[str, Any] = result.report.get("judge_usage") or {}
    return usage


def look_after(at: At, now: datetime, only: str = "") -> dict[str, str]:
    """Complete earlier nights; night -> ``done``, ``incomplete`` or ``busy``.

    Parameters
    ----------
    only
        This night alone, which the caller has taken up; else all within reach.
    """
    found: dict[str, str] = {}
    for night in [only] if only else _nights(at, now):
        if at.records.ended(night) is not None:
            found[night] = "done"
            continue
        if only:
            found[night] = _complete(at, night)
            continue
        who = at.records.worker_of(night)
        turn = who.turn if who else 0
        if (who is not None and who.works) or not at.records.take_night(night, turn):
            found[night] = "busy"
            continue
        try:
            found[night] = _complete(at, night)
        finally:
            at.records.leave_night(night, turn + 1)
    return found


def _nights(at: At, now: datetime) -> Sequence[str]:
    """Those within reach that are not done; before the first known night there was nothing."""
    known = at.records.nights()
    if not known or not at.nightly.catch_up:
        return []
    reach = at.schedule.nights_up_to(now, at.nightly.catch_up + 1)[:-1]
    return [n for n in reach if n >= known[0] and at.records.ended(n) is None]


def _complete(at: At, night: str) -> str:
    at.tell(f"The night of {night} is looked after, late.")
    complete = True
    for checkpoint in at.nightly.everybody:
        if checkpoint == at.nightly.canary:
            _canary(at, night)
        elif checkpoint.source.frozen:
            complete &= _frozen(at, night, checkpoint)
        else:
            complete &= _as_recorded(at, night, checkpoint)
    if not complete:
        return "incomplete"
    at.records.end_night(night, {"late": True, "in": at.current})
    return "done"


def _canary(at: At, night: str) -> None:
    canary = at.nightly.canary
    found = resolve(canary, at.workspace)
    plan = night_plan(at.nightly, found, night, at.base)
    if is_done(plan, at.workspace):
        # Who has measured it did so in that night: nobody begins a canary later.
        _keep(at, night, night, found, plan)
        return
    at.records.miss(night, canary.name, "nobody measured the canary that night; it cannot be now")


def _frozen(at: At, night: str, checkpoint: Checkpoint) -> bool:
    try:
        found = resolve(checkpoint, at.workspace)
        plan = night_plan(at.nightly, found, night, at.base)
    except RefinerError as error:
        at.tell(f"{checkpoint.name}: {error}")
        return False
    if not is_done(plan, at.workspace):
        return False  # this night's own evaluation has not ended well either
    _keep(at, night, at.current, found, plan)
    return True


def _as_recorded(at: At, night: str, checkpoint: Checkpoint) -> bool:
    noted = at.records.runs_of(night, checkpoint.name)
    if not noted:
        why = f"nobody looked that night which one {checkpoint.source.text} was"
        at.records.miss(night, checkpoint.name, why)
        return True
    run = at.workspace.read_run(noted[-1]["run"])
    plan = plan_of_run(at.workspace, run)
    config = plan.config.model
    digest = str(noted[-1]["digest"])
    found = Resolved(checkpoint, config.name_or_path, "", digest, checkpoint.source.text)
    measured_in = night
    if not is_done(plan, at.workspace):
        carry_out([Job(found, plan, run)], at.workspace, at.tell)
        measured_in = at.current
    if not is_done(plan, at.workspace):
        return False
    _keep(at, night, measured_in, found, plan, run.run)
    return True


def _keep(at: At, night: str, measured_in: str, found: Resolved, plan: Plan, run: str = "") -> None:
    occasion = Occasion(at.nightly, night, measured_in, late=True, run=run, measured=True)
    harvest(plan, found, occasion, at.workspace, at.records, at.records.rows())

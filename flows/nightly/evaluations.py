"""Evaluations of a night: the runs that make them, the lines of the history that they become.

In: plans, and which checkpoint each is of. Out: the last views of their stages; rows, and watched
metrics prompt by prompt, since outputs of old stages may be reclaimed. The canary's run comes
first, so it has the first slot. Ctrl-C asks all of them to save and stop.

A night that has passed is not evaluated any more: how the judge and the machines were then, nobody
can ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flows.nightly.checkpoints import Resolved, evaluations_in, night_overrides
from flows.running.calls import pin_code, record_run
from flows.running.console import Console
from flows.running.showing import orchestrate
from infra.jobs.dispatch import make_router
from infra.orchestrator.members import Member, Source
from infra.store.nightly_records import NightlyRecords
from infra.store.orchestrators import orchestrator_of
from infra.store.records import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import RunRecord, StageResult
from refiner_core.contract.types import StageView
from refiner_core.nightly.changes import per_prompt
from refiner_core.nightly.definition import ROW_VERSION, Nightly, Row

Tell = Callable[[str], None]


@dataclass(frozen=True)
class At:
    """Context of a night; ``base`` is the recipe."""

    nightly: Nightly
    workspace: Workspace
    records: NightlyRecords
    base: RecipeConfig
    tell: Tell


def carry_out(
    at: At, night: str, wanted: Sequence[tuple[Resolved, Plan]]
) -> dict[str, tuple[str, Mapping[str, StageView]]]:
    """Work on a recorded call for each plan, to its end; one that was begun in this night and not
    finished goes on. The call and its last views, by checkpoint.

    Raises
    ------
    KeyboardInterrupt
        A second Ctrl-C, a while later: what runs goes on by itself.
    """
    pinned, members, workspace = None, list[Member](), at.workspace
    for found, plan in wanted:
        name = found.checkpoint.name
        run = _begun(at, night, name, plan)
        if run is None:
            pinned = pinned or pin_code(workspace)
            words = night_overrides(at.nightly, found, night)
            which = {"name": at.nightly.name, "night": night, "checkpoint": name}
            run = record_run(plan, workspace, at.nightly.recipe, words, pinned, nightly=which)
            workspace.write_run(run)
            at.records.note_run(night, name, run.run, found.digest)
        members.append(Member(plan, run, workspace, name))
    if not members:
        return {}
    for member in members:
        member.take_up()

    def tell(member: Member) -> None:
        bad = "; ".join(f"{v.name} {v.state}: {v.message}" for v in ended_badly(member.views()))
        at.tell(f"{member.name}: {bad or 'evaluated'}")

    config = members[0].plan.config
    router = make_router(config.dispatch, workspace)
    orchestrate(Source(members, tell), workspace, router, config, console=_Teller(at.tell))
    return {member.name: (member.run.run, member.views()) for member in members}


def _begun(at: At, night: str, checkpoint: str, plan: Plan) -> RunRecord | None:
    wanted = {s.name: s.id for s in plan.stages}
    for noted in reversed(at.records.runs_of(night, checkpoint)):
        run = at.workspace.read_run(noted["run"])
        if dict(run.stages) == wanted and not orchestrator_of(at.workspace, run.run).works:
            return run
    return None


def ended_badly(views: Mapping[str, StageView]) -> list[StageView]:
    """The stages that have failed, or were stopped."""
    return [v for v in views.values() if v.state in ("failed", "interrupted")]


class _Teller(Console):
    """Shows a night's work in messages alone."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    def _print(self, message: str) -> None:
        self._tell(message)

    def show(self, views: Mapping[str, StageView]) -> None:
        """Each checkpoint is told of when it has ended."""

    def finish(self, views: Mapping[str, StageView]) -> None:
        """All of them have been."""


# ---------------------------------------------------------------- lines of the history


_NUMBER = ("value", "low", "high", "n", "protocol")


def harvest(
    at: At,
    plan: Plan,
    found: Resolved,
    night: str,
    known: Sequence[Row],
    *,
    measured_in: str,
    run: str,
) -> None:
    """Write what the evaluations of a checkpoint say into the history.

    Parameters
    ----------
    known
        The lines so far.
    measured_in
        The night in which an evaluation that they do not know was made; empty: it was made
        elsewhere, and nobody knows under which conditions.
    """
    before = {row.stage: row.measured_in for row in known}
    for stage in evaluations_in(plan):
        result = at.workspace.read_result(stage.id)
        if result is None:
            continue
        facts = _facts(plan, stage, result)
        evaluations = result.report["evaluations"]
        for decoding in dict.fromkeys(e["decoding"] for e in evaluations):
            entries = [e for e in evaluations if e["decoding"] == decoding]
            main = next((e for e in entries if e["metric"] != "reward"), entries[0])
            row = Row(
                version=ROW_VERSION,
                nightly=at.nightly.name,
                night=night,
                checkpoint=found.checkpoint.name,
                canary=found.checkpoint == at.nightly.canary,
                protocol=str(main["protocol"]),
                protocol_name=str(main["protocol_name"]),
                protocol_set=stage.protocol,
                decoding=str(main["decoding"]),
                digest=found.digest,
                source=found.what,
                stage=stage.id,
                samples=str(main["samples_file"]),
                run=run,
                fresh=stage.id not in before and bool(measured_in),
                late=False,
                measured_in=before.get(stage.id, measured_in),
                evaluated_at=now_text(),
                numbers={e["metric"]: {k: e.get(k) for k in _NUMBER} for e in entries},
                facts=facts,
            )
            _keep_values(at, row, entries)
            at.records.add_row(row)


def _keep_values(at: At, row: Row, entries: Sequence[Mapping[str, Any]]) -> None:
    there = {e["metric"] for e in entries}
    watched = [metric for metric in at.nightly.alerts.metrics if metric in there]
    wanted = [m for m in watched if at.records.values(row.stage, row.protocol, m) is None]
    output = at.workspace.output_dir(row.stage)
    if not wanted or output is None or not (output / row.samples).exists():
        return
    from refiner_core.evaluation.metrics import load_samples

    samples = load_samples(output / row.samples)
    found = {metric: per_prompt(samples, metric) for metric in wanted}
    at.records.keep_values(row.stage, row.protocol, found)


def _facts(plan: Plan, stage: PlannedStage, result: StageResult) -> dict[str, str]:
    """Facts beside the weights that may have changed."""
    judge, said = plan.config_of(stage).judge, result.provenance
    host, usage = said.get("host") or {}, result.report.get("judge_usage") or {}
    found = {
        "judge.kind": judge.kind,
        "judge.model": judge.model,
        "judge.revision": judge.revision or "",
        "judge.served": ", ".join(sorted(usage.get("served") or {})),
        "code": said.get("code") or "",
        "python": said.get("python") or "",
        "host.name": host.get("name") or "",
        "host.cpu": host.get("cpu") or "",
        "host.gpus": ", ".join(host.get("gpus") or ()),
        **{f"versions.{k}": v for k, v in (said.get("versions") or {}).items()},
    }
    return {name: str(value) for name, value in found.items() if value}


# ---------------------------------------------------------------- whose night it is


@contextmanager
def night_held(records: NightlyRecords, night: str, take_over: bool = False) -> Iterator[str]:
    """Take a night up for the time of the block; yields why not, where somebody else has it."""
    who = records.worker_of(night)
    if who.standing == "running" or (who.works and not take_over):
        hint = "; if you know that it is gone: --take-over" * (who.standing == "elsewhere")
        yield f"The night of {night} is worked on already, by {who.where}{hint}."
        return
    if not records.take_night(night, who.turn):
        yield f"The night of {night} has just been taken up by another process."
        return
    try:
        yield ""
    finally:
        records.leave_night(night, who.turn + 1)

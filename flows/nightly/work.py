"""Calls of one night, worked on together: each is a run like any other.

In: plans, and which checkpoint each is of. Out: the last views of their stages. The canary's comes
first, so it has the first slot. Ctrl-C asks all of them to save and stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from flows.nightly.checkpoints import Resolved
from flows.nightly.plans import night_overrides
from flows.running.recording import pin_code, record_pinned_run
from flows.running.showing import orchestrate
from infra.jobs.dispatch import make_router
from infra.orchestrator.member import Member
from infra.orchestrator.sources import Given
from infra.store import atomic
from infra.store.nightly_records import NightlyRecords
from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord
from refiner_core.contract.views import StageView
from refiner_core.nightly.values import Nightly

Tell = Callable[[str], None]


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

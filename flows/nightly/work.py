"""Calls of one night, worked on together in one thread: each is a run like any other.

In: plans, and which checkpoint each is of. Out: the last views of their stages. The canary's comes
first in every round, so it has the first slot. Ctrl-C asks all of them to save and stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from flows.nightly.checkpoints import Resolved
from flows.nightly.plans import night_overrides
from flows.running.recording import pin_code, record_pinned_run
from flows.running.stop_signals import StopSignals
from infra.campaign.campaign import Campaign
from infra.campaign.together import SharedRouter, Together
from infra.disk.keeper import DiskKeeper
from infra.jobs.dispatch import make_router
from infra.store import atomic
from infra.store.nightly_records import NightlyRecords
from infra.store.orchestrators import orchestrator_of, take_up
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
    router = SharedRouter.of(make_router(jobs[0].plan.config.dispatch, workspace))
    together = Together()
    campaigns: dict[str, Campaign] = {}
    for job in jobs:
        take_up(workspace, job.run.run)
        keeper = DiskKeeper(workspace, job.plan.config.disk)
        campaign = Campaign(
            job.plan, workspace, router, run=job.run, keeper=keeper, together=together
        )
        campaigns[job.found.checkpoint.name] = campaign
        campaign.begin()
    _step_all(campaigns, router, tell)
    return {name: campaign.views() for name, campaign in campaigns.items()}


def _step_all(campaigns: Mapping[str, Campaign], router: SharedRouter, tell: Tell) -> None:
    left = dict(campaigns)
    with StopSignals() as signals:
        while left:
            if by := signals.asked():
                tell(
                    f"Stopping ({by}): running evaluations save at their next step. "
                    "Ctrl-C again leaves."
                )
                for campaign in left.values():
                    campaign.request_stop(by)
            router.refresh()
            for name, campaign in list(left.items()):
                if campaign.step():
                    del left[name]
                    tell(f"{name}: {_words(campaign.views())}")
            router.flush()
            if left:
                signals.wait(max(campaign.wake_after() for campaign in left.values()))


def _words(views: Mapping[str, StageView]) -> str:
    bad = [v for v in views.values() if v.state in ("failed", "interrupted")]
    if bad:
        return "; ".join(f"{v.name} {v.state}: {v.message}" for v in bad)
    return "evaluated"

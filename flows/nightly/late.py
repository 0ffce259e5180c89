"""Nights that nobody has worked on, or not to the end: what can still be said of them.

In: the nights before the newest one, as far as ``catch_up`` reaches. Out: each completed as far as
that is honest:

- Weights that are frozen have the same numbers in every night, so those that are there hold, late.
- What was newest then is known only where a call of that night has recorded it; that call is
  finished now, and its numbers belong to the conditions of the night that is now.
- The canary of a past night cannot be measured any more: how the judge and the machines were then,
  nobody can ask. Unless it had been measured, it is recorded as missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from flows.nightly.at import At
from flows.nightly.checkpoints import Resolved, resolve
from flows.nightly.harvest import Occasion, harvest
from flows.nightly.plans import is_done, night_plan
from flows.nightly.work import Job, carry_out
from flows.running.calls import plan_of_run
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.plan import Plan
from refiner_core.nightly.values import Checkpoint


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

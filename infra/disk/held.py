"""Holds on checkpoints, and those of them that nothing waits behind any more.

In: a workspace. Out: one :class:`Hold` per file that :mod:`infra.store.holds` has written, with the
reason why it is idle, if it is. A hold is let go by whoever brings a plan about, once the waiting
stage is done; what is left of calls that were cancelled or forgotten stays until somebody asks for
it with `refiner disk --reclaim`. :func:`why_idle` is pure; where a record cannot be read, nothing
is idle.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from infra.store import atomic
from infra.store.checkpoints import read_checkpoint, step_name
from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError

log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d+)-(.+)\.json")


class Hold(NamedTuple):
    """``waiting`` (a stage id) waits for the checkpoint of ``step`` of stage ``stage_id``; ``runs``
    have that stage; ``idle`` says why nothing needs the hold, and is empty where something does."""

    path: Path
    stage_id: str
    step: int
    waiting: str
    runs: tuple[str, ...] = ()
    idle: str = ""


class Caller(NamedTuple):
    """A call that has the waiting stage.

    ``cancelled``: somebody wanted the stage to end; ``works``: a process works on the call, or may
    do so where nobody here can look.
    """

    run: str
    cancelled: bool
    works: bool


@dataclass(frozen=True)
class Waiting:
    """What decides about a hold.

    Attributes
    ----------
    done
        The waiting stage has its result.
    callers
        Calls that have it; None where a record cannot be read, so that nobody can tell.
    trained
        The stage whose checkpoint is held is done: no more of them will come.
    there
        The checkpoint is complete.
    """

    done: bool
    callers: Sequence[Caller] | None
    trained: bool
    there: bool


def why_idle(waiting: Waiting) -> str:
    """Why a hold may go; empty: it may not."""
    if waiting.done:
        return "what waited for it is done"
    if waiting.callers is None:
        return ""
    if not waiting.callers:
        return "no recorded run has the stage that waits for it"
    if any(c.works for c in waiting.callers):
        return ""
    if waiting.trained and not waiting.there:
        return "the checkpoint is gone and its training is over, so nothing can come of it"
    if all(c.cancelled for c in waiting.callers):
        return f"cancelled: {', '.join(c.run for c in waiting.callers)}"
    return ""


def read_holds(workspace: Workspace) -> list[Hold]:
    """All holds of a workspace, by stage and step."""
    found = [hold for stage_id in workspace.stage_ids() for hold in _of_stage(workspace, stage_id)]
    callers = _callers(workspace) if found else {}
    return [_judged(workspace, hold, callers) for hold in found]


def drop_idle(workspace: Workspace, holds: Iterable[Hold]) -> list[Hold]:
    """Let those go that are idle by another look; returns them."""
    gone = []
    for hold in holds:
        if hold.idle and _judged(workspace, hold, _callers(workspace)).idle:
            atomic.remove_quietly(hold.path)
            gone.append(hold)
    return gone


def _of_stage(workspace: Workspace, stage_id: str) -> list[Hold]:
    folder = workspace.layout.stage(stage_id).holds
    try:
        names = sorted(p.name for p in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(name, _NAME.fullmatch(name)) for name in names]
    return [Hold(folder / n, stage_id, int(m[1]), m[2]) for n, m in found if m]


def _judged(workspace: Workspace, hold: Hold, callers: dict[str, list[Caller]] | None) -> Hold:
    try:
        waiting = Waiting(
            done=workspace.read_result(hold.waiting) is not None,
            callers=None if callers is None else callers.get(hold.waiting, []),
            trained=workspace.read_result(hold.stage_id) is not None,
            there=read_checkpoint(
                workspace.layout.stage(hold.stage_id).checkpoints / step_name(hold.step)
            )
            is not None,
        )
    except RefinerError as error:
        log.warning("the hold %s stays: %s", hold.path.name, error)
        return hold
    runs = tuple(c.run for c in waiting.callers or ())
    return hold._replace(runs=runs, idle=why_idle(waiting))


def _callers(workspace: Workspace) -> dict[str, list[Caller]] | None:
    """Stage id -> calls that have it; None where a record cannot be read."""
    found: dict[str, list[Caller]] = {}
    try:
        for run_id in workspace.run_ids():
            run = workspace.read_run(run_id)
            asked = workspace.cancel_asked(run_id)
            works = orchestrator_of(workspace, run_id).works
            for name, stage_id in run.stages.items():
                ended = asked is not None and (
                    not asked["stages"] or name in asked["stages"] or stage_id in asked["stages"]
                )
                found.setdefault(stage_id, []).append(Caller(run_id, ended, works))
    except (RefinerError, ValueError, KeyError) as error:
        log.warning("no hold is let go, for a record cannot be read: %s", error)
        return None
    return found

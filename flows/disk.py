"""Disk use for people and scripts: current use, what may be deleted, forecasts of recipes.

In: a workspace or plans. Out: JSON-ready values, and forecasts. Imports nothing heavy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flows.running.status import find_run, stage_id_of
from infra.disk.forecast import Forecast, forecast_disk
from infra.disk.garbage_collection import Candidate, plan_reclaim
from infra.disk.inventory import Inventory, RetainedCheckpoint, drop_idle
from infra.disk.manager import DiskManager
from infra.disk.usage import COMPILE_CACHES, UsageRow, by_run_and_kind, find_caches
from infra.store.checkpoints import pin, pins, reclaimed_text, unpin
from infra.store.layout import Layout
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig, RecipeConfig
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import from_json, picked, to_json


def disk_config(workspace: Workspace, overrides: Sequence[str] = ()) -> DiskConfig:
    """The ``disk`` section of the newest run, with ``disk.*`` overrides.

    Raises
    ------
    ConfigurationError
        An override names no field, or has an invalid value.
    """
    from refiner_core.contract.loading import apply_overrides

    newest = next(workspace.runs(newest_first=True), None)
    recorded = newest.config.get("disk") if newest is not None else None
    config = from_json(DiskConfig, recorded) if recorded else DiskConfig()
    if not overrides:
        return config
    return apply_overrides(replace(RecipeConfig(), disk=config), overrides).disk


class DiskReport(NamedTuple):
    """Use of a workspace by run and kind, and the content of ``refiner disk --json``."""

    rows: list[UsageRow]
    json: dict[str, Any]


def disk_report(
    workspace: str | Path = RecipeConfig.workspace, overrides: Sequence[str] = ()
) -> DiskReport:
    """Use of a workspace by run and kind, free space, and what may be deleted.

    Parameters
    ----------
    workspace
        The folder.
    overrides
        Overrides of ``disk``, as ``key=value`` (default: the newest run's).

    Returns
    -------
    DiskReport
        ``rows``, and ``json`` with the complete report.

    Raises
    ------
    ConfigurationError
        An override is invalid.
    WorkspaceError
        The folder is no workspace, or a record is damaged.
    """
    from infra.judgements.store import summarise

    ws = Workspace.read_only(workspace)
    disk_manager = DiskManager(ws, disk_config(ws, overrides))
    stock = disk_manager.inventory()
    runs = {run.run: tuple(run.stages.values()) for run in ws.runs()}
    caches = find_caches([*disk_manager.config.watch_caches, *COMPILE_CACHES])
    rows = by_run_and_kind([*stock.items, *caches], runs)
    users = Counter(stage_id for stages in runs.values() for stage_id in {*stages})
    shared = sum(item.size.bytes for item in stock.items if users[item.stage_id] > 1)
    owner = {i: run for run, stages in runs.items() for i in stages if users[i] == 1}
    unique: dict[str, int] = dict.fromkeys(runs, 0)
    for item in stock.items:
        if item.stage_id in owner:
            unique[owner[item.stage_id]] += item.size.bytes
    left, reserved = disk_manager.available(fresh=True), disk_manager.ledger.others()
    value = {
        **{"version": 1, "workspace": str(ws.root), "data": str(ws.layout.data)},
        "room": {key: value for key, value in to_json(left).items() if key != "knows_quota"},
        "status": disk_manager.status_line(),
        "reservations": [
            {
                **{"workspace": str(r.workspace), "stage_id": r.ref.stage_id},
                **{"attempt": r.ref.number, "bytes": r.bytes, "written_bytes": r.written},
            }
            for r in reserved
        ],
        "pins": sorted(pins(ws.layout)),
        "use": [
            {"run": row.run or None, "kind": row.kind, **picked(row.size, "bytes", "inodes")}
            for row in rows
        ],
        "total": {
            "bytes": sum(item.size.bytes for item in stock.items),
            "inodes": sum(item.size.inodes for item in stock.items),
            "shared_bytes": shared,
        },
        "unique": unique,
        "judgements": summarise(ws.layout.judgements),
        "published": _published(ws, stock),
        "holds": [hold_json(h, stock) for h in stock.holds],
        "reclaimable": [candidate_json(c) for c in plan_reclaim(stock, None)],
        "caches": [{"path": str(i.path), "bytes": i.size.bytes} for i in caches],
    }
    return DiskReport(rows, value)


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """A candidate for deletion, as JSON."""
    said = picked(candidate, "stage_id", "bytes", "inodes", "why")
    return {"kind": candidate.rank.name.lower(), "path": str(candidate.path), **said}


def _published(workspace: Workspace, stock: Inventory) -> list[dict[str, Any]]:
    """Recorded publications, and whether their weights are still in the workspace."""
    found = []
    for stage_id, copies in sorted(stock.copies.items()):
        facts = stock.stages.get(stage_id)
        here = facts.weights if facts is not None else None
        for copy in copies:
            gone = reclaimed_text(workspace.layout.stage(stage_id)) if here is None else None
            found.append(
                {
                    **picked(copy, "by", "where", "target", "revision", "commit"),
                    **{"stage_id": stage_id, "here_bytes": 0 if here is None else here.gain},
                    "reclaimed": gone,
                }
            )
    return found


def hold_json(hold: RetainedCheckpoint, stock: Inventory) -> dict[str, Any]:
    """A checkpoint held for a waiting stage, and whether the wait is in vain."""
    sizes = [i.size.bytes for i in stock.items if (i.stage_id, i.step) == hold[1:3]]
    said = picked(hold, "stage_id", "step", "waiting")
    return {**said, "idle": hold.idle or None, "bytes": sum(sizes)}


class ReclaimResult(NamedTuple):
    """Result of reclaiming, done or not: released holds on checkpoints, candidates, deleted paths
    with their sizes, and the free space now."""

    holds: list[RetainedCheckpoint]
    stock: Inventory
    candidates: list[Candidate]
    items: tuple[str, ...]
    bytes: int
    status: str


def reclaim_disk(
    workspace: str | Path = RecipeConfig.workspace,
    overrides: Sequence[str] = (),
    *,
    caches: bool = False,
    judgements: bool = False,
    dry_run: bool = True,
) -> ReclaimResult:
    """Delete everything that the policy allows.

    Parameters
    ----------
    workspace, overrides
        As of :func:`flows.api.disk_report`.
    caches
        Has no effect any more.
    judgements
        Also delete judgements.
    dry_run
        Only list the candidates. Set to False to delete.

    Returns
    -------
    Reclaimed
        Candidates, and the deleted paths.

    Raises
    ------
    ConfigurationError
        An override is invalid.
    WorkspaceError
        The folder is no workspace, a record is damaged, or another user may have written there.
    """
    ws = Workspace.read_only(workspace)
    if not dry_run:
        ws.require_trust()
    disk_manager = DiskManager(ws, disk_config(ws, overrides))
    stock = disk_manager.inventory(as_if_dropped=dry_run)
    holds = [h for h in stock.holds if h.idle]
    if not dry_run and holds:
        holds = drop_idle(ws, holds)
        stock = disk_manager.inventory()
    candidates = plan_reclaim(stock, None, judgements=judgements)
    items: tuple[str, ...] = ()
    freed = 0
    if not dry_run:
        if candidates:
            done = disk_manager.carry_out(candidates)
            items, freed = tuple(done.items), done.bytes
        disk_manager.ledger.sweep()
    return ReclaimResult(holds, stock, candidates, items, freed, disk_manager.status_line())


class PinnedStage(NamedTuple):
    """A stage that is (or is no longer) pinned; ``changed`` is False if it was so before."""

    stage_id: str
    changed: bool


def pin_stage(stage: str, workspace: str | Path = RecipeConfig.workspace) -> PinnedStage:
    """Keep everything of a stage, even under a reclaim.

    Parameters
    ----------
    stage
        Its id, or its name in the newest run.
    workspace
        The folder.

    Returns
    -------
    Pinned
        The stage.

    Raises
    ------
    ConfigurationError
        There is no such stage; the message names the nearest.
    """
    return _marked(stage, workspace, pin)


def unpin_stage(stage: str, workspace: str | Path = RecipeConfig.workspace) -> PinnedStage:
    """Undo :func:`flows.api.pin_stage`.

    Parameters
    ----------
    stage, workspace
        As of :func:`flows.api.pin_stage`.

    Returns
    -------
    Pinned
        The stage.

    Raises
    ------
    ConfigurationError
        There is no such stage; the message names the nearest.
    """
    return _marked(stage, workspace, unpin)


def _marked(name: str, workspace: str | Path, mark: Callable[[Layout, str], bool]) -> PinnedStage:
    ws = Workspace.read_only(workspace)
    stage_id = stage_id_of(ws, name, find_run(ws, stage=name))
    return PinnedStage(stage_id, mark(ws.layout, stage_id))


# ---------------------------------------------------------------- forecasts


#: Settings under which a plan needs less space.
LESS_ROOM = "`STAGE.keep=1`, `dispatch.max_parallel=1` and `disk.reclaim=true`"


class PlannedSpace(NamedTuple):
    """A forecast and the free space; ``limit_bytes`` is the most that there could ever be."""

    forecast: Forecast
    free_bytes: int
    reclaimable_bytes: int
    source: str
    limit_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """True if it fits, after a reclaim if that is allowed."""
        more = self.reclaimable_bytes if self.forecast.reclaim else 0
        return self.forecast.needed_bytes <= self.free_bytes + more

    @property
    def never_fits(self) -> bool:
        """True if no deletion would help."""
        return self.limit_bytes is not None and self.forecast.sure_bytes > self.limit_bytes


def planned_space(plans: Sequence[Plan]) -> PlannedSpace:
    """Space that plans (a recipe's, or all trials' of a sweep) need, and the free space."""
    workspace = Workspace.read_only(plans[0].config.workspace)
    disk_manager = DiskManager(workspace, plans[0].config.disk)
    forecast = forecast_disk(plans, workspace)
    now, margin = disk_manager.available(), int(plans[0].config.disk.margin_gb * 2**30)
    free = max(0, now.free_bytes - disk_manager.reserved() - margin)
    most = None if now.limit_bytes is None else now.limit_bytes - margin
    is_short = forecast.needed_bytes > free
    may_go = sum(c.bytes for c in disk_manager.candidates()) if is_short else 0
    return PlannedSpace(forecast, free, may_go, now.source, most)


class DiskPlan(NamedTuple):
    """Disk use of a plan; ``change`` is always None."""

    room: PlannedSpace
    change: None = None


def disk_of_plan(plan: Plan, *, fit: bool = False) -> DiskPlan:
    """Forecast of a plan's disk use, and whether it fits.

    Parameters
    ----------
    plan
        From :func:`flows.api.make_recipe_plan`.
    fit
        Has no effect any more.

    Returns
    -------
    DiskPlan
        ``room.fits`` is the verdict.

    Raises
    ------
    WorkspaceError
        The workspace is not a folder, or has a damaged record.
    """
    return DiskPlan(planned_space([plan]))

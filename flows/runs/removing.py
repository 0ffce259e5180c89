"""`refiner rm` and `prune`: remove runs, with the stages that nothing else needs.

In: names of runs and sweeps, or an age and a metric. Out: a :class:`Removal`: what goes, what stays
and why, and what it would cost to make it again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flows.running.status import required_run
from flows.runs.run_table import RunRow, list_rows, sorted_rows
from flows.sweeping.budget import ResourceUsage, UsageReader
from flows.sweeping.status import sweep_named
from infra.disk.removal import RemovalPlan, finish_removals, plan_removal, remove
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError

#: Runs with this tag are never pruned.
KEEP = "keep"
_AGE = re.compile(r"(\d+)([hdw])")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True)
class Removal:
    """A removal, done or only planned.

    ``cost`` is what making the removed stages has cost; ``kept`` are the runs that
    :func:`prune_runs` keeps, with the reason.
    """

    plan: RemovalPlan
    cost: ResourceUsage
    kept: dict[str, str]
    done: bool = False


def remove_runs(
    names: Sequence[str],
    workspace: str | Path = RecipeConfig.workspace,
    *,
    unverified: bool = False,
    dry_run: bool = True,
) -> Removal:
    """Remove runs, and sweeps with all their trials.

    Parameters
    ----------
    names
        Unambiguous parts of ids of runs, or names of sweeps.
    workspace
        The folder that has their records.
    unverified
        Also runs with a publication that is not verified.
    dry_run
        Only plan it. Set to False to remove.

    Returns
    -------
    Removal
        What goes, what stays and why.

    Raises
    ------
    ConfigurationError
        There is no such run or sweep.
    WorkspaceError
        A record of a run is damaged, so that it is unknown which stages it needs.
    """
    ws = Workspace.read_only(workspace)
    sweeps = [name for name in names if sweep_named(ws, name) is not None]
    runs = [required_run(ws, n, "a run").run for n in names if n not in sweeps]
    return _removed(ws, runs, sweeps, {}, unverified=unverified, dry_run=dry_run)


def prune_runs(
    workspace: str | Path = RecipeConfig.workspace,
    *,
    older_than: str,
    keep_best: int = 0,
    metric: str = "",
    where: str = "",
    dry_run: bool = True,
) -> Removal:
    """Remove old runs, but the best ones.

    Parameters
    ----------
    workspace
        The folder that has their records.
    older_than
        An age such as ``30d``, ``12h`` or ``4w``, by the time of the call.
    keep_best, metric
        Keep this many with the largest value of a metric, among all runs.
    where
        Only runs that match a filter (:mod:`flows.runs.run_filter`).
    dry_run
        Only plan it. Set to False to remove.

    Returns
    -------
    Removal
        What goes, what stays and why. Runs tagged ``keep``, and trials of sweeps, stay.

    Raises
    ------
    ConfigurationError
        The age, the metric or the filter is not understood.
    WorkspaceError
        A record of a run is damaged.
    """
    before = datetime.now(UTC) - _age(older_than)
    rows = list_rows(workspace, every=True, where=where)
    best: set[str] = set()
    if keep_best:
        if not metric:
            raise ConfigurationError(
                "The best runs of what?", expected="a metric", fix="add --metric NAME"
            )
        ranked = sorted_rows(rows, metric)
        best = {row.run for row in ranked[:keep_best] if metric in row.metrics}
    kept = {row.run: reason for row in rows if (reason := _why_kept(row, best, before))}
    chosen = [row.run for row in rows if row.run not in kept]
    young = [run for run, reason in kept.items() if reason == _YOUNG]
    for run in young:
        del kept[run]
    return _removed(Workspace.read_only(workspace), chosen, [], kept, dry_run=dry_run)


_YOUNG = "younger"


def _why_kept(row: RunRow, best: set[str], before: datetime) -> str:
    if datetime.fromisoformat(row.started) >= before:
        return _YOUNG
    if row.sweep:
        return f"a trial of sweep {row.sweep.partition(':')[0]}"
    if KEEP in row.tags:
        return f"tagged {KEEP}"
    return "one of the best" if row.run in best else ""


def _age(text: str) -> timedelta:
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(
            f"{text!r} is no age.", expected="a number with h, d or w", fix="write 30d, say"
        )
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def _removed(
    workspace: Workspace,
    runs: Sequence[str],
    sweeps: Sequence[str],
    kept: dict[str, str],
    *,
    unverified: bool = False,
    dry_run: bool,
) -> Removal:
    if not dry_run:
        workspace.require_trust()
        finish_removals(workspace, elsewhere=True)
        runs = [name for name in runs if name in {*workspace.run_ids()}]
    plan = plan_removal(workspace, runs, sweeps, unverified=unverified)
    cost = UsageReader(workspace).total(plan.stages)
    if not dry_run:
        remove(workspace, plan)
    return Removal(plan, cost, kept, done=not dry_run)

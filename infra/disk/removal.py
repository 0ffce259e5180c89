"""Removal of runs, with the stages that nothing else needs.

In: ids of runs and names of sweeps. Out: :func:`plan_removal` says what goes, what stays and why;
:func:`remove` carries it out.

A removal is recorded first (``trash/ID/intent.json``); then folders are renamed into the trash,
stages before runs; then the records are read once more, and a stage that a new run has named
meanwhile goes back; then the trash is emptied. A removal that was killed at any of these steps is
completed by :func:`finish_removals`, and nothing that was to stay is ever touched: a stage that was
made again has its own folder, and the trash has the old one.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.disk.inventory import Inventory, read_inventory
from infra.disk.usage import size_of
from infra.host.files import exists, make_folder, names_in
from infra.host.processes import ProcessId
from infra.store import atomic
from infra.store.layout import sweep_call
from infra.store.orchestrators import orchestrator_of
from infra.store.records import now_text
from infra.store.sweep_records import read_sweep, sweep_names, sweep_versions
from infra.store.workspace import Workspace
from refiner_core.contract.errors import NoSpaceError, WorkspaceError
from refiner_core.contract.records import RunRecord, trial_of
from refiner_core.contract.services import is_service

log = logging.getLogger(__name__)
INTENT = "intent.json"


@dataclass(frozen=True)
class RemovalPlan:
    """What a removal would do.

    Attributes
    ----------
    runs, sweeps
        Go, with their reports.
    refused
        Run or sweep -> why it stays.
    stages
        Go: no other run or sweep names them.
    shared
        Stage -> the run or sweep that also has it; these stay.
    bytes
        Size of what goes.
    """

    runs: tuple[str, ...]
    sweeps: tuple[str, ...]
    refused: Mapping[str, str]
    stages: tuple[str, ...]
    shared: Mapping[str, str]
    bytes: int


def plan_removal(
    workspace: Workspace,
    runs: Collection[str],
    sweeps: Collection[str] = (),
    *,
    unverified: bool = False,
) -> RemovalPlan:
    """Plan the removal of runs, and of sweeps with all their trials. Changes nothing.

    Parameters
    ----------
    unverified
        Also runs with a publication that is not verified.

    Raises
    ------
    WorkspaceError
        A record of a run is damaged, so that it is unknown which stages it needs.
    """
    recorded = {name: workspace.read_run(name) for name in workspace.run_ids()}
    trials = {run for name in sweeps for run in _runs_of_sweep(name, recorded)}
    inventory = read_inventory(workspace)
    refused: dict[str, str] = {}
    for name in {*runs, *trials}:
        reason = _protection(workspace, recorded[name], inventory, unverified)
        if (trial := trial_of(recorded[name].provenance)) and name not in trials:
            reason = reason or f"it is a trial; remove the sweep {trial[0]}"
        if reason:
            refused[name] = reason
    for name in sweeps:
        stuck = [r for r in _runs_of_sweep(name, recorded) if r in refused]
        if orchestrator_of(workspace, sweep_call(name)).works:
            refused[name] = "it is running; cancel it first"
        elif stuck:
            refused[name] = f"its trial {stuck[0]} stays: {refused[stuck[0]]}"
    gone_sweeps = [name for name in sweeps if name not in refused]
    freed = {run for name in gone_sweeps for run in _runs_of_sweep(name, recorded)}
    gone = [n for n in recorded if n in ({*runs} | freed) and n not in refused]
    wanted = [i for name in gone for i in recorded[name].stages.values() if not is_service(i)]
    needed = _needed_by_others(workspace, {*gone}, {*gone_sweeps})
    stages = tuple(i for i in dict.fromkeys(wanted) if i not in needed and i in inventory.stages)
    sizes = sum(item.size.gain for item in inventory.items if item.stage_id in stages)
    sizes += sum(size_of(workspace.layout.run(name).folder).gain for name in gone)
    shared = {i: needed[i] for i in dict.fromkeys(wanted) if i in needed}
    return RemovalPlan(tuple(gone), tuple(gone_sweeps), refused, stages, shared, sizes)


def remove(workspace: Workspace, plan: RemovalPlan) -> None:
    """Carry a plan out.

    On a disk so full that not even the intent can be recorded, folders are deleted in place, each
    beginning with the file that marks it as complete.

    Raises
    ------
    OSError
        A folder cannot be moved or deleted; the rest is done by the next removal.
    """
    name = secrets.token_hex(4)
    intent = intent_of(plan.runs, plan.sweeps, plan.stages)
    try:
        workspace.replace(workspace.layout.trash / name / INTENT, intent, "recording a removal")
    except NoSpaceError:
        _remove_in_place(workspace, plan)
        return
    _finish(workspace, name)


def intent_of(
    runs: Sequence[str], sweeps: Sequence[str], stages: Sequence[str]
) -> dict[str, object]:
    """The record of a removal by this process."""
    value = {"runs": list(runs), "sweeps": list(sweeps), "stages": list(stages)}
    return {"version": 1, "at": now_text(), "process": str(ProcessId.of()), **value}


def finish_removals(workspace: Workspace, *, elsewhere: bool = False) -> None:
    """Complete removals whose process is gone; with ``elsewhere`` also those of other hosts."""
    for name in names_in(workspace.layout.trash):
        intent = workspace.read_control(workspace.layout.trash / name / INTENT) or {}
        process = ProcessId.parse(str(intent["process"])) if intent else None
        if process is None or (not process.alive if process.here else elsewhere):
            _finish(workspace, name)


def _finish(workspace: Workspace, name: str) -> None:
    layout = workspace.layout
    folder, other = layout.trash / name, layout.data_trash / name
    intent = workspace.read_control(folder / INTENT)
    if intent is not None:
        runs, sweeps, stages = ({*intent[key]} for key in ("runs", "sweeps", "stages"))
        pairs = {i: list(_stage_moves(workspace, name, i)) for i in sorted(stages)}
        needed = _needed_by_others(workspace, runs, sweeps)
        for stage_id, moves in pairs.items():
            if stage_id not in needed:
                for path, trash in moves:
                    _move(path, trash)
        # A run that began meanwhile has recorded its stages before it looked for them.
        needed = _needed_by_others(workspace, runs, sweeps)
        for stage_id in needed.keys() & pairs.keys():
            for path, trash in pairs[stage_id]:
                _move(trash, path)
        for run in sorted(runs):
            _move(layout.run(run).folder, folder / "runs" / run)
            _move(layout.reports / run, other / "reports" / run)
        for sweep in sorted(sweeps):
            _move(layout.sweeps / sweep, folder / "sweeps" / sweep)
            _move(layout.reports / sweep, other / "reports" / sweep)
    for part in ("stages", "reports"):
        atomic.remove_tree(other / part)
    for part in ("stages", "runs", "sweeps"):
        atomic.remove_tree(folder / part)
    atomic.remove_quietly(folder / INTENT)
    for empty in (other, folder):
        atomic.remove_tree(empty)


def _stage_moves(workspace: Workspace, name: str, stage_id: str) -> Iterator[tuple[Path, Path]]:
    """A stage's folders, and their places in the trash: the records first, so that a stage whose
    data are gone is not taken for done."""
    layout, stage = workspace.layout, workspace.layout.stage(stage_id)
    yield stage.control, layout.trash / name / "stages" / stage_id
    if stage.data != stage.control:
        yield stage.data, layout.data_trash / name / "stages" / stage_id


def _move(path: Path, target: Path) -> None:
    """Rename a folder, unless it is gone or the target is there."""
    if exists(path) and not exists(target):
        make_folder(target.parent)
        with contextlib.suppress(FileNotFoundError):  # another process has just done it
            path.rename(target)


def _remove_in_place(workspace: Workspace, plan: RemovalPlan) -> None:
    layout = workspace.layout
    for stage_id in plan.stages:
        stage = layout.stage(stage_id)
        atomic.remove_quietly(stage.result)
        atomic.remove_tree(stage.data)
        atomic.remove_tree(stage.control)
    folders = [layout.run(run).folder for run in plan.runs]
    folders += [layout.sweeps / name for name in plan.sweeps]
    folders += [layout.reports / name for name in (*plan.runs, *plan.sweeps)]
    for folder in folders:
        atomic.remove_tree(folder)


# ---------------------------------------------------------------- what has to stay


def _runs_of_sweep(name: str, recorded: Mapping[str, RunRecord]) -> Iterator[str]:
    for run in recorded.values():
        found = run.provenance.get("sweep")
        if isinstance(found, Mapping) and found.get("name") == name:
            yield run.run


def _protection(
    workspace: Workspace, run: RunRecord, inventory: Inventory, unverified: bool
) -> str:
    """Reason why a run has to stay; empty if there is none."""
    if orchestrator_of(workspace, run.run).works:
        return "it is running; cancel it first"
    verified = {copy.by for copies in inventory.copies.values() for copy in copies}
    for name, stage_id in run.stages.items():
        facts = inventory.stages.get(stage_id)
        if facts is None:
            continue
        if facts.pinned:
            return f"{name} is pinned (refiner disk --unpin {stage_id})"
        if facts.open:
            return f"an attempt at {name} may be running; cancel or resume the run first"
        begun = facts.done or bool(facts.dead)
        if facts.kind == "publish" and begun and stage_id not in verified and not unverified:
            return f"the publication of {name} is not verified (--unverified removes it)"
    return ""


def _needed_by_others(
    workspace: Workspace, runs: Collection[str], sweeps: Collection[str]
) -> dict[str, str]:
    """Stage id -> a run or sweep, outside of these, that has it or starts from it."""
    needed: dict[str, str] = {}
    for name in workspace.run_ids():
        if name in runs:
            continue
        try:
            run = workspace.read_run(name)
        except WorkspaceError as error:
            error.fix = f"{error.fix}; until then nothing is removed"
            raise
        needed |= dict.fromkeys(run.stages.values(), name)
        # A model or rows of this workspace, named by path.
        for stage_id in _stages_in_paths(run.config):
            needed.setdefault(stage_id, name)
    for name in sweep_names(workspace):
        if name not in sweeps:
            for number in sweep_versions(workspace, name):
                for trial in read_sweep(workspace, name, number).trials:
                    needed |= dict.fromkeys(trial.stages.values(), f"sweep {name}")
    return needed


def _stages_in_paths(config: Mapping[str, object]) -> Iterator[str]:
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _stages_in_paths(value)
        elif isinstance(value, str) and "/stages/" in value:
            yield value.partition("/stages/")[2].partition("/")[0]

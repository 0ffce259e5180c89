"""All that the policy of reclaiming decides by: what lies in a workspace, and what protects it.

In: a workspace. Out: a :class:`Stock`. Everything is read from records and the disk. What cannot be
read protects itself: a stage whose records are damaged has no facts, and is not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from infra.disk.copies import WEIGHTS, Copy, copies_of
from infra.disk.held import Hold, read_holds
from infra.disk.usage import Item, size_of, take_stock
from infra.foreign.checkpoints import older, unfinished
from infra.foreign.recorded import recorded_checkpoints
from infra.store.checkpoints import DAMAGED, MARKER, read_checkpoint
from infra.store.marks import pins
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.plan import make_plan
from refiner_core.contract.records import OutputFile, RunRecord, StageRecord, from_json
from refiner_core.contract.services import is_service

log = logging.getLogger(__name__)

_MOST_EDGES = 10_000
_EDGES: dict[tuple[str, ...], dict[str, tuple[str, ...]] | None] = {}


class Weights(NamedTuple):
    """Exported weights of a finished stage, and the copy that was published of them.

    ``verified``: what was published has the same hashes; ``elsewhere``: it does not lie on the
    quota or file system that deleting would relieve.
    """

    folder: Path
    files: tuple[OutputFile, ...]  # relative to the folder
    gain: int
    copy: Copy | None = None
    verified: bool = False
    elsewhere: bool = False


@dataclass(frozen=True)
class StageFacts:
    """What decides about a stage's files.

    Attributes
    ----------
    done, pinned
        It has its result; somebody wants to keep it.
    dead
        Attempts that can make nothing visible any more.
    open
        Whether an attempt is at work, or may be.
    kept_attempt
        The attempt whose output the result names; 0 without a result.
    leased
        A running attempt reads its output.
    held
        Steps whose checkpoints another stage waits for.
    needed_by
        An unfinished stage of a recorded run that will read its output; empty: none.
    weights
        What it exported.
    spare
        Another trainer's checkpoints that may go: see :func:`spare_of`.
    """

    kind: str = ""
    done: bool = False
    pinned: bool = False
    dead: frozenset[int] = frozenset()
    open: bool = False
    kept_attempt: int = 0
    leased: bool = False
    held: frozenset[int] = frozenset()
    needed_by: str = ""
    weights: Weights | None = None
    spare: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Stock:
    """What lies there and what protects it.

    ``complete`` are the checkpoints that can be resumed from, ``damaged`` those that were found not
    to be what was saved, ``idle_code`` the snapshots that no
    unfinished run uses, ``caches`` what was asked for besides; ``copies`` is what weights were
    published to, by the stage that made them, ``holds`` what waits for checkpoints.
    """

    items: tuple[Item, ...]
    stages: Mapping[str, StageFacts]
    complete: frozenset[Path] = frozenset()
    idle_code: frozenset[str] = frozenset()
    caches: tuple[Item, ...] = field(default=())
    copies: Mapping[str, tuple[Copy, ...]] = field(default_factory=dict)
    holds: tuple[Hold, ...] = ()
    damaged: frozenset[Path] = frozenset()


def read_stock(
    workspace: Workspace, caches: Iterable[Item] = (), *, as_if_dropped: bool = False
) -> Stock:
    """The stock of a workspace now. ``as_if_dropped``: as if idle holds had been let go."""
    # Records first: what becomes dead or superseded afterwards is merely kept a little longer.
    records = _records(workspace)
    runs = _runs(workspace)
    leased, needed = _readers(workspace, runs, records)
    copies = copies_of(workspace, records)
    pinned = pins(workspace.layout)
    holds = tuple(read_holds(workspace))
    stages = {
        stage_id: _facts(record, stage_id in pinned, stage_id in leased)
        for stage_id, record in records.items()
    }
    for stage_id, facts in stages.items():
        weights = _weights(workspace, stage_id, records[stage_id], copies.get(stage_id, ()))
        stages[stage_id] = StageFacts(
            **{
                **facts.__dict__,
                "held": frozenset(
                    h.step
                    for h in holds
                    if h.stage_id == stage_id and not (as_if_dropped and h.idle)
                ),
                "needed_by": needed.get(stage_id, ""),
                "weights": weights,
                "spare": spare_of(workspace, stage_id, records[stage_id]),
            }
        )
    items = [_looked_at(item) for item in take_stock(workspace.layout)]
    complete = frozenset(
        i.path for i in items if i.step is not None and read_checkpoint(i.path) is not None
    )
    idle = _idle_code(runs, records)
    damaged = frozenset(i.path for i in items if i.step is not None and (i.path / DAMAGED).exists())
    return Stock(tuple(items), stages, complete, idle, tuple(caches), copies, holds, damaged)


def protection_of(workspace: Workspace, stage_id: str) -> str:
    """Why a stage's output has to stay, by another look at everything; empty: it may go."""
    if stage_id in pins(workspace.layout):
        return "it is pinned"
    records = _records(workspace)
    leased, needed = _readers(workspace, _runs(workspace), records)
    if stage_id not in records:
        return "its records cannot be read"
    if stage_id in leased:
        return "a running attempt reads it"
    return f"{needed[stage_id]} needs it" if stage_id in needed else ""


def spare_of(workspace: Workspace, stage_id: str, record: StageRecord) -> tuple[Item, ...]:
    """Checkpoints of an unfinished `command` stage that may go: saves that were cut off
    (``temporary``), and what is older than its ``command.keep`` complete ones. While it may be at
    work, its newest is taken for one that is just being written."""
    if record.result is not None:
        return ()
    found, keep = recorded_checkpoints(workspace, stage_id)
    remains = [] if _is_open(record) else unfinished(found)
    saved = found[:-1] if _is_open(record) else [c for c in found if c not in remains]
    return (
        *(Item(c.path, "temporary", size_of(c.path), stage_id) for c in remains),
        *(Item(c.path, "checkpoints", size_of(c.path), stage_id) for c in older(saved, keep)),
    )


def idle_code(workspace: Workspace) -> frozenset[str]:
    """Snapshots that may go, by another look at all runs."""
    return _idle_code(_runs(workspace), _records(workspace))


def _readers(
    workspace: Workspace, runs: Iterable[RunRecord | None], records: Mapping[str, StageRecord]
) -> tuple[set[str], dict[str, str]]:
    """Stages that a running attempt reads, and stage id -> an unfinished stage that will."""
    inputs = {i: _recorded_inputs(workspace, i, r) for i, r in records.items()}
    leased = {s for i, r in records.items() if _is_open(r) for s in inputs[i]}
    return leased, _needed(runs, records, inputs)


def _looked_at(item: Item) -> Item:
    """A checkpoint folder without its marker is the remains of a deletion that was cut short."""
    if item.kind == "checkpoints" and item.step is not None and not (item.path / MARKER).exists():
        return item._replace(kind="temporary")
    return item


def _records(workspace: Workspace) -> dict[str, StageRecord]:
    found = {}
    for stage_id in workspace.stage_ids():
        try:
            record = workspace.read_record(stage_id)
        except RefinerError as error:
            log.warning("nothing of %s is reclaimed: %s", stage_id, error)
            continue
        if record is not None:
            found[stage_id] = record
    return found


def _runs(workspace: Workspace) -> list[RunRecord | None]:
    """Recorded calls, oldest first; None for one that cannot be read."""
    found: list[RunRecord | None] = []
    for run_id in workspace.run_ids():
        try:
            found.append(workspace.read_run(run_id))
        except RefinerError as error:
            log.warning("%s", error)
            found.append(None)
    return found


def _is_open(record: StageRecord) -> bool:
    """Whether its newest attempt may be at work."""
    return record.result is None and bool(record.attempts) and record.attempts[-1].outcome is None


def _facts(record: StageRecord, pinned: bool, leased: bool) -> StageFacts:
    numbers = [a.number for a in record.attempts]
    kept = 0 if record.result is None else record.result.attempt
    dead = {
        a.number
        for a in record.attempts
        if a.number != kept and (kept or a.outcome is not None or a.number != numbers[-1])
    }
    return StageFacts(
        kind=record.spec.kind,
        done=record.result is not None,
        pinned=pinned,
        dead=frozenset(dead),
        open=_is_open(record),
        kept_attempt=kept,
        leased=leased,
    )


def _recorded_inputs(workspace: Workspace, stage_id: str, record: StageRecord) -> tuple[str, ...]:
    """Stages that the attempts at an unfinished stage read."""
    if record.result is not None or not record.attempts:
        return ()
    paths = workspace.layout.attempt(stage_id, record.attempts[-1].number)
    try:
        return tuple(workspace.part(paths, "inputs").values())
    except RefinerError as error:
        log.warning("%s", error)
        return ()


def _needed(
    runs: Iterable[RunRecord | None],
    records: Mapping[str, StageRecord],
    inputs: Mapping[str, tuple[str, ...]],
) -> dict[str, str]:
    """Stage id -> an unfinished stage that will read its output."""
    needed = {s: reader for reader, read in inputs.items() for s in read}
    done = {stage_id for stage_id, record in records.items() if record.result is not None}
    for run in runs:
        if run is None:  # whatever it needs, it may be any of them
            return dict.fromkeys(records, "a run whose record cannot be read") | needed
        left = [n for n, i in run.stages.items() if i not in done and not is_service(i)]
        edges = edges_of(run) if left else None  # what is over needs nothing, and is not planned
        for name in left:
            read: Iterable[str] = () if edges is None else edges.get(name, ())
            if edges is None:  # a call about some stages alone may read any of the others
                read = records if run.config.get("only") else run.stages.values()
            needed.update(dict.fromkeys(read, f"{name} of {run.run}"))
    return needed


def edges_of(run: RunRecord) -> dict[str, tuple[str, ...]] | None:
    """Stage name -> ids of the stages that it reads; None where the record does not tell.

    A record never changes, so a run is planned once only in a process.
    """
    key = (run.run, run.started_at, *run.stages.values())
    if key not in _EDGES:
        if len(_EDGES) >= _MOST_EDGES:
            _EDGES.clear()
        _EDGES[key] = _planned_edges(run)
    return _EDGES[key]


def _planned_edges(run: RunRecord) -> dict[str, tuple[str, ...]] | None:
    if not run.config:
        return None
    try:
        plan = make_plan(from_json(RecipeConfig, run.config), run.provenance.get("sources") or {})
    except (RefinerError, TypeError, ValueError, KeyError, AttributeError):
        return None
    if not set(run.stages) <= set(plan.by_name):
        return None
    # A call about some stages alone records only these; where the others lie follows from what it
    # was planned with, if that gives its own stages the ids that they have.
    ids = {s.name: s.id for s in plan.given} | dict(run.stages)
    if plan.given and any(plan.by_name[n].id != run.stages[n] for n in run.stages):
        return None
    return {
        name: tuple(ids[i] for i in plan.by_name[name].inputs.values() if i in ids)
        for name in run.stages
    }


def _idle_code(runs: list[RunRecord | None], records: Mapping[str, StageRecord]) -> frozenset[str]:
    """Snapshots that only finished runs name. One that no run names may just have been made, and
    the newest run's is likely to be used again."""
    if None in runs or not runs:
        return frozenset()
    known = [r for r in runs if r is not None]
    busy = {known[-1].code}
    for run in known:
        stages = [s for s in run.stages.values() if not is_service(s)]  # these are never done
        if not all(s in records and records[s].result is not None for s in stages):
            busy.add(run.code)
    return frozenset({r.code for r in known if r.code} - busy)


# ---------------------------------------------------------------- published weights


def _weights(
    workspace: Workspace, stage_id: str, record: StageRecord, copies: Iterable[Copy]
) -> Weights | None:
    if record.result is None:
        return None
    folder = workspace.layout.stage(stage_id).data / record.result.output_dir
    files = tuple(
        f for f in record.result.files if f.path.endswith(WEIGHTS) and (folder / f.path).exists()
    )
    if not files:
        return None
    weights = Weights(folder, files, sum(size_of(folder / f.path).gain for f in files))
    for copy in copies:
        candidate = weights._replace(
            copy=copy, verified=copy.has(files), elsewhere=copy.is_elsewhere(folder)
        )
        if candidate.verified and candidate.elsewhere:
            return candidate
        weights = candidate
    return weights

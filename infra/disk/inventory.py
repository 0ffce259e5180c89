"""Inventory: the basis of reclaiming, the files in a workspace and what protects them.

In: a workspace. Out: a :class:`Inventory`. Everything is read from records and the disk. Unreadable
data are protected: a stage with damaged records has no facts, and is not touched.

Published copies of a stage's weights: a record has the files at the time of publication, verified
by hash; :class:`CopyCheck` checks them again right before anything is deleted: it reads a folder
again, or queries a Hub for the files of the commit. A copy that cannot be checked does not count.

Holds on checkpoints, with the reason if one is idle. A process that executes a plan releases its
holds once the waiting stage is done; those of cancelled or forgotten calls stay until a user runs
`refiner disk --reclaim`. While any record is unreadable, no hold is idle.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infra.disk.usage import DiskItem, size_of, take_inventory
from infra.external.checkpoints import older, recorded_checkpoints, unfinished
from infra.host.files import existing, names_in, project_id
from infra.store import atomic
from infra.store.checkpoints import (
    DAMAGED,
    HOLD_NAME,
    MARKER,
    MONITOR_HOLD,
    hash_of,
    pins,
    read_checkpoint,
)
from infra.store.orchestrators import orchestrator_of
from infra.store.stage_records import target_damage
from infra.store.workspace import Workspace
from refiner_core.contract.config import PublishConfig, RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.plan import make_plan
from refiner_core.contract.records import OutputFile, RunRecord, StageRecord, from_json
from refiner_core.contract.services import is_service

log = logging.getLogger(__name__)
WEIGHTS = ".safetensors"
#: A Hub that did not answer, or lacks the files, is queried again after this time, seconds.
_BELIEVED_S = 60.0
_LOOK_S = 10.0


class PublishedCopy(NamedTuple):
    """One publication of a stage's weights.

    ``target`` is the folder, or the address of the revision; ``names`` maps the SHA-256 of its
    files to their names there; ``by`` is the publishing stage.
    """

    where: Literal["folder", "hub"]
    target: str
    names: Mapping[str, str]
    repo_id: str = ""
    revision: str = ""
    commit: str | None = None
    by: str = ""

    @property
    def text(self) -> str:
        """For people: the folder, or the repository at its commit."""
        if self.where == "folder":
            return self.target
        return f"{self.target} (commit {(self.commit or '')[:12]})"

    @property
    def endpoint(self) -> str:
        """The Hub's address."""
        return self.target.partition(f"/{self.repo_id}")[0]

    def has(self, files: Iterable[OutputFile]) -> bool:
        """Tell whether all of these files were published."""
        return all(file.sha256 in self.names for file in files)

    def is_elsewhere(self, folder: Path) -> bool:
        """Tell whether it shares neither file system nor project (quota) with ``folder``."""
        target = Path(self.target)
        try:
            if self.where == "hub" or target.stat().st_dev != existing(folder).stat().st_dev:
                return True
        except OSError:
            return False
        return project_id(target) != project_id(folder)

    def way_back(self, files: Sequence[OutputFile], folder: Path) -> str:
        """The command that restores ``files`` (relative to ``folder``)."""
        names = [self.names[f.sha256] for f in files]
        where = folder / Path(files[0].path).parent
        if self.where == "folder":
            sources = [str(Path(self.target) / name) for name in names]
            return shlex.join(["cp", *sources, str(where)])
        words = ["hf", "download", self.repo_id, *names, "--revision", str(self.commit)]
        return f"HF_ENDPOINT={self.endpoint} " + shlex.join([*words, "--local-dir", str(where)])


def copies_of(
    workspace: Workspace, records: Mapping[str, StageRecord]
) -> dict[str, tuple[PublishedCopy, ...]]:
    """Stage id -> publications of its weights that, as far as known on this machine, still
    exist."""
    found: dict[str, tuple[PublishedCopy, ...]] = {}
    for stage_id, record in records.items():
        result = record.result
        if record.spec.kind != "publish" or result is None or "target" not in result.report:
            continue
        paths = workspace.layout.attempt(stage_id, result.attempt)
        try:
            inputs = workspace.part(paths, "inputs")
            copy = _copy(stage_id, result.report)
        except (RefinerError, KeyError, TypeError) as error:
            log.warning("the publication %s is not counted: %s", stage_id, error)
            continue
        if copy is None:
            continue
        for role, source in inputs.items():
            if role.partition("-")[0] == "weights":  # `weights-step50`: the best of several
                found[source] = (*found.get(source, ()), copy)
    return found


def _copy(stage_id: str, report: Mapping[str, Any]) -> PublishedCopy | None:
    """The copy in a report; None if it is not verified, or known to be gone."""
    names = {f["sha256"]: f["path"] for f in report.get("files", ())}
    target, where = str(report["target"]), report.get("where", "folder")
    if where == "hub":
        if not (report.get("verified") is True and report.get("commit")):
            return None
        repo_id, revision = str(report["repo_id"]), str(report["revision"])
        return PublishedCopy(
            "hub", target, names, repo_id, revision, str(report["commit"]), stage_id
        )
    if target_damage(report) or not Path(target).is_absolute():
        return None
    return PublishedCopy("folder", target, names, str(report.get("repo_id", "")), by=stage_id)


class CopyCheck:
    """Checks copies now.

    Parameters
    ----------
    clock
        Seconds, monotonic: a Hub that failed is not queried for a minute, so that a trainer that
        waits for space does not wait for the network, too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._doubts: dict[tuple[str, str | None], tuple[float, str]] = {}

    def doubt(self, copy: PublishedCopy, files: Sequence[OutputFile]) -> str:
        """Reason why the copy is not reliable for these files now; empty if it is."""
        if copy.where == "folder":
            return _doubt_of_folder(copy, files)
        key = (copy.target, copy.commit)
        if key in self._doubts and self._clock() - self._doubts[key][0] < _BELIEVED_S:
            return self._doubts[key][1]
        doubt = _doubt_of_hub(copy, files)
        if doubt:
            self._doubts[key] = (self._clock(), doubt)
        return doubt


def _doubt_of_folder(copy: PublishedCopy, files: Sequence[OutputFile]) -> str:
    for file in files:
        path = Path(copy.target) / copy.names[file.sha256]
        if hash_of(path) != file.sha256:
            return f"{path} differs from what was published"
    return ""


def _doubt_of_hub(copy: PublishedCopy, files: Sequence[OutputFile]) -> str:
    """Runs in the middle of a trainer's save: answers come within seconds, and nothing is retried.
    The token goes only to the configured Hub of this process, and to no other address."""
    from huggingface_hub import constants

    from infra.hub.target import endpoint_now, open_hub

    if constants.HF_HUB_OFFLINE:
        return f"{copy.text} was not checked: HF_HUB_OFFLINE is set here"
    if copy.endpoint != endpoint_now():
        return f"{copy.text} was not checked: HF_ENDPOINT is {endpoint_now()} here"
    config = PublishConfig(request_timeout_s=_LOOK_S)
    try:
        with open_hub(copy.repo_id, config, copy.endpoint, patience_s=0.0) as hub:
            there = hub.tree(str(copy.commit))
    except (RefinerError, OSError) as error:
        return f"{copy.text} cannot be relied on: {error}"
    for file in files:
        found = there.get(copy.names[file.sha256])
        if found is None or (found.bytes, found.sha256) != (file.bytes, file.sha256):
            return f"{copy.text} has no {copy.names[file.sha256]} with the published hash"
    return ""


class RetainedCheckpoint(NamedTuple):
    """Stage ``waiting`` waits for the checkpoint of ``step`` of stage ``stage_id``; ``idle`` is the
    reason why the hold is no longer needed, empty if it is."""

    path: Path
    stage_id: str
    step: int
    waiting: str
    idle: str = ""


#: A call with the waiting stage: its run, whether that stage was cancelled, and whether a process
#: works on the call, or may do so on another host.
Caller = tuple[str, bool, bool]


def read_holds(workspace: Workspace) -> list[RetainedCheckpoint]:
    """All holds of a workspace, by stage and step."""
    found = []
    for stage_id in workspace.stage_ids():
        folder = workspace.layout.stage(stage_id).holds
        for match in map(HOLD_NAME.fullmatch, names_in(folder)):
            if match:
                found.append(
                    RetainedCheckpoint(folder / match[0], stage_id, int(match[1]), match[2])
                )
    callers = _callers(workspace) if found else {}
    return [hold._replace(idle=_why_idle(workspace, hold, callers)) for hold in found]


def drop_idle(
    workspace: Workspace, holds: Iterable[RetainedCheckpoint]
) -> list[RetainedCheckpoint]:
    """Release holds that are still idle at a second check; returns them."""
    idle = {hold.path for hold in read_holds(workspace) if hold.idle}
    gone = [hold for hold in holds if hold.path in idle]
    for hold in gone:
        atomic.remove_quietly(hold.path)
    return gone


def _why_idle(
    workspace: Workspace, hold: RetainedCheckpoint, known: dict[str, list[Caller]] | None
) -> str:
    """Reason why a hold may go; empty if it may not. ``known`` are the calls of each stage, None
    if a record is unreadable. The best checkpoint by gold stays."""
    if hold.waiting == MONITOR_HOLD:
        return ""
    try:
        if workspace.read_result(hold.waiting) is not None:
            return "the stage that waited for it is done"
    except RefinerError as error:
        log.warning("the hold %s stays: %s", hold.path.name, error)
        return ""
    callers = None if known is None else known.get(hold.waiting, [])
    if callers == []:
        return "no recorded run has the stage that waits for it"
    if callers is None or not all(cancelled and not live for _, cancelled, live in callers):
        return ""
    return f"cancelled: {', '.join(run for run, _, _ in callers)}"


def _callers(workspace: Workspace) -> dict[str, list[Caller]] | None:
    """Stage id -> calls that have it; None if a record is unreadable."""
    found: dict[str, list[Caller]] = {}
    try:
        for run in map(workspace.read_run, workspace.run_ids()):
            asked = workspace.cancel_asked(run.run)
            live = orchestrator_of(workspace, run.run).works
            for name, stage_id in run.stages.items():
                named = None if asked is None else asked["stages"]
                ended = named is not None and (not named or not {name, stage_id}.isdisjoint(named))
                found.setdefault(stage_id, []).append((run.run, ended, live))
    except (RefinerError, ValueError, KeyError) as error:
        log.warning("no hold is released, because a record is unreadable: %s", error)
        return None
    return found


_EDGES: dict[tuple[str, ...], dict[str, tuple[str, ...]] | None] = {}


class Weights(NamedTuple):
    """Exported weights of a finished stage, and a published copy with the same hashes on another
    quota and file system than those that deleting would relieve."""

    folder: Path
    files: tuple[OutputFile, ...]  # relative to the folder
    gain: int
    copy: PublishedCopy | None = None


@dataclass(frozen=True)
class StageFacts:
    """Facts that decide which files of a stage may go.

    Attributes
    ----------
    done, pinned
        It has its result; a user has pinned it.
    dead
        Attempts that can no longer publish files.
    open
        Whether an attempt is running, or may be.
    kept_attempt
        The attempt whose output the result names; 0 without a result.
    leased
        A running attempt reads its output.
    held
        Steps whose checkpoints another stage waits for.
    needed_by
        An unfinished stage of a recorded run that will read its output; empty: none.
    weights
        Its exported weights.
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
    spare: tuple[DiskItem, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """The files of a workspace, and their protection.

    ``complete`` are resumable checkpoints, ``damaged`` those that differ from what was saved,
    ``idle_code`` the snapshots that no unfinished run uses; ``copies`` are the publications of
    weights by the stage that made them, ``holds`` the holds on checkpoints.
    """

    items: tuple[DiskItem, ...]
    stages: Mapping[str, StageFacts]
    complete: frozenset[Path] = frozenset()
    idle_code: frozenset[str] = frozenset()
    copies: Mapping[str, tuple[PublishedCopy, ...]] = field(default_factory=dict)
    holds: tuple[RetainedCheckpoint, ...] = ()
    damaged: frozenset[Path] = frozenset()


def read_inventory(workspace: Workspace, *, as_if_dropped: bool = False) -> Inventory:
    """The present stock of a workspace. ``as_if_dropped``: as if idle holds had been released."""
    # Records first: a file that becomes dead or superseded afterwards is kept a little longer.
    records = _records(workspace)
    runs = _runs(workspace)
    leased, needed = _readers(workspace, runs, records)
    copies = copies_of(workspace, records)
    pinned = pins(workspace.layout)
    holds = tuple(read_holds(workspace))
    counted = [h for h in holds if not (as_if_dropped and h.idle)]
    stages = {}
    for stage_id, record in records.items():
        kept = 0 if record.result is None else record.result.attempt
        newest = record.attempts[-1].number if record.attempts else 0
        dead = [
            a.number
            for a in record.attempts
            if a.number != kept and (kept or a.outcome is not None or a.number != newest)
        ]
        stages[stage_id] = StageFacts(
            kind=record.spec.kind,
            done=record.result is not None,
            pinned=stage_id in pinned,
            dead=frozenset(dead),
            open=record.state == "claimed",
            kept_attempt=kept,
            leased=stage_id in leased,
            held=frozenset(h.step for h in counted if h.stage_id == stage_id),
            needed_by=needed.get(stage_id, ""),
            weights=_weights(workspace, stage_id, record, copies.get(stage_id, ())),
            spare=spare_of(workspace, stage_id, record),
        )
    items = take_inventory(workspace.layout)
    for number, item in enumerate(items):
        is_checkpoint = item.kind == "checkpoints" and item.step is not None
        if is_checkpoint and not (item.path / MARKER).exists():
            # The remains of an interrupted deletion.
            items[number] = item._replace(kind="temporary")
    saved = [i.path for i in items if i.step is not None]
    complete = frozenset(path for path in saved if read_checkpoint(path) is not None)
    damaged = frozenset(path for path in saved if (path / DAMAGED).exists())
    idle = _idle_code(runs, records)
    return Inventory(tuple(items), stages, complete, idle, copies, holds, damaged)


def protection_of(workspace: Workspace, stage_id: str) -> str:
    """Reason why a stage's output has to stay, checked now; empty if it may go."""
    if stage_id in pins(workspace.layout):
        return "it is pinned"
    records = _records(workspace)
    leased, needed = _readers(workspace, _runs(workspace), records)
    if stage_id not in records:
        return "its records are unreadable"
    if stage_id in leased:
        return "a running attempt reads it"
    return f"{needed[stage_id]} needs it" if stage_id in needed else ""


def spare_of(workspace: Workspace, stage_id: str, record: StageRecord) -> tuple[DiskItem, ...]:
    """Checkpoints of an unfinished `command` stage that may go: interrupted saves (``temporary``),
    and all but its ``command.keep`` newest complete ones. While it may be running, its newest is
    treated as still being written."""
    if record.result is not None:
        return ()
    found, keep = recorded_checkpoints(workspace, stage_id)
    running = record.state == "claimed"
    remains = [] if running else unfinished(found)
    saved = found[:-1] if running else [c for c in found if c not in remains]
    return (
        *(DiskItem(c.path, "temporary", size_of(c.path), stage_id) for c in remains),
        *(DiskItem(c.path, "checkpoints", size_of(c.path), stage_id) for c in older(saved, keep)),
    )


def idle_code(workspace: Workspace) -> frozenset[str]:
    """Snapshots that may go, after another check of all runs."""
    return _idle_code(_runs(workspace), _records(workspace))


def _readers(
    workspace: Workspace, runs: Iterable[RunRecord | None], records: Mapping[str, StageRecord]
) -> tuple[set[str], dict[str, str]]:
    """Stages that a running attempt reads, and stage id -> an unfinished stage that will."""
    inputs: dict[str, tuple[str, ...]] = {}
    for stage_id, record in records.items():
        inputs[stage_id] = ()
        if record.result is None and record.attempts:
            paths = workspace.layout.attempt(stage_id, record.attempts[-1].number)
            try:
                inputs[stage_id] = tuple(workspace.part(paths, "inputs").values())
            except RefinerError as error:
                log.warning("%s", error)
    leased = {s for i, r in records.items() if r.state == "claimed" for s in inputs[i]}
    return leased, _needed(runs, records, inputs)


def _records(workspace: Workspace) -> dict[str, StageRecord]:
    found = {}
    for stage_id in workspace.stage_ids():
        try:
            if (record := workspace.read_record(stage_id)) is not None:
                found[stage_id] = record
        except RefinerError as error:
            log.warning("nothing of %s is reclaimed: %s", stage_id, error)
    return found


def _runs(workspace: Workspace) -> list[RunRecord | None]:
    """Recorded calls, oldest first; None for an unreadable one."""
    found: list[RunRecord | None] = []
    for run_id in workspace.run_ids():
        try:
            found.append(workspace.read_run(run_id))
        except RefinerError as error:
            log.warning("%s", error)
            found.append(None)
    return found


def _needed(
    runs: Iterable[RunRecord | None],
    records: Mapping[str, StageRecord],
    inputs: Mapping[str, tuple[str, ...]],
) -> dict[str, str]:
    """Stage id -> an unfinished stage that will read its output."""
    needed = {s: reader for reader, read in inputs.items() for s in read}
    done = {stage_id for stage_id, record in records.items() if record.result is not None}
    for run in runs:
        if run is None:  # it may need any of them
            return dict.fromkeys(records, "a run with an unreadable record") | needed
        left = [n for n, i in run.stages.items() if i not in done and not is_service(i)]
        edges = edges_of(run) if left else None  # an ended run needs nothing, and is not planned
        for name in left:
            read: Iterable[str] = () if edges is None else edges.get(name, ())
            if edges is None:  # a call with selected stages may read any of the others
                read = records if run.config.get("only") else run.stages.values()
            needed.update(dict.fromkeys(read, f"{name} of {run.run}"))
    return needed


def edges_of(run: RunRecord) -> dict[str, tuple[str, ...]] | None:
    """Stage name -> ids of the stages that it reads; None if the record does not have them.

    Records never change, so a run is planned only once per process.
    """
    key = (run.run, run.started_at, *run.stages.values())
    if key not in _EDGES:
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
    # A call with selected stages records only these. The other ids follow from planning it again,
    # provided that this gives its own stages their recorded ids.
    ids = {s.name: s.id for s in plan.given} | dict(run.stages)
    if plan.given and any(plan.by_name[n].id != run.stages[n] for n in run.stages):
        return None
    return {
        name: tuple(ids[i] for i in plan.by_name[name].inputs.values() if i in ids)
        for name in run.stages
    }


def _idle_code(runs: list[RunRecord | None], records: Mapping[str, StageRecord]) -> frozenset[str]:
    """Snapshots that only finished runs name. A snapshot without a run may just have been created,
    and the newest run's is likely to be used again."""
    if None in runs or not runs:
        return frozenset()
    known = [r for r in runs if r is not None]
    busy = {known[-1].code}
    for run in known:
        stages = [s for s in run.stages.values() if not is_service(s)]  # services are never done
        if not all(s in records and records[s].result is not None for s in stages):
            busy.add(run.code)
    return frozenset({r.code for r in known if r.code} - busy)


# ---------------------------------------------------------------- published weights


def _weights(
    workspace: Workspace, stage_id: str, record: StageRecord, copies: Iterable[PublishedCopy]
) -> Weights | None:
    if record.result is None:
        return None
    folder = workspace.layout.stage(stage_id).data / record.result.output_dir
    named = (f for f in record.result.files if f.path.endswith(WEIGHTS))
    files = tuple(f for f in named if (folder / f.path).exists())
    if not files:
        return None
    copy = next((c for c in copies if c.has(files) and c.is_elsewhere(folder)), None)
    return Weights(folder, files, sum(size_of(folder / f.path).gain for f in files), copy)

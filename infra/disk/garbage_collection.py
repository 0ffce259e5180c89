"""Garbage collection: the order of deletion when space is short, and the deletion.

In: a :class:`~infra.disk.inventory.Inventory` and a need. Out: :func:`plan_reclaim` (pure) names
candidates, cheapest loss first; :func:`carry_out` deletes them.

=====================  ============================================================================
order                  restriction
=====================  ============================================================================
leftovers              half-written, by attempts that can no longer publish files
superseded outputs     of attempts that did not make the stage's result
finished checkpoints   the stage has its result, so they are not needed to resume
older checkpoints      of unfinished stages: the newest complete one always stays, of another's
                       trainer ``command.keep`` of them; never those that a publication waits for
code snapshots         only those used by finished runs alone
published weights      with a verified copy elsewhere, and without an unfinished reader
stored judgements      oldest first, and only when nothing else frees enough: to judge again costs
                       calls; all of them only on request
=====================  ============================================================================

Nothing of a pinned stage, and no output that a running attempt reads, is ever a candidate.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from infra.disk.inventory import (
    CopyCheck,
    Inventory,
    StageFacts,
    Weights,
    idle_code,
    protection_of,
    spare_of,
)
from infra.disk.usage import DiskItem
from infra.external.checkpoints import work_folder
from infra.store import atomic
from infra.store.atomic import is_no_space
from infra.store.checkpoints import (
    MARKER,
    CheckpointStore,
    CompleteCheckpoint,
    damage_of,
    pins,
    retained_steps,
    write_reclaimed,
)
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError

log = logging.getLogger(__name__)
#: The folder of a stage that trainers write into.
CHECKPOINTS = "checkpoints"


class ReclaimOrder(enum.IntEnum):
    """The order of deletion."""

    LEFTOVER = 1
    SUPERSEDED = 2
    FINISHED = 3
    OLDER = 4
    CODE = 5
    WEIGHTS = 6
    JUDGEMENTS = 8


_CHECKPOINTS = (ReclaimOrder.FINISHED, ReclaimOrder.OLDER)


@dataclass(frozen=True)
class Candidate:
    """One item that may go, its size, and the reason."""

    rank: ReclaimOrder
    path: Path
    bytes: int
    inodes: int
    why: str
    stage_id: str = ""
    attempt: int = 0
    step: int | None = None
    weights: Weights | None = None


class ReclaimedBytes(NamedTuple):
    """Sum of the freed space, by the sizes of the files."""

    bytes: int = 0
    items: tuple[str, ...] = ()


def plan_reclaim(
    inventory: Inventory, need_bytes: int | None, need_inodes: int = 0, *, judgements: bool = False
) -> list[Candidate]:
    """Candidates to free ``need_bytes`` and ``need_inodes``; None: all that may go.

    If everything together does not suffice, all that is of no further use goes all the same, but
    published weights and judgements stay. Without a need, judgements go only with ``judgements``.
    """

    order = sorted(_candidates(inventory), key=lambda c: c.rank)
    if need_bytes is None:
        return [c for c in order if judgements or c.rank is not ReclaimOrder.JUDGEMENTS]
    gained_bytes = gained_inodes = 0
    for count, candidate in enumerate(order):
        if gained_bytes >= need_bytes and gained_inodes >= need_inodes:
            return order[:count]
        gained_bytes += candidate.bytes
        gained_inodes += candidate.inodes
    if gained_bytes >= need_bytes and gained_inodes >= need_inodes:
        return order
    return [c for c in order if c.rank < ReclaimOrder.WEIGHTS]


def _candidates(inventory: Inventory) -> Iterator[Candidate]:
    order = ReclaimOrder
    for item in inventory.items:
        facts = inventory.stages.get(item.stage_id)
        if item.kind == "code" and item.path.name in inventory.idle_code:
            yield _candidate(order.CODE, item, "only finished runs have used it")
        if item.kind == "judgements":  # its writer starts another one when it is gone
            yield _candidate(order.JUDGEMENTS, item, "to judge it again costs calls")
        if facts is None or facts.pinned:
            continue
        if item.path in inventory.damaged:
            yield _candidate(order.LEFTOVER, item, "damaged, and of no use")
        elif item.kind == "temporary" and _is_leftover(item, facts):
            yield _candidate(order.LEFTOVER, item, "half-written by an attempt that has ended")
        elif item.kind == "outputs" and not facts.leased and item.attempt in facts.dead:
            yield _candidate(order.SUPERSEDED, item, "of an attempt that did not make the result")
    yield from _checkpoints(inventory)
    for stage_id, facts in inventory.stages.items():
        for item in () if facts.pinned else facts.spare:
            if item.kind == "temporary":
                yield _candidate(order.LEFTOVER, item, "a save that its trainer did not finish")
            else:
                yield _candidate(order.OLDER, item, "there are newer complete ones")
        if (weights := facts.weights) is not None and weights.copy is not None and _may_go(facts):
            why, count = f"published and verified in {weights.copy.text}", len(weights.files)
            size = (weights.folder, weights.gain, count)
            yield Candidate(ReclaimOrder.WEIGHTS, *size, why, stage_id, weights=weights)


def _candidate(rank: ReclaimOrder, item: DiskItem, why: str) -> Candidate:
    size = item.size
    return Candidate(rank, item.path, size.gain, size.inodes, why, *item[3:])


def _is_leftover(item: DiskItem, facts: StageFacts) -> bool:
    # Only among checkpoints: elsewhere they are small, and an orchestrator may be writing them now.
    if item.path.parent.name != CHECKPOINTS:
        return False
    if item.attempt:
        return (facts.done and item.attempt != facts.kept_attempt) or item.attempt in facts.dead
    return not facts.open


def _may_go(facts: StageFacts) -> bool:
    """Tell whether a finished stage's weights may be deleted."""
    weights = facts.weights
    return (
        facts.done
        and weights is not None
        and weights.copy is not None
        and weights.gain > 0
        and not (facts.pinned or facts.leased or facts.needed_by)
    )


def _checkpoints(inventory: Inventory) -> Iterator[Candidate]:
    by_stage: dict[str, list[DiskItem]] = {}
    for item in inventory.items:
        if item.kind == "checkpoints":
            by_stage.setdefault(item.stage_id, []).append(item)
    for stage_id, items in by_stage.items():
        facts = inventory.stages.get(stage_id)
        if facts is None or facts.pinned:
            continue
        items.sort(key=lambda i: -1 if i.step is None else i.step)
        rank, why = ReclaimOrder.FINISHED, "the stage is done, so it is not needed to resume"
        if not facts.done:
            rank, why = ReclaimOrder.OLDER, "there is a newer complete one"
            items = [i for i in items if i.path in inventory.complete][:-1]
        yield from (_candidate(rank, i, why) for i in items if i.step not in facts.held)


# ---------------------------------------------------------------- deleting


def carry_out(
    workspace: Workspace, candidates: Iterable[Candidate], copies: CopyCheck | None = None
) -> ReclaimedBytes:
    """Delete candidates, each after another check of its protection. Never raises: failures are
    logged and not counted.

    ``copies`` checks the copies of published weights; reused over several calls, it remembers which
    Hub cannot be reached.
    """
    total, items = 0, []
    copies, is_whole = copies or CopyCheck(), functools.cache(_is_whole)
    for candidate in candidates:
        path = candidate.path
        try:
            if not _still_may_go(workspace, candidate, is_whole):
                continue
            _delete(workspace, candidate, copies)
        except (OSError, ValueError, RefinerError) as error:
            log.warning("%s was not reclaimed: %s", candidate.path, error)
            continue
        weights = candidate.weights
        left = [path] if weights is None else [path / f.path for f in weights.files]
        if not any(file.exists() for file in left):
            log.info("reclaimed %d bytes: %s (%s)", candidate.bytes, candidate.path, candidate.why)
            total += candidate.bytes
            items.append(str(candidate.path))
    return ReclaimedBytes(total, tuple(items))


def _is_whole(checkpoint: CompleteCheckpoint) -> bool:
    """Verify a checkpoint by reading all of it."""
    damage = damage_of(checkpoint)
    if damage is not None:
        log.warning("%s is damaged: %s; earlier ones stay", checkpoint.path, damage.description)
    return damage is None


def _still_may_go(
    workspace: Workspace, candidate: Candidate, is_whole: Callable[[CompleteCheckpoint], bool]
) -> bool:
    stage = workspace.layout.stage(candidate.stage_id)
    if candidate.stage_id in pins(workspace.layout):
        return False
    if work_folder(stage) in candidate.path.parents:
        record = workspace.read_record(candidate.stage_id)
        spare = () if record is None else spare_of(workspace, candidate.stage_id, record)
        return candidate.path in {item.path for item in spare}
    if candidate.rank in _CHECKPOINTS and candidate.step in retained_steps(stage):
        return False
    if candidate.rank is ReclaimOrder.CODE:
        return candidate.path.name in idle_code(workspace)
    if candidate.rank is ReclaimOrder.FINISHED:
        return stage.result.exists()
    if candidate.rank is ReclaimOrder.OLDER:
        complete = CheckpointStore(stage.checkpoints, 0).complete()
        newer = [c for c in complete if candidate.step is not None and c.step > candidate.step]
        return bool(newer) and is_whole(newer[-1])
    if candidate.rank is ReclaimOrder.SUPERSEDED:
        result = workspace.read_result(candidate.stage_id)
        return result is None or result.attempt != candidate.attempt
    return True


def _delete(workspace: Workspace, candidate: Candidate, copies: CopyCheck) -> None:
    path = candidate.path
    if candidate.weights is not None:
        _delete_weights(workspace, candidate.stage_id, candidate.weights, copies)
        return
    # Hidden first, then one more check: a reader that started before the check gets it back, and a
    # later one sees that it is gone. (A run records itself first, then ensures its code.)
    stage, hidden = workspace.layout.stage(candidate.stage_id), atomic.temporary_name(path)
    is_code = candidate.rank is ReclaimOrder.CODE
    is_checkpoint = candidate.rank in _CHECKPOINTS and candidate.step is not None
    if not is_code and not is_checkpoint:
        hidden = path
    else:
        try:
            path.rename(hidden)
        except FileNotFoundError:
            return  # the trainer was faster
        except OSError as error:
            if is_code or not is_no_space(error):
                raise
            hidden = path  # a full quota may refuse even a new name, and accept only deletions
    needed = is_code and path.name not in idle_code(workspace) and not path.exists()
    if needed or (is_checkpoint and candidate.step in retained_steps(stage)):
        if hidden != path:
            hidden.rename(path)
        return
    if is_checkpoint:  # marker first: an interrupted deletion leaves nothing that looks complete
        atomic.remove_quietly(hidden / MARKER)
    atomic.remove_tree(hidden)


def _delete_weights(
    workspace: Workspace, stage_id: str, weights: Weights, copies: CopyCheck
) -> None:
    copy = weights.copy
    doubt = "there is no copy" if copy is None else copies.doubt(copy, weights.files)
    doubt = doubt or protection_of(workspace, stage_id)  # last: it may be needed by now
    if copy is None or doubt:
        raise ValueError(doubt)
    write_reclaimed(
        workspace.layout.stage(stage_id),
        weights.files,
        why="space was short",
        copy=copy.text,
        way_back=copy.way_back(weights.files, weights.folder),
    )
    for file in weights.files:
        (weights.folder / file.path).unlink(missing_ok=True)

"""Stages of a dead workspace, or of a stage's folder that was copied out of one, go on in another.

In: a folder that refiner has written (``workspace.json``, or a stage's ``spec.json``). Out: the
same stages in the current workspace: finished ones are done there, too, others go on from their
newest complete checkpoint when the same recipe is run. Large files become hard links, which is safe
because nothing of ours writes into a file that is whole; what another trainer may write into is
copied. The source is never changed.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from infra.foreign.checkpoints import files_below, find_checkpoints, work_folder
from infra.foreign.exports import link_or_copy
from infra.host.processes import ProcessId
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.checkpoints import Complete, read_checkpoint
from infra.store.layout import Layout, StagePaths
from infra.store.records import RecordFiles
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, WorkspaceError
from refiner_core.contract.records import Outcome, StageResult, StageSpec, from_json, to_json

log = logging.getLogger(__name__)

#: Kinds whose result lies outside of a workspace: the same recipe makes them again at once.
_NOT_TAKEN = ("fetch", "publish", "card")
#: A worker writes its heartbeat more often than this.
_LISTEN_S = 5.0

StageFate = Literal["done", "goes on", "starts over", "was here", "not taken", "damaged"]


class FoundStage(NamedTuple):
    """A stage in the source: what it is, and what would become of it.

    ``step`` is that of its newest complete checkpoint; ``notes`` name what is damaged.
    """

    id: str
    spec: StageSpec
    paths: StagePaths
    fate: StageFate
    step: int | None
    notes: tuple[str, ...]


def is_ours(folder: Path) -> bool:
    """Whether refiner has written this folder as a workspace or a stage of one."""
    return (folder / "workspace.json").is_file() or (folder / "spec.json").is_file()


def find_stages(folder: Path, workspace: Workspace) -> list[FoundStage]:
    """The stages in ``folder``, and what adopting them into ``workspace`` would make of each.

    Raises
    ------
    WorkspaceError
        A record of it cannot be read.
    ConfigurationError
        It is the very workspace that they would go to.
    """
    if (folder / "workspace.json").is_file():
        source = Workspace.read_only(folder)
        if source.root.resolve() == workspace.root.resolve():
            raise ConfigurationError(
                f"{folder} is this workspace itself",
                expected="the folder of another one",
                fix="run the recipe again: it goes on by itself",
            )
        stages = [source.layout.stage(i) for i in source.stage_ids()]
    else:
        stages = [StagePaths(folder, folder)]
    return [_found(paths, workspace) for paths in stages if paths.spec.is_file()]


def adopt_stages(
    found: Sequence[FoundStage], workspace: Workspace, listen_s: float = _LISTEN_S
) -> None:
    """Bring stages into ``workspace``; those that are there already stay as they are.

    Raises
    ------
    WorkspaceError
        One of them still runs.
    NoSpaceError
        What could not be linked did not fit; run it again when there is room.
    """
    wanted = [s for s in found if s.fate in ("done", "goes on", "starts over")]
    _refuse_living(wanted, listen_s)
    for stage in wanted:
        target = workspace.layout.stage(stage.id)
        with no_space_guard(workspace.layout.data, f"adopting {stage.id}"):
            target.control.mkdir(parents=True, exist_ok=True)
            if not target.spec.exists():
                atomic.create_json(target.spec, to_json(stage.spec))
            for checkpoint in _complete(stage.paths):
                _take_checkpoint(checkpoint, target)
            if stage.spec.kind == "command" and stage.fate != "done":
                _copy_work(stage.paths, target)
            for number in stage.paths.attempt_numbers():
                _take_attempt(stage, number, target)
            if stage.fate == "done":
                result = atomic.read_json(stage.paths.result)
                atomic.create_json(target.result, result)


# ---------------------------------------------------------------- looking


def _found(paths: StagePaths, workspace: Workspace) -> FoundStage:
    value = atomic.read_json(paths.spec)
    try:
        spec = from_json(StageSpec, value)
    except (TypeError, AttributeError) as error:
        raise WorkspaceError(
            f"{paths.spec} is no specification of a stage: {error}",
            expected="a file that refiner has written",
            fix="name the folder that holds whole stages",
        ) from error
    stage_id = f"{spec.kind}-{spec.fingerprint[:12]}"
    steps = [c.step for c in _complete(paths)]
    if spec.kind == "command":
        steps = _foreign_steps(paths)
    step = max(steps, default=None)
    notes = tuple(_damaged_checkpoints(paths))
    fate: StageFate = "starts over" if step is None else "goes on"
    if paths.result.is_file():
        wrong = _output_damage(paths)
        fate, notes = ("done", notes) if wrong is None else (fate, (*notes, wrong))
    if spec.kind in _NOT_TAKEN:
        fate = "not taken"
    elif workspace.layout.stage(stage_id).attempt_numbers():
        fate = "was here"
    return FoundStage(stage_id, spec, paths, fate, step, notes)


def _complete(paths: StagePaths) -> list[Complete]:
    folders = sorted(paths.checkpoints.glob("step-*")) if paths.checkpoints.is_dir() else []
    return [c for c in map(read_checkpoint, folders) if c is not None]


def _damaged_checkpoints(paths: StagePaths) -> Iterator[str]:
    for folder in sorted(paths.checkpoints.glob("step-*")) if paths.checkpoints.is_dir() else ():
        said: list[str] = []
        if read_checkpoint(folder, said.append) is None:
            yield said[0] if said else f"checkpoint {folder} is not complete"


def _foreign_steps(paths: StagePaths) -> list[int]:
    config = _newest_config(paths)
    if config is None:
        return []
    found = find_checkpoints(work_folder(paths), config.command)
    return [c.step for c in found if not c.damage]


def _newest_config(paths: StagePaths) -> RecipeConfig | None:
    records = RecordFiles(Layout(paths.control, paths.data))
    for number in reversed(paths.attempt_numbers()):
        if value := records.part(paths.attempt(number), "config"):
            return from_json(RecipeConfig, value)
    return None


def _output_damage(paths: StagePaths) -> str | None:
    result = from_json(StageResult, atomic.read_json(paths.result))
    folder = paths.data / result.output_dir
    for path in (folder, *(folder / file.path for file in result.files)):
        if not path.resolve().is_relative_to(paths.data.resolve()):
            return f"its output {path} lies elsewhere"
    for file in result.files:
        path = folder / file.path
        if not path.is_file() or path.stat().st_size != file.bytes:
            return f"its output {path} is gone or cut short"
    return None


def _refuse_living(stages: Sequence[FoundStage], listen_s: float) -> None:
    """A stage that still runs elsewhere would go on twice."""
    opened = [
        (stage, stage.paths.attempt(n))
        for stage in stages
        for n in stage.paths.attempt_numbers()
        if stage.fate != "done" and not stage.paths.attempt(n).outcome.exists()
    ]
    beats = [atomic.read_json(paths.heartbeat) for _, paths in opened]
    if any(beats):
        time.sleep(listen_s)
    for (stage, paths), before in zip(opened, beats, strict=True):
        process = (atomic.read_json(paths.started) or {}).get("process")
        lives = process is not None and ProcessId.parse(process).alive
        if lives or atomic.read_json(paths.heartbeat) != before:
            raise WorkspaceError(
                f"{stage.id} still runs in {stage.paths.control}",
                expected="a run that has ended",
                fix="stop it there first (`refiner cancel`), or wait for its end",
            )


# ---------------------------------------------------------------- taking


def _take_checkpoint(checkpoint: Complete, target: StagePaths) -> None:
    place = target.checkpoints / checkpoint.path.name
    if place.exists():
        return
    _rename_in(checkpoint.path, place)


def _take_attempt(stage: FoundStage, number: int, target: StagePaths) -> None:
    """Its records, log, metrics and rollouts; its output only where that is the stage's."""
    source, place = stage.paths.attempt(number), target.attempt(number)
    with_output = stage.fate == "done"
    if source.data != source.control and source.data.is_dir() and not place.data.exists():
        _rename_in(source.data, place.data, left_out=() if with_output else ("output",))
    if place.control.exists():
        return
    place.control.parent.mkdir(parents=True, exist_ok=True)
    temporary = atomic.temporary_name(place.control)
    try:
        _link_tree(source.control, temporary, left_out=() if with_output else ("output",))
        if not (temporary / source.outcome.name).exists():
            outcome = Outcome("killed", "resume", "its workspace was left, and adopted elsewhere")
            value = {"outcome": to_json(outcome), "ended_at": now_text(), "seconds": None}
            atomic.write_json(temporary / source.outcome.name, value)
        temporary.rename(place.control)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_work(source: StagePaths, target: StagePaths) -> None:
    """Another trainer's own folder: copied, because it may write into files that are there."""
    place = work_folder(target)
    if not work_folder(source).is_dir() or place.exists():
        return
    temporary = atomic.temporary_name(place)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(work_folder(source), temporary, symlinks=True)
        atomic.sync_tree(temporary)
        temporary.rename(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_in(source: Path, place: Path, left_out: tuple[str, ...] = ()) -> None:
    temporary = atomic.temporary_name(place)
    try:
        _link_tree(source, temporary, left_out)
        atomic.sync_tree(temporary)
        temporary.rename(place)
        atomic.sync_folder(place.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _link_tree(source: Path, target: Path, left_out: tuple[str, ...] = ()) -> None:
    target.mkdir(parents=True)
    for file in files_below(source):
        name = file.relative_to(source)
        if name.parts[0] in left_out or not file.is_file() or file.is_symlink():
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(file, target / name)

"""Adopting: dead runs, ours or anybody's, become stages that go on here.

A checkpoint of somebody else's becomes a `command` stage that is done, whose output is the
checkpoint, and a recipe file that names it. What the stage *is* follows from the weights' own
digest, so that adopting the same ones again changes nothing. Files are hard links unless the caller
asks for copies, or for links by name (which hold only while the source stays).

Stages of a dead workspace of ours, or of a stage's folder that was copied out of one, become the
same stages in the current workspace: finished ones are done there, too, others go on from their
newest complete checkpoint when the same recipe is run. Large files become hard links, which is safe
because nothing of ours writes into a file that is whole; what another trainer may write into is
copied. The source is never changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from infra.foreign.checkpoints import files_below, find_checkpoints, work_folder
from infra.foreign.exports import copy, link, link_or_copy, model_files, open_file
from infra.foreign.sightings import Sighting
from infra.host.processes import ProcessId
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.checkpoints import Complete, read_checkpoint
from infra.store.layout import Layout, StagePaths
from infra.store.records import RecordFiles
from infra.store.stage_records import Claim
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import CommandConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, WorkspaceError
from refiner_core.contract.plan import make_plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import (
    RECORD_VERSION,
    Outcome,
    OutputFile,
    StageResult,
    StageSpec,
    from_json,
    to_json,
)

How = Literal["link", "copy", "in-place"]
#: In words, for people.
HOW_IN_WORDS: dict[How, str] = {
    "link": "hard links (no room needed; the source may be deleted later)",
    "copy": "copies",
    "in-place": "links by name (the source must stay where it is)",
}


@dataclass(frozen=True)
class Source:
    """Source of an adoption.

    ``companions`` is a folder with the configuration and tokenizer that the checkpoint lacks;
    ``base_model`` what its training started from, where somebody knows.
    """

    checkpoint: Sighting
    how: How = "link"
    companions: Path | None = None
    base_model: str = ""


class Adopted(NamedTuple):
    """A finished stage; ``new`` is False where it was there already."""

    stage_id: str
    digest: str
    model: Path
    files: tuple[OutputFile, ...]
    new: bool


def adopt_checkpoint(workspace: Workspace, source: Source) -> Adopted:
    """Record a checkpoint as the result of a `command` stage.

    Raises
    ------
    ConfigurationError
        It cannot be linked here (``how="link"`` across file systems), or has links that lead out
        of it.
    NoSpaceError
        It did not fit; nothing of it stays.
    WorkspaceError
        Somebody else is adopting it at this moment.
    """
    wanted = model_files(source.checkpoint.path, source.companions)
    files = tuple(_described(f"model/{name}", path) for name, path in sorted(wanted.items()))
    digest = _digest(files)
    stage, config = adopted_stage(digest)
    model = workspace.output_dir(stage.id)
    if model is not None and workspace.output_damage(stage.id) is None:
        return Adopted(stage.id, digest, model / "model", files, False)
    if model is not None:
        workspace.check_output(stage.id)  # refuses, and says what to delete
    folder = _record(workspace, stage, config, source, wanted, files)
    return Adopted(stage.id, digest, folder / "model", files, True)


def adopted_stage(digest: str) -> tuple[PlannedStage, RecipeConfig]:
    """The stage that weights of this digest are, and a configuration that plans it."""
    config = replace(
        RecipeConfig(recipe="adopted"), stages=("command",), command=CommandConfig(adopted=digest)
    )
    return make_plan(config, {}).by_name["command"], config


def write_recipe(path: Path, adopted: Adopted, fields: dict[str, Any]) -> None:
    """A recipe that publishes (and evaluates) what was adopted; the same call writes the same."""
    command = {
        **{"run": "", "adopted": adopted.digest, "version": "", "env": []},
        **{"resume_arguments": "", "companions": ""},
    }
    text = yaml.safe_dump({**fields, "command": command}, sort_keys=False, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, f"# Written by `refiner adopt`. Edit it as any recipe.\n{text}")


def _record(
    workspace: Workspace,
    stage: PlannedStage,
    config: RecipeConfig,
    source: Source,
    wanted: dict[str, Path],
    files: tuple[OutputFile, ...],
) -> Path:
    number = max(workspace.layout.stage(stage.id).attempt_numbers(), default=0)
    claim = Claim(str(ProcessId.of()), "local", number)
    attempt = workspace.claim_attempt(stage, config, {}, claim)
    token = {"process": str(ProcessId.of()), "started_at": now_text()}
    if attempt is None or not workspace.start_attempt(stage.id, attempt.number, token):
        raise WorkspaceError(
            f"Somebody else works on {stage.id} at this moment",
            expected="one `refiner adopt` of these weights at a time",
            fix="look at `refiner status`, and run the same command again",
        )
    output = workspace.layout.attempt(stage.id, attempt.number).output
    try:
        with no_space_guard(workspace.layout.data, "adopting the checkpoint"):
            _place(wanted, output / "model", source.how)
        result = StageResult(
            version=RECORD_VERSION,
            attempt=attempt.number,
            output_dir=output.relative_to(workspace.layout.stage(stage.id).data).as_posix(),
            files=files,
            report={
                "steps": source.checkpoint.step,
                "adopted": True,
                "source": os.fspath(source.checkpoint.path),
                "layout": source.checkpoint.layout,
                "how": source.how,
                "base_model": source.base_model,
            },
            provenance={"adopted": True},
            seconds=0.0,
            finished_at=now_text(),
        )
        workspace.publish_result(stage.id, result)
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        workspace.close_attempt(
            stage.id, attempt.number, Outcome("interrupted", "resume", "adopting did not finish")
        )
        raise
    workspace.close_attempt(stage.id, attempt.number, Outcome("none", "finish", "adopted"))
    return output


def _place(wanted: dict[str, Path], target: Path, how: How) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name, path in wanted.items():
        if how == "in-place":
            (target / name).symlink_to(path)
        elif how == "copy":
            copy(path, target / name)
        elif not link(path, target / name):
            raise ConfigurationError(
                f"{path} cannot be linked into the workspace: they are on different file systems, "
                "or its owner is another user",
                expected="one file system for a hard link",
                fix="use --copy (needs room), --in-place (the source must stay), or "
                "workspace=DIR on the source's file system",
            )
    atomic.sync_folder(target)
    if how == "copy":
        atomic.sync_tree(target)


def _described(name: str, path: Path) -> OutputFile:
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return OutputFile(name, os.fstat(file.fileno()).st_size, digest)


def _digest(files: tuple[OutputFile, ...]) -> str:
    text = "".join(f"{f.path}:{f.bytes}:{f.sha256}\n" for f in files)
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------- stages of ours

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
    """Tell whether refiner has written this folder as a workspace or a stage of one."""
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
                place = target.checkpoints / checkpoint.path.name
                if not place.exists():
                    with _placed(place) as temporary:
                        _link_tree(checkpoint.path, temporary)
            work, place = work_folder(stage.paths), work_folder(target)
            wanted_work = stage.spec.kind == "command" and stage.fate != "done" and work.is_dir()
            if wanted_work and not place.exists():
                # Another trainer's own folder: it may write into files that are there.
                with _placed(place) as temporary:
                    shutil.copytree(work, temporary, symlinks=True)
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
    notes: list[str] = []
    for checkpoint in sorted(paths.checkpoints.glob("step-*")):
        said: list[str] = []
        if read_checkpoint(checkpoint, said.append) is None:
            notes.append(said[0] if said else f"checkpoint {checkpoint} is not complete")
    fate: StageFate = "starts over" if step is None else "goes on"
    if paths.result.is_file():
        wrong = _output_damage(paths)
        fate = "done" if wrong is None else fate
        notes += [] if wrong is None else [wrong]
    if spec.kind in _NOT_TAKEN:
        fate = "not taken"
    elif workspace.layout.stage(stage_id).attempt_numbers():
        fate = "was here"
    return FoundStage(stage_id, spec, paths, fate, step, tuple(notes))


def _complete(paths: StagePaths) -> list[Complete]:
    folders = sorted(paths.checkpoints.glob("step-*"))
    return [c for c in map(read_checkpoint, folders) if c is not None]


def _foreign_steps(paths: StagePaths) -> list[int]:
    records = RecordFiles(Layout(paths.control, paths.data))
    for number in reversed(paths.attempt_numbers()):
        if value := records.part(paths.attempt(number), "config"):
            command = from_json(RecipeConfig, value).command
            return [c.step for c in find_checkpoints(work_folder(paths), command) if not c.damage]
    return []


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


def _take_attempt(stage: FoundStage, number: int, target: StagePaths) -> None:
    """Its records, log, metrics and rollouts; its output only where that is the stage's."""
    source, place = stage.paths.attempt(number), target.attempt(number)
    left_out = () if stage.fate == "done" else ("output",)
    if source.data != source.control and source.data.is_dir() and not place.data.exists():
        with _placed(place.data) as temporary:
            _link_tree(source.data, temporary, left_out)
    if place.control.exists():
        return
    with _placed(place.control) as temporary:
        _link_tree(source.control, temporary, left_out)
        if not (temporary / source.outcome.name).exists():
            outcome = Outcome("killed", "resume", "its workspace was left, and adopted elsewhere")
            value = {"outcome": to_json(outcome), "ended_at": now_text(), "seconds": None}
            atomic.write_json(temporary / source.outcome.name, value)


@contextlib.contextmanager
def _placed(place: Path) -> Iterator[Path]:
    """A temporary name, which takes its place when the block has come to its end."""
    temporary = atomic.temporary_name(place)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
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

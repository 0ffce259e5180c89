"""Adopting: a checkpoint of anybody's dead run becomes a stage that is done.

It becomes a `command` stage whose output is the checkpoint, and a recipe file that names it. What
the stage *is* follows from the weights' own digest, so that adopting the same ones again changes
nothing. Files are hard links unless the caller asks for copies, or for links by name (which hold
only while the source stays). The source is never changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from infra.foreign.exports import copy, link, model_files, open_file
from infra.foreign.sightings import Sighting
from infra.host.processes import ProcessId
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.stage_records import Claim
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import CommandConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, WorkspaceError
from refiner_core.contract.plan import make_plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import RECORD_VERSION, Outcome, OutputFile, StageResult

How = Literal["link", "copy", "in-place"]
#: In words, for people.
HOW_IN_WORDS: dict[How, str] = {
    "link": "hard links (no room needed; the source may be deleted later)",
    "copy": "copies",
    "in-place": "links by name (the source must stay where it is)",
}


class Adopted(NamedTuple):
    """A finished stage; ``new`` is False where it was there already."""

    stage_id: str
    digest: str
    model: Path
    files: tuple[OutputFile, ...]
    new: bool


def adopt_checkpoint(
    workspace: Workspace,
    checkpoint: Sighting,
    how: How = "link",
    companions: Path | None = None,
    base_model: str = "",
) -> Adopted:
    """Record a checkpoint as the result of a `command` stage.

    ``companions`` is a folder with the configuration and tokenizer that it lacks; ``base_model``
    what its training started from, where somebody knows.

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
    wanted = model_files(checkpoint.path, companions)
    files = tuple(_described(f"model/{name}", path) for name, path in sorted(wanted.items()))
    digest = _digest(files)
    stage, config = adopted_stage(digest)
    model = workspace.output_dir(stage.id)
    if model is not None and workspace.output_damage(stage.id) is None:
        return Adopted(stage.id, digest, model / "model", files, False)
    if model is not None:
        workspace.check_output(stage.id)  # refuses, and says what to delete
    report = {
        **{"steps": checkpoint.step, "adopted": True, "source": os.fspath(checkpoint.path)},
        **{"layout": checkpoint.layout, "how": how, "base_model": base_model},
    }
    folder = _record(workspace, stage, config, wanted, files, report)
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
    wanted: dict[str, Path],
    files: tuple[OutputFile, ...],
    report: dict[str, Any],
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
            _place(wanted, output / "model", report["how"])
        result = StageResult(
            version=RECORD_VERSION,
            attempt=attempt.number,
            output_dir=output.relative_to(workspace.layout.stage(stage.id).data).as_posix(),
            files=files,
            report=report,
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

"""Adopts a checkpoint of an external trainer's dead run as a finished stage.

In: its folder. Out: a JSON-ready report, records in the workspace, and a recipe that publishes (and
evaluates) the checkpoint. It becomes a `command` stage with the checkpoint as its output,
identified by the digest of the weights, so that adopting the same ones again changes nothing. Files
are hard links, or on request copies or links by name (which need the source to stay). The source is
never changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from infra.external.checkpoints import DetectedCheckpoint, choose, detect, prove
from infra.external.exports import copy, missing_in, model_files, open_file
from infra.host.files import link
from infra.host.processes import ProcessId
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.stage_records import StageClaim
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import CommandConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, WorkspaceError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import make_plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.recipes import find_recipe
from refiner_core.contract.records import (
    RECORD_VERSION,
    AttemptOutcome,
    OutputFile,
    StageResult,
    picked,
)

#: Version of the JSON that `adopt --json` prints.
OUTPUT_VERSION = 1

How = Literal["link", "copy", "in-place"]
#: Descriptions for people.
HOW_IN_WORDS: dict[How, str] = {
    "link": "hard links (no space needed; the source may be deleted later)",
    "copy": "copies",
    "in-place": "links by name (the source must stay where it is)",
}


def adopt_run(
    folder: str | Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    recipe: str | None = None,
    companions: str | Path | None = None,
    name: str | None = None,
    how: How = "link",
    dry_run: bool = False,
) -> dict[str, Any]:
    """Adopt a checkpoint of an external trainer's dead run.

    Parameters
    ----------
    folder
        The folder of the run.
    overrides
        ``key=value``, as for ``refiner run``; ``workspace=DIR`` is the target.
    step
        Step of the checkpoint (default: the newest complete one).
    recipe
        Recipe with data, judge and evaluation.
    companions
        A folder with config and tokenizer, if the checkpoint has none.
    name
        Name of the model (default: the folder's).
    how
        Hard links, links by name, or copies.
    dry_run
        Check and report only; change nothing.

    Returns
    -------
    dict
        The content of ``refiner adopt --json``: checkpoints with their state, the adopted one, and
        the next command.

    Raises
    ------
    ConfigurationError
        Nothing there can be adopted, or an override is invalid.
    WorkspaceError
        The workspace cannot be used.
    """
    place = Path(folder).expanduser().absolute()
    _refuse_ours(place)
    found = prove(detect(place), step)
    chosen = None if dry_run and not any(s.usable for s in found) else choose(found, step)
    given = {key: value for key, _, value in (o.partition("=") for o in overrides)}
    root = given.get("workspace", RecipeConfig.workspace)
    report: dict[str, Any] = {
        **{"version": OUTPUT_VERSION, "kind": "checkpoints", "source": str(place)},
        "workspace": str(Path(root).expanduser().absolute()),
        **{"dry_run": dry_run, "how": HOW_IN_WORDS[how]},
        "checkpoints": [_checkpoint_json(sighting, place) for sighting in found],
        **{"adopted": None, "step": None, "recipe": None, "notes": []},
        "next": ["refiner", "adopt", "FOLDER-OF-CONVERTED-WEIGHTS"],
    }
    if chosen is None:
        return report
    model = name or (place.parent.name if chosen.path == place else place.name)
    stem = re.sub(r"[^\w.-]+", "-", f"{model}-step{chosen.step}").strip("-.")
    made = Path(report["workspace"]) / "adopted" / f"{stem}.yaml"
    rest = [o for o in overrides if not o.startswith("workspace=")]
    report |= {"step": chosen.step, "recipe": str(made)}
    report["next"] = ["refiner", "run", str(made), *rest]
    beside = None if companions is None else Path(companions)
    if missing := missing_in(chosen.path, beside):
        report["notes"] = [
            f"step {chosen.step} lacks {', '.join(missing)}, so it can be neither published nor "
            "evaluated yet; adopt it with --companions FOLDER (config and tokenizer of its base "
            "model)"
        ]
        # It could be started, but would be refused at its first stage.
        again = ["refiner", "adopt", str(folder), *overrides]
        report["next"] = [*again, "--step", str(chosen.step), "--companions", "FOLDER"]
    base = ""  # the base of the training, if the call names it
    if recipe is not None or "model.name_or_path" in given:
        # Refuses invalid overrides before anything is made.
        base = load_recipe(recipe or "tiny", overrides).model.name_or_path
    if not dry_run:
        workspace = Workspace.open(root)
        digest, report["adopted"] = _adopt(workspace, chosen, how, beside, base)
        fields = _recipe_fields(recipe, given, report, digest)
        text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
        made.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(made, f"# Written by `refiner adopt`. Edit it as any recipe.\n{text}")
    return report


def _refuse_ours(place: Path) -> None:
    if (place / "workspace.json").is_file() or (place / "spec.json").is_file():
        raise ConfigurationError(
            f"{place} was written by refiner itself",
            expected="the folder of another trainer's run",
            fix=f"continue it with `refiner resume workspace={place}`, also after it was moved or "
            "copied; a stage's folder can be used in the `stages` folder of any workspace",
        )


def _checkpoint_json(found: DetectedCheckpoint, place: Path) -> dict[str, Any]:
    return {
        **picked(found, "step", "layout", "bytes", "usable", "note"),
        **{"path": found.path.relative_to(place).as_posix(), "complete": not found.damage},
    }


def _recipe_fields(
    recipe: str | None, given: Mapping[str, str], report: Mapping[str, Any], digest: str
) -> dict[str, Any]:
    """A recipe that publishes (and evaluates) the checkpoint; equal calls give equal recipes."""
    evaluates = recipe is not None or "data.rl_path" in given
    stages = ["data", "command", "publish", "evaluate"] if evaluates else ["command", "publish"]
    source = Path(report["source"]).name
    fields: dict[str, Any] = {
        "description": f"Another trainer's checkpoint, adopted from {source}.",
        **{"workspace": report["workspace"], "stages": stages},
        "publish": {"repo_id": f"refiner/{Path(report['recipe']).stem}"},
        "command": {"run": "", "adopted": digest, "version": "", "env": []},
    }
    fields["command"] |= {"resume_arguments": "", "companions": ""}
    if recipe is not None:
        # The adopted recipe is in another folder.
        is_file = Path(recipe).expanduser().is_file()
        include = str(find_recipe(recipe).resolve()) if is_file else recipe
        return {"include": [include], **fields, "evaluate": {"models": ["base", "command"]}}
    fields["data"] = {"sft_path": None}
    if "model.name_or_path" not in given:  # its own tokenizer, and no base for comparison
        fields["model"] = {"name_or_path": report["adopted"]["model"]}
        fields["evaluate"] = {"models": ["command"]}
    return fields


# ---------------------------------------------------------------- the stage


def _adopt(
    workspace: Workspace,
    checkpoint: DetectedCheckpoint,
    how: How,
    companions: Path | None,
    base_model: str,
) -> tuple[str, dict[str, Any]]:
    """Record a checkpoint as the result of a `command` stage; returns its digest, and its part of
    ``adopt --json``: ``new`` is False if it existed already.

    ``companions`` is a folder with the missing configuration and tokenizer; ``base_model`` the
    start of its training, if known.
    """
    wanted = model_files(checkpoint.path, companions)
    files = tuple(_described(f"model/{name}", path) for name, path in sorted(wanted.items()))
    text = "".join(f"{f.path}:{f.bytes}:{f.sha256}\n" for f in files)
    digest = hashlib.sha256(text.encode()).hexdigest()
    config = replace(
        RecipeConfig(recipe="adopted"), stages=("command",), command=CommandConfig(adopted=digest)
    )
    stage = make_plan(config, {}).by_name["command"]
    folder = workspace.output_dir(stage.id)
    new = folder is None
    if folder is not None:
        workspace.check_output(stage.id)  # refuses a damaged output, and names the files to delete
    report = {
        **{"steps": checkpoint.step, "adopted": True, "source": os.fspath(checkpoint.path)},
        **{"layout": checkpoint.layout, "how": how, "base_model": base_model},
    }
    folder = folder or _record(workspace, stage, config, wanted, files, report)
    listed = [picked(file, "path", "bytes", "sha256") for file in files]
    return digest, {"id": stage.id, "new": new, "model": str(folder / "model"), "files": listed}


def _record(
    workspace: Workspace,
    stage: PlannedStage,
    config: RecipeConfig,
    wanted: dict[str, Path],
    files: tuple[OutputFile, ...],
    report: dict[str, Any],
) -> Path:
    number = max(workspace.layout.stage(stage.id).attempt_numbers(), default=0)
    claim = StageClaim(str(ProcessId.of()), "local", number)
    attempt = workspace.claim_attempt(stage, config, {}, claim)
    token = {"process": str(ProcessId.of()), "started_at": now_text()}
    if attempt is None or not workspace.start_attempt(stage.id, attempt.number, token):
        raise WorkspaceError(
            f"Another process is working on {stage.id}",
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
            stage.id,
            attempt.number,
            AttemptOutcome("interrupted", "resume", "adopting did not finish"),
        )
        raise
    workspace.close_attempt(stage.id, attempt.number, AttemptOutcome("none", "finish", "adopted"))
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
                fix="use --copy (needs space), --in-place (the source must stay), or "
                "workspace=DIR on the source's file system",
            )
    atomic.sync_folder(target)
    if how == "copy":
        atomic.sync_tree(target)


def _described(name: str, path: Path) -> OutputFile:
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return OutputFile(name, os.fstat(file.fileno()).st_size, digest)

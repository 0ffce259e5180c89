"""Adopting: look at another trainer's dead run, record a checkpoint of it, say what to run next.

In: its folder. Out: a JSON-ready report, records in the workspace, and a recipe that publishes (and
evaluates) the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infra.adopting import HOW_IN_WORDS, How, adopt_checkpoint, write_recipe
from infra.foreign.exports import missing_in
from infra.foreign.sightings import Sighting, choose, prove, sight
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.recipes import find_recipe
from refiner_core.contract.records import picked

#: Version of the JSON that `adopt --json` prints.
OUTPUT_VERSION = 1


class AdoptRequest(NamedTuple):
    """Arguments of :func:`adopt_run`."""

    folder: Path
    overrides: Sequence[str]
    step: int | None
    recipe: str | None
    companions: Path | None
    name: str | None
    how: How
    dry_run: bool

    @property
    def workspace(self) -> str:
        """Workspace: ``workspace=``, or as recipes have it."""
        given = [o.partition("=")[2] for o in self.overrides if o.startswith("workspace=")]
        return given[-1] if given else RecipeConfig().workspace

    def sets(self, field: str) -> bool:
        """True if an override sets a field."""
        return any(o.startswith(f"{field}=") for o in self.overrides)


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
    """Take over a dead run of another trainer's.

    Parameters
    ----------
    folder
        Where it lies.
    overrides
        ``key=value``, as for ``refiner run``; ``workspace=DIR`` says where to.
    step
        Which checkpoint (default: the newest that is complete).
    recipe
        Whose data, judge and evaluation are used.
    companions
        A folder with config and tokenizer, where the checkpoint has none.
    name
        Of the model (default: the folder's).
    how
        Hard links, links by name, or copies.
    dry_run
        Look, say what would be done, change nothing.

    Returns
    -------
    dict
        What ``refiner adopt --json`` prints: checkpoints with their state, what was adopted, and
        the command that comes next.

    Raises
    ------
    ConfigurationError
        Nothing there can be adopted, or an override cannot be meant.
    WorkspaceError
        The workspace cannot be used.
    """
    beside = None if companions is None else Path(companions)
    request = AdoptRequest(Path(folder), tuple(overrides), step, recipe, beside, name, how, dry_run)
    place = request.folder.expanduser().absolute()
    if (place / "workspace.json").is_file() or (place / "spec.json").is_file():
        raise ConfigurationError(
            f"{place} was written by refiner itself",
            expected="the folder of another trainer's run",
            fix=f"go on there with `refiner resume workspace={place}`, also after it was moved or "
            "copied; a stage's folder goes on in the `stages` folder of any workspace",
        )
    return _adopt_checkpoint(request, place)


def _adopt_checkpoint(request: AdoptRequest, folder: Path) -> dict[str, Any]:
    found = prove(sight(folder), request.step)
    chosen = (
        None
        if request.dry_run and not any(s.usable for s in found)
        else choose(found, request.step)
    )
    report: dict[str, Any] = {
        **{"version": OUTPUT_VERSION, "kind": "checkpoints", "source": str(folder)},
        "workspace": str(Path(request.workspace).expanduser().absolute()),
        "dry_run": request.dry_run,
        "how": HOW_IN_WORDS[request.how],
        "checkpoints": [_listed(s, folder) for s in found],
        **{"adopted": None, "step": None, "recipe": None, "notes": [], "next": []},
    }
    if chosen is None:
        report["next"] = ["refiner", "adopt", "FOLDER-OF-CONVERTED-WEIGHTS"]
        return report
    report |= {"step": chosen.step, "notes": _notes(chosen, request)}
    recipe = Path(report["workspace"]) / "adopted" / f"{_name(request, folder, chosen)}.yaml"
    report["recipe"] = str(recipe)
    rest = [o for o in request.overrides if not o.startswith("workspace=")]
    report["next"] = ["refiner", "run", str(recipe), *rest]
    if report["notes"]:  # it could be run, and would be refused at its first stage
        again = ["refiner", "adopt", str(request.folder), *request.overrides]
        report["next"] = [*again, "--step", str(chosen.step), "--companions", "FOLDER"]
    base = ""  # what training started from, where the call says so
    if request.recipe is not None or request.sets("model.name_or_path"):
        # Refuses overrides that cannot be meant, before anything is made.
        base = load_recipe(request.recipe or "tiny", request.overrides).model.name_or_path
    if request.dry_run:
        return report
    workspace = Workspace.open(request.workspace)
    adopted = adopt_checkpoint(workspace, chosen, request.how, request.companions, base)
    report["adopted"] = {
        "id": adopted.stage_id,
        "new": adopted.new,
        "model": str(adopted.model),
        "files": [picked(file, "path", "bytes", "sha256") for file in adopted.files],
    }
    write_recipe(recipe, adopted, _recipe_fields(request, workspace, adopted.model, recipe))
    return report


def _listed(sighting: Sighting, folder: Path) -> dict[str, Any]:
    inside = sighting.path.relative_to(folder).as_posix()
    said = picked(sighting, "step", "layout", "bytes", "usable", "note")
    return {**said, "path": inside, "complete": not sighting.damage}


def _notes(chosen: Sighting, request: AdoptRequest) -> list[str]:
    missing = missing_in(chosen.path, request.companions)
    if not missing:
        return []
    return [
        f"step {chosen.step} lacks {', '.join(missing)}, so it can be neither published nor "
        "evaluated yet; adopt it with --companions FOLDER (config and tokenizer of its base model)"
    ]


def _name(request: AdoptRequest, folder: Path, chosen: Sighting) -> str:
    name = request.name or (folder.parent.name if chosen.path == folder else folder.name)
    return re.sub(r"[^\w.-]+", "-", f"{name}-step{chosen.step}").strip("-.")


def _recipe_fields(
    request: AdoptRequest, workspace: Workspace, model: Path, recipe: Path
) -> dict[str, Any]:
    evaluates = request.recipe is not None or request.sets("data.rl_path")
    stages = ["data", "command", "publish", "evaluate"] if evaluates else ["command", "publish"]
    fields: dict[str, Any] = {}
    if request.recipe is not None:
        # The adopted recipe lies elsewhere.
        is_file = Path(request.recipe).expanduser().is_file()
        include = str(find_recipe(request.recipe).resolve()) if is_file else request.recipe
        fields["include"] = [include]
    fields |= {
        "description": f"Another trainer's checkpoint, adopted from {request.folder.name}.",
        "workspace": str(workspace.root),
        "stages": stages,
        "publish": {"repo_id": f"refiner/{recipe.stem}"},
    }
    if request.recipe is None:
        fields["data"] = {"sft_path": None}
        if not request.sets("model.name_or_path"):  # its own tokenizer, and no base to compare with
            fields["model"] = {"name_or_path": str(model)}
            fields["evaluate"] = {"models": ["command"]}
    else:
        fields["evaluate"] = {"models": ["base", "command"]}
    return fields

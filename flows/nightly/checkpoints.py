"""Weights that a checkpoint of a nightly file means now, and the plan that evaluates them.

In: a :class:`Checkpoint`, the workspace. Out: a :class:`Resolved`, or why there is none. What is
frozen is looked at all the same: a folder whose content is not what was pinned is refused. Its plan
is the recipe's measuring (`data` and `evaluate` alone), with other weights for its base. Weights
that are the same have the same stages in every night, so that nothing is evaluated twice; the
canary has an occasion of its own in each night, and is sampled and judged afresh.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.checking.sources import model_digest
from flows.running.calls import check_supported, make_recipe_plan
from flows.running.status import find_run, has_begun, newest_runs
from infra.store.workspace import Workspace
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import RunRecord, trial_of
from refiner_core.nightly.definition import Checkpoint, Nightly, Source

_PATIENCE_S = 60.0


class NothingYet(RefinerError, RuntimeError):
    """There is no such checkpoint at this time; it may come."""

    resumable = True


@dataclass(frozen=True)
class Resolved:
    """Weights.

    Attributes
    ----------
    ref, revision
        For ``model.name_or_path`` and, of a Hub repository, ``model.revision``.
    digest
        What they are: of the content, or ``hub:NAME@COMMIT``.
    what
        For people.
    """

    checkpoint: Checkpoint
    ref: str
    revision: str
    digest: str
    what: str


def resolve(checkpoint: Checkpoint, workspace: Workspace) -> Resolved:
    """The weights that a checkpoint means now.

    Raises
    ------
    ConfigurationError
        There can be none: no such folder, run or stage, or its content has changed.
    NothingYet
        Nothing has been trained or exported yet.
    HubOutage, HubRefused
        The Hub does not say which commit a branch is at.
    """
    source = checkpoint.source
    if source.kind == "hub":
        revision = source.revision if source.is_commit else _commit(source)
        digest = model_digest(source.ref, revision)
        return Resolved(checkpoint, source.ref, revision, digest, f"{source.ref}@{revision[:12]}")
    if source.kind == "folder":
        builtin = source.ref.startswith("builtin:")
        ref = source.ref if builtin else str(Path(source.ref).expanduser().absolute())
        return _checked(Resolved(checkpoint, ref, "", model_digest(ref, ""), source.ref))
    if source.kind == "stage":
        return _checked(_of_stage(checkpoint, workspace, source.ref))
    return _newest(checkpoint, workspace)


def _checked(found: Resolved) -> Resolved:
    source = found.checkpoint.source
    if not source.digest or source.digest == found.digest:
        return found
    raise ConfigurationError(
        f"The weights of `{found.checkpoint.name}` ({found.what}) are not those that were pinned: "
        f"their digest is {found.digest}.",
        expected=f"content with the digest {source.digest}",
        fix="bring the pinned weights back; or pin these under another `name`, since their "
        "numbers are another series",
    )


def _of_stage(checkpoint: Checkpoint, workspace: Workspace, stage_id: str) -> Resolved:
    output = workspace.output_dir(stage_id)
    folder = (output or Path()) / "model"
    if output is None or not folder.is_dir():
        raise ConfigurationError(
            f"{workspace.root} has no finished stage {stage_id!r} with a model in its output.",
            expected="the id of a stage that has trained or exported one",
            fix="see `refiner status`, or name another workspace=DIR",
        )
    return Resolved(checkpoint, str(folder), "", model_digest(str(folder), ""), stage_id)


def _newest(checkpoint: Checkpoint, workspace: Workspace) -> Resolved:
    what, _, name = checkpoint.source.ref.partition(" ")
    for run, stage_id in _models(workspace, what, name):
        output = workspace.output_dir(stage_id)
        if output is not None and (output / "model").is_dir():
            found = _of_stage(checkpoint, workspace, stage_id)
            return Resolved(checkpoint, found.ref, "", found.digest, f"{stage_id} of {run.run}")
    raise NothingYet(
        f"Nothing of {what} {name} is finished in {workspace.root} yet.",
        expected="a training stage that has ended, or an exported checkpoint",
        fix="train it; the next night looks again",
    )


def _models(workspace: Workspace, what: str, name: str) -> Iterator[tuple[RunRecord, str]]:
    """Runs and their stages that may have made the checkpoint, the best first: of the newest run
    what has come furthest. What a run shares with calls before it is theirs, as long as any other
    is there: a training that goes on has not made the weights that it starts from."""
    if what == "run":
        run = find_run(workspace, name)
        assert run is not None, "an id that is not known is refused"
        yield from ((run, stage_id) for stage_id in _models_of(run, workspace))
        return
    for run in newest_runs(workspace, models=True):
        if name in _names(run, what):
            found = _models_of(run, workspace)
            yield from ((run, i) for i in found if has_begun(workspace, run, i))
    for run in workspace.runs(newest_first=True):
        if name in _names(run, what) and "nightly" not in run.provenance:
            yield from ((run, stage_id) for stage_id in _models_of(run, workspace))


def _names(run: RunRecord, what: str) -> set[str]:
    """The names that a run goes by among recipes, or among sweeps."""
    trial = trial_of(run.provenance)
    if what == "sweep" and trial is not None:
        return {trial[0], f"{trial[0]}/{trial[1]}"}
    return {run.recipe} if what == "recipe" else set()


def _models_of(run: RunRecord, workspace: Workspace) -> list[str]:
    """Finished stages of a run that hold a model, the furthest first."""
    found: list[tuple[tuple[int, float], str]] = []
    for name, stage_id in run.stages.items():
        if name not in TRAINED and not name.startswith("export-"):
            continue
        record = workspace.read_record(stage_id)
        if record is None or record.result is None:
            continue
        family, _, step = record.spec.model.partition("-step")
        place = TRAINED.index(family) if family in TRAINED else len(TRAINED)
        found.append(((place, int(step) if step else math.inf), stage_id))
    return [stage_id for _, stage_id in sorted(found, reverse=True)]


def _commit(source: Source) -> str:
    """The commit that a branch or tag of the Hub is at."""
    from infra.hub.target import open_hub

    with open_hub(source.ref, PublishConfig(), patience_s=_PATIENCE_S) as hub:
        refs = hub.refs()
    known = {name.partition("/")[2]: commit for name, commit in refs.items()}
    if source.revision not in known:
        raise ConfigurationError(
            f"{source.ref} has no revision {source.revision!r}.",
            expected="a commit (40 hex digits), or one of: " + ", ".join(sorted(known)[:12]),
            fix="correct `revision`",
        )
    return known[source.revision]


def night_overrides(nightly: Nightly, found: Resolved, night: str) -> list[str]:
    """Overrides of the recipe for a checkpoint, as words of a command line."""
    changes: dict[str, Any] = {
        "stages": ["data", "evaluate"],
        "only": [],
        "evaluate.models": ["base"],
        "data.sft_path": None,  # nothing is trained; what is held out does not depend on it
        "model.name_or_path": found.ref,
    }
    if found.revision:
        changes["model.revision"] = found.revision
    if found.checkpoint == nightly.canary:
        changes["evaluate.occasion"] = f"{nightly.name}/{night}"
    return [*nightly.overrides, *(f"{k}={json.dumps(v)}" for k, v in changes.items())]


def night_plan(nightly: Nightly, found: Resolved, night: str) -> Plan:
    """The plan of one checkpoint in one night.

    Raises
    ------
    ConfigurationError, DataError
        The recipe cannot be carried out as it stands.
    """
    plan = make_recipe_plan(nightly.recipe, night_overrides(nightly, found, night))
    check_supported(plan.config)
    return plan


def evaluations_in(plan: Plan) -> list[PlannedStage]:
    """The stages whose numbers are wanted, one for each protocol."""
    return [s for s in plan.stages if s.kind == "evaluate"]


def is_done(plan: Plan, workspace: Workspace) -> bool:
    """True if all numbers are there."""
    return all(workspace.read_result(s.id) is not None for s in evaluations_in(plan))

"""Resolves the checkpoints of a nightly file to weights, and plans their evaluations.

In: a :class:`Checkpoint`, the workspace. Out: a :class:`ResolvedWeights`, or an error. Frozen
checkpoints are checked as well: a folder whose content differs from the pinned digest is refused.
The plan is the recipe's evaluation (`data` and `evaluate` alone) with these weights as its base.
The same weights have the same stages every night, so nothing is evaluated twice; the canary has a
separate occasion each night, and is sampled and judged again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.checking.sources import model_digest
from flows.running.calls import check_supported, make_recipe_plan
from flows.running.status import find_run, has_started, newest_runs
from flows.stored import monitor_of
from infra.store.workspace import Workspace
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import RunRecord, trial_of
from refiner_core.nightly.definition import Checkpoint, CheckpointSource, Nightly

_PATIENCE_S = 60.0


class CheckpointNotReady(RefinerError, RuntimeError):
    """There is no such checkpoint yet."""

    resumable = True


@dataclass(frozen=True)
class ResolvedWeights:
    """Resolved weights.

    Attributes
    ----------
    ref, revision
        For ``model.name_or_path`` and, for a Hub repository, ``model.revision``.
    digest
        Digest of the content, or ``hub:NAME@COMMIT``.
    what
        Description for people.
    """

    checkpoint: Checkpoint
    ref: str
    revision: str
    digest: str
    what: str


def resolve(checkpoint: Checkpoint, workspace: Workspace) -> ResolvedWeights:
    """The current weights of a checkpoint.

    Raises
    ------
    ConfigurationError
        There is no such folder, run or stage, or its content has changed.
    CheckpointNotReady
        Nothing has been trained or exported yet.
    HubOutage, HubRefused
        The Hub does not return the commit of a branch.
    """
    source = checkpoint.source
    if source.kind == "hub":
        revision = source.revision if source.is_commit else _commit(source)
        digest = model_digest(source.ref, revision)
        return ResolvedWeights(
            checkpoint, source.ref, revision, digest, f"{source.ref}@{revision[:12]}"
        )
    if source.kind == "folder":
        builtin = source.ref.startswith("builtin:")
        ref = source.ref if builtin else str(Path(source.ref).expanduser().absolute())
        return _checked(ResolvedWeights(checkpoint, ref, "", model_digest(ref, ""), source.ref))
    if source.kind == "stage":
        return _checked(_of_stage(checkpoint, workspace, source.ref))
    return _newest(checkpoint, workspace)


def _checked(found: ResolvedWeights) -> ResolvedWeights:
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


def _of_stage(checkpoint: Checkpoint, workspace: Workspace, stage_id: str) -> ResolvedWeights:
    output = workspace.output_dir(stage_id)
    folder = (output or Path()) / "model"
    if output is None or not folder.is_dir():
        raise ConfigurationError(
            f"{workspace.root} has no finished stage {stage_id!r} with a model in its output.",
            expected="the id of a stage that has trained or exported a model",
            fix="see `refiner status`, or name another workspace=DIR",
        )
    return ResolvedWeights(checkpoint, str(folder), "", model_digest(str(folder), ""), stage_id)


def _newest(checkpoint: Checkpoint, workspace: Workspace) -> ResolvedWeights:
    what, _, name = checkpoint.source.ref.partition(" ")
    for run, stage_id in _models(workspace, what, name):
        output = workspace.output_dir(stage_id)
        if output is not None and (output / "model").is_dir():
            found = _of_stage(checkpoint, workspace, stage_id)
            stopped = monitor_of(workspace, run.stages).get("stopped")
            by = "" if stopped is None else f", stopped by its monitor at step {stopped}"
            return replace(found, what=f"{stage_id} of {run.run}{by}")
    raise CheckpointNotReady(
        f"Nothing of {what} {name} is finished in {workspace.root} yet.",
        expected="a training stage that has ended, or an exported checkpoint",
        fix="train it; the next night looks again",
    )


def _models(workspace: Workspace, what: str, name: str) -> Iterator[tuple[RunRecord, str]]:
    """Runs and stages that may have made the checkpoint, best first: the newest run's latest
    stages. Stages that a run shares with earlier calls belong to those, unless there are no others:
    a continuing training has not made its initial weights."""
    if what == "run":
        run = find_run(workspace, name)
        assert run is not None, "an unknown id is refused"
        yield from ((run, stage_id) for stage_id in _models_of(run, workspace))
        return
    for run in newest_runs(workspace, models=True):
        if name in _names(run, what):
            found = _models_of(run, workspace)
            yield from ((run, i) for i in found if has_started(workspace, run, i))
    for run in workspace.runs(newest_first=True):
        if name in _names(run, what) and "nightly" not in run.provenance:
            yield from ((run, stage_id) for stage_id in _models_of(run, workspace))


def _names(run: RunRecord, what: str) -> set[str]:
    """Names of a run as a recipe, or as a part of a sweep."""
    trial = trial_of(run.provenance)
    if what == "sweep" and trial is not None:
        return {trial[0], f"{trial[0]}/{trial[1]}"}
    return {run.recipe} if what == "recipe" else set()


def _models_of(run: RunRecord, workspace: Workspace) -> list[str]:
    """Finished stages of a run with a model, the latest first."""
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


def _commit(source: CheckpointSource) -> str:
    """Commit of a branch or tag on the Hub."""
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


def night_overrides(nightly: Nightly, found: ResolvedWeights, night: str) -> list[str]:
    """Overrides of the recipe for a checkpoint, as on a command line."""
    changes: dict[str, Any] = {
        "stages": ["data", "evaluate"],
        "only": [],
        "evaluate.models": ["base"],
        "data.sft_path": None,  # nothing is trained; the held-out split does not depend on it
        "model.name_or_path": found.ref,
    }
    if found.revision:
        changes["model.revision"] = found.revision
    if found.checkpoint == nightly.canary:
        changes["evaluate.occasion"] = f"{nightly.name}/{night}"
    return [*nightly.overrides, *(f"{k}={json.dumps(v)}" for k, v in changes.items())]


def night_plan(nightly: Nightly, found: ResolvedWeights, night: str) -> Plan:
    """The plan of one checkpoint in one night.

    Raises
    ------
    ConfigurationError, DataError
        The recipe cannot be carried out.
    """
    plan = make_recipe_plan(nightly.recipe, night_overrides(nightly, found, night))
    check_supported(plan.config)
    return plan


def evaluations_in(plan: Plan) -> list[PlannedStage]:
    """The stages with the wanted metrics, one per protocol."""
    return [s for s in plan.stages if s.kind == "evaluate"]


def is_done(plan: Plan, workspace: Workspace) -> bool:
    """True if all metrics exist."""
    return all(workspace.read_result(s.id) is not None for s in evaluations_in(plan))

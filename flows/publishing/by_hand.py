"""Publishes checkpoints of a recorded run by hand, during its training or long after.

In: a recorded call, steps, overrides of the `publish` section. Out: a call of its own for the
publication alone (``only``): it begins no training, and reads existing outputs. It is recorded, so
`refiner status`, `resume` and `cancel` know it, and later calls know what it has published.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.checking.sources import resolve_sources
from flows.running.calls import (
    RunOutcome,
    check_hub_access,
    check_supported,
    publish_run,
    record_run,
    with_space,
)
from flows.running.status import newest_runs, required_run
from infra.jobs.dispatch import make_router
from infra.store.checkpoints import CheckpointStore
from infra.store.workspace import Workspace
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import PublishConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.loading import apply_overrides
from refiner_core.contract.plan import (
    Plan,
    final_model,
    make_plan,
    published_steps,
    publishes_final,
)
from refiner_core.contract.plan_builder import OF_A_PROTOCOL
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.protocols import protocol_name, under
from refiner_core.contract.records import RunRecord, from_json

#: Sections that may differ from the run: its target, and how jobs run.
_SECTIONS = ("publish", "dispatch", "disk", "tracking", "log_level")
#: Fields set by the command's own options.
_OPTIONS = ("publish.which", "publish.steps", "publish.evaluate")


def _prepared(
    workspace: Workspace,
    run_id: str | None,
    steps: Sequence[int],
    overrides: Sequence[str],
    *,
    evaluate: bool,
) -> tuple[Plan, RunRecord, dict[str, str], list[str]]:
    """A plan to publish ``steps`` (none: the last checkpoint) of a run's final model, that run, the
    digests of its inputs, and the overrides of the call."""
    run = _run_with_model(workspace, run_id)
    sources = _recorded_sources(workspace, run)
    recorded = from_json(RecipeConfig, run.config)
    if "publish" not in recorded.stages:
        recorded = replace(recorded, stages=(*recorded.stages, "publish"))
    recorded = replace(recorded, only=(), workspace=str(workspace.root))  # its current place
    made = make_plan(recorded, sources).by_name[final_model(recorded)]
    if made.id not in run.stages.values():
        raise ConfigurationError(
            f"The inputs of run {run.run} differ from those of this version "
            f"({made.name} would be {made.id}).",
            expected="a run of this version, or of an older one with the same stages",
            fix="publish it with the version that trained it",
        )
    _check_steps(workspace, made, steps)
    config = _config(recorded, steps, overrides, evaluate=evaluate)
    if config.publish.card_template is not None:
        sources["card_template"] = resolve_sources(config)["card_template"]
    whole = make_plan(config, sources)
    names = _about_publishing(workspace, whole, steps)
    assert names, "an empty `only` would mean the whole recipe"
    plan = make_plan(replace(config, only=names), sources)
    check_supported(plan.config)
    publish = plan.config.publish
    listed = f"publish.steps=[{','.join(map(str, publish.steps))}]"
    words = [*run.overrides, f"publish.which={publish.which}", listed, *overrides]
    return plan, run, sources, words


def plan_publication(
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    steps: Sequence[int] = (),
    overrides: Sequence[str] = (),
    evaluate: bool = True,
) -> Plan:
    """Plan the publication of checkpoints of a run by hand. Changes nothing.

    Parameters
    ----------
    run
        Run id (default: the newest that trains). It may be training, have ended or have died.
    workspace
        The folder that has its records.
    steps
        Saved steps (default: the last checkpoint).
    overrides
        Overrides of ``publish``, ``dispatch``, ``disk`` and ``tracking``, as ``key=value``.
    evaluate
        Wait for evaluations, and start the missing ones.

    Returns
    -------
    Plan
        Exports, evaluations, publications.

    Raises
    ------
    ConfigurationError
        There is no such run or step, or an override concerns another section.
    """
    ws = Workspace.read_only(workspace)
    return _prepared(ws, run, steps, overrides, evaluate=evaluate)[0]


def begin_publication(
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    steps: Sequence[int] = (),
    overrides: Sequence[str] = (),
    evaluate: bool = True,
) -> tuple[Plan, Workspace, RunRecord]:
    """Record a call that publishes.

    Parameters
    ----------
    run, workspace, steps, overrides, evaluate
        As of :func:`flows.api.plan_publication`.

    Returns
    -------
    Plan, Workspace, RunRecord
        For :func:`flows.api.publish_run`, or :func:`flows.api.detach_run`.

    Raises
    ------
    RefinerError
        As of :func:`flows.api.plan_publication`; or the Hub would refuse it.
    """
    ws = Workspace.read_only(workspace)
    plan, whose, sources, words = _prepared(ws, run, steps, overrides, evaluate=evaluate)
    check_hub_access(plan.config)

    def begin() -> tuple[Plan, Workspace, RunRecord]:
        opened = Workspace.open(ws.root)
        make_router(plan.config.dispatch, opened).check(plan.stages)
        recipe = str(whose.provenance.get("recipe") or whose.recipe)
        more: dict[str, Any] = {"sources": sources, "publishes": whose.run}
        record = record_run(plan, opened, recipe, words, **more)
        opened.write_run(record)
        return plan, opened, record

    return with_space(plan.config, begin)


def publish_checkpoints(
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    steps: Sequence[int] = (),
    overrides: Sequence[str] = (),
    evaluate: bool = True,
    use_server: bool = True,
    quiet: bool = True,
) -> RunOutcome:
    """Publish checkpoints of a run by hand. Files that are already published are not sent again.

    Parameters
    ----------
    run, workspace, steps, overrides, evaluate
        As of :func:`flows.api.plan_publication`.
    use_server, quiet
        As of :func:`flows.api.run_recipe`.

    Returns
    -------
    RunOutcome
        The reports of its views name the target of each checkpoint.

    Raises
    ------
    RefinerError
        As of :func:`flows.api.begin_publication`.
    """
    begun = begin_publication(run, workspace, steps=steps, overrides=overrides, evaluate=evaluate)
    return publish_run(*begun, use_server=use_server, quiet=quiet)


def _run_with_model(workspace: Workspace, run_id: str | None) -> RunRecord:
    """The run with that id, else the newest run that trains."""
    if run_id is not None:
        run = required_run(workspace, run_id, "a run with a model")
        trained = run.provenance.get("publishes")  # itself a publication by hand, of that run
        return workspace.read_run(str(trained)) if trained else run
    recorded = workspace.runs(newest_first=True)
    for run in itertools.chain(newest_runs(workspace, models=True), recorded):
        trained = run.provenance.get("publishes")
        if trained or {*TRAINED} & run.stages.keys():
            return workspace.read_run(str(trained)) if trained else run
    raise ConfigurationError(
        f"No run in {workspace.root} has trained anything.",
        expected="a run with a model",
        fix="name its workspace=DIR (`refiner runs` lists runs), or begin a run",
    )


def _config(
    recorded: RecipeConfig, steps: Sequence[int], overrides: Sequence[str], *, evaluate: bool
) -> RecipeConfig:
    """The configuration with other settings of the publication."""
    keys = {o: o.partition("=")[0].strip() for o in overrides}
    other = [o for o, k in keys.items() if k.partition(".")[0] not in _SECTIONS or k in _OPTIONS]
    if other:
        raise ConfigurationError(
            f"`refiner publish` was given {' '.join(other)}.",
            expected=f"overrides of {', '.join(_SECTIONS)}: the training is recorded; the "
            "steps as --step N (none: the last), and --no-evaluate for no metrics",
            fix="drop them, or begin another run with `refiner run`",
        )
    publish = replace(_with_steps(recorded, steps), evaluate=evaluate)
    return check_config(apply_overrides(replace(recorded, publish=publish), overrides))


def _with_steps(config: RecipeConfig, steps: Sequence[int]) -> PublishConfig:
    """The `publish` section with these steps added to the run's own, so that its last card still
    includes those."""
    publish, last = config.publish, config.grpo.num_training_steps
    own: set[int] = set()
    if publish.which in ("every-save", "listed"):
        own = {*published_steps(config), *([last] if publishes_final(config) else [])}
    if set(steps) <= own and (steps or publishes_final(config)):
        return publish
    if not steps:
        return replace(publish, which="final", steps=())
    return replace(publish, which="listed", steps=tuple(sorted(own | set(steps))))


def _recorded_sources(workspace: Workspace, run: RunRecord) -> dict[str, str]:
    """Digests of the run's inputs, as recorded by its stages."""
    found: dict[str, str] = dict(run.provenance.get("sources") or {})
    for name, stage_id in run.stages.items():
        record, protocol = workspace.read_record(stage_id), protocol_name(name)
        if record is not None:
            found |= {
                under(k, protocol) if k in OF_A_PROTOCOL else k: digest
                for k, digest in record.spec.sources.items()
            }
    return found


def _about_publishing(workspace: Workspace, plan: Plan, steps: Sequence[int]) -> tuple[str, ...]:
    """Names of the stages that publish ``steps`` (none: the last), of the evaluations for their
    cards, and of the exports that these need."""
    wanted = {f"{kind}-step{s}" for s in steps for kind in ("export", "publish", "card")}
    wanted &= plan.by_name.keys()
    if not wanted or plan.config.grpo.num_training_steps in steps:
        wanted |= {"publish", "card", *_progression(workspace, plan, steps)}
    if not plan.config.publish.evaluate:
        wanted -= {s.name for s in plan.stages if s.kind == "card"}
    own_sets = {s.name for s in plan.stages if s.kind == "data" and s.protocol}
    for stage in reversed(plan.stages):
        if stage.name in wanted:
            read = (plan.by_name[n] for n in stage.inputs.values())
            wanted |= {
                s.name for s in read if s.kind in ("export", "evaluate") or s.name in own_sets
            }
    return tuple(s.name for s in plan.stages if s.name in wanted)


def _progression(workspace: Workspace, plan: Plan, steps: Sequence[int]) -> tuple[str, ...]:
    """The stage that adds the earlier steps to the last card, if all of them have been measured or
    are measured by this call."""
    card = plan.by_name.get("card-progression")
    if card is None:
        return ()
    asked = {f"step{step}" for step in steps}
    for name in (n for n in card.inputs.values() if "-step" in n):
        measured = workspace.read_result(plan.by_name[name].id) is not None
        if not measured and name.rpartition("-")[2] not in asked:
            return ()
    return (card.name,)


def _check_steps(workspace: Workspace, made: PlannedStage, steps: Sequence[int]) -> None:
    """Refuse a step with neither a checkpoint nor an export, before anything runs."""
    result = workspace.read_result(made.id)
    stage = workspace.layout.stage(made.id)
    kept = {c.step for c in CheckpointStore(stage.checkpoints, 0).complete()}
    kept |= _exported(workspace, made)
    if result is not None:
        kept.add(int(result.report["steps"]))
    missing = [s for s in steps if s not in kept]
    if missing or (not steps and result is None):
        what = f"no step {missing[0]}" if missing else "no last checkpoint"
        ended = "" if result is not None else " (it has not ended)"
        raise ConfigurationError(
            f"There is {what} of {made.name} ({made.id}) to publish{ended}.",
            expected=f"an existing step: {', '.join(map(str, sorted(kept))) or 'none is'}",
            fix="name one with --step; set publish.which before training to keep others",
        )


def _exported(workspace: Workspace, made: PlannedStage) -> set[int]:
    """Steps of a training stage that have been exported."""
    found = set()
    for stage_id in (i for i in workspace.stage_ids() if i.startswith("export-")):
        record = workspace.read_record(stage_id)
        if record is None or record.result is None:
            continue
        if record.spec.input_fingerprints.get("policy") == made.fingerprint:
            found.add(record.spec.at_step["policy"])
    return found

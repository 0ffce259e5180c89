"""What the command does, as functions: plan a recipe, run it, look at what is there.

>>> from flows.api import make_recipe_plan
>>> plan = make_recipe_plan("tiny", ["seed=3"])
>>> [stage.name for stage in plan.stages][:3]
['data', 'sft', 'grpo']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.sources import resolve_sources
from infra.explain import StageForecast, observe_actions
from infra.workspace import Workspace
from refiner_core.contract.checks import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.records import RECORD_VERSION, RunRecord, to_json
from refiner_core.contract.views import StageView

#: Version of the JSON that `plan --json` and `run --json` print.
OUTPUT_VERSION = 1


def make_recipe_plan(recipe: str, overrides: Sequence[str] = ()) -> Plan:
    """The plan of a recipe. Reads files, writes nothing, needs no network.

    Raises
    ------
    ConfigurationError, DataError
        The recipe cannot be carried out as it stands.
    """
    config = check_config(load_recipe(recipe, overrides))
    return make_plan(config, resolve_sources(config))


def forecast(plan: Plan) -> list[StageForecast]:
    """What a run would do now, stage by stage."""
    return observe_actions(plan, Workspace.read_only(plan.config.workspace))


def plan_json(plan: Plan, forecasts: Sequence[StageForecast]) -> dict[str, Any]:
    """A plan for scripts."""
    return {
        "version": OUTPUT_VERSION,
        "recipe": plan.recipe,
        "workspace": plan.config.workspace,
        "stages": [
            {
                "stage": f.stage.kind,
                "name": f.stage.name,
                "id": f.stage.id,
                "fingerprint": f.stage.fingerprint,
                "action": f.action,
                "reason": f.reason,
                "inputs": dict(f.stage.inputs),
                "needs_network": f.stage.needs_network,
                "resources": to_json(f.stage.resources),
                "config": dict(f.stage.identity),
            }
            for f in forecasts
        ],
        "config": to_json(plan.config),
    }


@dataclass(frozen=True)
class RunOutcome:
    """How a call ended.

    Attributes
    ----------
    run
        Id of the run's record.
    views
        Last view of every stage.
    exit_code
        See :data:`refiner_core.contract.errors.EXIT_CODES`.
    """

    run: str
    plan: Plan
    views: Mapping[str, StageView]

    @property
    def exit_code(self) -> int:
        """0 if everything is done, else that of the first stage that is not."""
        for view in self.views.values():
            if view.state in ("failed", "interrupted"):
                return view.exit_code or 1
        return 0 if all(v.state in ("done", "skipped") for v in self.views.values()) else 1


def run_recipe(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    use_server: bool = True,
    quiet: bool = False,
) -> RunOutcome:
    """Bring about everything that a recipe asks for; see ``refiner run --help``.

    Raises
    ------
    RefinerError
        Nothing was started.
    """
    from flows.console import Console
    from flows.pipeline import run_pictured
    from infra.campaign import Campaign
    from infra.dispatch import make_router

    plan = make_recipe_plan(recipe, overrides)
    check_supported(plan.config)
    workspace = Workspace.open(plan.config.workspace)
    router = make_router(plan.config.dispatch, workspace)
    run = _record_run(plan, workspace, overrides)
    campaign = Campaign(plan, workspace, router, run=run)
    console = Console(
        command=["refiner", "run", recipe, *overrides],
        workspace=plan.config.workspace,
        quiet=quiet,
    )
    views = run_pictured(campaign, plan, run.run, use_server=use_server, console=console)
    return RunOutcome(run.run, plan, views)


def check_supported(config: RecipeConfig) -> None:
    """Refuse before anything starts what this version or machine cannot carry out.

    Raises
    ------
    UnsupportedError
        Names the field.
    ConfigurationError
        A Hub data set without a pinned revision.
    """
    from refiner_core.contract.errors import UnsupportedError
    from refiner_core.data.sources import resolve_source
    from refiner_core.training.support import refuse_unsupported

    for which in ("sft", "rl"):
        resolve_source(config.data, which)  # refuses a revision that may move
    refuse_unsupported(config)
    if config.publish.target == "hub" and "publish" in config.stages:
        raise UnsupportedError(
            "publish.target is hub, which this version does not upload to.",
            expected="publish.target=folder",
            fix="set publish.target=folder and upload that folder with `hf upload`",
        )


def _record_run(plan: Plan, workspace: Workspace, overrides: Sequence[str]) -> RunRecord:
    from infra import atomic
    from infra.provenance import checkout_of, limited_diff, run_provenance, this_command
    from infra.snapshot import snapshot_code
    from infra.workspace import now_text

    run_id = workspace.new_run_id(plan.recipe)
    code = snapshot_code(workspace)
    checkout, command = checkout_of(), this_command()
    if checkout.diff:
        atomic.write_text(workspace.layout.run(run_id).diff, limited_diff(checkout.diff))
    return RunRecord(
        version=RECORD_VERSION,
        run=run_id,
        recipe=plan.recipe,
        overrides=tuple(overrides),
        command=tuple(command),
        config=to_json(plan.config),
        stages={s.name: s.id for s in plan.stages},
        code=code.id,
        started_at=now_text(),
        provenance=run_provenance(command, code.id, checkout),
    )


def run_json(outcome: RunOutcome, workspace: Workspace | None = None) -> dict[str, Any]:
    """A finished run for scripts: stages, and every evaluated number with its interval."""
    workspace = workspace or Workspace.read_only(outcome.plan.config.workspace)
    return {
        "version": OUTPUT_VERSION,
        "run": outcome.run,
        "recipe": outcome.plan.recipe,
        "workspace": str(Path(outcome.plan.config.workspace)),
        "exit_code": outcome.exit_code,
        "stages": [
            {
                "stage": view.kind,
                "name": view.name,
                "id": outcome.plan.by_name[view.name].id,
                "fingerprint": view.fingerprint,
                "state": view.state,
                "seconds": round(view.seconds, 3),
                "attempt": view.attempt,
                "message": view.message,
                "log": view.log,
                **_target(view),
                "output": str(workspace.output_dir(outcome.plan.by_name[view.name].id) or ""),
            }
            for view in outcome.views.values()
        ],
        "evaluations": evaluations_of(outcome.plan, workspace),
    }


def _target(view: StageView) -> dict[str, str]:
    """Where a publish or card stage has put what it published."""
    return {"target": str(view.report["target"])} if "target" in view.report else {}


def evaluations_of(plan: Plan, workspace: Workspace) -> list[dict[str, Any]]:
    """Every number of the plan's finished evaluations, the random copier's floor last."""
    numbers: list[dict[str, Any]] = []
    floor: dict[tuple[str, ...], dict[str, Any]] = {}
    for stage in plan.stages:
        result = workspace.read_result(stage.id) if stage.kind == "evaluate" else None
        if result is None:
            continue
        numbers += [_number(e) for e in result.report["evaluations"]]
        for entry in result.report["reference"]:
            floor[tuple(str(entry[k]) for k in ("protocol", "metric"))] = _number(entry)
    return [*numbers, *floor.values()]


def _number(entry: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("stage", "protocol", "protocol_name", "decoding", "metric", "value", "low", "high", "n")
    return {key: entry.get(key) for key in keys}

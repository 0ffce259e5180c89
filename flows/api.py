"""What the command does, as functions: plan a recipe, run it, look at what is there.

>>> from flows.api import make_recipe_plan
>>> plan = make_recipe_plan("tiny", ["seed=3"])
>>> [stage.name for stage in plan.stages][:3]
['data', 'sft', 'grpo']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.running.calls import (
    RunOutcome,
    Showing,
    begin_run,
    check_supported,
    in_folder_of,
    make_recipe_plan,
    plan_of_run,
    run_to_resume,
    with_room,
    work_on,
)
from flows.running.status import RunStatus, Watcher, find_run
from infra.campaign.explain import StageForecast, observe_actions
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord, from_json, to_json
from refiner_core.contract.views import StageView

if TYPE_CHECKING:
    from flows.running.cancelling import CancelOutcome

__all__ = [
    "RunOutcome",
    "begin_run",
    "cancel_run",
    "check_supported",
    "evaluations_of",
    "forecast",
    "make_recipe_plan",
    "plan_json",
    "resume_run",
    "run_json",
    "run_recipe",
    "status_of_run",
]

#: Version of the JSON that `plan --json` and `run --json` print.
OUTPUT_VERSION = 1


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
    plan, workspace, run = begin_run(recipe, overrides)
    command = ["refiner", "run", recipe, *overrides]
    return work_on(plan, workspace, run, Showing(use_server, quiet, command))


def publish_run(
    plan: Plan,
    workspace: Workspace,
    run: RunRecord,
    *,
    use_server: bool = True,
    quiet: bool = False,
) -> RunOutcome:
    """Work on a publication that :func:`flows.publishing.by_hand.begin_publication` has
    recorded."""
    command = ["refiner", "resume", run.run, f"workspace={workspace.root}"]
    with in_folder_of(run):
        return work_on(plan, workspace, run, Showing(use_server, quiet, command))


def resume_run(
    run_id: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    take_over: bool = False,
    use_server: bool = True,
    quiet: bool = False,
) -> RunOutcome:
    """Go on with a recorded call (default: the newest that is not finished), exactly as recorded.

    Its jobs use the code that it was begun with, and it keeps its id. Relative paths of the recipe
    are taken from the folder in which it was begun.

    Parameters
    ----------
    take_over
        Also where a process on another host says that it works on it; only if you know better.

    Raises
    ------
    ConfigurationError
        There is none, another process works on it, or what it was made from has changed.
    """
    root = Path(workspace).absolute()
    run = run_to_resume(Workspace.read_only(root), run_id)
    room = with_room(from_json(RecipeConfig, run.config), lambda: Workspace.open(root))
    with in_folder_of(run):
        plan = plan_of_run(room, run)
        check_supported(plan.config)
        showing = Showing(
            use_server,
            quiet,
            ["refiner", "resume", run.run, f"workspace={room.root}"],
            take_over=take_over,
            resumed=True,
        )
        return work_on(plan, room, run, showing)


def cancel_run(
    run_id: str | None = None,
    stages: Sequence[str] = (),
    workspace: str | Path = RecipeConfig.workspace,
    *,
    wait_s: float | None = None,
    now: bool = False,
    tell: Callable[[str], None] = lambda message: None,
) -> CancelOutcome:
    """End a call, or some of its stages (by name), and keep what is saved.

    Parameters
    ----------
    wait_s
        Seconds to wait for the end (default: ``dispatch.grace_s`` of the recipe and a minute).
    now
        Do not leave it to the process that works on it, but end the jobs from here.
    tell
        Hears what is waited for.
    """
    from flows.running.cancelling import cancel

    room = Workspace.read_only(Path(workspace).absolute())  # a full disk must not keep one from it
    run = find_run(room, run_id)
    if run is None:
        raise ConfigurationError(
            f"No run is recorded in {room.root}.",
            expected="a run to cancel",
            fix="name another workspace=DIR",
        )
    return cancel(room, run, stages, wait_s=wait_s, now=now, tell=tell)


def status_of_run(
    run_id: str | None = None, workspace: str | Path = RecipeConfig.workspace
) -> RunStatus | None:
    """How a call (default: the newest) stands; None where there is none. Writes nothing."""
    room = Workspace.read_only(workspace)
    run = find_run(room, run_id)
    return None if run is None else Watcher(room, run).look()


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
    evaluations = [s for s in plan.stages if s.kind == "evaluate"]
    for stage in sorted(evaluations, key=lambda s: _place(s.model)):
        result = workspace.read_result(stage.id)
        if result is None:
            continue
        numbers += [_number(e) for e in result.report["evaluations"]]
        for entry in result.report["reference"]:
            floor[tuple(str(entry[k]) for k in ("protocol", "metric"))] = _number(entry)
    return [*numbers, *floor.values()]


def _place(model: str) -> tuple[int, int]:
    """Where a model stands among others: in the order of training, steps before the end."""
    family, _, step = model.partition("-step")
    order = ("base", "sft", "rft", "grpo", "command")
    return (order.index(family) if family in order else len(order), int(step) if step else 1 << 62)


def _number(entry: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("stage", "protocol", "protocol_name", "decoding", "metric", "value", "low", "high", "n")
    return {**{key: entry.get(key) for key in keys}, "under": entry.get("under", "")}

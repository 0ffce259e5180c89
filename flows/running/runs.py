"""Runs: carried out, gone on with, listed; and how they have ended, for scripts.

In: recipes or recorded runs, and the workspace they lie in. Out: outcomes, JSON-ready values.
Progress and warnings, where there are any, go to stderr.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flows.evaluations import evaluations_of
from flows.running.background import Launch
from flows.running.calls import (
    RunOutcome,
    begin_run,
    check_supported,
    in_folder_of,
    plan_of_run,
    run_to_resume,
    with_room,
    work_on,
)
from flows.running.status import is_finished
from infra.store.orchestrators import Standing, orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord, from_json, picked
from refiner_core.contract.services import is_service


class KnownRun(NamedTuple):
    """One recorded run: who works on it, and how many of its stages are done."""

    run: str
    recipe: str
    standing: Standing
    finished: bool
    done: int
    stages: int

    @property
    def state(self) -> str:
        """In two words."""
        words = {"running": "running", "elsewhere": "running elsewhere"}
        return words.get(self.standing, "finished" if self.finished else "not finished")


def run_recipe(
    recipe: str, overrides: Sequence[str] = (), *, use_server: bool = True, quiet: bool = True
) -> RunOutcome:
    """Bring about everything that a recipe asks for: what is done is skipped.

    Parameters
    ----------
    recipe
        A shipped name or the path of a YAML file.
    overrides
        ``key=value``, as on the command line, such as ``"grpo.beta=0.01"``.
    use_server
        Show it as a flow run of the local Prefect server, which is started where there is none.
    quiet
        Show no progress on stderr, but warnings and failures.

    Returns
    -------
    RunOutcome
        How each stage stands; ``exit_code`` is 0 if all is done. Failed stages raise nothing.

    Raises
    ------
    RefinerError
        Nothing was started: the recipe cannot be carried out here.
    """
    plan, workspace, run = begin_run(recipe, overrides)
    command = ["refiner", "run", recipe, *overrides]
    return work_on(plan, workspace, run, Launch(use_server, quiet), command)


def resume_run(
    run_id: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    take_over: bool = False,
    use_server: bool = True,
    quiet: bool = True,
) -> RunOutcome:
    """Go on with a recorded run exactly as it was recorded.

    Its jobs use the code that it was begun with, and it keeps its id. Relative paths of the recipe
    are taken from the folder in which it was begun.

    Parameters
    ----------
    run_id
        Which one (default: the newest that is not finished).
    workspace
        The folder that it is recorded in.
    take_over
        Also where a process on another host says that it works on it; only if you know better.
    use_server, quiet
        As of :func:`flows.api.run_recipe`.

    Returns
    -------
    RunOutcome
        As of :func:`flows.api.run_recipe`.

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
        launch = Launch(use_server, quiet, take_over=take_over, resumed=True)
        command = ["refiner", "resume", run.run, f"workspace={room.root}"]
        return work_on(plan, room, run, launch, command)


def publish_run(
    plan: Plan, workspace: Workspace, run: RunRecord, *, use_server: bool = True, quiet: bool = True
) -> RunOutcome:
    """Work on a publication that was recorded; see :func:`flows.api.publish_checkpoints`.

    Parameters
    ----------
    plan, workspace, run
        What :func:`flows.api.begin_publication` has made.
    use_server, quiet
        As of :func:`flows.api.run_recipe`.

    Returns
    -------
    RunOutcome
        As of :func:`flows.api.run_recipe`.

    Raises
    ------
    ConfigurationError
        Another process works on it.
    """
    command = ["refiner", "resume", run.run, f"workspace={workspace.root}"]
    with in_folder_of(run):
        return work_on(plan, workspace, run, Launch(use_server, quiet), command)


def list_runs(workspace: str | Path = RecipeConfig.workspace) -> list[KnownRun]:
    """All runs that a workspace has recorded, oldest first.

    Parameters
    ----------
    workspace
        The folder; it need not exist.

    Returns
    -------
    list of KnownRun
        Empty where there are none.

    Raises
    ------
    WorkspaceError
        It is no workspace.
    """
    room = Workspace.read_only(workspace)
    found = []
    for run in room.runs():
        stages = [i for i in run.stages.values() if not is_service(i)]
        done = sum(room.layout.stage(i).result.exists() for i in stages)
        who, finished = orchestrator_of(room, run.run), is_finished(room, run)
        found.append(KnownRun(run.run, run.recipe, who.standing, finished, done, len(stages)))
    return found


def run_json(outcome: RunOutcome, workspace: Workspace | None = None) -> dict[str, Any]:
    """A finished run for scripts: stages, and every evaluated number with its interval.

    Parameters
    ----------
    outcome
        What :func:`flows.api.run_recipe` has returned.
    workspace
        Where its records are (default: the plan's own).

    Returns
    -------
    dict
        What ``refiner run --json`` prints.

    Raises
    ------
    WorkspaceError
        A record is damaged.
    """
    plan = outcome.plan
    workspace = workspace or Workspace.read_only(plan.config.workspace)
    ids = {stage.name: stage.id for stage in plan.stages}
    return {
        **{"version": 1, "run": outcome.run, "recipe": plan.recipe},
        **{"workspace": str(Path(plan.config.workspace)), "exit_code": outcome.exit_code},
        "stages": [
            {
                **{"stage": view.kind, "id": ids[view.name], "seconds": round(view.seconds, 3)},
                **picked(view, "name", "fingerprint", "state", "attempt", "message", "log"),
                **({"target": str(view.report["target"])} if "target" in view.report else {}),
                "output": str(workspace.output_dir(ids[view.name]) or ""),
            }
            for view in outcome.views.values()
        ],
        "evaluations": evaluations_of(plan, workspace),
    }

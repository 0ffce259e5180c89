"""Runs: carried out, gone on with, ended, looked at.

In: recipes or recorded runs, and the workspace they lie in. Out: outcomes and standings. Progress
and warnings, where there are any, go to stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from flows.running.calls import (
    RunOutcome,
    Showing,
    begin_run,
    check_supported,
    in_folder_of,
    plan_of_run,
    run_to_resume,
    with_room,
    work_on,
)
from flows.running.status import SCHEDULER_WAIT_S, RunStatus, Watcher, find_run, is_finished
from infra.store.orchestrators import Standing, orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord, from_json
from refiner_core.contract.services import is_service

if TYPE_CHECKING:
    from flows.running.background import Detached
    from flows.running.cancelling import CancelOutcome

_HERE = RecipeConfig.workspace


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
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    use_server: bool = True,
    quiet: bool = True,
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
    return work_on(plan, workspace, run, Showing(use_server, quiet, command))


def publish_run(
    plan: Plan,
    workspace: Workspace,
    run: RunRecord,
    *,
    use_server: bool = True,
    quiet: bool = True,
) -> RunOutcome:
    """Work on a publication that was recorded; see :func:`flows.api.publish_checkpoints`.

    Parameters
    ----------
    plan, workspace, run
        What :func:`flows.publishing.by_hand.begin_publication` has made.
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
        return work_on(plan, workspace, run, Showing(use_server, quiet, command))


def resume_run(
    run_id: str | None = None,
    workspace: str | Path = _HERE,
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
        showing = Showing(
            use_server,
            quiet,
            ["refiner", "resume", run.run, f"workspace={room.root}"],
            take_over=take_over,
            resumed=True,
        )
        return work_on(plan, room, run, showing)


def detach_run(
    run: RunRecord,
    workspace: str | Path = _HERE,
    *,
    where: Literal["process", "job"] = "process",
    use_server: bool = True,
    take_over: bool = False,
) -> Detached:
    """Leave a recorded run to the background, and come back as soon as it is worked on.

    Parameters
    ----------
    run
        What :func:`flows.api.begin_run` has recorded, or a run of the workspace.
    workspace
        The folder that it is recorded in.
    where
        A process on this machine, or a small Slurm job that may be started again.
    use_server
        As of :func:`flows.api.run_recipe`.
    take_over
        As of :func:`flows.api.resume_run`.

    Returns
    -------
    Detached
        Process or job, and its log; ``exit_code`` where it has ended already.

    Raises
    ------
    UnsupportedError
        There is no Slurm here to submit a job to.
    LaunchError
        Slurm refused the job.
    ConfigurationError
        Another process works on the run.
    """
    from flows.running.background import detach, detach_as_job
    from infra.store.orchestrators import require_idle

    room = Workspace.open(workspace)
    require_idle(room, run.run, regardless=take_over)
    options = ["--no-server"] * (not use_server) + ["--take-over"] * take_over
    if where == "job":
        return detach_as_job(room, run, dict(run.config.get("dispatch") or {}), *options)
    return detach(room, run, *options)


def cancel_run(
    run_id: str | None = None,
    stages: Sequence[str] = (),
    workspace: str | Path = _HERE,
    *,
    wait_s: float | None = None,
    now: bool = False,
    tell: Callable[[str], None] = lambda message: None,
) -> CancelOutcome:
    """End a run, or some of its stages, and keep what is saved.

    Parameters
    ----------
    run_id
        Which one (default: the newest).
    stages
        Only these, by name.
    workspace
        The folder that it is recorded in.
    wait_s
        Seconds to wait for the end (default: ``dispatch.grace_s`` of the recipe and a minute).
    now
        Do not leave it to the process that works on it, but end the jobs from here.
    tell
        Hears what is waited for.

    Returns
    -------
    CancelOutcome
        What was ended; ``ended`` is False where that takes longer than was waited for.

    Raises
    ------
    ConfigurationError
        There is no such run or stage.
    WorkspaceError
        Somebody else may have written what is recorded there.
    """
    from flows.running.cancelling import cancel

    room = Workspace.read_only(Path(workspace).absolute())  # a full disk must not keep one from it
    room.require_trust()
    run = find_run(room, run_id)
    if run is None:
        raise ConfigurationError(
            f"No run is recorded in {room.root}.",
            expected="a run to cancel",
            fix="name another workspace=DIR",
        )
    return cancel(room, run, stages, wait_s=wait_s, now=now, tell=tell)


def status_of_run(
    run_id: str | None = None, workspace: str | Path = _HERE, *, wait_s: float = SCHEDULER_WAIT_S
) -> RunStatus | None:
    """How a run stands. Writes nothing.

    Parameters
    ----------
    run_id
        Which one (default: the newest).
    workspace
        The folder that it is recorded in.
    wait_s
        How long a scheduler may take to answer, seconds.

    Returns
    -------
    RunStatus or None
        Stages, incidents, disk, who works on it; None where no run is recorded at all. As a
        dataframe: :func:`flows.api.stages_frame`.

    Raises
    ------
    ConfigurationError
        There is no run of that name; names the nearest.
    """
    room = Workspace.read_only(workspace)
    if find_run(room, run_id) is None:
        return None
    return watch_run(run_id, workspace, wait_s=wait_s).look()


def watch_run(
    run_id: str | None = None, workspace: str | Path = _HERE, *, wait_s: float = SCHEDULER_WAIT_S
) -> Watcher:
    """Look at a run again and again: each ``look()`` gives a :class:`RunStatus`.

    Parameters
    ----------
    run_id, workspace, wait_s
        As of :func:`flows.api.status_of_run`.

    Returns
    -------
    Watcher
        It asks schedulers at every look, and reads the rest anew.

    Raises
    ------
    ConfigurationError
        There is no run of that name, or none at all; names the nearest.
    """
    room = Workspace.read_only(workspace)
    run = find_run(room, run_id)
    if run is None:
        raise ConfigurationError(
            f"No run is recorded in {room.root}.",
            expected="a run to look at",
            fix="name another workspace=DIR, or begin one with `refiner run RECIPE`",
        )
    return Watcher(room, run, wait_s)


def list_runs(workspace: str | Path = _HERE) -> list[KnownRun]:
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

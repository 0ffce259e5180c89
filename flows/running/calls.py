"""Calls of `refiner run`: begin, record, take up, work on until the end.

In: a recipe with overrides, or a recorded call. Out: a :class:`RunOutcome`. The record of a call
holds its configuration, its code and its folder, so that another process can continue it exactly:
in the background, in a Slurm job, from any shell.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flows.checking.models import check_model_files
from flows.checking.resources import check_server_programs
from flows.checking.sources import resolve_sources
from flows.running.console import Console
from flows.running.foreground import CallObserver, LaunchOptions, orchestrate
from flows.running.status import find_run, unfinished_runs
from infra.host.files import names_in
from infra.host.secrets import mask_keys_of
from infra.jobs.dispatch import make_router
from infra.orchestrator.members import Member, MemberSource
from infra.store import atomic
from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, NoSpaceError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.planned import stage_changes
from refiner_core.contract.protocols import configs_under, refused_under
from refiner_core.contract.records import RECORD_VERSION, RunRecord, from_json, picked, to_json
from refiner_core.contract.sections.steering import alarms_of
from refiner_core.contract.types import StageView
from refiner_core.report.printing import size

if TYPE_CHECKING:
    from flows.disk import PlannedSpace


@dataclass(frozen=True)
class CodeSnapshot:
    """Snapshot of the code at the start, for all runs that begin then.

    Attributes
    ----------
    code
        Id of the snapshot.
    command
        The command line, masked.
    provenance
        Code, versions and machine, for the record of each run.
    diff
        Uncommitted changes, cut to the limit of a record; empty if there are none.
    """

    code: str
    command: tuple[str, ...]
    provenance: Mapping[str, object]
    diff: str = ""


def pin_code(workspace: Workspace) -> CodeSnapshot:
    """Take a snapshot of the code as it is now, with its provenance.

    Raises
    ------
    NoSpaceError
        The snapshot did not fit.
    """
    from infra.store import provenance

    code = provenance.snapshot_code(workspace).name
    checkout, command = provenance.checkout_of(), provenance.this_command()
    known = provenance.run_provenance(command, code, checkout)
    diff = provenance.limited_diff(checkout.diff) if checkout.diff else ""
    return CodeSnapshot(code, tuple(command), known, diff)


def record_run(
    plan: Plan,
    workspace: Workspace,
    recipe: str,
    overrides: Sequence[str],
    pinned: CodeSnapshot | None = None,
    **more: object,
) -> RunRecord:
    """Record of a call of ``plan``, with the current or the ``pinned`` code. Does not write it.

    ``more`` is added to its provenance.
    """
    pinned = pinned or pin_code(workspace)
    run = RunRecord(
        version=RECORD_VERSION,
        run=workspace.new_run_id(plan.recipe),
        recipe=plan.recipe,
        overrides=tuple(overrides),
        command=pinned.command,
        config=to_json(plan.config),
        stages={s.name: s.id for s in plan.stages},
        code=pinned.code,
        started_at=now_text(),
        provenance={**pinned.provenance, "folder": str(Path.cwd()), "recipe": recipe, **more},
    )
    if pinned.diff:
        atomic.write_text(workspace.layout.run(run.run).diff, pinned.diff)
    return run


T = TypeVar("T")


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a call.

    Attributes
    ----------
    run
        Id of the run's record.
    views
        Last view of every stage.
    next_commands
        Suggested next commands, most useful first; empty without a terminal.
    exit_code
        See :data:`refiner_core.contract.errors.EXIT_CODES`.
    """

    run: str
    plan: Plan
    views: Mapping[str, StageView]
    next_commands: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if everything is done, else that of the first stage that is not done."""
        for view in self.views.values():
            if view.state in ("failed", "interrupted"):
                return view.exit_code or 1
        return 0 if all(v.state in ("done", "skipped") for v in self.views.values()) else 1


def make_recipe_plan(recipe: str, overrides: Sequence[str] = ()) -> Plan:
    """Plan of a recipe. Reads files, writes nothing, needs no network.

    Parameters
    ----------
    recipe
        A shipped name or the path of a YAML file.
    overrides
        ``key=value``, such as ``"grpo.beta=0.01"``.

    Returns
    -------
    Plan
        Its stages in order, with fingerprints.

    Raises
    ------
    ConfigurationError, DataError, UnsupportedError
        The recipe cannot be carried out.
    """
    config = check_config(load_recipe(recipe, overrides))
    mask_keys_of(config)
    plan = make_plan(config, resolve_sources(config))
    check_model_files(config)
    return plan


def begin_run(recipe: str, overrides: Sequence[str] = ()) -> tuple[Plan, Workspace, RunRecord]:
    """Check a recipe and record a call of it.

    Parameters
    ----------
    recipe, overrides
        As of :func:`make_recipe_plan`.

    Returns
    -------
    Plan, Workspace, RunRecord
        For :func:`work_on` or :func:`detach_run`.

    Raises
    ------
    RefinerError
        It cannot be carried out here; nothing was recorded.
    """
    from flows.checking.resources import planning_notes
    from flows.disk import LESS_ROOM

    plan = make_recipe_plan(recipe, overrides)
    check_supported(plan.config)
    check_server_programs(plan)
    check_hub_access(plan.config)

    def begin() -> tuple[Plan, Workspace, RunRecord]:
        workspace = Workspace.open(plan.config.workspace, plan.config.data_root)
        if names_in(workspace.layout.trash):  # a removal was interrupted
            from infra.disk.removal import finish_removals

            finish_removals(workspace)
        # Refuses a recipe that cannot be dispatched from here.
        make_router(plan.config.dispatch, workspace).check(plan.stages)
        run = record_run(plan, workspace, recipe, overrides)
        workspace.write_run(run)
        return plan, workspace, run

    space = refuse_what_never_fits(plan)
    if not space.fits:
        print_line(
            f"This run needs up to {size(space.forecast.needed_bytes)} at a time, and "
            f"{size(space.free_bytes)} are free (by {space.source}). It pauses when the disk is "
            f"full. Reduce this with {LESS_ROOM}"
        )
    for note in planning_notes(plan):
        print_line(note)
    warn_of_silence(plan.config)
    return with_space(plan.config, begin)


def refuse_what_never_fits(plan: Plan) -> PlannedSpace:
    """Space that a run needs, and the space that is available.

    Raises
    ------
    NoSpaceError
        Even an empty disk or quota is too small: the run would wait forever.
    """
    from flows.disk import planned_space

    space = planned_space([plan])
    # A file system without a size (/proc) holds nothing: opening the workspace reports that.
    if space.never_fits and space.limit_bytes and plan.config.disk.too_small == "refuse":
        raise NoSpaceError(
            f"This run needs {size(space.forecast.sure_bytes)} at one time, and "
            f"{plan.config.workspace} can never hold more than {size(space.limit_bytes)} (by "
            f"{space.source})",
            expected="a disk and a quota that hold two checkpoints and the weights",
            fix="name another `workspace=`, have the limit raised, or start it anyway and wait "
            "with `disk.too_small=wait`",
        )
    return space


def warn_of_silence(config: RecipeConfig) -> None:
    """Warn at the start of a run about addresses that receive no messages."""
    for alarm in alarms_of(config.notify):
        from flows.notifying.sender import addresses

        if alarm.channel == "url" and not addresses(alarm.what):
            print_line(
                f"No messages will be sent by notify.urls: {alarm.what} holds no address. "
                "Export it in the shell of `refiner`, and check it with `refiner notify test "
                f"notify.urls=[{alarm.what}]`"
            )


def with_space(config: RecipeConfig, action: Callable[[], T]) -> T:
    """Run an action that needs some space in the workspace; on a full disk, wait for space.

    Raises
    ------
    NoSpaceError
        There was no space for ``disk.wait_min``.
    """
    from infra.disk.manager import DiskManager
    from infra.orchestrator.waiting import retry_with_space

    disk_manager = DiskManager(Workspace.read_only(config.workspace), config.disk)
    return retry_with_space(action, disk_manager, config.disk, print_line)


def print_line(text: str) -> None:
    """Print a line on standard error."""
    print(f"refiner: {text}", file=sys.stderr, flush=True)


def run_to_resume(workspace: Workspace, run_id: str | None = None) -> RunRecord:
    """The call with that id, or the newest unfinished call.

    Raises
    ------
    ConfigurationError
        There is none.
    """
    if run_id is not None and (run := find_run(workspace, run_id)) is not None:
        return run
    if unfinished := unfinished_runs(workspace):
        return unfinished[-1]
    count = len(workspace.run_ids())
    raise ConfigurationError(
        f"Nothing to resume in {workspace.root}: "
        + (f"all of its {count} runs are finished." if count else "it has no run."),
        expected="a run with an unfinished stage",
        fix="name another workspace=DIR, or begin one with `refiner run RECIPE`",
    )


def plan_of_run(workspace: Workspace, run: RunRecord) -> Plan:
    """Plan of a recorded call, from its recorded configuration.

    Raises
    ------
    ConfigurationError
        Its inputs have changed: its stages would differ from the recorded ones.
    """
    config = from_json(RecipeConfig, run.config)
    root = str(workspace.root)  # it may have been moved, or mounted elsewhere
    config = check_config(replace(config, workspace=root))
    mask_keys_of(config)
    # A call of some stages alone needs no inputs of the others.
    sources = run.provenance.get("sources") if config.only else None
    plan = make_plan(config, sources or resolve_sources(config))
    other = [s.name for s in plan.stages if run.stages.get(s.name) != s.id]
    if other or len(plan.stages) != len(run.stages):
        changed = _done_otherwise(workspace, run, plan)
        why = f"this version of refiner differs in {'; '.join(changed)}"
        if not changed:
            names = ", ".join(other) or "their number"
            why = f"the inputs of its stages have changed ({names})"
        raise ConfigurationError(
            f"Run {run.run} cannot be resumed as it was: {why}.",
            expected="the original version of refiner, rows, weights, rubrics and prompts",
            fix=f"restore these, or begin a new run: {shlex.join(run.command)}",
        )
    return plan


def _done_otherwise(workspace: Workspace, run: RunRecord, plan: Plan) -> list[str]:
    """Stages of a call that were begun under another version of their kind, and the differences."""
    found = []
    for stage in plan.stages:
        record = workspace.read_record(run.stages.get(stage.name, stage.id))
        if record is not None and record.spec.stage_version < stage.version:
            what = stage_changes(stage.kind, stage.version, since=record.spec.stage_version)
            found.append(f"{stage.name} ({what})")
    return found


def work_on(
    plan: Plan,
    workspace: Workspace,
    run: RunRecord,
    launch: LaunchOptions,
    command: Sequence[str] = (),
    console: Console | None = None,
) -> RunOutcome:
    """Take up a recorded call and work on it until its end.

    Parameters
    ----------
    plan, workspace, run
        From :func:`begin_run`.
    launch
        Settings of the work.
    command
        Command line that runs the same call again.
    console
        Shows the progress (default: the terminal's own).

    Returns
    -------
    RunOutcome
        State of each stage. Failed stages raise nothing.

    Raises
    ------
    ConfigurationError
        Another process is working on it.
    """

    def show_in_prefect() -> None:
        from flows.running.background import attach

        attach(workspace, run.run, shown)

    router = make_router(plan.config.dispatch, workspace)
    before = orchestrator_of(workspace, run.run)
    member = Member(plan, run, workspace)
    with_space(plan.config, lambda: member.take_up(regardless=launch.take_over))
    if launch.resumed:
        with_space(plan.config, lambda: workspace.withdraw_cancel(run.run))
    where = plan.config.workspace
    own = Console(command=command, workspace=where, run=run.run, quiet=launch.quiet)
    shown = console or own
    observer = CallObserver()
    if alarms_of(plan.config.notify):
        from flows.notifying.notifiers import RunNotifier

        about = (run.run, run, plan.config.notify, workspace, before)
        observer = RunNotifier(plan, *about, resumed=launch.resumed, print_line=shown.warn)
    views = orchestrate(
        MemberSource([member]),
        workspace,
        router,
        plan.config,
        console=shown,
        observer=observer,
        begun=show_in_prefect if launch.use_server else lambda: None,
    )
    following = () if console else own.next_commands(views)
    return RunOutcome(run.run, plan, views, tuple(following))


def in_folder(folder: Any) -> contextlib.AbstractContextManager[None]:
    """Work in the folder in which a call was begun, if it exists: its paths may be relative."""
    there = folder and Path(folder).is_dir()
    return contextlib.chdir(folder) if there else contextlib.nullcontext()


def check_hub_access(config: RecipeConfig) -> None:
    """Check before the work that the Hub accepts what the recipe publishes. A Hub that does not
    answer is only reported.

    Raises
    ------
    HubRefused, ConfigurationError
        The token, its rights, or the repository's name.
    """
    if config.publish.target != "hub" or "publish" not in config.stages:
        return
    from infra.hub.target import check_hub

    for warning in check_hub(config):
        print_line(warning)


def check_supported(config: RecipeConfig) -> None:
    """Refuse what this version or machine cannot carry out, before anything starts.

    Parameters
    ----------
    config
        Of a recipe.

    Raises
    ------
    UnsupportedError
        Names the field.
    ConfigurationError
        A Hub data set without a pinned revision, or a model whose files do not fit the recipe.
    """
    from refiner_core.contract.placement import refuse_unsupported
    from refiner_core.data.sources import resolve_source

    for which in ("sft", "rl"):
        resolve_source(config.data, which)  # refuses a moving revision
    for name, measured in configs_under(config).items():
        with refused_under(name):
            resolve_source(measured.data, "rl")
    check_model_files(config)
    refuse_unsupported(config)


def run_recipe(
    recipe: str, overrides: Sequence[str] = (), *, use_server: bool = True, quiet: bool = True
) -> RunOutcome:
    """Carry out a recipe; stages that are done are skipped.

    Parameters
    ----------
    recipe
        A shipped name or the path of a YAML file.
    overrides
        ``key=value``, as on the command line, such as ``"grpo.beta=0.01"``.
    use_server
        Show it as a flow run of the local Prefect server, which is started if necessary.
    quiet
        Show only warnings and failures on stderr, no progress.

    Returns
    -------
    RunOutcome
        State of each stage; ``exit_code`` is 0 if all is done. Failed stages raise nothing.

    Raises
    ------
    RefinerError
        Nothing was started: the recipe cannot be carried out here.
    """
    plan, workspace, run = begin_run(recipe, overrides)
    command = ["refiner", "run", recipe, *overrides]
    return work_on(plan, workspace, run, LaunchOptions(use_server, quiet), command)


def resume_run(
    run_id: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    take_over: bool = False,
    use_server: bool = True,
    quiet: bool = True,
) -> RunOutcome:
    """Continue a recorded run exactly as it was recorded.

    Its jobs use its pinned code, and it keeps its id. Relative paths of the recipe are relative to
    the folder in which it was begun.

    Parameters
    ----------
    run_id
        Run id (default: the newest unfinished run).
    workspace
        The folder that has its records.
    take_over
        Take over from a process on another host that claims the run; only if it is gone.
    use_server, quiet
        As of :func:`flows.api.run_recipe`.

    Returns
    -------
    RunOutcome
        As of :func:`flows.api.run_recipe`.

    Raises
    ------
    ConfigurationError
        There is no such run, another process is working on it, or its inputs have changed.
    """
    root = Path(workspace).absolute()
    run = run_to_resume(Workspace.read_only(root), run_id)
    ws = with_space(from_json(RecipeConfig, run.config), lambda: Workspace.open(root))
    with in_folder(run.provenance.get("folder")):
        plan = plan_of_run(ws, run)
        check_supported(plan.config)
        launch = LaunchOptions(use_server, quiet, take_over=take_over, resumed=True)
        command = ["refiner", "resume", run.run, f"workspace={ws.root}"]
        return work_on(plan, ws, run, launch, command)


def publish_run(
    plan: Plan, workspace: Workspace, run: RunRecord, *, use_server: bool = True, quiet: bool = True
) -> RunOutcome:
    """Work on a recorded publication; see :func:`flows.api.publish_checkpoints`.

    Parameters
    ----------
    plan, workspace, run
        From :func:`flows.api.begin_publication`.
    use_server, quiet
        As of :func:`flows.api.run_recipe`.

    Returns
    -------
    RunOutcome
        As of :func:`flows.api.run_recipe`.

    Raises
    ------
    ConfigurationError
        Another process is working on it.
    """
    command = ["refiner", "resume", run.run, f"workspace={workspace.root}"]
    with in_folder(run.provenance.get("folder")):
        return work_on(plan, workspace, run, LaunchOptions(use_server, quiet), command)


def run_json(outcome: RunOutcome, workspace: Workspace | None = None) -> dict[str, Any]:
    """A finished run for scripts: stages, and every evaluated number with its interval.

    Parameters
    ----------
    outcome
        The result of :func:`flows.api.run_recipe`.
    workspace
        Where its records are (default: the workspace of the plan).

    Returns
    -------
    dict
        The content of ``refiner run --json``.

    Raises
    ------
    WorkspaceError
        A record is damaged.
    """
    from flows.evaluations import evaluations_of

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

"""Stages as tasks of your own Prefect flow: ``from flows import begin_run, ensure``.

In: a recipe, and inside a ``@flow`` the names of stages. Out: a recorded :class:`Run`, and for each
``ensure`` a task run that shows its stage, and returns the stage's view with its report. Imports
Prefect.

- :func:`begin_run` checks the recipe and records it with the current code. Inside a flow run it
  does so once: a retry continues the same record.
- Each ``ensure`` is a call of its own on that record: for its stage and that stage's inputs, with
  an orchestrator of its own. Concurrent ones share stages as any two calls do: each waits for what
  the other runs. Finished stages are not run again, and need no orchestrator.
- *Cancel* is recorded, and the running stages save. *Suspend* ends the flow before its next
  ``ensure``. *Retry* and *Resume* run the flow from its beginning, skipping what is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import Abort, Pause, TerminationSignal
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run as this_run
from prefect.states import Cancelled, Completed, Failed, State

from flows.flow_runs import LAST_LINE_S, TERMINATION_S, as_task, flow_run_state, show_stage
from flows.running import calls
from flows.running.background import detach
from flows.running.following import Follower, Node
from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, LaunchError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.records import RunRecord, from_json, to_json
from refiner_core.contract.services import is_service
from refiner_core.contract.types import StageView


@dataclass(frozen=True)
class Run:
    """A recorded run: its id, as in `refiner status`, and its workspace."""

    id: str
    workspace: str


def begin_run(
    recipe: str, overrides: Sequence[str] = (), workspace: str | Path | None = None
) -> Run:
    """Check a recipe and record a run of it. No stage begins yet.

    Parameters
    ----------
    recipe, overrides
        As of :func:`flows.api.run_recipe`.
    workspace
        Folder for records, outputs and checkpoints (default: the recipe's).

    Returns
    -------
    Run
        For :data:`ensure`. In a retried flow run: the one recorded before.

    Raises
    ------
    RefinerError
        It cannot be carried out here; nothing was recorded.
    """
    from flows.checking.sources import read_each_once, resolve_sources

    words = [*overrides, *([] if workspace is None else [f"workspace={workspace}"])]
    mine = {"flow_run": this_run.id, "asked": [recipe, *words]}
    if mine["flow_run"]:
        root = check_config(load_recipe(recipe, words)).workspace
        for run in Workspace.read_only(Path(root).absolute()).runs():
            if {key: run.provenance.get(key) for key in mine} == mine:
                return Run(run.run, str(Path(root).absolute()))
    with read_each_once():
        plan, ws, run = calls.begin_run(recipe, words)
        sources = resolve_sources(plan.config)
    # Its parts are planned from these, whatever the flow's current folder is then.
    run = replace(run, provenance={**run.provenance, **mine, "sources": sources})
    calls.with_space(plan.config, lambda: ws.write_run(run))
    return Run(run.run, str(ws.root))


class _Ensure:
    """``ensure(run, "sft")``: the stage is done, or the task has failed.

    Inside a ``@flow``, it returns the stage's
    :class:`~refiner_core.contract.types.StageView` (``.report["validation_loss"]``) or raises;
    ``ensure.submit(run, "sft")`` returns a future of it at once. ``wait_for`` is Prefect's.
    """

    def __call__(self, run: Run, stage: str, wait_for: Any = None) -> StageView:
        task_of, arguments = _task_of(run, stage)
        state = task_of(*arguments, wait_for=wait_for, return_state=True)
        if (
            state.is_cancelled()
            and (stop_request := flow_run_state(this_run.id))
            and stop_request.is_cancelling()
        ):
            with get_client(sync_client=True) as client:  # there may be no runner to set it
                client.set_flow_run_state(UUID(str(this_run.id)), Cancelled(), force=True)
            raise Abort(state.message)
        view: StageView = state.result()
        return view

    def submit(self, run: Run, stage: str, wait_for: Any = None) -> PrefectFuture[StageView]:
        """A future of the stage's view; allows several stages at a time."""
        task_of, arguments = _task_of(run, stage)
        future: PrefectFuture[StageView] = task_of.submit(*arguments, wait_for=wait_for)
        return future


ensure = _Ensure()


def _task_of(run: Run, stage: str) -> tuple[Any, tuple[Run, str]]:
    """Task of one stage, unless the flow run is to be suspended: then the flow ends here."""
    if not this_run.id:
        raise ConfigurationError(
            f"ensure was called for {stage} of run {run.id} outside a flow run.",
            expected="a call inside a function with @flow",
            fix="call it there, or use `refiner run RECIPE` without a flow",
        )
    if (state := flow_run_state(this_run.id)) is not None and state.is_paused():
        raise Pause(state=state)
    return as_task(_ensure, stage, stage), (run, stage)


def _ensure(run: Run, stage: str) -> State[Any]:
    ws = Workspace.open(run.workspace)
    whole = ws.read_run(run.id)
    config = replace(from_json(RecipeConfig, whole.config), workspace=str(ws.root))
    plan = make_plan(config, whole.provenance["sources"])
    names = _needed(ws, plan, plan.find(stage)[0].name)
    if not names:
        return _completed(ws, Node(stage, plan.find(stage)[0].id))
    part = calls.with_space(config, lambda: _record_part(ws, whole, plan, names))
    left = detach(ws, part.run, part.code, "--no-server")
    if left.failed and left.message:
        raise LaunchError(
            f"The orchestrator of {stage} ended at once: {left.message}",
            expected="it to work on the stage",
            fix=f"see {left.log}, then retry the flow run",
        )
    follower = Follower(ws, part.run, part.stages)
    node, followed = follower.nodes[names[0]], _LazyFollower(ws, part, follower)
    try:
        state = show_stage(part.run, node, partial(followed.observe, node.name))
    except TerminationSignal:
        followed.cancel()
        until = time.monotonic() + TERMINATION_S
        while time.monotonic() < until and followed.works:
            time.sleep(0.2)
        raise
    failed = [v for v in follower.observe().values() if v.state == "failed"]
    if failed:
        return Failed(message="; ".join(f"{v.name}: {v.message}" for v in failed))
    return _completed(ws, node) if state.is_completed() else state


def _completed(ws: Workspace, node: Node) -> State[Any]:
    result = ws.read_result(node.id)
    view = replace(node.waiting, state="done", report={} if result is None else result.report)
    return Completed(message="done", data=view)


def _needed(ws: Workspace, plan: Plan, name: str) -> list[str]:
    """A stage and its unfinished inputs; the servers that they use are added automatically."""
    found: list[str] = []
    queue = [name]
    while queue:
        stage = plan.by_name[queue.pop(0)]
        done = ws.layout.stage(stage.id).result.exists()
        if not done and stage.name not in found and not is_service(stage.id):
            found.append(stage.name)
            queue += [*stage.inputs.values(), *stage.after]
    return found


def _record_part(ws: Workspace, whole: RunRecord, plan: Plan, names: list[str]) -> RunRecord:
    """A call for some stages of a recorded run, with the code of that run."""
    sources = whole.provenance["sources"]
    about = make_plan(replace(plan.config, only=tuple(names)), sources)
    provenance = {k: v for k, v in whole.provenance.items() if k not in ("sources", "asked")}
    part = replace(
        whole,
        run=ws.new_run_id(whole.recipe),
        config=to_json(about.config),
        stages={s.name: s.id for s in about.stages},
        started_at=now_text(),
        provenance={**provenance, "part_of": whole.run},
    )
    ws.write_run(part)
    return part


@dataclass
class _LazyFollower:
    """A part that is read while a caller waits for a stage; it also checks for requests to the flow
    run."""

    workspace: Workspace
    part: RunRecord
    follower: Follower
    gone_since: float = math.inf
    asked: bool = False

    def observe(self, name: str, timeout_s: float) -> tuple[StageView, bool]:
        """The view, and whether the part has no orchestrator any more."""
        now = time.monotonic()
        self.gone_since = math.inf if self.works else min(self.gone_since, now)
        view = self.follower.observe()[name]
        if view.terminal or now - self.gone_since > LAST_LINE_S:
            return view, True
        state = flow_run_state(this_run.id)
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            self.cancel()
        time.sleep(timeout_s)
        return view, False

    def cancel(self) -> None:
        """Request the end of the part, once: its stages save."""
        from flows.running.cancelling import cancel

        if not self.asked:
            cancel(self.workspace, self.part, wait_s=0)
        self.asked = True

    @property
    def works(self) -> bool:
        """True if an orchestrator of the part is running."""
        return orchestrator_of(self.workspace, self.part.run).works

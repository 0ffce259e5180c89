"""Ends a sweep: by asking the process that works on it, or from here if none does.

In: a workspace and a sweep's name. Out: a :class:`flows.running.cancelling.CancelOutcome`. To who
ends it a sweep is one call that has the stages of all its trials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flows.running.cancelling import CancelOutcome, cancel, waiting_stages
from infra.host.processes import host_name, user_name
from infra.store.layout import sweep_call
from infra.store.orchestrators import orchestrator_of
from infra.store.sweep_records import read_sweep, trial_run
from infra.store.workspace import Workspace
from refiner_core.contract.records import RECORD_VERSION, RunRecord


def cancel_sweep(
    workspace: Workspace,
    name: str,
    *,
    wait_s: float | None = None,
    now: bool = False,
    tell: Callable[[str], None] = lambda message: None,
) -> CancelOutcome:
    """End all trials of a sweep; what is saved is kept. See :func:`flows.api.cancel_run`."""
    sweep = read_sweep(workspace, name)
    known = {t.name: trial_run(workspace, name, t.name) for t in sweep.trials}
    runs = {trial: run for trial, run in known.items() if run is not None}
    stages: dict[str, str] = {}
    for trial in sweep.trials:
        if trial.name in runs:
            new = {n: i for n, i in trial.stages.items() if i not in stages.values()}
            stages |= {f"{trial.name}/{n}": i for n, i in new.items()}
    config = next((workspace.read_run(run).config for run in runs.values()), {})
    call = RunRecord(
        version=RECORD_VERSION,
        run=sweep_call(name),
        recipe=sweep.recipe,
        overrides=(),
        command=(),
        config=config,
        stages=stages,
        code=sweep.code,
        started_at=sweep.started_at,
    )
    outcome = cancel(
        workspace, call, wait_s=wait_s, now=now, tell=tell, ours=frozenset(runs.values())
    )
    return replace(outcome, run=name, stages=())


def suspend_sweep(workspace: Workspace, name: str) -> None:
    """Let a sweep begin no further trial, and its trials at work no further stage. What runs goes
    on to its end; `refiner resume` goes on with the rest.

    Raises
    ------
    OSError, NoSpaceError
        It could not be recorded.
    """
    sweep, by = read_sweep(workspace, name), f"{user_name()} on {host_name()}"
    workspace.ask_cancel(sweep_call(name), by, [t.name for t in sweep.trials])
    for trial in sweep.trials:
        run = trial_run(workspace, name, trial.name)
        if run is None or not orchestrator_of(workspace, run).works:
            continue
        if waiting := waiting_stages(workspace, workspace.read_run(run)):
            workspace.ask_cancel(run, by, waiting)

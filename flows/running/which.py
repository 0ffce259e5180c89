"""Which run is meant, and which is the newest.

In: a workspace, and what a person has typed or not. Out: a :class:`RunRecord`. Every command that
takes the newest run, where none is named, takes it from :func:`newest_runs`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from infra.store.orchestrators import orchestrator_of
from infra.store.sweep_records import read_sweep, sweep_names, trial_run
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.records import RunRecord
from refiner_core.contract.services import is_service

#: Kinds of stages whose outputs are weights, or weights for others.
_OF_MODELS = (*TRAINED, "export", "publish")


def newest_runs(
    workspace: Workspace, among: Sequence[str] | None = None, *, models: bool = False
) -> Iterator[RunRecord]:
    """The calls that count where nobody names one, the newest first: those that have begun a stage
    of their own, and those that are not finished.

    A call that found everything done, or only waited for what another one had begun, has a record
    too, and is none of them; nor is a night, which measures what others have made, unless somebody
    works on it now.

    Parameters
    ----------
    among
        Ids of runs, oldest first (default: all).
    models
        Calls alone that have begun to train, export or publish.
    """
    for run in workspace.runs(newest_first=True):
        if among is not None and run.run not in among:
            continue
        if "nightly" in run.provenance:
            counts = not models and orchestrator_of(workspace, run.run).works
        else:
            counts = not models and not is_finished(workspace, run)
            counts = counts or any(
                has_begun(workspace, run, stage_id)
                for name, stage_id in run.stages.items()
                if not is_service(stage_id) and (not models or _family(name) in _OF_MODELS)
            )
        if counts:
            yield run


def _family(stage_name: str) -> str:
    return stage_name.partition("-")[0]


def has_begun(workspace: Workspace, run: RunRecord, stage_id: str) -> bool:
    """Whether the newest attempt at a stage was claimed since the run was called, so by it or by a
    later call. Both times are those of orchestrators."""
    numbers = workspace.layout.stage(stage_id).attempt_numbers()
    attempt = workspace.read_attempt(stage_id, numbers[-1]) if numbers else None
    return attempt is not None and attempt.claimed_at >= run.started_at


def find_run(
    workspace: Workspace, wanted: str | None = None, *, stage: str = ""
) -> RunRecord | None:
    """The run of that id, of the only id that begins or ends so, or the newest of a recipe of that
    name; the newest without one, with ``stage`` the newest that has such a stage, if any has
    (:func:`newest_runs` says which is the newest). A trial's run may be named by its place in the
    sweep, ``SWEEP:ARM/seed1``.

    Raises
    ------
    ConfigurationError
        There is none, or several; the message suggests the nearest.
    """
    if wanted is not None and ":" in wanted:
        return _run_of_trial(workspace, wanted)
    known = workspace.run_ids()
    if wanted is None:
        recorded = workspace.runs(newest_first=True)
        ranked = itertools.chain(newest_runs(workspace), recorded)
        newest = next(ranked, None)
        if newest is None or not stage or stage in newest.stages:
            return newest
        return next((run for run in ranked if stage in run.stages), newest)
    hits = [wanted] if wanted in known else [r for r in known if _means(wanted, r)]
    if not hits:  # a recipe's name is its newest run
        hits = [r for r in known if _recipe_in(r) == wanted]
        if (newest := next(newest_runs(workspace, hits), None)) is not None:
            return newest
        hits = hits[-1:]
    if len(hits) == 1:
        return workspace.read_run(hits[0])
    if not known:
        raise ConfigurationError(
            f"{workspace.root} has no run {wanted!r}: no run is recorded there.",
            expected="a workspace with runs",
            fix="name another one with workspace=DIR, or begin a run with `refiner run RECIPE`",
        )
    hint = _hint_at_trial(workspace, wanted) or suggest(wanted, known)
    what = f"{workspace.root} has no run {wanted!r}.{hint}"
    if hits:
        what = f"{wanted!r} may mean {len(hits)} runs of {workspace.root}."
    shown = ", ".join((hits or known)[-5:])
    raise ConfigurationError(
        what,
        expected=f"one of: {shown}",
        fix="name one of these (`refiner status --all` lists them), or another workspace=DIR",
    )


def _hint_at_trial(workspace: Workspace, wanted: str) -> str:
    """How a trial is named, where a sweep or a trial without its sweep was; else empty."""
    for name in sweep_names(workspace):
        trials = [t.name for t in read_sweep(workspace, name).trials]
        if wanted == name:
            return f" It is a sweep; a run of it is {name}:ARM/seedN, e.g. {name}:{trials[0]}."
        if (trial := wanted.removeprefix(f"{name}/")) in trials:
            return f" Did you mean the trial {name}:{trial}?"
    return ""


def _run_of_trial(workspace: Workspace, wanted: str) -> RunRecord:
    """The run of ``SWEEP:ARM/seed1``."""
    name, _, trial = wanted.partition(":")
    sweep = read_sweep(workspace, name)
    known = [t.name for t in sweep.trials]
    run_id = trial_run(workspace, name, trial)
    if run_id is not None:
        return workspace.read_run(run_id)
    if trial in known:
        raise ConfigurationError(
            f"Trial {trial} of sweep {name} has not begun.",
            expected="a trial that has a run",
            fix=f"look with `refiner status {name}`",
        )
    raise ConfigurationError(
        f"Sweep {name} has no trial {trial!r}.{suggest(trial, known)}",
        expected=f"one of: {', '.join(known[:5])}{', …' if len(known) > 5 else ''}",
        fix=f"name one of these (`refiner status {name}` shows them)",
    )


def _recipe_in(run_id: str) -> str:
    """The recipe's name as it stands in a run's id: day-time-NAME-number."""
    return "-".join(run_id.split("-")[2:-1])


def _means(wanted: str, run_id: str) -> bool:
    return len(wanted) >= 4 and (run_id.startswith(wanted) or run_id.endswith(wanted))


def unfinished_runs(workspace: Workspace) -> list[RunRecord]:
    """Runs of which a stage is not done, oldest first."""
    runs = workspace.runs()
    return [run for run in runs if not is_finished(workspace, run)]


def is_finished(workspace: Workspace, run: RunRecord) -> bool:
    """Whether every stage of a run is done."""
    stages = (i for i in run.stages.values() if not is_service(i))  # these are never done
    return all(workspace.layout.stage(i).result.exists() for i in stages)

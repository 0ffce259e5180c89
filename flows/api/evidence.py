"""What runs and sweeps have shown: compared, explained, reported, scored again, proven.

In: names of runs, sweeps and numbers, and the workspace they lie in. Out: values with all that
commands print.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.proofs import ResumeProof

if TYPE_CHECKING:
    from flows.diffing import Difference
    from flows.proving import Plans
    from flows.reporting.run import WrittenRun
    from flows.reporting.writing import Written
    from flows.rescoring import Planned
    from flows.rescoring.asking import Prices
    from flows.rescoring.planning import Options
    from flows.rescoring.reading import Part
    from flows.rescoring.results import Watcher
    from flows.why import Explanation, Figure
    from refiner_core.report.run.document import RunReport
    from refiner_core.report.sweep.document import SweepReport

_HERE = RecipeConfig.workspace


class Rescored(NamedTuple):
    """What rescoring has found, and where its files lie."""

    document: dict[str, Any]
    folder: Path


def diff_runs(
    a: str, b: str, workspace: str | Path = _HERE, *, other: str | Path | None = None
) -> Difference:
    """In what two runs, trials or stages differ, down to the first step that is not the same.

    Parameters
    ----------
    a, b
        Runs, trials (``SWEEP:ARM/seed1``) or stages (``RUN:STAGE``).
    workspace
        The folder that they are recorded in.
    other
        The workspace of ``b``, where it is another one.

    Returns
    -------
    Difference
        ``equal`` is True where what came out is bitwise the same, None where not all is there.

    Raises
    ------
    ConfigurationError
        One of them is not there; names the nearest.
    """
    from flows.diffing import diff_sides, find_side

    room = Workspace.read_only(workspace)
    second = room if other is None else Workspace.read_only(other)
    return diff_sides(find_side(room, a), find_side(second, b))


def find_numbers(
    words: Sequence[str], workspace: str | Path = _HERE, *, card: str | Path | None = None
) -> list[Figure]:
    """The recorded numbers that words mean.

    Parameters
    ----------
    words
        A number as it was printed (``["0.512"]``), or names (``["citation_f1", "grpo", "greedy"]``)
        and perhaps a run.
    workspace
        The folder that is looked through.
    card
        A card with its evidence beside it; then its numbers are looked at.

    Returns
    -------
    list of Figure
        At least one.

    Raises
    ------
    ConfigurationError
        None fits; says what there is.
    """
    from flows.why.figures import find_figures

    return find_figures(Workspace.read_only(workspace), words, card)


def explain_number(
    figure: Figure, workspace: str | Path = _HERE, *, sample: str | None = None
) -> Explanation:
    """What a number was made of: its protocol, samples, answers and judgements.

    Parameters
    ----------
    figure
        One of :func:`flows.api.find_numbers`.
    workspace
        The folder that its records lie in.
    sample
        The sample to show in full (default: a typical one).

    Returns
    -------
    Explanation
        With the files that all of it lies in.

    Raises
    ------
    ConfigurationError
        There is no such sample.
    DataError
        The samples are damaged.
    """
    from flows.why import explain

    room = Workspace.read_only(workspace)
    return explain(figure, room if room.stage_ids() else None, sample)


def make_sweep_report(sweep: str, workspace: str | Path = _HERE) -> SweepReport:
    """What the arms of a sweep have shown so far. Writes nothing.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that it is recorded in.

    Returns
    -------
    SweepReport
        Comparisons, curves, costs. As a dataframe: :func:`flows.api.comparisons_frame`.

    Raises
    ------
    ConfigurationError
        There is no such sweep; names the nearest.
    """
    from flows.reporting.writing import make

    return make(Workspace.read_only(workspace), sweep)


def report_sweep(
    sweep: str | None = None,
    workspace: str | Path = _HERE,
    *,
    folder: str | Path | None = None,
    reload_s: int = 15,
) -> Written:
    """The report of a sweep as page, Markdown, CSV and JSON.

    Parameters
    ----------
    sweep
        Its name (default: the newest of the workspace).
    workspace
        The folder that it is recorded in.
    folder
        Where the files go (default: ``reports/SWEEP`` in the workspace).
    reload_s
        How often the page of a running sweep loads itself again, seconds.

    Returns
    -------
    Written
        The report, and where its ``page`` lies.

    Raises
    ------
    ConfigurationError
        There is no such sweep; names the nearest.
    NoSpaceError
        There is no room for the files; those that were there before still are.
    """
    from flows.reporting.writing import write_report
    from flows.sweeping.status import newest_sweep

    room = Workspace.read_only(workspace)
    name = newest_sweep(room, None) if sweep is None else sweep
    if name is None:
        raise ConfigurationError(
            f"{room.root} has no sweeps.",
            expected="a workspace in which `refiner sweep FILE` has been called",
            fix="name another one with workspace=DIR",
        )
    return write_report(room, name, None if folder is None else Path(folder), reload_s=reload_s)


def report_run(
    run: str | None = None,
    workspace: str | Path = _HERE,
    *,
    folder: str | Path | None = None,
    reload_s: int = 15,
) -> WrittenRun:
    """The report of a run as page, Markdown and JSON: what it did, what it has learned.

    Parameters
    ----------
    run
        Which run (default: the newest).
    workspace
        The folder that it is recorded in.
    folder
        Where the files go (default: ``reports/RUN`` in the workspace).
    reload_s
        How often the page of a running run loads itself again, seconds.

    Returns
    -------
    WrittenRun
        The report, and where its ``page`` lies.

    Raises
    ------
    ConfigurationError
        There is no such run; names the nearest.
    NoSpaceError
        There is no room for the files; those that were there before still are.
    """
    from flows.reporting.run import write_run_report

    room = Workspace.read_only(workspace)
    where = None if folder is None else Path(folder)
    return write_run_report(room, _run_id(room, run), where, reload_s=reload_s)


def report_of_run(run: str | None = None, workspace: str | Path = _HERE) -> RunReport:
    """Everything about a run as it is now: stages, curves, numbers, examples, cost. Writes nothing.

    Parameters
    ----------
    run
        Its id, or enough of it (default: the newest of the workspace).
    workspace
        The folder that it is recorded in.

    Returns
    -------
    RunReport
        What cannot be read is among its ``warnings``.

    Raises
    ------
    ConfigurationError
        There is no such run; names the nearest.
    """
    from flows.reporting.run import report_of_run as make

    room = Workspace.read_only(workspace)
    return make(_run_id(room, run), room)


def _run_id(workspace: Workspace, run: str | None) -> str:
    from flows.running.status import find_run

    found = find_run(workspace, run)
    if found is None:
        raise ConfigurationError(
            f"No run is recorded in {workspace.root}.",
            expected="a run to report on",
            fix="name another workspace=DIR, or begin one with `refiner run RECIPE`",
        )
    return found.run


def plan_rescoring(
    runs: Sequence[str] = (),
    workspace: str | Path = _HERE,
    *,
    options: Options | None = None,
    part: Part | None = None,
    steps: str | None = None,
    prices: Prices | None = None,
    **more: Any,
) -> Planned:
    """What scoring stored rollouts again would take. Asks no judge and writes nothing.

    Parameters
    ----------
    runs
        Which ones (default: the newest).
    workspace
        The folder that they are recorded in.
    options
        Judges, rubrics, weights and overrides (:class:`flows.rescoring.planning.Options`).
    part
        Which rollouts or samples (:class:`flows.rescoring.reading.Part`).
    steps
        ``all``, ``last:5`` or ``40-50``.
    prices
        Of a judge's tokens.
    **more
        ``baseline``, ``metric`` and ``common`` of :class:`flows.rescoring.planning.Wanted`.

    Returns
    -------
    Planned
        ``new_calls`` says how often judges would be asked.

    Raises
    ------
    ConfigurationError, DataError, WorkspaceError
        Something that was asked for is not there, or cannot be meant.
    """
    from flows.rescoring import Wanted, plan_rescore
    from flows.rescoring.asking import Prices
    from flows.rescoring.planning import Options
    from flows.rescoring.reading import Part
    from flows.running.status import find_run

    room = Workspace.read_only(workspace)
    # A publication by hand is a run as well, and has no rollouts.
    trains = "" if part is not None and part.source != "rollouts" else "grpo"
    found = [find_run(room, name) for name in runs] or [find_run(room, stage=trains)]
    wanted = tuple({run.run: run for run in found if run is not None}.values())
    if not wanted:
        raise ConfigurationError(
            f"{room.root} has no runs.",
            expected="a workspace in which something was trained",
            fix="name another one with workspace=DIR",
        )
    return plan_rescore(
        Wanted(
            room,
            wanted,
            options or Options(),
            part or Part(),
            steps=steps,
            prices=prices or Prices(),
            **more,
        )
    )


def rescore(
    planned: Planned, folder: str | Path | None = None, watcher: Watcher | None = None
) -> Rescored:
    """Score stored rollouts again, and write down what changes.

    Parameters
    ----------
    planned
        What :func:`flows.api.plan_rescoring` has made.
    folder
        Where the files go (default: ``rescores/ID`` in the workspace).
    watcher
        Hears how far it is.

    Returns
    -------
    Rescored
        The document that is also written as JSON, and the folder.

    Raises
    ------
    JudgeOutage
        A judge does not answer; what was judged is kept.
    NoSpaceError
        There is no room for the files.
    WorkspaceError
        Somebody else may have written what is recorded there.
    """
    from flows.rescoring import carry_out
    from flows.rescoring.results import Silent, document_of, write

    planned.wanted.workspace.require_trust()  # its records name the judge, and whose key it gets
    default = planned.wanted.workspace.layout.rescores / planned.short_id
    where = default if folder is None else Path(folder)
    done = carry_out(planned, watcher or Silent())
    document = document_of(done)
    write(done, document, where)
    return Rescored(document, where)


def plan_resume_proofs(recipe: str, overrides: Sequence[str] = (), **options: Any) -> Plans:
    """Which trainings of a recipe would be run straight and interrupted, and where they are hit.

    Parameters
    ----------
    recipe, overrides
        As for :func:`flows.api.run_recipe`.
    **options
        Fields of :class:`flows.proving.Asked`: ``stage``, ``steps``, ``interruptions``, ``seed``,
        ``how``, ``processes``, ``resume_processes``, ``tolerance``.

    Returns
    -------
    Plans
        For :func:`flows.api.prove_resume`.

    Raises
    ------
    ConfigurationError
        The recipe trains nothing that can be proven, or an option cannot be meant.
    """
    from flows.proving import Asked, plan_proofs

    return plan_proofs(Asked(recipe, tuple(overrides), **options))


def prove_resume(
    plans: Plans, tell: Callable[[str], None] = lambda line: None, *, keep: bool = False
) -> list[ResumeProof]:
    """Prove that trainings resume exactly: run them straight and interrupted, and compare.

    Parameters
    ----------
    plans
        What :func:`flows.api.plan_resume_proofs` has made.
    tell
        Hears how far it is.
    keep
        Keep both runs (those that diverge always stay).

    Returns
    -------
    list of ResumeProof
        One per training: ``bitwise``, ``within tolerance`` or ``diverged``.

    Raises
    ------
    RefinerError
        A stage failed for a reason of its own.
    """
    from flows.proving import prove

    return prove(plans, tell, keep=keep)

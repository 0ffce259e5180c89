"""Report of a sweep, gathered from records, and its files (``report.html``, ``report.md``,
``report.csv``, ``trials.csv``, ``report.json``).

In: a workspace and the name of a sweep, or the record of trials. Out:
:class:`~refiner_core.report.sweep.evidence.SweepEvidence`, the report, and its files below
``WORKSPACE/reports/SWEEP`` or another folder, each complete or absent. The page of a running sweep
reloads itself.

Asks no scheduler, imports neither torch nor Prefect. Shared stages are read once, samples files by
several threads. An unreadable evaluation is left out with a warning: its metrics are missing, not
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from flows.reporting.samples import SamplesReader, questions_of
from flows.stored import monitor_of
from flows.sweeping.status import SweepWatcher, TrialStanding, newest_sweep
from infra.orchestrator.timeline import Incident, run_incidents
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.layout import sweep_call
from infra.store.orchestrators import orchestrator_of
from infra.store.sweep_records import read_sweep
from infra.store.traces import read_metrics
from infra.store.workspace import Workspace, now_text
from infra.tracking import tracked_address
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError, WorkspaceError
from refiner_core.contract.fingerprint import canonical_json
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.protocols import protocol_name
from refiner_core.contract.records import SweepRecord, TrialRecord
from refiner_core.evaluation.metrics import weighed
from refiner_core.evaluation.results import load_results
from refiner_core.report.pages import json_text
from refiner_core.report.printing import whole
from refiner_core.report.run.run_report import RunReport
from refiner_core.report.sweep.comparing import SHOWN
from refiner_core.report.sweep.evidence import (
    MeasuredDecoding,
    PromptMeans,
    SweepEvidence,
    Training,
    TrialEvidence,
)
from refiner_core.report.sweep.rendering import csv_of, markdown, number_rows, page, trial_rows
from refiner_core.report.sweep.sweep_report import (
    NUMBERS,
    PAGE,
    TEXT,
    TRIALS,
    VALUES,
    Row,
    RunsReport,
    SweepReport,
)

_EVALUATE = "evaluate-"
_THREADS = 4
#: Fields of a trial and of its use that a report shows.
_OF_STANDING = ("arm", "seed", "run", "state", "reason", "progress")
_OF_USE = (
    *("seconds", "gpu_hours", "cpu_hours", "queue_seconds", "lost_seconds", "lost_steps"),
    *("attempts", "judge_calls"),
)


def gather(workspace: Workspace, sweep: str) -> SweepEvidence:
    """Evidence of the newest version of a sweep.

    Raises
    ------
    ConfigurationError
        There is no such sweep; the message names the nearest.
    """
    record = read_sweep(workspace, sweep)
    works = orchestrator_of(workspace, sweep_call(record.name)).works
    look = SweepWatcher(workspace, record.name).standings
    found = evidence_of(workspace, record, lambda: look(record), SHOWN)
    return replace(
        found,
        state="running" if works else found.state,
        provenance={**_provenance(record), **found.provenance},
    )


def evidence_of(
    workspace: Workspace,
    record: SweepRecord,
    look: Callable[[], Sequence[TrialStanding]],
    metrics: Collection[str] | None = None,
) -> SweepEvidence:
    """Evidence of trials, given how to look at their states; with these curves, or with all."""
    read = _StageReader(workspace, metrics)
    with ThreadPoolExecutor(1) as pool:  # records beside samples, which leave a core free
        looked = pool.submit(look)
        read.evaluations_of(record.trials)
        standings = looked.result()
    trials = tuple(
        read.trial(trial, standing)
        for trial, standing in zip(record.trials, standings, strict=True)
    )
    over = all(s.state in ("done", "failed") for s in standings)
    protocols = dict(sorted(read.protocols.items()))  # threads have read them in any order
    return SweepEvidence(
        sweep=record,
        made_at=now_text(),
        state="finished" if over else "stopped",
        trials=trials,
        evaluations=read.evaluations,
        protocols=protocols,
        trainings=read.trainings,
        people=_people(workspace, standings),
        incidents=_incidents(workspace, standings),
        stored=read,
        provenance={
            **{"workspace": str(workspace.root), "trials": len(record.trials)},
            "evaluations read": len(read.evaluations),
            "judges": _judges(protocols),
        },
        warnings=(*read.warnings, *_mixed(record, trials, read.made_with)),
    )


def _people(workspace: Workspace, standings: Sequence[TrialStanding]) -> tuple[Row, ...]:
    """Means corrected by people's labels, of every trial."""
    return tuple(
        {"arm": standing.arm, "seed": standing.seed, **entry}
        for standing in standings
        if standing.run
        for entry in workspace.people_of(standing.run)
    )


class _StageReader:
    """Reads stages, each once, and texts of evaluations for the report (see
    :class:`refiner_core.report.sweep.evidence.SweepEvidence`). Unreadable texts are left out, since
    the metrics do not need them."""

    def __init__(self, workspace: Workspace, metrics: Collection[str] | None) -> None:
        self.workspace, self.metrics = workspace, metrics
        self.samples = SamplesReader()
        self.evaluations: dict[str, tuple[MeasuredDecoding, ...]] = {}
        self.trainings: dict[str, Training] = {}
        self.protocols: dict[str, Mapping[str, Any]] = {}
        self.tracked: dict[str, str] = {}
        self.warnings: list[str] = []
        #: Code and libraries that made a stage.
        self.made_with: dict[str, tuple[str, str]] = {}

    def evaluations_of(self, trials: Iterable[TrialRecord]) -> None:
        """Read all finished evaluations."""
        names = {i: n for t in trials for n, i in t.stages.items() if n.startswith(_EVALUATE)}
        with ThreadPoolExecutor(_THREADS) as pool:
            found = pool.map(lambda pair: self._evaluation(*pair), names.items())
            for stage, measured in zip(names, found, strict=True):
                if isinstance(measured, str):
                    self.warnings.append(measured)
                elif measured is not None:
                    self.evaluations[stage] = measured

    def _evaluation(self, stage: str, name: str) -> tuple[MeasuredDecoding, ...] | str | None:
        """One evaluation; or the reason why it is left out; None if it is not done."""
        path = self.workspace.layout.stage(stage)
        result = self.workspace.read_control(path.result)
        if result is None:
            return None
        folder = path.data / str(result["output_dir"])
        made = result.get("provenance") or {}
        versions = canonical_json(made.get("versions") or {})
        self.made_with[stage] = str(made.get("code") or ""), versions
        try:
            report = result["report"]
            report = report if "evaluations" in report else load_results(folder)
            measured = tuple(self._measured(stage, name, folder, report))
        except DataError as error:
            return f"{name} ({stage}) is left out: {error}"
        self.protocols.update(report["protocols"])
        return measured

    def _measured(
        self, stage: str, name: str, folder: Path, report: Mapping[str, Any]
    ) -> Iterable[MeasuredDecoding]:
        files = {str(e["samples_file"]) for e in report["reference"]}
        reference = {file: self.samples.means(folder / file) for file in files}
        by_decoding: dict[str, list[Mapping[str, Any]]] = {}
        for entry in report["evaluations"]:
            by_decoding.setdefault(str(entry["decoding"]), []).append(entry)
        for decoding, entries in by_decoding.items():
            file = str(entries[0]["samples_file"])
            protocols = {weighed(str(e["metric"])): str(e["protocol"]) for e in reversed(entries)}
            beside = [e for e in report["reference"] if e["decoding"] == decoding]
            yield MeasuredDecoding(
                stage=stage,
                model=str(report["model"]),
                protocol_file=protocol_name(name),
                decoding=decoding,
                protocol=protocols.get(False) or protocols[True],
                reward_protocol=protocols.get(True) or protocols[False],
                means=_only(self.samples.means(folder / file), entries),
                reference=reference[str(beside[0]["samples_file"])] if beside else None,
                samples=folder / file,
                episodes=(report.get("episodes") or {}).get(decoding) or {},
            )

    def trial(self, trial: TrialRecord, standing: TrialStanding) -> TrialEvidence:
        """The existing data of one trial."""
        planned = {n: i for n, i in trial.stages.items() if n.startswith(_EVALUATE)}
        trained = [n for n in TRAINED if n in trial.stages and self._training(n, trial)]
        return TrialEvidence(
            row=self._row(trial, standing),
            stages=trial.stages,
            evaluations=tuple(i for i in planned.values() if i in self.evaluations),
            trainings={n: trial.stages[n] for n in trained},
            missing=tuple(n for n, i in planned.items() if i not in self.evaluations),
            monitor=monitor_of(self.workspace, trial.stages),
        )

    def _training(self, name: str, trial: TrialRecord) -> bool:
        stage = trial.stages[name]
        if stage not in self.trainings:
            numbers = self.workspace.layout.stage(stage).attempt_numbers()
            if not numbers:
                return False
            # The newest attempt's file has the complete history.
            paths = self.workspace.layout.attempt(stage, numbers[-1])
            try:
                self.trainings[stage] = read_training(paths.metrics, self.metrics)
            except WorkspaceError as error:
                self.warnings.append(f"The curves of {name} ({stage}) are left out: {error}")
                self.trainings[stage] = {}
            self.tracked[stage] = tracked_address(paths.tracker) or ""
        return bool(self.trainings[stage])

    def _row(self, trial: TrialRecord, standing: TrialStanding) -> Row:
        published = trial.stages.get("publish")
        result = self.workspace.read_result(published) if published is not None else None
        target = str(result.report.get("target") or "") if result is not None else ""
        trained = (self.tracked.get(trial.stages.get(name, ""), "") for name in TRAINED[::-1])
        return {
            **{name: getattr(standing, name) for name in _OF_STANDING},
            **{name: getattr(standing.use, name) for name in _OF_USE},
            **{"shared": standing.shared, "tracked": next(filter(None, trained), "")},
            **{"card": "", "published": target},
        }

    # ------------------------------------------------------------ texts

    def answers(self, measured: MeasuredDecoding, prompts: Sequence[str]) -> list[dict[str, Any]]:
        """First samples of these prompts; for agents the first attempts."""
        try:
            return self.samples.rows(measured.samples, prompts)
        except DataError:
            return []

    def rubrics(
        self, measured: MeasuredDecoding, names: Sequence[tuple[str, str]] | None = None
    ) -> tuple[tuple[tuple[str, str], ...], Any] | None:
        """Credit per rubric."""
        try:
            return self.samples.rubrics(measured.samples, names)
        except DataError:
            return None

    def questions(self, stage: str, prompts: Sequence[str]) -> dict[str, dict[str, str]]:
        """Questions, from the prepared rows of the evaluation."""
        result = self.workspace.read_result(stage)
        if result is None:
            return {}
        return questions_of(self.workspace, stage, result.attempt, prompts)


def _only(means: PromptMeans, entries: Sequence[Mapping[str, Any]]) -> PromptMeans:
    """Only the metrics of the evaluation's own results."""
    told = {str(e["metric"]) for e in entries}
    if told >= set(means.metrics):
        return means
    kept = [i for i, metric in enumerate(means.metrics) if metric in told]
    return PromptMeans(means.prompts, tuple(means.metrics[i] for i in kept), means.values[kept])


def read_training(path: Path, only: Collection[str] | None = SHOWN) -> Training:
    """These metrics of a ``metrics.jsonl``; a step's later line replaces an earlier one."""
    found: dict[str, dict[int, float]] = {}
    for step, metrics in read_metrics(path, only):
        for metric, value in metrics.items():
            if value is not None:
                found.setdefault(metric, {})[step] = value
    return {
        metric: (np.array([*points], np.int64), np.array([*points.values()], np.float64))
        for metric, points in found.items()
    }


def _incidents(workspace: Workspace, standings: Sequence[TrialStanding]) -> tuple[Row, ...]:
    """Incidents of trials, oldest first; those of a shared stage once."""
    found: list[tuple[Incident, TrialStanding]] = []
    for standing in standings:
        troubled = standing.use.attempts > standing.stages or standing.state != "done"
        if not standing.run or not (troubled or standing.use.lost_seconds):
            continue
        try:
            run = workspace.read_run(standing.run)
        except ConfigurationError:  # it was deleted; its stages are not
            continue
        own = (i for i in run_incidents(workspace, run) if i.stage not in standing.shared)
        found += [(incident, standing) for incident in own]
    found.sort(key=lambda pair: pair[0].at)
    return tuple(
        {
            **{"arm": s.arm, "seed": s.seed, "at": i.at},
            **{"text": f"{i.stage}: {i.text}", "resolved": i.resolved},
        }
        for i, s in found
    )


def _mixed(
    sweep: SweepRecord, trials: Sequence[TrialEvidence], made_with: Mapping[str, tuple[str, str]]
) -> Iterator[str]:
    """Warnings about trials made with different code or libraries, which may be the difference."""
    of = f"{sweep.name}:" if sweep.name else ""
    for place, what in enumerate(("the code", "the libraries")):
        found: dict[str, list[str]] = {}
        for trial in trials:
            for made in sorted({made_with[stage][place] for stage in trial.evaluations}):
                name = "{}/seed{}".format(*trial.place) if sweep.name else trial.row["run"]
                found.setdefault(made, []).append(name)
        if len(found) < 2:
            continue
        few, many = min(found.values(), key=len), max(found.values(), key=len)
        odd = few[0]
        other = next((name for name in reversed(many) if name != odd), odd)
        yield (
            f"{'Trials' if of else 'Runs'} were made with {len(found)} versions of {what}, {odd} "
            f"with another one than {other}: a difference of arms may come from that. "
            f"`refiner diff {of}{other} {of}{odd}` shows it."
        )


def _judges(protocols: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {
        f"{judge.get('model')}@{judge.get('prompt')}": str(judge.get("revision") or "unknown")
        for protocol in protocols.values()
        if (judge := protocol.get("judge"))
    }


def _provenance(sweep: SweepRecord) -> dict[str, Any]:
    """Provenance of a sweep."""
    given = {k: v for k, v in sweep.provenance.items() if isinstance(v, str | int | float | bool)}
    return {
        **given,
        "sweep_version": sweep.number,
        "launched": sweep.started_at,
        "code": sweep.code,
        "sweep file": sweep.text,
    }


#: Interval at which the page of a running sweep reloads itself, seconds.
RELOAD_S = 15


R = TypeVar("R", SweepReport, RunsReport, RunReport)


@dataclass(frozen=True)
class WrittenReport(Generic[R]):
    """A report of a sweep or a run, and the folder of its files."""

    report: R
    folder: Path

    @property
    def page(self) -> Path:
        """The page, for a browser."""
        return self.folder / PAGE


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write a report's files in this order, each completely or not at all.

    Raises
    ------
    NoSpaceError
        There is no space for the files; earlier files are kept.
    """
    with no_space_guard(folder, "writing the report"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            atomic.write_text(folder / name, whole(text))


def make_sweep_report(sweep: str, workspace: str | Path = RecipeConfig.workspace) -> SweepReport:
    """Current results of a sweep's arms. Writes nothing.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that has its records.

    Returns
    -------
    SweepReport
        Comparisons, curves, costs. As a dataframe: :func:`flows.api.comparisons_frame`.

    Raises
    ------
    ConfigurationError
        There is no such sweep; the message names the nearest.
    """
    from refiner_core.report.sweep.comparing import make_report

    return make_report(gather(Workspace.read_only(workspace), sweep))


def report_sweep(
    sweep: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    folder: str | Path | None = None,
    reload_s: int = RELOAD_S,
) -> WrittenReport[SweepReport]:
    """Write the report of a sweep as page, Markdown, CSV and JSON.

    Parameters
    ----------
    sweep
        Its name (default: the newest of the workspace).
    workspace
        The folder that has its records.
    folder
        Folder for the files (default: ``reports/SWEEP`` in the workspace).
    reload_s
        Interval at which the page of a running sweep reloads itself, seconds.

    Returns
    -------
    WrittenReport
        The report, and the path of its ``page``.

    Raises
    ------
    ConfigurationError
        There is no such sweep; the message names the nearest.
    NoSpaceError
        There is no space for the files; earlier files are kept.
    """
    ws = Workspace.read_only(workspace)
    name = newest_sweep(ws, None) if sweep is None else sweep
    if name is None:
        raise ConfigurationError(
            f"{ws.root} has no sweeps.",
            expected="a workspace in which `refiner sweep FILE` was run",
            fix="name another one with workspace=DIR",
        )
    place = ws.layout.reports / name if folder is None else Path(folder)
    written = WrittenReport(make_sweep_report(name, workspace), place)
    write_files(place, files_of(written.report, reload_s=reload_s))
    return written


def files_of(report: SweepReport, *, reload_s: int = RELOAD_S) -> dict[str, str]:
    """Texts of a sweep's report by name; the page last, as it refers to the others."""
    return {
        VALUES: json_text(report),
        NUMBERS: csv_of(number_rows(report)),
        TRIALS: csv_of(trial_rows(report)),
        TEXT: markdown(report),
        PAGE: page(report, reload_s=reload_s),
    }

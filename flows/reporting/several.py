"""Report of several runs on one page: settings that differ, numbers paired with those of the first
run, curves over each other, answers side by side.

In: a workspace and the names of runs. Out: a
:class:`~refiner_core.report.sweep.sweep_report.RunsReport` and its files. It is the report of a
sweep without a sweep file: each run is an arm, and the first is the baseline. Runs that differ only
in their seed are seeds of one arm, if all arms have the same seeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from flows.diffing.run_diff import shortened
from flows.reporting.run.report import masked_overrides, shown_setting
from flows.reporting.writing import RELOAD_S, WrittenReport, evidence_of, files_of, write_files
from flows.running.status import required_run
from flows.runs.run_table import label_of, row_of
from flows.stored import field_values, recorded_field
from flows.sweeping.budget import UsageReader
from flows.sweeping.status import TrialStanding
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import ArmRecord, RunRecord, SweepRecord, TrialRecord
from refiner_core.contract.services import is_service
from refiner_core.report.printing import counted, label
from refiner_core.report.sweep.comparing import make_report
from refiner_core.report.sweep.sweep_report import Row, RunsReport, TrialState

#: Fields that say where a run is and what people call it.
_NAMES = ("description", "workspace", "data_root", "tracking.notes", "tracking.tags")
_SEED = "seed"
#: Characters of the settings in the name of an arm.
_MOST_OF_NAME = 48
#: Arm -> seed -> run.
_Arms = Mapping[str, Mapping[int, RunRecord]]


def compare_runs(runs: Sequence[str], workspace: str | Path = RecipeConfig.workspace) -> RunsReport:
    """Compare several runs with the first one. Writes nothing.

    Parameters
    ----------
    runs
        At least two: ids, unambiguous parts of ids, or trials (``SWEEP:ARM/seed1``).
    workspace
        The folder that has their records.

    Returns
    -------
    RunsReport
        Settings, comparisons, curves, answers, costs.

    Raises
    ------
    ConfigurationError
        There is no such run, only one, or one is named twice.
    """
    ws = Workspace.read_only(workspace)
    found = [required_run(ws, word, "a run to compare") for word in runs]
    twice = [run.run for place, run in enumerate(found) if run in found[:place]]
    if twice or len(found) < 2:
        raise ConfigurationError(
            f"{twice[0]} is named twice." if twice else "There is one run, and nothing to compare.",
            expected="two runs or more, each once",
            fix="name other runs (`refiner runs` lists them)",
        )
    arms, warnings = _arms(found)
    trials = {
        run.run: TrialRecord(arm, seed, masked_overrides(run.overrides), run.stages)
        for arm, by_seed in arms.items()
        for seed, run in by_seed.items()
    }
    by_run, baseline = {run.run: run for run in found}, next(iter(arms))
    settings = tuple(_settings(arms))
    sweep = _as_sweep(arms, tuple(trials.values()), settings, baseline)
    standings = list(_standings(ws, [(t, by_run[run]) for run, t in trials.items()]))
    report = make_report(evidence_of(ws, sweep, lambda: standings))
    works = any(standing.state in ("running", "waiting") for standing in standings)
    values = {**vars(report), "title": counted(len(found), "run") + " compared"}
    values |= {"state": "running"} if works else {}
    values |= {"warnings": (*report.warnings, *warnings), "settings": settings}
    rows = (_run_row(ws, by_run[s.run], s) for s in standings)
    return RunsReport(**values, runs=tuple(rows))


def report_runs(
    runs: Sequence[str],
    workspace: str | Path = RecipeConfig.workspace,
    *,
    folder: str | Path | None = None,
    reload_s: int = RELOAD_S,
) -> WrittenReport[RunsReport]:
    """Write the report of several runs as page, Markdown, CSV and JSON.

    Parameters
    ----------
    runs, workspace
        As of :func:`flows.api.compare_runs`.
    folder
        Folder for the files (default: ``reports/compared-…`` in the workspace).
    reload_s
        Interval at which the page of running runs reloads itself, seconds.

    Returns
    -------
    WrittenReport
        The report, and the path of its ``page``.

    Raises
    ------
    ConfigurationError
        There is no such run, only one, or one is named twice.
    NoSpaceError
        There is no space for the files; earlier files are kept.
    """
    report = compare_runs(runs, workspace)
    name = compared_name([row["run"] for row in report.runs])
    place = Workspace.read_only(workspace).layout.reports / name
    written = WrittenReport(report, place if folder is None else Path(folder))
    write_files(written.folder, files_of(report, reload_s=reload_s))
    return written


def compared_name(runs: Sequence[str]) -> str:
    """Name of the folder of a report on these runs."""
    more = f"-and-{len(runs) - 8}" * (len(runs) > 8)
    return "-".join(["compared", *(run[-4:] for run in runs[:8])]) + more


# ---------------------------------------------------------------- arms


def _arms(runs: Sequence[RunRecord]) -> tuple[_Arms, list[str]]:
    """Runs by arm and seed, and warnings about their seeds."""
    settings: list[dict[str, Any]] = [{} for _ in runs]
    fields_ = field_values([run.config for run in runs])
    for path, info, values in sorted(fields_, key=lambda field: not _is_own(field[0], runs)):
        if info.mark == "identity" and path not in _NAMES and any(v != values[0] for v in values):
            for found, value in zip(settings, values, strict=True):
                found[path] = value
    seeds = [int(recorded_field(run.config, _SEED, RecipeConfig.seed)) for run in runs]
    groups: dict[str, dict[int, RunRecord]] = {}
    for run, found, seed in zip(runs, settings, seeds, strict=True):
        key = json.dumps({k: v for k, v in found.items() if k != _SEED}, default=str)
        groups.setdefault(key, {})[seed] = run
    whole = sum(map(len, groups.values())) == len(runs)
    if whole and len({frozenset(group) for group in groups.values()}) == 1 < len(groups):
        firsts = [next(iter(group.values())) for group in groups.values()]
        said = [json.loads(key) for key in groups]
        return dict(zip(_names(firsts, said), groups.values(), strict=True)), []
    text = ", ".join(map(str, sorted(set(seeds))))
    warnings = [f"The runs have several seeds ({text}): a difference may come from these."]
    arms = {name: {0: run} for name, run in zip(_names(runs, settings), runs, strict=True)}
    return arms, warnings if len(set(seeds)) > 1 else []


def _is_own(path: str, runs: Iterable[RunRecord]) -> bool:
    """True if a field was given on the command line of one of the runs."""
    given = (o.lstrip("+~").partition("=")[0] for run in runs for o in run.overrides)
    return any(path == g or path.startswith(f"{g}.") for g in given)


def _names(runs: Sequence[RunRecord], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of arms: what differs if that is short, else the recipe, else with the run's id."""
    paths = list(settings[0])
    last = [path.rpartition(".")[2] for path in paths]
    shown = dict(zip(paths, last if len(set(last)) == len(last) else paths, strict=True))
    said = [", ".join(f"{shown[k]}={v}" for k, v in found.items()) for found in settings]
    for names in (said, [run.recipe for run in runs]):
        if len(set(names)) == len(runs) and all(0 < len(n) <= _MOST_OF_NAME for n in names):
            return names
    pairs = zip(runs, said, strict=True)
    return [f"{run.run[-9:]} {shortened(text, _MOST_OF_NAME - 10)}".strip() for run, text in pairs]


def _as_sweep(
    arms: _Arms, trials: tuple[TrialRecord, ...], settings: Sequence[Row], baseline: str
) -> SweepRecord:
    """The runs as a sweep without a name."""
    runs = [run for by_seed in arms.values() for run in by_seed.values()]
    levels: dict[str, dict[str, str]] = {arm: {} for arm in arms}
    for row in settings:
        if row["differs"] and row["mark"] == "identity":
            for arm, value in row["values"].items():
                levels[arm][row["field"]] = shortened(value, _MOST_OF_NAME)
    return SweepRecord(
        version=1,
        number=1,
        name="",
        recipe=", ".join(dict.fromkeys(run.recipe for run in runs)),
        folder="",
        text="",
        arms=tuple(ArmRecord(arm, levels[arm], {}) for arm in arms),
        baseline=baseline,
        seeds=tuple(dict.fromkeys(trial.seed for trial in trials)),
        trials=trials,
        limits={},
        question={"text": f"How do the others differ from {baseline}?"},
        forecast={},
        code="",
        started_at=min(run.started_at for run in runs),
    )


def _settings(arms: _Arms) -> list[Row]:
    """Settings by arm: those that differ first, of these one's own before the recipe's."""
    runs = {arm: next(iter(by_seed.values())) for arm, by_seed in arms.items()}
    left_out = (*_NAMES, _SEED) if any(len(by_seed) > 1 for by_seed in arms.values()) else _NAMES
    rows = []
    for path, info, values in field_values([{}, *(run.config for run in runs.values())]):
        default, *values = values
        differs = any(value != values[0] for value in values)
        own = _is_own(path, runs.values())
        if path not in left_out and (differs or own or values[0] != default):
            shown = {a: shown_setting(path, v) for a, v in zip(runs, values, strict=True)}
            row = {"field": path, "mark": info.mark, "differs": differs, "own": own}
            rows.append({**row, "values": shown})
    return sorted(rows, key=lambda r: (not r["differs"], r["mark"] != "identity", not r["own"]))


def _standings(
    workspace: Workspace, runs: Sequence[tuple[TrialRecord, RunRecord]]
) -> Iterator[TrialStanding]:
    """State and use of each run; a shared stage counts for the first."""
    usage, seen = UsageReader(workspace), set[str]()
    for trial, run in runs:
        row, _ = row_of(workspace, usage, run)
        own = {n: i for n, i in run.stages.items() if i not in seen and not is_service(i)}
        seen.update(own.values())
        yield TrialStanding(
            *(trial.arm, trial.seed, run.run, cast("TrialState", row.state)),
            stages_done=row.stages_done,
            stages=row.stages,
            use=usage.total(own.values()),
            shared=tuple(n for n, i in run.stages.items() if n not in own and not is_service(i)),
        )


def _run_row(workspace: Workspace, run: RunRecord, standing: TrialStanding) -> Row:
    note_and_tags = label_of(workspace, run.run, run.config.get("tracking") or {})
    return {
        **{"run": run.run, "arm": standing.arm, "seed": standing.seed, "recipe": run.recipe},
        **{"started": run.started_at, "state": standing.state, "label": label(*note_and_tags)},
    }

"""Table of the runs of a workspace: find, filter, compare.

In: a workspace. Out: a :class:`RunRow` per run: its changes, state, numbers and cost. Rows of runs
that have ended are kept in an index in the user's state folder on this node, so that ten thousand
runs are listed within a second; the index may be deleted at any time. Reads only records,
asks no scheduler.

A row is hidden by default if its run did nothing of its own (everything was done already), if a
newer run has the same stages, or if it is a night, which evaluates the models of others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flows.running.status import RunWatcher, has_started, required_run
from flows.runs.run_filter import RunFilter
from flows.stored import monitor_of, results_of
from flows.sweeping.budget import UsageReader
from infra.host.files import names_in
from infra.prefect_server import state_dir
from infra.store import atomic
from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.kinds import KINDS, TRAINED
from refiner_core.contract.marks import walk
from refiner_core.contract.records import RunRecord, to_json, trial_of
from refiner_core.contract.services import is_service

log = logging.getLogger(__name__)

_INDEX_VERSION = 2
#: Metrics that a table shows if none is named, the first that a run has.
MAIN_METRICS = ("reward", "pass@1", "oracle", "rubric_score", "format_valid")
#: States, the one that decides first.
_STATES = ("failed", "blocked", "cancelled", "interrupted", "paused", "killed", "hung", "waiting")
#: Overrides that say where a run is, not what it is.
_PLACES = ("workspace", "data_root")
#: Overrides that give a run its note and tags.
_LABEL = ("tracking.notes=", "tracking.tags=")


#: Tags of runs by the alarm of their monitor.
STOPPED_TAG, ALARM_TAG = "stopped-by-monitor", "monitor-alarm"


@dataclass(frozen=True)
class RunRow:
    """One run.

    Attributes
    ----------
    state
        ``running``, ``waiting`` (an orchestrator works, no stage runs), ``done``, ``failed``,
        ``blocked``, ``cancelled``, ``interrupted``; ``not begun`` without any attempt;
        ``unreadable`` if a record is damaged.
    model, metrics
        The last evaluated model, and its numbers by name (greedy decoding, the recipe's protocol
        first): ``value``, ``low``, ``high``, ``n``. A run that trains has none by the base model.
    seconds, gpu_hours, cpu_hours, judge_calls
        Cost of all attempts at its stages; shared stages count in each run that has them.
    sweep
        ``SWEEP:ARM/seedN`` of a trial, else empty.
    fields
        Recorded fields that differ from the defaults, by dotted name.
    key
        Identifies the stages: runs with the same one are repetitions of a command.
    began, night
        Began a stage of its own or has not ended; is a night.
    """

    run: str
    recipe: str
    started: str
    state: str
    stages: int
    stages_done: int = 0
    overrides: tuple[str, ...] = ()
    model: str = ""
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    gpu_hours: float = 0.0
    cpu_hours: float = 0.0
    judge_calls: int | None = None
    sweep: str = ""
    key: str = ""
    began: bool = True
    night: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    tags: tuple[str, ...] = ()

    def value(self, name: str) -> Any:
        """A value by the name that a filter uses: a column, a metric, or a configuration field.

        Raises
        ------
        KeyError
            The run has none of that name.
        """
        if name in self.metrics:
            return self.metrics[name].get("value")
        if name in COLUMNS:
            return getattr(self, name)
        return self.fields[name] if name in self.fields else defaults()[name]


#: Columns of a row that a filter or a sort may name.
COLUMNS = (
    *("run", "recipe", "started", "state", "stages_done", "stages", "model", "seconds"),
    *("gpu_hours", "cpu_hours", "judge_calls", "sweep", "note", "tags"),
)


def list_rows(
    workspace: str | Path = RecipeConfig.workspace,
    *,
    every: bool = False,
    where: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[RunRow]:
    """Runs of a workspace, newest first.

    Parameters
    ----------
    workspace
        The folder that has their records; it need not exist.
    every
        Also runs that are hidden by default (:mod:`flows.runs.run_table`).
    where
        A filter such as ``grpo.beta < 0.01 and oracle > 0.8``.
    progress
        Receives the number of read runs and of all runs.

    Returns
    -------
    list of RunRow
        Empty if there are none.

    Raises
    ------
    ConfigurationError
        The filter is not understood, or names a value that no run has.
    WorkspaceError
        The folder is no workspace.
    """
    ws = Workspace.read_only(workspace)
    index = _Index(ws)
    rows = [row for row in index.rows(progress) if row is not None]
    if not every:
        rows = _folded(rows)
    if where:
        wanted = RunFilter(where)
        check_names(rows, wanted.names)
        rows = [row for row in rows if wanted.matches(row.value)]
    return rows


def _folded(rows: Sequence[RunRow]) -> list[RunRow]:
    """The newest run of each set of stages that did something."""
    kept: dict[str, RunRow] = {}
    for row in rows:
        if row.began and not row.night:
            kept.setdefault(row.key, row)
    return list(kept.values())


def changes_of(rows: Sequence[RunRow]) -> dict[str, tuple[str, ...]]:
    """Overrides of each run that not all runs of its recipe have, by run id."""
    common: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.recipe] = counts.get(row.recipe, 0) + 1
        common[row.recipe] = common.get(row.recipe, set(row.overrides)) & set(row.overrides)
    return {
        row.run: tuple(
            o
            for o in row.overrides
            if not o.startswith(_LABEL) and (counts[row.recipe] == 1 or o not in common[row.recipe])
        )
        for row in rows
    }


def sorted_rows(rows: Sequence[RunRow], by: str, *, reverse: bool = False) -> list[RunRow]:
    """Rows in the order of a column, metric or field: the largest first, missing values last.

    Raises
    ------
    ConfigurationError
        No row has such a value.
    """
    check_names(rows, [by])
    have = [(value, row) for row in rows if (value := _value(row, by)) is not None]
    numbers = all(isinstance(value, int | float) for value, _ in have)
    have.sort(key=lambda pair: pair[0] if numbers else str(pair[0]), reverse=not reverse)
    return [*(row for _, row in have), *(row for row in rows if _value(row, by) is None)]


def _value(row: RunRow, name: str) -> Any:
    try:
        return row.value(name)
    except KeyError:
        return None


def check_names(rows: Sequence[RunRow], names: Iterable[str]) -> None:
    """Refuse a name that is no column, no configuration field, and no metric of any row."""
    metrics = {name for row in rows for name in row.metrics}
    for name in names:
        known = name in COLUMNS or name in metrics or name in defaults()
        if rows and not known and not any(name in row.fields for row in rows):
            raise ConfigurationError(
                f"No run has a value {name!r}.{suggest(name, {*COLUMNS, *metrics, *defaults()})}",
                expected=f"a metric ({', '.join(sorted(metrics)) or 'none is measured yet'}), a "
                f"field such as grpo.beta, or one of {', '.join(COLUMNS)}",
                fix="name one of these",
            )


def main_metric(rows: Sequence[RunRow]) -> str:
    """The metric that a table shows: the first of :data:`MAIN_METRICS` that a row has."""
    there = {name for row in rows for name in row.metrics}
    return next((n for n in MAIN_METRICS if n in there), min(there, default=""))


# ---------------------------------------------------------------- one row


def defaults() -> Mapping[str, Any]:
    """Default of each configuration field, by dotted name."""
    if not _DEFAULTS:
        _DEFAULTS.update({path: to_json(info.default) for path, info in walk(RecipeConfig)})
    return _DEFAULTS


_DEFAULTS: dict[str, Any] = {}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Fields of a recorded configuration that differ from the defaults."""
    found: dict[str, Any] = {}
    known = defaults()
    for name, value in config.items():
        path = prefix + name
        if path in known:
            if value is not None and value != known[path] and path != "description":
                found[path] = value
        elif isinstance(value, Mapping):
            found |= _flat(value, f"{path}.")
    return found


def row_of(workspace: Workspace, usage: UsageReader, run: RunRecord) -> tuple[RunRow, bool]:
    """The row of a run, and whether it can only change with a new attempt."""
    own = [i for i in run.stages.values() if not is_service(i)]
    done = sum(usage.is_done(i) for i in own)
    works = orchestrator_of(workspace, run.run).works
    state, is_settled = ("done", True) if done == len(own) else _state(workspace, run, works)
    use = usage.total(own)
    model, metrics = _numbers(workspace, run)
    row = _row(workspace, run, state)
    monitor = monitor_of(workspace, run.stages)
    told = STOPPED_TAG if monitor.get("stopped") is not None else ALARM_TAG
    row = replace(
        row,
        tags=row.tags if monitor.get("alarm") is None else (*row.tags, told),
        stages_done=done,
        model=model,
        metrics=metrics,
        seconds=round(use.seconds, 1),
        gpu_hours=round(use.gpu_hours, 4),
        cpu_hours=round(use.cpu_hours, 4),
        judge_calls=use.judge_calls,
        began=state != "done" or any(has_started(workspace, run, i) for i in own),
    )
    return row, is_settled and not works


def _row(workspace: Workspace, run: RunRecord, state: str) -> RunRow:
    """The part of a row that the record of the run alone has."""
    own, trial = [i for i in run.stages.values() if not is_service(i)], trial_of(run.provenance)
    places = tuple(f"{name}=" for name in _PLACES)
    note, tags = label_of(workspace, run.run, run.config.get("tracking") or {})
    return RunRow(
        *(run.run, run.recipe, run.started_at, state, len(own)),
        note=note,
        tags=tags,
        overrides=tuple(o for o in run.overrides if not o.startswith(places)),
        sweep=f"{trial[0]}:{trial[1]}/seed{trial[2]}" if trial else "",
        key=hashlib.sha256("\n".join(sorted(own)).encode()).hexdigest()[:16],
        night="nightly" in run.provenance,
        fields=_flat(run.config),
    )


def _state(workspace: Workspace, run: RunRecord, works: bool) -> tuple[str, bool]:
    """State of an unfinished run, and whether all its attempts have ended."""
    stages = RunWatcher(workspace, run, ask=False).stages()
    states = {stage.state for stage in stages if not is_service(stage.id)}
    runs = bool(states & {"running", "queued", "suspended"})
    if works:
        return ("running" if runs else "waiting"), False
    if states <= {"waiting"}:
        return "not begun", True
    found = next((s for s in _STATES[:-1] if s in states), "interrupted")
    return {"killed": "interrupted", "hung": "interrupted"}.get(found, found), not runs


def _numbers(workspace: Workspace, run: RunRecord) -> tuple[str, dict[str, dict[str, Any]]]:
    """The last evaluated model, and its numbers by metric. The base model is no result of a run
    that trains."""
    trains = any(i.rpartition("-")[0] in TRAINED for i in run.stages.values())
    evaluated = [i for i in run.stages.values() if i.startswith("evaluate-")]
    reports = (results_of(workspace, stage_id) or {} for stage_id in evaluated)
    every = (e for report in reports for e in report.get("evaluations") or ())
    entries = [e for e in every if not (trains and e["stage"] == "base")]
    model = max((str(e["stage"]) for e in entries), key=_order, default="")
    # The recipe's own protocol before others, greedy before sampled answers.
    entries.sort(key=lambda e: (bool(e.get("under")), e["decoding"] != "greedy"))
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry["stage"] == model:
            number = {key: entry.get(key) for key in ("value", "low", "high", "n")}
            found.setdefault(str(entry["metric"]), number)
    return model, found


def _order(model: str) -> int:
    return KINDS[model].order if model in KINDS else 0


# ---------------------------------------------------------------- the index


class _Index:
    """Index: rows of ended runs in a file of the user's state folder.

    A row is used as long as its files are unchanged: the run's record, and for unfinished runs the
    folders in which a new attempt would appear.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        name = hashlib.sha256(os.path.realpath(workspace.root).encode()).hexdigest()[:16]
        self.path = state_dir() / "runs" / f"{name}.json"
        self._folder = str(workspace.layout.runs)  # text: ten thousand paths cost half a second
        one = workspace.layout.run("run")
        self._files = [path.name for path in (one.record, one.orchestrator, one.label)]
        self._kept = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        is_ours = isinstance(found, dict) and found.get("version") == _INDEX_VERSION
        return dict(found["rows"]) if is_ours else {}

    def rows(self, progress: Callable[[int, int], None]) -> list[RunRow | None]:
        """All rows, newest first; None for a damaged record."""
        names = sorted(names_in(self.workspace.layout.runs), reverse=True)
        usage, found, kept = UsageReader(self.workspace), list[RunRow | None](), dict[str, Any]()
        for count, name in enumerate(names):
            row, entry = self._row(name, usage)
            found.append(row)
            if entry is not None:
                kept[name] = entry
            if count % 100 == 99 or count + 1 == len(names):
                progress(count + 1, len(names))
        if kept != self._kept:
            self._write(kept)
        return found

    def _row(self, name: str, usage: UsageReader) -> tuple[RunRow | None, dict[str, Any] | None]:
        entry = self._kept.get(name)
        if entry is not None and entry["stamp"] == self._stamp(name, entry["stages"]):
            return _from_json(entry["row"]), entry
        try:
            run = self.workspace.read_run(name)
        except ConfigurationError:  # deleted meanwhile
            return None, None
        except OSError as error:
            log.warning("%s is left out: %s", name, error)
            return None, None
        try:
            row, is_settled = row_of(self.workspace, usage, run)
        except OSError as error:
            self.workspace.complaints.warn(Path(str(error)), "%s", error)
            row, is_settled = _row(self.workspace, run, "unreadable"), False
        entry = None
        if is_settled:
            stages = [] if row.state == "done" else sorted(set(run.stages.values()))
            stamp = self._stamp(name, stages)
            entry = {"stamp": stamp, "stages": stages, "row": to_json(row)}
        return row, entry

    def _stamp(self, name: str, stages: Sequence[str]) -> list[int]:
        paths = [f"{self._folder}/{name}/{file}" for file in self._files]
        for stage_id in stages:
            stage = self.workspace.layout.stage(stage_id)
            paths += [str(stage.result), str(stage.attempts)]
        return [_modified(path) for path in paths]

    def _write(self, kept: Mapping[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_json(self.path, {"version": _INDEX_VERSION, "rows": kept})
        except OSError as error:  # a full or read-only home: the next call reads records again
            log.debug("the index of runs was not written: %s", error)


def _from_json(row: Mapping[str, Any]) -> RunRow:
    return RunRow(**{**row, "overrides": tuple(row["overrides"]), "tags": tuple(row["tags"])})


def _modified(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0


# ---------------------------------------------------------------- note and tags


def label_run(
    run: str,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    tags: Sequence[str] = (),
    note: str | None = None,
    remove: bool = False,
) -> dict[str, Any]:
    """Give a run tags and a note.

    Parameters
    ----------
    run
        An unambiguous part of its id.
    workspace
        The folder that has its records.
    tags
        To add; with ``remove`` to remove.
    note
        Replaces the note (default: it stays).

    Returns
    -------
    dict
        ``run``, ``note`` and ``tags`` from now on.

    Raises
    ------
    ConfigurationError
        There is no such run, or a tag has spaces.
    """
    ws = Workspace.open(workspace)
    found = required_run(ws, run, "a run")
    if wrong := [tag for tag in tags if not tag.strip() or len(tag.split()) > 1]:
        raise ConfigurationError(
            f"{wrong[0]!r} is no tag.", expected="a word", fix="use --note for sentences"
        )
    old_note, old_tags = label_of(ws, found.run, found.config.get("tracking") or {})
    kept = [t for t in old_tags if t not in tags]
    label = {"note": old_note if note is None else note, "tags": kept if remove else [*kept, *tags]}
    ws.write_label(found.run, label)
    return {"run": found.run, **label}


def label_of(
    workspace: Workspace, run: str, tracking: Mapping[str, Any]
) -> tuple[str, tuple[str, ...]]:
    """Note and tags of a run: those given later, else those it began with."""
    label = workspace.read_label(run)
    note = label.get("note", tracking.get("notes") or "")
    return str(note), tuple(label.get("tags", tracking.get("tags") or ()))

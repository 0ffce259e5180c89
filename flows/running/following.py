"""Follows the records of an orchestrator of a run or a sweep. No Prefect import.

In: a call's event log (append-only, one writer) and the heartbeats of running stages. Out: the
newest :class:`~refiner_core.contract.types.StageView` of each stage (in a large sweep: of each
trial), and other events. Only new lines are read; nothing scans the workspace. A ``begin`` line
means that another process has taken up the call: earlier lines are history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from infra.host.files import again
from infra.orchestrator.timeline import events_in
from infra.store.layout import sweep_call
from infra.store.workspace import Workspace
from refiner_core.contract.records import SweepRecord, from_json
from refiner_core.contract.types import TERMINAL, Progress, StageView, ViewState

#: Events of interest to a person who is not watching the run.
TOLD = (
    *("short", "reclaimed", "room", "cancel", "stop", "kill", "release", "refused", "closed"),
    *("outage", "back"),
    *("trial", "canary", "hold"),  # sweeps only
)
#: A sweep with more stages is shown by its trials.
MOST_STAGES = 200
_AT_WORK = ("running", "reattached")
#: State in the event log -> a view's state.
_STATES: Mapping[str, ViewState] = {
    **{state: state for state in get_args(ViewState)},
    "held": "interrupted",  # trials only
}
#: Precedence among the views of a stage that several trials share.
_SAYS_MOST: tuple[ViewState, ...] = (
    *("waiting", "blocked", "interrupted", "failed", "skipped"),
    *("queued", "paused", "reattached", "running", "done"),
)


@dataclass(frozen=True)
class Node:
    """A stage, or a trial of a sweep (without ``id``)."""

    name: str
    id: str = ""

    @property
    def kind(self) -> str:
        """Kind of the stage, or ``trial``."""
        return self.id.rpartition("-")[0] or "trial"

    @property
    def fingerprint(self) -> str:
        """Part of the fingerprint that the id contains."""
        return self.id.rpartition("-")[2]

    @property
    def title(self) -> str:
        """See :attr:`refiner_core.contract.planned.PlannedStage.title`."""
        return f"{self.name} [{self.fingerprint[:8]}]" if self.id else self.name

    @property
    def waiting(self) -> StageView:
        """Its view before any event."""
        return StageView(self.name, self.kind, self.fingerprint, "waiting")


class Follower:
    """The newest views of one call.

    Parameters
    ----------
    workspace, call
        A run's id, or :func:`infra.store.layout.sweep_call`.
    stages
        Stage name -> id; for trials, names only.
    """

    def __init__(self, workspace: Workspace, call: str, stages: Mapping[str, str]) -> None:
        self.nodes = {name: Node(name, stage_id) for name, stage_id in stages.items()}
        self.runs: dict[str, str] = {}  # trial -> its run
        self._workspace = workspace
        self._log = workspace.layout.run(call).events
        self._position = 0
        self._views = {node.name: node.waiting for node in self.nodes.values()}
        self._news: list[Mapping[str, Any]] = []

    def observe(self) -> dict[str, StageView]:
        """The current views."""
        for event in self._new_events():
            self._take_in(event)
        for name, view in self._views.items():
            if view.state in _AT_WORK and view.attempt:
                self._views[name] = replace(view, progress=self._progress(view))
        return dict(self._views)

    def new_events(self) -> list[Mapping[str, Any]]:
        """Other events since the newest ``begin``, each once."""
        new_events, self._news = self._news, []
        return new_events

    def _take_in(self, event: Mapping[str, Any]) -> None:
        what = event.get("event")
        if what == "begin":
            self._views = {name: self._anew(view) for name, view in self._views.items()}
            self._news = []
        elif what in TOLD:
            self._news.append(event)
        name = str(event.get("stage") or event.get("trial"))
        view = self._views.get(name)
        if what == "claim" and view is not None:
            self._views[name] = replace(view, attempt=int(event.get("attempt") or 0))
        if what not in ("stage", "trial") or view is None:
            return
        if event.get("run"):
            self.runs[name] = str(event["run"])
        view = replace(
            view,
            state=_STATES.get(str(event.get("state")), "waiting"),
            attempt=int(event.get("attempt") or 0),
            job_id=event.get("job"),
            seconds=float(event.get("seconds") or 0.0),
            message=str(event.get("message") or event.get("reason") or ""),
        )
        self._views[name] = self._with_records(view)

    def _anew(self, view: StageView) -> StageView:
        """View after a change of process; a done trial gets no new events and stays done."""
        node = self.nodes[view.name]
        if not node.id and view.state in ("done", "skipped"):
            return replace(view, state="skipped")
        return node.waiting

    def _with_records(self, view: StageView) -> StageView:
        """The view with its log, and with its report once it is done."""
        node = self.nodes[view.name]
        if not node.id:
            return view
        if view.attempt:
            log = self._workspace.layout.attempt(node.id, view.attempt).log
            view = replace(view, log=str(log))
        if view.state in TERMINAL:
            result = self._workspace.read_result(node.id) if view.state == "done" else None
            report = {} if result is None else result.report
            view = replace(view, report=report, progress=self._progress(view))
        return view

    def _progress(self, view: StageView) -> Progress | None:
        stage_id = self.nodes[view.name].id
        there = stage_id and view.attempt
        beat = self._workspace.read_heartbeat(stage_id, view.attempt) if there else None
        found = (beat or {}).get("progress")
        return view.progress if found is None else from_json(Progress, found)

    def _new_events(self) -> Iterator[Mapping[str, Any]]:
        whole, self._position = new_lines(self._log, self._position)
        yield from events_in(whole)


class SweepFollower:
    """The newest views of a sweep: each stage once, ``ARM/seed1/grpo``, shared stages by their own
    name; with more than ``most`` stages, one view per trial."""

    def __init__(self, workspace: Workspace, record: SweepRecord, most: int = MOST_STAGES) -> None:
        self._workspace = workspace
        self._trials = Follower(
            workspace, sweep_call(record.name), {t.name: "" for t in record.trials}
        )
        self._stages = {t.name: t.stages for t in record.trials}
        self._names = _stage_names(record)
        self._followers: dict[tuple[str, str], Follower] = {}
        self._by_stage = len(self._names) <= most
        self.nodes = self._trials.nodes
        if self._by_stage:
            self.nodes = {name: Node(name, stage_id) for stage_id, name in self._names.items()}

    def observe(self) -> dict[str, StageView]:
        """The current views."""
        trials = self._trials.observe()
        if not self._by_stage:
            return trials
        views = {name: node.waiting for name, node in self.nodes.items()}
        for trial, whole in trials.items():
            stages, mine = self._stages[trial], dict[str, StageView]()
            run = self._trials.runs.get(trial) if whole.state != "waiting" else None
            if run is not None:
                follower = Follower(self._workspace, run, stages)
                mine = self._followers.setdefault((trial, run), follower).observe()
            over: ViewState = "skipped" if whole.state in ("done", "skipped") else "interrupted"
            for name, stage_id in stages.items():
                node = self._names[stage_id]
                view = replace(mine.get(name, self.nodes[node].waiting), name=node)
                if whole.terminal and not view.terminal:  # it never began
                    view = replace(view, state=over, message=whole.message)
                views[node] = max(views[node], view, key=_says)
        return views

    def new_events(self) -> list[Mapping[str, Any]]:
        """Events of trials and the disk since the newest ``begin``, each once."""
        return self._trials.new_events()


def inputs_of(workspace: Workspace, nodes: Mapping[str, Node], name: str) -> list[str]:
    """Stages that end before this one begins, by its record; without those of which it only reads a
    checkpoint."""
    stage_id = nodes[name].id
    record = workspace.read_record(stage_id) if stage_id else None
    if record is None:
        return []
    at_step = record.spec.at_step
    wanted = {f for role, f in record.spec.input_fingerprints.items() if role not in at_step}
    of_stages = [node for node in nodes.values() if node.id]
    return [n.name for n in of_stages if any(f.startswith(n.fingerprint) for f in wanted)]


def _says(view: StageView) -> int:
    return _SAYS_MOST.index(view.state)


def _stage_names(record: SweepRecord) -> dict[str, str]:
    """Stage id -> its name in the sweep; with part of its fingerprint if several shared stages have
    the same name."""
    count = Counter(i for t in record.trials for i in t.stages.values())
    first = {i: (t, name) for t in reversed(record.trials) for name, i in t.stages.items()}
    alike = Counter(name for i, (_, name) in first.items() if count[i] > 1)
    names = {}
    for trial in record.trials:
        for stage_id in trial.stages.values():
            owner, name = first[stage_id]
            if count[stage_id] == 1:
                names[stage_id] = f"{owner.name}/{name}"
            else:
                more = f"-{stage_id.rpartition('-')[2][:6]}" if alike[name] > 1 else ""
                names[stage_id] = f"{name}{more}"
    return names


def new_lines(path: Path, position: int) -> tuple[list[str], int]:
    """The complete lines of a growing file after ``position`` (bytes), and their end."""

    def read() -> bytes:
        with path.open("rb") as file:
            file.seek(position)
            return file.read()

    try:
        data = again(read)
    except (FileNotFoundError, NotADirectoryError):
        return [], position
    data = data[: data.rfind(b"\n") + 1]
    return data.decode(errors="replace").splitlines(), position + len(data)

"""Follows what the orchestrator of a run or a sweep records. No Prefect import.

In: a call's event log (append-only, one writer) and, of stages at work, their heartbeats. Out: the
newest :class:`~refiner_core.contract.types.StageView` of each stage (of a sweep: of each trial).
Only new lines are read, so following costs no scan of the workspace. A ``begin`` line says that
another process has taken the call up: what stood before it is history.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from infra.host.files import again
from infra.store.workspace import Workspace
from refiner_core.contract.records import from_json
from refiner_core.contract.types import TERMINAL, Progress, StageView, ViewState

_AT_WORK = ("running", "reattached")
#: As the event log says it -> a view's state.
_STATES: Mapping[str, ViewState] = {
    **{state: state for state in get_args(ViewState)},
    "held": "interrupted",  # of a trial
}


@dataclass(frozen=True)
class Node:
    """A stage, or a trial of a sweep (without ``id``)."""

    name: str
    id: str = ""

    @property
    def kind(self) -> str:
        """Of the stage; ``trial``."""
        return self.id.rpartition("-")[0] or "trial"

    @property
    def fingerprint(self) -> str:
        """The part of it that stands in the id."""
        return self.id.rpartition("-")[2]

    @property
    def title(self) -> str:
        """As :attr:`refiner_core.contract.planned.PlannedStage.title`."""
        return f"{self.name} [{self.fingerprint[:8]}]" if self.id else self.name

    @property
    def waiting(self) -> StageView:
        """Its view before anything has happened."""
        return StageView(self.name, self.kind, self.fingerprint, "waiting")


class Follower:
    """The newest views of one call.

    Parameters
    ----------
    workspace, call
        A run's id, or :func:`infra.store.layout.sweep_call`.
    stages
        Name -> id of its stages; of trials, names alone.
    """

    def __init__(self, workspace: Workspace, call: str, stages: Mapping[str, str]) -> None:
        self.nodes = {name: Node(name, stage_id) for name, stage_id in stages.items()}
        self._workspace = workspace
        self._log = workspace.layout.run(call).events
        self._position = 0
        self._views = {node.name: node.waiting for node in self.nodes.values()}

    def look(self) -> dict[str, StageView]:
        """The views now."""
        for event in self._new_events():
            self._take_in(event)
        for name, view in self._views.items():
            if view.state in _AT_WORK and view.attempt:
                self._views[name] = replace(view, progress=self._progress(view))
        return dict(self._views)

    def _take_in(self, event: Mapping[str, Any]) -> None:
        what = event.get("event")
        if what == "begin":
            self._views = {name: self._anew(view) for name, view in self._views.items()}
        name = str(event.get("stage") or event.get("trial"))
        view = self._views.get(name)
        if what == "claim" and view is not None:
            self._views[name] = replace(view, attempt=int(event.get("attempt") or 0))
        if what not in ("stage", "trial") or view is None:
            return
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
        """Before another process has said anything: of a trial that is done it says nothing."""
        node = self.nodes[view.name]
        if not node.id and view.state in ("done", "skipped"):
            return replace(view, state="skipped")
        return node.waiting

    def _with_records(self, view: StageView) -> StageView:
        """With its log, and with its report once it is done."""
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
        for line in whole:
            try:
                yield json.loads(line)
            except ValueError:  # its writer was killed in the middle of it
                continue


def inputs_of(workspace: Workspace, nodes: Mapping[str, Node], name: str) -> list[str]:
    """The stages that are over before this one begins, by its record; not those of which it only
    reads a checkpoint."""
    stage_id = nodes[name].id
    record = workspace.read_record(stage_id) if stage_id else None
    if record is None:
        return []
    at_step = record.spec.at_step
    wanted = {f for role, f in record.spec.input_fingerprints.items() if role not in at_step}
    of_stages = [node for node in nodes.values() if node.id]
    return [n.name for n in of_stages if any(f.startswith(n.fingerprint) for f in wanted)]


def new_lines(path: Path, position: int) -> tuple[list[str], int]:
    """The whole lines of a growing file after ``position`` (bytes), and where they end."""

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

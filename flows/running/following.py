"""Follows what the orchestrator of a run or a sweep records. No Prefect import.

In: a call's event log (append-only, one writer) and, of stages at work, their heartbeats. Out: the
newest :class:`~refiner_core.contract.views.StageView` of each stage, or of each trial of a sweep.
Only new lines are read, so following costs no scan of the workspace. A ``begin`` line says that
another process has taken the call up: what stood before it is history.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from infra.host.reading import again
from infra.store.workspace import Workspace
from refiner_core.contract.plan import Plan, PlannedStage
from refiner_core.contract.records import from_json
from refiner_core.contract.types import Progress
from refiner_core.contract.views import TERMINAL, StageView, ViewState

_AT_WORK = ("running", "reattached")
#: As the event log says it -> a view's state.
_STATES: Mapping[str, ViewState] = {
    **{state: state for state in get_args(ViewState)},
    "held": "interrupted",  # of a trial
}


@dataclass(frozen=True)
class Node:
    """A stage of a run, or a trial of a sweep (without ``id`` and ``inputs``)."""

    name: str
    kind: str
    title: str
    fingerprint: str = ""
    id: str = ""
    inputs: tuple[str, ...] = ()  # names of stages that are over before it begins


def nodes_of(plan: Plan) -> tuple[Node, ...]:
    """The stages of a plan, in its order."""
    return tuple(
        Node(s.name, s.kind, s.title, s.fingerprint, s.id, _before(s)) for s in plan.stages
    )


def _before(stage: PlannedStage) -> tuple[str, ...]:
    """What is over before a stage begins: not what it only reads a checkpoint of."""
    names = (name for role, name in stage.inputs.items() if role not in stage.at_step)
    return tuple(dict.fromkeys(names))


class Follower:
    """The newest views of one call.

    Parameters
    ----------
    workspace, call
        A run's id, or :func:`infra.store.layout.sweep_call`.
    nodes
        Its stages, or its trials.
    """

    def __init__(self, workspace: Workspace, call: str, nodes: Sequence[Node]) -> None:
        self.nodes = {node.name: node for node in nodes}
        self._workspace = workspace
        self._log = workspace.layout.run(call).events
        self._position = 0
        self._views = self._waiting()

    def look(self) -> dict[str, StageView]:
        """The views now."""
        for event in self._new_events():
            self._take_in(event)
        for name, view in self._views.items():
            if view.state in _AT_WORK and view.attempt:
                self._views[name] = replace(view, progress=self._progress(view))
        return dict(self._views)

    def _waiting(self) -> dict[str, StageView]:
        nodes = self.nodes.values()
        return {n.name: StageView(n.name, n.kind, n.fingerprint, "waiting") for n in nodes}

    def _take_in(self, event: Mapping[str, Any]) -> None:
        if event.get("event") == "begin":
            self._views = self._waiting()
        name = str(event.get("stage") or event.get("trial"))
        view = self._views.get(name)
        if event.get("event") == "claim" and view is not None:
            self._views[name] = replace(view, attempt=int(event.get("attempt") or 0))
        if event.get("event") not in ("stage", "trial") or view is None:
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

    def _with_records(self, view: StageView) -> StageView:
        """With its log, and with its report once it is done."""
        node = self.nodes[view.name]
        if not node.id:
            return view
        if view.attempt:
            log = self._workspace.layout.attempt(node.id, view.attempt).log
            view = replace(view, log=str(log))
        if view.state in TERMINAL:
            result = self._workspace.read_result(node.id)
            view = replace(view, report={} if result is None else result.report)
        return view

    def _progress(self, view: StageView) -> Progress | None:
        node = self.nodes[view.name]
        beat = self._workspace.read_heartbeat(node.id, view.attempt) if node.id else None
        found = (beat or {}).get("progress")
        return view.progress if found is None else from_json(Progress, found)

    def _new_events(self) -> Iterator[Mapping[str, Any]]:
        whole, self._position = new_lines(self._log, self._position)
        for line in whole:
            try:
                yield json.loads(line)
            except ValueError:  # its writer was killed in the middle of it
                continue


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

"""A sweep as one graph: which nodes Prefect shows, and how each looks now.

In: a planned sweep, and views and states of its trials as they change. Out: a drawing for
:mod:`flows.running.pipeline`, and a :class:`StageView` per node. A small sweep shows every stage as
``ARM/seed1/grpo``, those that trials share once; one with more stages than a page can show has a
node per trial, and a very large one a node per arm.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from flows.picture.feed import Drawing, Node, Story, up_to_now
from infra.store.layout import sweep_call
from refiner_core.contract.plan import PlannedStage
from refiner_core.contract.views import StageView, ViewState
from refiner_core.report.sweep.document import TrialState
from sweeps.values import SweepPlan, Trial

#: Nodes that a page of Prefect, and the threads behind it, bear.
MOST_NODES = 240
Level = Literal["stages", "trials", "arms"]
_AS_VIEW: dict[TrialState, ViewState] = {
    "waiting": "waiting",
    "running": "running",
    "done": "done",
    "failed": "failed",
    "interrupted": "interrupted",
    "held": "interrupted",
}


class Graph:
    """The nodes of a sweep. One thread updates it, others look.

    Parameters
    ----------
    plan
        The sweep.
    most
        Nodes at most.
    """

    def __init__(self, plan: SweepPlan, most: int = MOST_NODES) -> None:
        self.plan = plan
        stages = plan.stages()
        self.level: Level = "stages"
        if len(stages) > most:
            self.level = "trials" if len(plan.trials) <= most else "arms"
        self._names = _stage_names(plan) if self.level == "stages" else {}
        self._states: dict[str, TrialState] = {t.name: "waiting" for t in plan.trials}
        self._views = {
            n.name: StageView(n.name, n.kind, n.fingerprint, "waiting") for n in self.nodes()
        }
        self._lock = threading.Lock()

    def nodes(self) -> list[Node]:
        """Each after those that come before it."""
        if self.level == "stages":
            return [self._node(stage, trial) for stage, trial in _first_of_each(self.plan)]
        names = [t.name for t in self.plan.trials]
        if self.level == "arms":
            names = [arm.name for arm in self.plan.arms]
        return [Node(name, self.level[:-1], name, "", ()) for name in names]

    def _node(self, stage: PlannedStage, trial: Trial) -> Node:
        name = self._names[stage.id]
        before = (n for role, n in stage.inputs.items() if role not in stage.at_step)
        known = {**{s.name: s.id for s in trial.plan.stages}}
        inputs = dict.fromkeys(self._names[known[n]] for n in before if n in known)
        title = f"{name} [{stage.fingerprint[:8]}]"
        return Node(name, stage.kind, title, stage.fingerprint, tuple(inputs))

    def drawing(self, owner: str, story: Story) -> Drawing:
        """All that a picture needs before anything has happened."""
        name = self.plan.sweep.name
        return Drawing(name, sweep_call(name), owner, tuple(self.nodes()), up_to_now(story))

    def views(self) -> dict[str, StageView]:
        """How every node is."""
        with self._lock:
            return dict(self._views)

    def show_stages(self, trial: Trial, views: Mapping[str, StageView]) -> None:
        """Take in how the stages of a trial are."""
        if self.level != "stages":
            return
        for name, view in views.items():
            stage = trial.plan.by_name[name]
            node = self._names.get(stage.id)
            if node is not None:
                self._put(node, replace(view, name=node))

    def show_trial(self, trial: Trial, state: TrialState, reason: str) -> None:
        """Take in how a trial as a whole is."""
        self._states[trial.name] = state
        if self.level == "trials":
            self._put(trial.name, _whole(trial.name, "trial", _AS_VIEW[state], reason))
        elif self.level == "arms":
            states = {self._states[t.name] for t in self.plan.trials if t.arm == trial.arm}
            self._put(trial.arm, _whole(trial.arm, "arm", _of_many(states), reason))
        elif state in ("done", "failed", "interrupted", "held"):
            self._end_stages(trial, state, reason)

    def end(self, reason: str) -> None:
        """Nothing more will happen: what has not ended is left for another call."""
        for name, view in self.views().items():
            if not view.terminal:
                self._put(name, replace(view, state="interrupted", message=reason))

    def _end_stages(self, trial: Trial, state: TrialState, reason: str) -> None:
        """What never came to be in a trial that is over. Others may still want a shared stage."""
        for stage in trial.plan.stages:
            node = self._names[stage.id]
            view = self.views()[node]
            if state == "done" and not view.terminal:
                self._put(node, replace(view, state="skipped"))
            elif node.startswith(f"{trial.name}/") and not view.terminal:
                self._put(node, replace(view, state="interrupted", message=reason))

    def _put(self, node: str, view: StageView) -> None:
        with self._lock:
            before = self._views.get(node)
            if before is not None and before.state == "done" and view.state != "done":
                return  # who shares a stage finds it skipped
            self._views[node] = view


def _first_of_each(plan: SweepPlan) -> list[tuple[PlannedStage, Trial]]:
    """Every stage once, with the first trial that has it, in an order in which inputs come
    first."""
    found: dict[str, tuple[PlannedStage, Trial]] = {}
    for trial in plan.trials:
        for stage in trial.plan.stages:
            found.setdefault(stage.id, (stage, trial))
    return list(found.values())


def _stage_names(plan: SweepPlan) -> dict[str, str]:
    """Stage id -> its node: ``ARM/seed1/grpo``; a shared one by its own name, with some of its
    fingerprint where several go by that."""
    count = Counter(s.id for t in plan.trials for s in t.plan.stages)
    first = _first_of_each(plan)
    alike = Counter(s.name for s, _ in first if count[s.id] > 1)
    names = {}
    for stage, trial in first:
        if count[stage.id] == 1:
            names[stage.id] = f"{trial.name}/{stage.name}"
        elif alike[stage.name] == 1:
            names[stage.id] = stage.name
        else:
            names[stage.id] = f"{stage.name}-{stage.fingerprint[:6]}"
    return names


def _whole(name: str, kind: str, state: ViewState, reason: str) -> StageView:
    code = {"failed": 1, "interrupted": 6}.get(state, 0)
    return StageView(name, kind, "", state, message=reason, exit_code=code)


def _of_many(states: set[TrialState]) -> ViewState:
    if states & {"running"} or ("waiting" in states and len(states) > 1):
        return "running"
    for state in ("waiting", "failed", "interrupted", "held"):
        if state in states:
            return _AS_VIEW[state]
    return "done"

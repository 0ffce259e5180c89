"""What the orchestrator tells the process that draws, as lines of JSON. No Prefect import.

In (drawing side): a stream of lines: first the *header* (:class:`Drawing`: recipe, run, stages and
their inputs), then a line for every :class:`~refiner_core.contract.views.StageView` that changed,
at last ``end``. Out: a :class:`Feed` that answers ``wait(stage, timeout_s)`` as a campaign does. A
stream that closes without ``end`` means that the orchestrator died.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from infra.host.reading import status_of
from refiner_core.contract.plan import Plan, PlannedStage
from refiner_core.contract.records import from_json, to_json
from refiner_core.contract.views import StageView


class NothingMore(Exception):
    """The stream is over, and this stage never came to an end."""


class Watched(Protocol):
    """What a drawing needs of a campaign. ``infra.campaign.campaign.Campaign`` and :class:`Feed`
    are one."""

    def wait(self, stage_name: str, timeout_s: float) -> StageView:
        """The stage's view, once it is terminal or ``timeout_s`` have passed."""
        ...


@dataclass(frozen=True)
class Node:
    """A stage as it stands in the graph."""

    name: str
    kind: str
    title: str
    fingerprint: str
    inputs: tuple[str, ...]  # names of stages, which come before it


@dataclass(frozen=True)
class Story:
    """Where the run tells what happens: its event log, ``…/WORKSPACE/runs/RUN/events.jsonl``, or
    that of a sweep.

    ``resumed``: the run was begun by an earlier process. What stood in the log before ``since``
    (bytes) is not news, nor are the incidents ``known`` (``STAGE/ATTEMPT``).
    """

    events: str
    resumed: bool = False
    since: int = 0
    known: tuple[str, ...] = ()

    @property
    def workspace(self) -> Path:
        """The workspace's folder."""
        return Path(self.events).parents[2]


@dataclass(frozen=True)
class Drawing:
    """All that is known before anything has happened.

    ``owner`` is the orchestrator's process (``host:pid:start time``), by which a later one can tell
    that nobody draws on.
    """

    recipe: str
    run: str
    owner: str
    nodes: tuple[Node, ...]
    story: Story | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """How flow runs are found: by recipe, by run (of a sweep ``sweep:NAME``), and those that
        go on with an earlier one."""
        more = (f"resumes:{self.run}",) if self.story is not None and self.story.resumed else ()
        return (self.recipe, self.run, f"run:{self.run}", *more)


def drawing_of(plan: Plan, run: str, owner: str, story: Story | None = None) -> Drawing:
    """The graph of a plan; ``story`` is taken to be read up to where it is now."""
    story = None if story is None else up_to_now(story)
    nodes = tuple(Node(s.name, s.kind, s.title, s.fingerprint, _before(s)) for s in plan.stages)
    return Drawing(plan.recipe, run, owner, nodes, story)


def up_to_now(story: Story) -> Story:
    """The story, taken to be read up to where it is now."""
    path = Path(story.events)
    return replace(story, since=0 if (found := status_of(path)) is None else found.st_size)


def _before(stage: PlannedStage) -> tuple[str, ...]:
    """What is over before a stage begins: not what it only reads a checkpoint of."""
    names = (name for role, name in stage.inputs.items() if role not in stage.at_step)
    return tuple(dict.fromkeys(names))


def header_line(drawing: Drawing) -> str:
    """The first line."""
    return json.dumps({"drawing": to_json(drawing)}) + "\n"


def view_line(view: StageView) -> str:
    """A line that says how a stage is now."""
    return json.dumps({"view": to_json(view)}) + "\n"


END_LINE = json.dumps({"end": True}) + "\n"


def read_header(line: str) -> Drawing:
    """The drawing in a first line.

    Raises
    ------
    ValueError
        The stream did not begin with one.
    """
    message = json.loads(line) if line.strip() else {}
    if "drawing" not in message:
        raise ValueError("The orchestrator's stream did not begin with a drawing.")
    return from_json(Drawing, message["drawing"])


class Feed:
    """The newest view of every stage, kept up by a thread that reads the orchestrator's lines."""

    def __init__(self, drawing: Drawing) -> None:
        self._views = {
            n.name: StageView(n.name, n.kind, n.fingerprint, "waiting") for n in drawing.nodes
        }
        self._changed = threading.Condition()
        self.ended = threading.Event()  # no more lines, for whichever reason
        self._lost = False

    def read(self, stream: IO[str]) -> None:
        """Take in lines until the stream closes or ends. Runs in a thread of its own."""
        for line in stream:
            try:
                message: Mapping[str, Any] = json.loads(line)
            except json.JSONDecodeError:  # the writer was killed in the middle of a line
                break
            if "end" in message:
                self.close(lost=False)
                return
            view = from_json(StageView, message["view"])
            with self._changed:
                self._views[view.name] = view
                self._changed.notify_all()
        self.close(lost=True)

    def close(self, *, lost: bool) -> None:
        """Let nobody wait any longer. ``lost``: because the orchestrator is gone."""
        with self._changed:
            self._lost = lost
            self.ended.set()
            self._changed.notify_all()

    def wait(self, stage_name: str, timeout_s: float) -> StageView:
        """The stage's view: at once when it is terminal, else after ``timeout_s`` at the latest.

        Raises
        ------
        NothingMore
            The stream is over, and the stage is not terminal.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._views[stage_name].terminal or self.ended.is_set(), timeout_s
            )
            view = self._views[stage_name]
            if self.ended.is_set() and not view.terminal:
                raise NothingMore(
                    "The orchestrator is gone; jobs that it had submitted may go on. The same "
                    "command takes up where it left off."
                    if self._lost
                    else f"The run ended while this stage was {view.state}."
                )
            return view

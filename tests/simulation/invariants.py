"""What must hold at every moment of a campaign, judged from the files and from nothing else.

In: every operation on the disk, as it is done. Out: a
:class:`~tests.simulation.world.Violation` that says what should never have happened. Nothing here
asks the code under test: a claim is a folder that was renamed into place, a token is a link to
``started.json``, a checkpoint is what its marker says.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.store.layout import Layout
from infra.store.traces import read_metrics
from refiner_core.contract.config import RetryConfig
from refiner_core.contract.planned import PlannedStage
from tests.simulation.disk import read_state
from tests.simulation.worker import Shape, chain_after
from tests.simulation.world import Process, Violation, World

#: Points between a look at the fence and what it lets through.
_GLANCE = 8
_ATTEMPT = re.compile(r"(\d{4})")


@dataclass
class _End:
    """How an attempt ended, and how far the stage's checkpoints were then."""

    failure: str
    decision: str
    saved: int
    by: Process | None  # who said so


@dataclass
class _Stage:
    """What has happened to one stage."""

    newest: int = 0
    tokens: dict[int, Process | None] = field(default_factory=dict)  # None: void
    ends: dict[int, _End] = field(default_factory=dict)
    stale: dict[int, int] = field(default_factory=dict)  # points of its process when it became so
    claims: dict[int, int | None] = field(default_factory=dict)  # attempt -> pid of who claimed it
    result: str = ""
    saved: int = 0
    setbacks: Counter[str] = field(default_factory=Counter)


class Watch:
    """Sees everything; raises for what must not be.

    Parameters
    ----------
    world, layout
        What is watched.
    shapes
        What each stage is to do.
    retries
        The budgets per class.
    """

    def __init__(
        self, world: World, layout: Layout, shapes: dict[str, Shape], retries: RetryConfig
    ) -> None:
        self.world, self.layout, self.shapes, self.retries = world, layout, shapes, retries
        self.stages: defaultdict[str, _Stage] = defaultdict(_Stage)
        self.calls: dict[int, str] = {}  # orchestrators by pid
        self.seen_at_start: dict[int, dict[str, int]] = {}
        self.cancelled: set[tuple[str, int]] = set()
        self.claims = 0
        self.is_slurm_down: Callable[[], bool] = lambda: False

    # ------------------------------------------------------------ what others tell

    def setback(self, stage_id: str, why: str) -> None:
        """Something happened for which one more attempt is right."""
        self.stages[stage_id].setbacks[why] += 1

    def scancelled(self, stage_id: str, attempt: int) -> None:
        """A person has cancelled the job.

        A job that Slurm has started again closes the attempt before its own. One that is cancelled
        between the two belongs to no attempt that could say so, and may be tried again.
        """
        stage = self.stages[stage_id]
        if (newest := stage.newest or attempt) not in stage.ends:
            self.cancelled.add((stage_id, newest))

    def call_begins(self, process: Process) -> None:
        """An orchestrator begins: what has ended by now is history to it."""
        self.calls[process.pid] = process.name
        self.seen_at_start[process.pid] = {i: s.newest for i, s in self.stages.items()}

    # ------------------------------------------------------------ what is seen

    def done(self, operation: str, path: Path) -> None:
        """One operation on the disk has been done."""
        try:
            parts = path.relative_to(self.layout.stages).parts
        except ValueError:
            return
        stage_id, name = parts[0], parts[-1]
        stage = self.stages[stage_id]
        if operation == "rename" and len(parts) == 3 and _ATTEMPT.fullmatch(name):
            self._claimed(stage_id, stage, int(name))
        elif operation == "link" and name == "started.json":
            self._started(stage_id, stage, int(parts[2]), path)
        elif operation == "link" and name == "outcome.json":
            self._closed(stage_id, stage, int(parts[2]), path)
        elif operation == "link" and name == "result.json":
            self._finished(stage_id, stage, path)
        elif "checkpoints" in parts:
            visible = operation == "rename" and len(parts) == 3 and name.startswith("step-")
            self._checkpoints(stage_id, stage, path if visible else None)

    def _claimed(self, stage_id: str, stage: _Stage, number: int) -> None:
        process = self.world.current
        if number <= stage.newest or stage.result:
            if not stage.result:
                self.world.violated(f"attempt {number} of {stage_id} was claimed a second time")
            return
        for older in range(1, number):
            self._is_stale(stage, older)
        stage.newest = number
        by = process.pid if process is not None and process.pid in self.calls else None
        stage.claims[number] = by
        self.world.tell(f"claims attempt {number} of {stage_id}")
        allowed = 1 + stage.setbacks.total() + len(self.calls)
        if number > allowed:
            self.world.violated(f"{stage_id} has {number} attempts after {stage.setbacks}")
        if by is not None:
            self._check_call(stage_id, stage, number, by)

    def _check_call(self, stage_id: str, stage: _Stage, number: int, pid: int) -> None:
        """Whether this call may try again."""
        first = self.seen_at_start[pid].get(stage_id, 0) + 1
        before = [n for n in range(first, number) if n in stage.ends]
        if number - 1 >= 1 and number - 1 not in stage.ends:
            self.world.violated(
                f"attempt {number} of {stage_id} was claimed, {number - 1} still open"
            )
        if not before or before[-1] != number - 1:
            return
        last = stage.ends[before[-1]]
        if last.decision == "stop":
            self.world.violated(f"{stage_id} was tried again by the same call after {last.failure}")
        if (stage_id, number - 1) in self.cancelled and stage.claims.get(number - 1) == pid:
            self.world.violated(f"{stage_id} was tried again by the call in which it was cancelled")
        budget = getattr(self.retries, last.failure, -1)
        count = self._in_vain(stage, before, last.failure)
        if 0 <= budget < count:
            self.world.violated(
                f"{stage_id}: try {count + 1} after {last.failure}, allowed {budget}"
            )

    def _in_vain(self, stage: _Stage, numbers: list[int], failure: str) -> int:
        """How many of the last attempts ended so, with nothing saved by any attempt since."""
        saved, count = stage.ends[numbers[-1]].saved, 0
        for number in reversed(numbers):
            end, older = stage.ends[number], stage.ends.get(number - 1)
            if end.saved != saved:
                break
            if (older.saved if older else 0) < end.saved:
                break  # it had saved something itself
            count += end.failure == failure
        return count

    def _started(self, stage_id: str, stage: _Stage, number: int, path: Path) -> None:
        if number in stage.tokens:
            self.world.violated(f"the token of attempt {number} of {stage_id} was taken twice")
        is_void = json.loads(path.read_text()).get("void")
        stage.tokens[number] = None if is_void else self.world.current
        if not is_void:
            self.world.tell(f"takes the token of attempt {number} of {stage_id}")

    def _closed(self, stage_id: str, stage: _Stage, number: int, path: Path) -> None:
        value = json.loads(path.read_text())["outcome"]
        # Who has ended the job cannot be asked; or it outlived its scancel, and was killed by us.
        if self.is_slurm_down() or value["failure"] == "hung":
            self.cancelled.discard((stage_id, number))
        self.world.tell(f"closes attempt {number}: {value['failure']}, {value['message'][:70]}")
        stage.ends[number] = _End(
            value["failure"], value["decision"], stage.saved, self.world.current
        )
        self._is_stale(stage, number)

    def _is_stale(self, stage: _Stage, number: int) -> None:
        process = stage.tokens.get(number)
        if process is not None:
            stage.stale.setdefault(number, process.points)

    def _visible(self, stage_id: str, stage: _Stage, what: str) -> None:
        """Something of the current process has become visible to others: it had the right to, if
        not now, then a moment ago, when it looked."""
        process = self.world.current
        for number, since in stage.stale.items():
            if stage.tokens.get(number) is not process or process is None:
                continue
            if process.points - since > _GLANCE:
                self.world.violated(
                    f"attempt {number} of {stage_id} is stale, and published {what}"
                )

    def _finished(self, stage_id: str, stage: _Stage, path: Path) -> None:
        if stage.result:
            self.world.violated(f"{stage_id} was finished twice")
        stage.result = path.read_text()
        self._visible(stage_id, stage, "a result")
        self.world.tell(f"{stage_id} is done")
        self._check_result(stage_id, stage, json.loads(stage.result))

    def _check_result(self, stage_id: str, stage: _Stage, result: dict[str, Any]) -> None:
        number, shape = int(result["attempt"]), self.shapes[stage_id]
        if stage.tokens.get(number) is None:
            self.world.violated(f"attempt {number} of {stage_id} has a result, and had no token")
        if result["report"].get("state") != shape.final_state(stage_id):
            self.world.violated(f"{stage_id} has done steps twice, not at all, or out of order")
        if shape.reads:
            return
        steps = [m.step for m in read_metrics(self.layout.attempt(stage_id, number).metrics)]
        if steps != list(range(1, shape.steps + 1)):
            self.world.violated(f"the metrics of {stage_id} have steps {steps}")

    def _checkpoints(self, stage_id: str, stage: _Stage, visible: Path | None) -> None:
        found = self._newest_complete(stage_id)
        if found < stage.saved and not stage.result:
            self.world.violated(
                f"{stage_id}: checkpoint {stage.saved} is gone, {found} is the newest"
            )
        stage.saved = max(stage.saved, found)
        if visible is None:
            return
        self._visible(stage_id, stage, visible.name)
        state = read_state(visible)
        if state != chain_after(stage_id, int(visible.name.removeprefix("step-"))):
            self.world.violated(f"{visible.name} of {stage_id} holds another state")

    def _newest_complete(self, stage_id: str) -> int:
        folder = self.layout.stage(stage_id).checkpoints
        try:
            names = sorted(e.name for e in os.scandir(folder) if e.name.startswith("step-"))
        except FileNotFoundError:
            return 0
        for name in reversed(names):
            marker, state = folder / name / "COMPLETE.json", folder / name / "state.bin"
            if marker.exists() and state.exists():
                return int(name.removeprefix("step-"))
        return 0

    # ------------------------------------------------------------ after every event

    def check(self) -> None:
        """What must hold between any two events."""
        for stage_id, stage in self.stages.items():
            tokens = stage.tokens.items()
            workers = [p for n, p in tokens if p is not None and self._works(stage, n, p)]
            if len(workers) > 1:
                names = ", ".join(p.name for p in workers)
                raise Violation(f"{stage_id} is worked on by {names} at a time")

    def _works(self, stage: _Stage, number: int, process: Process) -> bool:
        """Whether a process that has the token of an attempt may still be at work on it: not one
        that has ended the attempt itself, or that the scheduler could not end."""
        end = stage.ends.get(number)
        gone = not process.alive or process.lost
        return not gone and (end is None or end.by is not process)

    # ------------------------------------------------------------ in the end

    def check_end(self, stages: tuple[PlannedStage, ...]) -> None:
        """All is done, as if nothing had happened."""
        for planned in stages:
            stage, paths = self.stages[planned.id], self.layout.stage(planned.id)
            if not stage.result:
                raise Violation(f"{planned.name} was lost: {self._story(planned.id)}")
            if paths.result.read_text() != stage.result:
                raise Violation(f"the result of {planned.name} has changed")
            result = json.loads(stage.result)
            for file in result["files"]:
                path = paths.data / result["output_dir"] / file["path"]
                if not path.exists() or path.stat().st_size != file["bytes"]:
                    raise Violation(f"{planned.name} is done, and {path.name} is gone")

    def _story(self, stage_id: str) -> str:
        stage = self.stages[stage_id]
        ends = ", ".join(f"{n} {e.failure}" for n, e in sorted(stage.ends.items()))
        return f"{stage.newest} attempts ({ends or 'none ended'}), saved step {stage.saved}"

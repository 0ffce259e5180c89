"""The runs of a proof: as `refiner run` does them, each in a workspace of its own.

In: a recipe with overrides, a folder, stages that are there already. Out: finished stages. Both
runs of a proof use one copy of the code, though the checkout may be edited meanwhile.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.proving.planning import Asked
from flows.running.calls import (
    RunOutcome,
    Showing,
    make_recipe_plan,
    work_on,
)
from flows.running.recording import Pinned, pin_code, record_pinned_run
from infra.jobs.dispatch import make_router
from infra.store import atomic
from infra.store.room import no_space_guard
from infra.store.workspace import Workspace
from refiner_core.contract.errors import Interrupted, StageFailed
from refiner_core.contract.plan import Plan
from refiner_core.contract.views import StageView

Tell = Callable[[str], None]
#: How often a stage that goes on is said to go on.
_STILL_S = 30.0


@dataclass(frozen=True)
class Room:
    """A workspace of a proof, and the code that its jobs run."""

    workspace: Workspace
    pinned: Pinned

    @classmethod
    def make(cls, folder: Path) -> Room:
        """A fresh one, with the code as it is now."""
        workspace = Workspace.open(folder)
        return cls(workspace, pin_code(workspace))

    def beside(self, name: str, stages: Iterable[str]) -> Room:
        """Another one with the same code, judgements, and these finished stages.

        Judgements are shared so that it is training that is compared: a model that judges need not
        say the same twice.
        """
        other = Workspace.open(self.workspace.root.parent / name)
        for part in ("code", "judgements"):
            source, target = getattr(self.workspace.layout, part), getattr(other.layout, part)
            if source.is_dir():
                link_tree(source, target)
        share_stages(self.workspace, other, stages)
        return Room(other, self.pinned)


def run_recipe_in(
    room: Room, asked: Asked, overrides: tuple[str, ...], *, name: str, tell: Tell
) -> RunOutcome:
    """Carry a recipe out in a workspace of a proof, to its end.

    Raises
    ------
    Interrupted
        On request (Ctrl-C); nothing is proven.
    StageFailed
        A stage failed, or was ended and not taken up again; names its log.
    """
    workspace = room.workspace
    where = (f"workspace={workspace.root}", "data_root=null")
    plan = make_recipe_plan(asked.recipe, (*overrides, *where))
    make_router(plan.config.dispatch, workspace).check(plan.stages)
    run = record_pinned_run(plan, workspace, asked.recipe, (*overrides, *where), room.pinned, {})
    workspace.write_run(run)
    console = ProofConsole(name, tell)
    outcome = work_on(plan, workspace, run, Showing(False, True, (), console=console))
    _require_done(outcome, plan, console.stopping)
    return outcome


def _require_done(outcome: RunOutcome, plan: Plan, stopping: bool) -> None:
    for view in outcome.views.values():
        if view.terminal and view.state in ("done", "skipped"):
            continue
        if stopping:
            raise Interrupted(
                f"Stopped while proving {plan.recipe}; nothing was recorded",
                fix="run the same command again; it begins anew",
            )
        error = StageFailed(
            f"The proof came to no end: {view.name} {view.state}"
            + (f" ({view.message.rstrip('.')})" if view.message else ""),
            expected="the shortened recipe to run",
            fix=f"look at {view.log or 'the message'}, mend it, and run the same command again",
        )
        error.exit_code = view.exit_code or StageFailed.exit_code
        raise error


class ProofConsole:
    """Says on stderr, line by line, how the stages of a proof go."""

    def __init__(self, name: str, tell: Tell) -> None:
        self._name, self._tell = name, tell
        #: Whether somebody has pressed Ctrl-C.
        self.stopping = False
        self._states: dict[str, str] = {}
        self._said_at = time.monotonic()

    def show(self, views: Mapping[str, StageView]) -> None:
        """Stages that began or ended, and now and then how far one is."""
        for view in views.values():
            if view.state in ("running", "done", "failed") and (
                self._states.get(view.name) != view.state
            ):
                self._states[view.name] = view.state
                took = f" ({view.seconds:.0f} s)" if view.state == "done" else ""
                self._say(f"{view.name} {view.state}{took}")
            elif view.state == "running" and time.monotonic() - self._said_at > _STILL_S:
                told = view.progress
                if told is not None:
                    step = f"step {told.done} of {told.total}, " if told.total else ""
                    self._say(f"{view.name}: {step}{told.phase}")

    def note(self, message: str) -> None:
        """Say something in between: that it is being stopped."""
        self.stopping = True
        self._say(message)

    def warn(self, message: str) -> None:
        """Say something that is amiss."""
        self._say(message)

    def finish(self, views: Mapping[str, StageView]) -> None:
        """The last states."""
        self.show(views)

    def close(self) -> None:
        """There is nothing to leave."""

    def _say(self, message: str) -> None:
        self._said_at = time.monotonic()
        self._tell(f"{self._name}: {message}")


# ---------------------------------------------------------------- what is shared


def share_stages(source: Workspace, target: Workspace, stages: Iterable[str]) -> None:
    """Finished stages of another workspace, by hard links; without their checkpoints."""
    for stage_id in stages:
        if source.read_result(stage_id) is None:
            continue
        ours, theirs = (w.layout.stage(stage_id) for w in (target, source))
        link_tree(theirs.data, ours.data, leave_out=("checkpoints", "result.json"))
        link_tree(theirs.control, ours.control, leave_out=("checkpoints", "result.json"))
        # Last, and of its own: what it names is there by now.
        atomic.write_bytes(ours.result, theirs.result.read_bytes())


def link_tree(source: Path, target: Path, leave_out: tuple[str, ...] = ()) -> None:
    """The same files elsewhere, as hard links where that can be, else as copies."""

    def link(one: str, other: str) -> None:
        if Path(other).exists():
            return
        try:
            os.link(one, other)
        except OSError:
            shutil.copyfile(one, other)

    def ignored(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if n in leave_out] if Path(folder) == source else []

    with no_space_guard(target, "sharing what is done already"):
        shutil.copytree(source, target, copy_function=link, ignore=ignored, dirs_exist_ok=True)

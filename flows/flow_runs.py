"""What the flows ``pipeline`` and ``sweep`` have in common. Imports Prefect.

In: how a call is begun, worked on and ended. Out: a flow run that shows it: a task run for each
stage that begins (of a sweep: for each trial), with its progress, log, curves, numbers and card.

Who does what:

- The flow records the call, starts the orchestrator (a process in a session of its own) where
  nobody works on it, and follows what that records. It writes nothing else into the workspace but
  the wish to cancel.
- *Cancel* is recorded as `refiner cancel` does; the running stages save. *Suspend* cancels the
  stages that have not begun; those that run end by themselves. *Retry* and *Resume* go on with the
  call that the flow run's parameter names: nothing that is done runs again.
- Where this process is killed, the orchestrator works on, and a retry follows it again. Where the
  orchestrator is killed, the flow run is Crashed, and a retry starts another one.

The orchestrator alone retries stages: flows and tasks have no retries, cache or results.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import TagsContext, TaskRunContext
from prefect.events import emit_event
from prefect.exceptions import Pause, PrefectException, TerminationSignal
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run as this_run
from prefect.states import Cancelled, Completed, Crashed, Failed, Running, State

from flows.picture.artifacts import artifact_key, artifacts_of, inert, markdown_table
from flows.running.detach import Detached
from flows.running.following import Follower, Node, new_lines
from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.errors import LaunchError, RefinerError
from refiner_core.contract.types import Progress
from refiner_core.contract.views import StageView

#: Task runs that follow a stage at the same time.
MOST_TASKS = 64
_LOOK_S = 1.0
_PROGRESS_S = 5.0
#: Log lines of one stage that go to the server at a time: what is more is in the file.
_MOST_LINES = 100
#: Prefect's runner kills 30 s after it has asked.
_TERMINATION_S = 20.0
#: A busy file system may show a process's end before its last line.
_LAST_LINE_S = 5.0


@dataclass(frozen=True)
class Call:
    """A recorded run or sweep: its name, the id of its records, and what it consists of."""

    room: Workspace
    name: str
    id: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Doors:
    """How a call is begun, worked on, and ended (only the stages named, if any)."""

    begin: Callable[[], Call]
    start: Callable[[Call], Detached]
    cancel: Callable[[Call, list[str]], None]


def carry_out(title: str, folder: str, noun: str, doors: Doors) -> State[Any]:
    """Begin or find the call, let somebody work on it, and follow it to its end.

    Parameters
    ----------
    title
        The recipe or the sweep, for the flow run's name.
    folder
        Where relative paths begin.
    noun
        ``run`` or ``sweep``.
    """
    try:
        with contextlib.chdir(Path(folder).expanduser()):
            call = doors.begin()
            _name_run(title, call, noun)
            _start(call, doors)
    except (RefinerError, OSError) as error:
        return Failed(message=str(error))
    return _Follow(call, doors, noun).to_the_end()


def _name_run(title: str, call: Call, noun: str) -> None:
    """The call's id becomes a parameter of the flow run, so that a retry goes on with it."""
    tags = {*this_run.tags, f"{noun}:{call.name}"}
    parameters = {**this_run.parameters, "run": call.name, "workspace": str(call.room.root)}
    with get_client(sync_client=True) as client:
        name = f"{Path(title).stem} {call.name}" if noun == "run" else call.name
        client.update_flow_run(
            UUID(str(this_run.id)), parameters=parameters, name=name, tags=sorted(tags)
        )


def _start(call: Call, doors: Doors) -> None:
    """Let somebody work on the call: whoever does already, or a process of its own."""
    if orchestrator_of(call.room, call.id).works:
        return
    try:
        left = doors.start(call)
    except RefinerError:
        if not orchestrator_of(call.room, call.id).works:
            raise
        return  # somebody was quicker
    if left.failed and left.message and not orchestrator_of(call.room, call.id).works:
        raise LaunchError(
            f"The orchestrator ended at once: {left.message}",
            expected="it to work on the run",
            fix=f"see {left.log}, then press Retry",
        )


class _Follow:
    """One flow run that follows one call."""

    def __init__(self, call: Call, doors: Doors, noun: str) -> None:
        self._call, self._doors, self._noun = call, doors, noun
        self._follower = Follower(call.room, call.id, call.nodes)
        self._shared = _Views()
        self._futures: dict[str, PrefectFuture[Any]] = {}
        self._log = get_run_logger()
        self._run_id = UUID(str(this_run.id))
        self._ends = ""  # "cancel" or "suspend" once somebody wants it
        self._skips_told = False

    def to_the_end(self) -> State[Any]:
        """Follow until every stage has ended, or nobody works on the call any more."""
        self._emit("began")
        try:
            lost = self._until_over()
        except TerminationSignal:
            self._wish("cancel")
            self._wait_for_saves()
            raise
        finally:
            self._shared.close()
        for future in self._futures.values():
            future.wait()
        return self._last_word(self._shared.all(), lost)

    def _until_over(self) -> str:
        """Why the call has no end that it said itself; empty where it has one."""
        gone_since = None
        while True:
            views = self._follower.look()
            self._shared.put(views)
            self._show(views)
            if views and all(view.terminal for view in views.values()):
                return ""
            who = orchestrator_of(self._call.room, self._call.id)
            if who.works:
                gone_since = None
            elif gone_since is None:
                gone_since = time.monotonic()
            elif time.monotonic() - gone_since > _LAST_LINE_S:
                if who.standing == "ended":
                    return ""
                return f"The orchestrator ({who.where}) was killed, or its node was restarted."
            self._hear()
            time.sleep(_LOOK_S)

    # ------------------------------------------------------------ what somebody wants

    def _hear(self) -> None:
        """Whether this flow run is to be cancelled or suspended."""
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(self._run_id).state
        except (httpx.HTTPError, PrefectException, OSError):
            return  # work goes on without a server
        if state is None:
            return
        if state.is_cancelling() or state.is_cancelled():
            self._wish("cancel")
        elif state.is_paused():
            self._wish("suspend")

    def _wish(self, what: str) -> None:
        """Record it, once."""
        if self._ends in (what, "cancel"):
            return
        waiting = [
            v.name for v in self._shared.all().values() if v.state == "waiting" and not v.attempt
        ]
        stages = waiting if what == "suspend" else []
        self._ends = what
        if what == "suspend" and not stages:
            return
        try:
            self._doors.cancel(self._call, stages)
        except (RefinerError, OSError) as error:
            self._ends = ""
            self._log.warning("The wish to %s could not be recorded: %s", what, error)
            return
        self._log.info("%s: %s", what.capitalize(), ", ".join(stages) or "all stages save and end")

    def _wait_for_saves(self) -> None:
        """Before the runner kills this process: as long as it gives, then say what goes on."""
        until = time.monotonic() + _TERMINATION_S
        while time.monotonic() < until and orchestrator_of(self._call.room, self._call.id).works:
            time.sleep(0.2)
        views = self._follower.look()
        rows = [
            {"stage": v.name, "state": v.state, "attempt": v.attempt, "what": v.message}
            for v in views.values()
        ]
        saves = orchestrator_of(self._call.room, self._call.id).works
        head = "Stages still save." if saves else "All stages have saved and ended."
        self._put(head + "\n\n" + markdown_table(rows), "cancelled", "What was saved")

    # ------------------------------------------------------------ what is shown

    def _show(self, views: Mapping[str, StageView]) -> None:
        """Submit a task run for each stage that has begun."""
        with TagsContext(current_tags=set()):  # each tag costs a request for a concurrency slot
            for node in self._call.nodes:
                view = views[node.name]
                begun = view.state not in ("waiting", "skipped", "blocked")
                if node.name in self._futures or not (begun and (view.attempt or not node.id)):
                    continue
                before = [self._futures[n] for n in node.inputs if n in self._futures]
                done = [future for future in before if future.state.is_completed()]
                ensure = _stage_task(self._call, node, self._shared)
                self._futures[node.name] = ensure.submit(wait_for=done)
        skipped = [v for v in views.values() if v.state == "skipped"]
        if skipped and not self._skips_told and not any(v.state == "waiting" for v in skipped):
            self._skips_told = True
            rows = [{"stage": v.name, "fingerprint": v.fingerprint[:8]} for v in skipped]
            self._put(markdown_table(rows), "skipped", "Stages that were done before")

    def _last_word(self, views: Mapping[str, StageView], lost: str) -> State[Any]:
        rows = [{"stage": v.name, "state": v.state, "what": v.message} for v in views.values()]
        self._put(markdown_table(rows), "stages", "How each stage stands")
        more = f"Retry goes on from here, and so does `refiner resume {self._call.name}`."
        states = [view.state for view in views.values()]
        words = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
        failed = [f"{v.name}: {v.message}" for v in views.values() if v.state == "failed"]
        if lost:
            state: State[Any] = Crashed(message=f"{lost} {more}")
        elif failed:
            state = Failed(message="; ".join([words, *failed]) + f". {more}")
        elif all(s in ("done", "skipped") for s in states):
            state = Completed(message=words)
        elif self._ends == "suspend":
            self._emit("suspended")
            with get_client(sync_client=True) as client:
                raise Pause(state=client.read_flow_run(self._run_id).state)
        else:
            state = Cancelled(message=f"{words}. {more}")
        self._emit(str(state.type.value).lower())
        return state

    def _put(self, markdown: str, name: str, title: str) -> None:
        key = artifact_key(self._call.name, name)
        with _warned(self._log, title):
            create_markdown_artifact(inert(markdown), key=key, description=title)

    def _emit(self, what: str) -> None:
        """An event that automations can be built on."""
        resource = {
            "prefect.resource.id": f"refiner.{self._noun}.{self._call.name}",
            "prefect.resource.name": self._call.name,
            "prefect.resource.role": self._noun,
        }
        emit_event(f"refiner.{self._noun}.{what}", resource)


class _Views:
    """The newest views, for threads that wait for one of them."""

    def __init__(self) -> None:
        self._views: dict[str, StageView] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, views: Mapping[str, StageView]) -> None:
        with self._changed:
            self._views = dict(views)
            self._changed.notify_all()

    def all(self) -> dict[str, StageView]:
        with self._changed:
            return dict(self._views)

    def close(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, name: str, timeout_s: float) -> tuple[StageView, bool]:
        """The view, once it has ended or after a while; and whether nothing more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._views[name].terminal, timeout_s)
            return self._views[name], self._closed


def _stage_task(call: Call, node: Node, shared: _Views) -> Any:
    @task(  # type: ignore[untyped-decorator]
        name=node.name,
        task_run_name=node.title.replace("{", "{{").replace("}", "}}"),
        cache_policy=NO_CACHE,
        retries=0,
        persist_result=False,
    )
    def ensure() -> State[Any]:
        return _Shown(call, node).until_over(shared)

    return ensure


class _Shown:
    """One stage as its task run shows it."""

    def __init__(self, call: Call, node: Node) -> None:
        self._call, self._node = call, node
        self._log = get_run_logger()
        self._state = "Running"
        self._progress: UUID | None = None
        self._posted = (float("-inf"), None)
        self._file, self._position = "", 0

    def until_over(self, shared: _Views) -> State[Any]:
        """Show the stage until it has ended; the state that says honestly how."""
        while True:
            view, closed = shared.wait(self._node.name, _LOOK_S)
            with _warned(self._log, self._node.name):
                self._show(view)
            if view.terminal:
                with _warned(self._log, self._node.name):
                    for found in artifacts_of(self._call.name, view):
                        create_markdown_artifact(
                            found.markdown, key=found.key, description=found.description
                        )
                return _state_of(view)
            if closed:
                return Crashed(message=f"It was {view.state} when it was last seen.")

    def _show(self, view: StageView) -> None:
        name = view.state.capitalize()
        name = name if name in ("Waiting", "Queued", "Paused") else "Running"
        if name != self._state and not view.terminal:
            self._state = name
            self._log.info("%s", f"{view.state} {view.message}".strip())
            self._set_state(Running(name=name, message=view.message or None))
        self._show_log(view)
        now, progress = time.monotonic(), view.progress
        if progress is None or progress.total <= 0 or progress == self._posted[1]:
            return
        if view.terminal or now - self._posted[0] >= _PROGRESS_S:
            self._posted = (now, progress)  # type: ignore[assignment]
            self._show_progress(progress)

    def _set_state(self, state: State[Any]) -> None:
        if (context := TaskRunContext.get()) is not None:
            with get_client(sync_client=True) as client:
                client.set_task_run_state(context.task_run.id, state, force=True)

    def _show_log(self, view: StageView) -> None:
        """The stage's own log lines, which are masked where they are written."""
        if view.log != self._file:
            self._file, self._position = view.log, 0
        if not self._file:
            return
        lines, self._position = new_lines(Path(self._file), self._position)
        for line in lines[-_MOST_LINES:]:
            self._log.info("%s", line)

    def _show_progress(self, progress: Progress) -> None:
        percent = min(100.0, 100.0 * progress.done / progress.total)
        values = [f"{name} {value:.4g}" for name, value in progress.values.items()]
        text = ", ".join([f"{progress.done}/{progress.total} {progress.phase}".strip(), *values])
        if self._progress is None:
            key = artifact_key(self._call.name, self._node.name, "progress")
            self._progress = create_progress_artifact(percent, key=key, description=text)
        else:
            update_progress_artifact(self._progress, percent, description=text)


def _state_of(view: StageView) -> State[Any]:
    match view.state:
        case "done" | "skipped":
            return Completed(message=view.message or f"done in {view.seconds:.0f} s")
        case "failed":
            return Failed(message=view.message or "failed; its log says why")
        case _:
            return Cancelled(message=f"stopped: {view.message}; a retry goes on from here")


@contextlib.contextmanager
def _warned(log: Any, what: str) -> Any:
    """What is only shown may be missing: it is said, and the work goes on."""
    try:
        yield
    except (httpx.HTTPError, PrefectException, OSError) as error:
        log.warning("%s is not shown: %s", what, error)

"""Base of the flows ``pipeline`` and ``sweep``, and the task runs of stages. Imports Prefect.

In: functions that begin, work on and end a call. Out: a flow run with a task run per stage (per
trial for a sweep), each with its progress, log, numbers and card.

- The flow records the call, starts an orchestrator (a process in its own session) if none is
  running, and follows its records. It writes nothing else into the workspace except cancel
  requests.
- *Cancel* is recorded as by `refiner cancel`; running stages save. *Suspend* cancels the stages
  that have not begun; running stages finish. *Retry* and *Resume* continue the call in the flow
  run's parameter: nothing that is done runs again.
- If this process is killed, the orchestrator continues, and a retry follows it again. If the
  orchestrator is killed, the flow run is Crashed, and a retry starts another orchestrator.

Only the orchestrator retries stages: flows and tasks have no retries, cache or results.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import httpx
from prefect import flow, get_run_logger, task
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
from prefect.task_runners import ThreadPoolTaskRunner

from flows.artifacts import artifact_key, artifacts_of, inert, markdown_table
from flows.running.background import BackgroundProcess, detach_run
from flows.running.following import Follower, Node, SweepFollower, inputs_of, new_lines
from flows.running.foreground import LaunchOptions
from infra.host.processes import ProcessId
from infra.orchestrator.timeline import Incident, run_incidents
from infra.store.layout import is_sweep, sweep_call
from infra.store.orchestrators import orchestrator_of
from infra.store.sweep_records import read_sweep
from infra.store.workspace import Workspace
from refiner_core.contract.errors import LaunchError, RefinerError
from refiner_core.contract.records import to_json
from refiner_core.contract.types import Progress, StageView

#: Maximum number of task runs that follow a stage at the same time.
MOST_TASKS = 64
_LOOK_S, _GLANCE_S = 1.0, 0.1
_PROGRESS_S = 5.0
#: Maximum number of a stage's log lines sent to the server at a time; the file has the rest.
_MOST_LINES = 100
#: Prefect's runner kills the process 30 s after its request.
TERMINATION_S = 20.0
#: Maximum length of a report that the UI shows completely, in characters.
_MOST_MARKDOWN = 200_000
#: Characters of a note in the name of a flow run.
_MOST_OF_NOTE = 80
#: A busy file system may show a process's end before its last line.
LAST_LINE_S = 5.0
#: Label of a flow run: the process that follows the call, in the form of :class:`ProcessId`.
FOLLOWER = "refiner.follower"
#: Prefix of events other than those of stages: `refiner.short`, `refiner.incident` and so on.
_EVENTS = "refiner"
_started_in_terminal: ContextVar[bool] = ContextVar("begun_in_terminal", default=False)


#: Waits for a while, or until a stage has ended; its view then, and whether it is the last one.
Look = Callable[[float], tuple[StageView, bool]]


def as_task(follow: Callable[..., State[Any]], name: str, title: str) -> Any:
    """A task that shows a stage. It has no retries: the orchestrator retries stages."""
    return task(
        follow,
        name=name,
        task_run_name=title.replace("{", "{{").replace("}", "}}"),
        cache_policy=NO_CACHE,
        retries=0,
        persist_result=False,
    )


def flow_run_state(run_id: object) -> State[Any] | None:
    """Current state of a flow run on the server; None if the server does not answer."""
    try:
        with get_client(sync_client=True) as client:
            state: State[Any] | None = client.read_flow_run(UUID(str(run_id))).state
    except (httpx.HTTPError, PrefectException, OSError):
        return None
    return state


def show_stage(call: str, node: Node, look: Look) -> State[Any]:
    """Show a stage as its task run until it has ended, and return its final state."""
    shown = _ShownStage(call, node)
    while True:
        view, closed = look(_LOOK_S)
        with warned(shown.log, node.name):
            shown.show(view)
        if view.terminal:
            with warned(shown.log, node.name):
                for found in artifacts_of(call, view):
                    create_markdown_artifact(**found)
            return state_of(view)
        if closed:
            return Crashed(message=f"It was {view.state} when it was last seen.")


class _ShownStage:
    def __init__(self, call: str, node: Node) -> None:
        self._call, self._node = call, node
        self.log = get_run_logger()
        self._state = "Running"
        self._progress: UUID | None = None
        self._posted = (float("-inf"), None)
        self._file, self._position = "", 0

    def show(self, view: StageView) -> None:
        name = view.state.capitalize()
        name = name if name in ("Waiting", "Queued", "Paused") else "Running"
        if name != self._state and not view.terminal:
            self._state = name
            self.log.info("%s", f"{view.state} {view.message}".strip())
            if (context := TaskRunContext.get()) is not None:
                state = Running(name=name, message=view.message or None)
                with get_client(sync_client=True) as client:
                    client.set_task_run_state(context.task_run.id, state, force=True)
        self._show_log(view)
        now, progress = time.monotonic(), view.progress
        if progress is not None and view.state == "done":  # its last heartbeat may be older
            progress = replace(progress, done=progress.total)
        if progress is None or progress.total <= 0 or progress == self._posted[1]:
            return
        if view.terminal or now - self._posted[0] >= _PROGRESS_S:
            self._posted = (now, progress)  # type: ignore[assignment]
            self._show_progress(progress)

    def _show_log(self, view: StageView) -> None:
        """Send the stage's own log lines, which were masked when they were written."""
        if view.log != self._file:
            self._file, self._position = view.log, 0
        if not self._file:
            return
        lines, self._position = new_lines(Path(self._file), self._position)
        for line in lines[-_MOST_LINES:]:
            self.log.info("%s", line)

    def _show_progress(self, progress: Progress) -> None:
        percent = min(100.0, 100.0 * progress.done / progress.total)
        values = [f"{name} {value:.4g}" for name, value in progress.values.items()]
        text = ", ".join([f"{progress.done}/{progress.total} {progress.phase}".strip(), *values])
        if self._progress is None:
            key = artifact_key(self._call, self._node.name, "progress")
            self._progress = create_progress_artifact(percent, key=key, description=text)
        else:
            update_progress_artifact(self._progress, percent, description=text)


def state_of(view: StageView) -> State[Any]:
    """The Prefect state for a stage that has ended."""
    match view.state:
        case "done" | "skipped":
            return Completed(message=view.message or f"done in {view.seconds:.0f} s")
        case "failed":
            return Failed(message=view.message or "failed; see its log")
        case _:
            return Cancelled(message=f"stopped: {view.message}; a retry continues from here")


@contextlib.contextmanager
def warned(log: Any, what: str) -> Iterator[None]:
    """Guard for display code: an error in it is only logged."""
    try:
        yield
    except (httpx.HTTPError, PrefectException, RefinerError, OSError) as error:
        log.warning("%s is not shown: %s", what, error)


def observing_flow(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for a flow that shows a call."""
    runner = ThreadPoolTaskRunner(max_workers=MOST_TASKS)
    made: Callable[[Callable[..., Any]], Any]
    made = flow(name=name, retries=0, persist_result=False, task_runner=runner)
    return made


@dataclass(frozen=True)
class RecordedCall:
    """A recorded run or sweep: its name, the id of its records, and a reader of its events."""

    workspace: Workspace
    name: str
    id: str
    follower: Follower | SweepFollower

    @property
    def noun(self) -> str:
        """``run`` or ``sweep``."""
        return "sweep" if is_sweep(self.id) else "run"

    @property
    def label(self) -> tuple[str, tuple[str, ...]]:
        """Note and tags of a run."""
        from flows.runs.run_table import label_of

        if is_sweep(self.id):
            return "", ()
        tracking = self.workspace.read_run(self.id).config.get("tracking") or {}
        return label_of(self.workspace, self.id, tracking)

    def start(self) -> BackgroundProcess:
        """Start a background process that works on it."""
        if is_sweep(self.id):
            from flows.sweeping.launching import detach_sweep

            return detach_sweep(
                self.name, self.workspace.root, launch=LaunchOptions(use_server=False)
            )
        return detach_run(self.workspace.read_run(self.id), self.workspace.root, use_server=False)

    def end(self, how: Literal["cancel", "suspend"]) -> None:
        """Cancel it, or keep further stages from beginning."""
        from flows.running.cancelling import cancel_run, waiting_stages
        from flows.sweeping.launching import cancel_sweep, suspend_sweep

        ws, name = self.workspace, self.name
        if is_sweep(self.id):
            if how == "cancel":
                cancel_sweep(name, ws.root, wait_s=0)
            else:
                suspend_sweep(ws, name)
            return
        stages = waiting_stages(ws, ws.read_run(name)) if how == "suspend" else []
        if stages or how == "cancel":
            cancel_run(name, stages, ws.root, wait_s=0)

    @staticmethod
    def of_run(ws: Workspace, run: str) -> RecordedCall:
        """A recorded run."""
        record = ws.read_run(run)
        return RecordedCall(ws, record.run, record.run, Follower(ws, record.run, record.stages))

    @staticmethod
    def of_sweep(ws: Workspace, name: str) -> RecordedCall:
        """The newest version of a recorded sweep."""
        record = read_sweep(ws, name)
        return RecordedCall(ws, record.name, sweep_call(record.name), SweepFollower(ws, record))


@contextlib.contextmanager
def started_in_terminal() -> Iterator[None]:
    """Let flow runs inside follow a call of a terminal: they start no orchestrator."""
    token = _started_in_terminal.set(True)
    try:
        yield
    finally:
        _started_in_terminal.reset(token)


def carry_out(title: str, folder: str, begin: Callable[[], RecordedCall]) -> State[Any]:
    """Begin or find the call, start an orchestrator if none is running, and follow it to its end.

    Parameters
    ----------
    title
        The recipe or the sweep, for the flow run's name.
    folder
        Base folder of relative paths.
    begin
        Records the call, or finds it.
    """
    try:
        with contextlib.chdir(Path(folder).expanduser()):
            call = begin()
            _name_run(title, call)
            _start(call)
    except (RefinerError, OSError) as error:
        return Failed(message=str(error))
    return _FlowRun(call).to_the_end()


def _name_run(title: str, call: RecordedCall) -> None:
    """Make the call's id a parameter of the flow run, so that a retry continues it, and label the
    flow run with this process, so that others can tell whether it is still followed."""
    note, own = call.label
    tags = {*this_run.tags, f"{call.noun}:{call.name}", *own}
    parameters = {**this_run.parameters, "run": call.name, "workspace": str(call.workspace.root)}
    with get_client(sync_client=True) as client:
        name = f"{Path(title).stem} {call.name}" if call.noun == "run" else call.name
        name += f": {note[:_MOST_OF_NOTE]}" if note else ""
        run_id = UUID(str(this_run.id))
        client.update_flow_run(run_id, parameters=parameters, name=name, tags=sorted(tags))
        client.update_flow_run_labels(run_id, {FOLLOWER: str(ProcessId.of())})


def _start(call: RecordedCall) -> None:
    """Start an orchestrator for the call in its own process, if none is running."""
    if _started_in_terminal.get() or orchestrator_of(call.workspace, call.id).works:
        return
    try:
        left = call.start()
    except RefinerError:
        if not orchestrator_of(call.workspace, call.id).works:
            raise
        return  # another process was quicker
    if left.failed and left.message and not orchestrator_of(call.workspace, call.id).works:
        raise LaunchError(
            f"The orchestrator ended at once: {left.message}",
            expected="it to work on the run",
            fix=f"see {left.log}, then press Retry",
        )


class _FlowRun:
    """Follows one call in one flow run."""

    def __init__(self, call: RecordedCall) -> None:
        self._call, self._noun = call, call.noun
        self._follower = call.follower
        self._views: Mapping[str, StageView] = {}
        self._closed = False  # no further events
        self._futures: dict[str, PrefectFuture[Any]] = {}
        self._log = get_run_logger()
        self._run_id = UUID(str(this_run.id))
        self._ends = ""  # "cancel" or "suspend" once requested
        self._incidents: list[Incident] = []

    def to_the_end(self) -> State[Any]:
        """Follow the call until all stages have ended or its orchestrator is gone."""
        self._emit("began")
        try:
            lost = self._until_over()
        except Pause:  # the server has refused a task run: the flow run was suspended just now
            self._request("suspend")
            raise
        except TerminationSignal:
            self._request("cancel")
            self._wait_for_saves()
            raise
        finally:
            self._closed = True
        for future in self._futures.values():
            future.wait()
        if is_sweep(self._call.id):
            self._show_report()
        return self._last_word(self._views, lost)

    def _show_report(self) -> None:
        """Attach the sweep's current report (as of `refiner report`) to the flow run."""
        from flows.reporting.writing import make_sweep_report
        from refiner_core.report.sweep.rendering import markdown

        with warned(self._log, "the report"):
            text = markdown(make_sweep_report(self._call.name, self._call.workspace.root))
            if len(text) > _MOST_MARKDOWN:
                text = f"{text[:_MOST_MARKDOWN]}\n\nThe rest: `refiner report {self._call.name}`.\n"
            self._put(text, "report", f"Results of {self._call.name}")

    def _until_over(self) -> str:
        """Follow until the end. Returns the reason if the call recorded no end, else empty."""
        gone_since, over_since, unread = None, None, ""
        while True:
            try:
                views = self._follower.observe()
                who = orchestrator_of(self._call.workspace, self._call.id)
            except (RefinerError, OSError) as error:  # the run also waits for the file system
                if unread != str(error):
                    unread = str(error)
                    self._log.warning("The status of the stages cannot be read: %s", error)
                self._receive()
                time.sleep(_LOOK_S)
                continue
            self._views = views
            self._show(views)
            # An orchestrator that has just taken the call over has written nothing yet: until it
            # does, the stages stand as the one before has left them.
            over = bool(views) and all(view.terminal for view in views.values())
            over_since = (over_since or time.monotonic()) if over else None
            if over_since and (not who.works or time.monotonic() - over_since > LAST_LINE_S):
                return ""
            if who.works:
                gone_since = None
            elif gone_since is None:
                gone_since = time.monotonic()
            elif time.monotonic() - gone_since > LAST_LINE_S:
                if who.standing == "ended":
                    return ""
                return f"The orchestrator ({who.where}) was killed, or its node was restarted."
            self._receive()
            time.sleep(_LOOK_S)

    # ------------------------------------------------------------ requests

    def _receive(self) -> None:
        """Check for a request to cancel or suspend this flow run."""
        state = flow_run_state(self._run_id)
        if state is None:
            return
        if state.is_cancelling() or state.is_cancelled():
            self._request("cancel")
        elif state.is_paused():
            self._request("suspend")

    def _request(self, what: Literal["cancel", "suspend"]) -> None:
        """Record the request, once."""
        if self._ends in (what, "cancel"):
            return
        before, self._ends = self._ends, what
        try:
            self._call.end(what)
        except (RefinerError, OSError) as error:
            self._ends = before
            self._log.warning("The request to %s could not be recorded: %s", what, error)
            return
        said = "running stages save and end" if what == "cancel" else "no further stage begins"
        self._log.info("%s: %s", what.capitalize(), said)

    def _wait_for_saves(self) -> None:
        """Wait for saves until shortly before the runner kills this process, then show the rest."""
        until = time.monotonic() + TERMINATION_S
        while (
            time.monotonic() < until and orchestrator_of(self._call.workspace, self._call.id).works
        ):
            self._views = self._follower.observe()
            time.sleep(0.2)
        self._views = self._follower.observe()
        saves = orchestrator_of(self._call.workspace, self._call.id).works
        head = "Stages are still saving." if saves else "All stages have saved and ended."
        self._put(head, "cancelled", "Saved stages")

    # ------------------------------------------------------------ display

    def _show(self, views: Mapping[str, StageView]) -> None:
        """Submit a task run for each stage that has begun, and emit other events."""
        with TagsContext(current_tags=set()):  # each tag costs a request for a concurrency slot
            for name in self._call.follower.nodes:
                self._submit(name, views)
        with warned(self._log, "other events"):
            self._emit_events()

    def _submit(self, name: str, views: Mapping[str, StageView]) -> None:
        """Submit a task run after those of its inputs, if the stage has begun and has none yet."""
        node, view = self._call.follower.nodes[name], views[name]
        begun = view.state not in ("waiting", "skipped", "blocked")
        if name in self._futures or not (begun and (view.attempt or not node.id)):
            return
        inputs: list[str] = []
        with warned(self._log, f"the inputs of {name}"):
            inputs = inputs_of(self._call.workspace, self._call.follower.nodes, name)
        for before in inputs:
            self._submit(before, views)
        over = [n for n in inputs if n in self._futures and views[n].state == "done"]

        def ensure() -> State[Any]:
            return show_stage(self._call.name, node, partial(self._wait, name))

        made = as_task(ensure, node.name, node.title)
        self._futures[name] = made.submit(wait_for=[self._futures[n] for n in over])

    def _wait(self, name: str, timeout_s: float) -> tuple[StageView, bool]:
        until = time.monotonic() + timeout_s
        while not (self._closed or self._views[name].terminal) and time.monotonic() < until:
            time.sleep(_GLANCE_S)
        return self._views[name], self._closed

    def _emit_events(self) -> None:
        new_events = self._follower.new_events()
        for event in new_events:
            self._emit(str(event["event"]), event, of=_EVENTS)
        if new_events and not is_sweep(self._call.id):
            self._show_incidents()

    def _show_incidents(self) -> None:
        ws = self._call.workspace
        found = run_incidents(ws, ws.read_run(self._call.id))
        known = {incident.key for incident in self._incidents}
        for incident in found:
            if incident.key not in known:
                self._emit("incident", {**to_json(incident), "line": incident.line}, of=_EVENTS)
        if found and found != self._incidents:
            self._incidents = found
            title = f"Incidents of {self._call.name}, with their costs"
            text = "\n".join(f"- {incident.line}" for incident in found)
            self._put(text, "incidents", title)

    def _last_word(self, views: Mapping[str, StageView], lost: str) -> State[Any]:
        rows = [{"stage": v.name, "state": v.state, "what": v.message} for v in views.values()]
        self._put(markdown_table(rows), "stages", "State of each stage")
        more = (
            "Retry continues from here if `refiner serve` is running; from any shell: "
            f"`refiner resume {self._call.name} workspace={self._call.workspace.root}`."
        )
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
        self._emit(str(state.type.value).lower(), {"message": state.message or "", "next": more})
        return state

    def _put(self, markdown: str, name: str, title: str) -> None:
        key = artifact_key(self._call.name, name)
        with warned(self._log, title):
            create_markdown_artifact(inert(markdown), key=key, description=title)

    def _emit(self, what: str, payload: Mapping[str, Any] = {}, of: str = "") -> None:
        """Emit an event for automations."""
        resource = {
            "prefect.resource.id": f"refiner.{self._noun}.{self._call.name}",
            "prefect.resource.name": self._call.name,
            "prefect.resource.role": self._noun,
            "refiner.stage": str(payload.get("stage") or payload.get("stage_id") or ""),
        }
        emit_event(f"{of or f'refiner.{self._noun}'}.{what}", resource, payload=dict(payload))

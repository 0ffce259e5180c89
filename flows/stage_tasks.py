"""Task runs of stages, for flow runs that follow a call. Imports Prefect.

In: the newest views of a call's stages. Out: for each stage a task run with its log, progress,
numbers and card, and the state that says how it ended. The orchestrator alone retries
stages: tasks have no retries, cache or results.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
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
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectException
from prefect.states import Cancelled, Completed, Crashed, Failed, Running, State

from flows.artifacts import artifact_key, artifacts_of
from flows.running.following import Node, new_lines
from refiner_core.contract.types import Progress, StageView

_LOOK_S = 1.0
_PROGRESS_S = 5.0
#: Log lines of one stage that go to the server at a time: what is more is in the file.
_MOST_LINES = 100


class Views:
    """The newest views, for threads that wait for one of them."""

    def __init__(self) -> None:
        self._views: dict[str, StageView] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, views: Mapping[str, StageView]) -> None:
        """Take in the views as they are now."""
        with self._changed:
            self._views = dict(views)
            self._changed.notify_all()

    def all(self) -> dict[str, StageView]:
        """Every view."""
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


def as_task(follow: Callable[..., State[Any]], name: str, title: str) -> Any:
    """A task that shows a stage; the orchestrator alone retries it."""
    return task(
        follow,
        name=name,
        task_run_name=title.replace("{", "{{").replace("}", "}}"),
        cache_policy=NO_CACHE,
        retries=0,
        persist_result=False,
    )


def stage_task(call: str, node: Node, shared: Views) -> Any:
    """The task ``ensure`` of one stage of a call: it follows the stage until that has ended."""

    def ensure() -> State[Any]:
        return ShownStage(call, node).until_over(shared)

    return as_task(ensure, node.name, node.title)


def flow_run_state(run_id: object) -> State[Any] | None:
    """The state of a flow run as the server has it now; None where it does not answer: work goes on
    without it."""
    try:
        with get_client(sync_client=True) as client:
            state: State[Any] | None = client.read_flow_run(UUID(str(run_id))).state
    except (httpx.HTTPError, PrefectException, OSError):
        return None
    return state


class ShownStage:
    """One stage as its task run shows it."""

    def __init__(self, call: str, node: Node) -> None:
        self._call, self._node = call, node
        self._log = get_run_logger()
        self._state = "Running"
        self._progress: UUID | None = None
        self._posted = (float("-inf"), None)
        self._file, self._position = "", 0

    def until_over(self, shared: Views) -> State[Any]:
        """Show the stage until it has ended; the state that says honestly how."""
        while True:
            view, closed = shared.wait(self._node.name, _LOOK_S)
            with warned(self._log, self._node.name):
                self._show(view)
            if view.terminal:
                with warned(self._log, self._node.name):
                    for found in artifacts_of(self._call, view):
                        create_markdown_artifact(**found)
                return state_of(view)
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
        if progress is not None and view.state == "done":  # its last word may have come before that
            progress = replace(progress, done=progress.total)
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
            key = artifact_key(self._call, self._node.name, "progress")
            self._progress = create_progress_artifact(percent, key=key, description=text)
        else:
            update_progress_artifact(self._progress, percent, description=text)


def state_of(view: StageView) -> State[Any]:
    """The Prefect state that says how a stage has ended."""
    match view.state:
        case "done" | "skipped":
            return Completed(message=view.message or f"done in {view.seconds:.0f} s")
        case "failed":
            return Failed(message=view.message or "failed; its log says why")
        case _:
            return Cancelled(message=f"stopped: {view.message}; a retry goes on from here")


@contextlib.contextmanager
def warned(log: Any, what: str) -> Iterator[None]:
    """Guard of what is only shown: that it is missing is said, and the work goes on."""
    try:
        yield
    except (httpx.HTTPError, PrefectException, OSError) as error:
        log.warning("%s is not shown: %s", what, error)

"""Puts a stage's progress, links and artifacts on the Prefect server. Imports Prefect.

In: views of one stage. Out: artifacts on the server, attached to the task run that calls. Artifacts
are decoration: when the server does not take one, that is logged once per stage and the stage's
task goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectException
from prefect.states import Running

from flows.picture.artifacts import artifact_key, artifacts_of
from flows.picture.feed import Node
from refiner_core.contract.types import Progress
from refiner_core.contract.views import StageView

#: Progress goes to the server at most this often.
_EVERY_S = 2.0
_LOG_EVERY_S = 10.0
#: A task run is running for Prefect from the moment that it waits for its stage.
_WAITING = ("waiting", "queued", "paused")


class Poster:
    """The artifacts of one stage's task run."""

    def __init__(self, recipe: str, node: Node) -> None:
        self._recipe, self._node = recipe, node
        self._link = ""
        self._state = "Running"
        self._progress: UUID | None = None
        self._shown: Progress | None = None
        self._posted = self._logged = float("-inf")
        self._warned = False

    def show(self, view: StageView) -> None:
        """Bring link and progress up to date."""
        if view.log and view.log != self._link:
            self._link = view.log
            self._try(lambda: self._post_link(view))
        progress, now = view.progress, time.monotonic()
        if progress is not None and view.state == "done":  # its last word may have come before that
            progress = replace(progress, done=progress.total)
        if progress is None or progress == self._shown or progress.total <= 0:
            return
        if view.terminal or now - self._posted >= _EVERY_S:
            self._shown, self._posted = progress, now
            self._try(lambda: self._post_progress(progress))
        if now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            get_run_logger().info("%s", describe(progress))

    def show_state(self, view: StageView) -> None:
        """Why it does not run, as the name of its task run's state: Queued, Paused, Waiting."""
        name = view.state.capitalize() if view.state in _WAITING else "Running"
        if name == self._state or view.terminal:
            return
        self._state = name
        self._try(lambda: self._set_state(name, view.message))

    def _set_state(self, name: str, message: str) -> None:
        context = TaskRunContext.get()
        if context is None:
            return
        with get_client(sync_client=True) as client:
            state = Running(name=name, message=message or None)
            client.set_task_run_state(context.task_run.id, state, force=True)

    def finish(self, view: StageView) -> None:
        """Post what the report has to show."""
        for artifact in artifacts_of(self._recipe, view):
            self._try(
                lambda a=artifact: create_markdown_artifact(  # type: ignore[misc]
                    a.markdown, key=a.key, description=a.description
                )
            )

    def _post_link(self, view: StageView) -> None:
        create_link_artifact(
            f"file://{view.log}",
            link_text=view.log,
            key=artifact_key(self._recipe, view.name, "log"),
            description=f"Log of attempt {view.attempt} of {view.name}: `{view.log}`",
        )

    def _post_progress(self, progress: Progress) -> None:
        percent = min(100.0, 100.0 * progress.done / progress.total)
        if self._progress is None:
            key = artifact_key(self._recipe, self._node.name, "progress")
            self._progress = create_progress_artifact(
                percent, key=key, description=describe(progress)
            )
        else:
            update_progress_artifact(self._progress, percent, description=describe(progress))

    def _try(self, post: Callable[[], object]) -> None:
        try:
            post()
        except (httpx.HTTPError, PrefectException, OSError) as error:
            if not self._warned:
                self._warned = True
                get_run_logger().warning("an artifact of %s is missing: %s", self._node.name, error)


def describe(progress: Progress) -> str:
    """``12/80 rollouts, reward 0.412``."""
    parts = [f"{progress.done}/{progress.total} {progress.phase}".strip()]
    parts += [f"{name} {value:.4g}" for name, value in progress.values.items()]
    return ", ".join(parts)

"""Tells Prefect what happens in a run beside its stages: disk, cancels, incidents. Imports Prefect.

In: the run's event log, of which new lines are read as they come, and its records. Out: Prefect
events (``refiner.short``, ``refiner.reclaimed``, ``refiner.incident`` …), on which automations can
be built, and an artifact ``…-incidents`` of the flow run with the timeline so far. It is called in
the flow's own thread, so that both belong to its flow run. What Prefect does not take is logged
once; the picture goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event
from prefect.exceptions import PrefectException

from flows.picture.artifacts import artifact_key, incidents_markdown
from flows.picture.feed import Drawing, Story
from infra.campaign.history import run_incidents
from infra.campaign.timeline import Incident
from infra.host.reading import again
from infra.store.layout import is_sweep
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import to_json

#: Lines of the event log that are of use to somebody who is not looking at the run.
TOLD = (
    *("short", "reclaimed", "room", "cancel", "stop", "kill", "release", "refused", "closed"),
    *("outage", "back"),
    *("trial", "canary", "hold"),  # of a sweep
)


class News:
    """What has happened in one run since it was last asked for."""

    def __init__(self, drawing: Drawing, story: Story) -> None:
        self._drawing, self._log = drawing, Path(story.events)
        self._position = story.since
        self._workspace = Workspace.read_only(story.workspace)
        self._known = set(story.known)
        self._shown: list[Incident] = []
        self._warned = False

    def tell(self) -> None:
        """Send what is new."""
        try:
            events = list(self._new_events())
            for event in events:
                if event.get("event") in TOLD:
                    self._emit(str(event["event"]), event)
            if events and not is_sweep(self._drawing.run):  # incidents are told of single runs
                self._tell_incidents()
        except (httpx.HTTPError, PrefectException, RefinerError, OSError, ValueError) as error:
            if not self._warned:
                self._warned = True
                get_run_logger().warning("the run's events are not shown: %s", error)

    def _new_events(self) -> Iterator[Mapping[str, Any]]:
        try:
            data = again(self._read_on)
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]  # the rest of the last line is still to come
        self._position += len(whole)
        for line in whole.splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # a writer that was killed in the middle of a line
                continue

    def _read_on(self) -> bytes:
        with self._log.open("rb") as file:
            file.seek(self._position)
            return file.read()

    def _incidents(self) -> list[Incident]:
        return run_incidents(self._workspace, self._workspace.read_run(self._drawing.run))

    def _tell_incidents(self) -> None:
        found = self._incidents()
        for incident in found:
            if incident.key not in self._known:
                self._known.add(incident.key)
                self._emit("incident", {**to_json(incident), "line": incident.line})
        if found and found != self._shown:
            self._shown = found
            create_markdown_artifact(
                incidents_markdown(found),
                key=artifact_key(self._drawing.recipe, "incidents"),
                description=f"What went wrong in {self._drawing.run}, and what it cost",
            )

    def _emit(self, name: str, payload: Mapping[str, Any]) -> None:
        stage = str(payload.get("stage") or payload.get("stage_id") or "")
        resource = {
            "prefect.resource.id": f"refiner.run.{self._drawing.run}",
            "prefect.resource.name": f"{self._drawing.recipe} {self._drawing.run}",
            "refiner.stage": stage,
        }
        emit_event(f"refiner.{name}", resource, payload=dict(payload))

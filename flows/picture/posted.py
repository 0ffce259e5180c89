"""Puts a sweep's report on the Prefect server, beside the picture of the sweep. Imports Prefect.

In: the drawing of a sweep, and ``report.md`` as whoever works on the sweep keeps it fresh. Out: a
markdown artifact ``SWEEP-report`` of the flow run with each new report, and a link to the page. It
reads one small file now and then, and makes no report itself. What Prefect does not take is logged
once; the picture goes on.
"""

from __future__ import annotations

from pathlib import Path

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.exceptions import PrefectException

from flows.picture.artifacts import artifact_key
from flows.picture.feed import Drawing, Story
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError
from refiner_core.report.sweep.files import PAGE, TEXT

#: Prefect shows markdown as a whole.
_MOST_CHARACTERS = 200_000


class ReportNews:
    """The newest report of one sweep, posted when it has changed."""

    def __init__(self, drawing: Drawing, story: Story) -> None:
        self._sweep = drawing.recipe
        self._story = story
        self._seen = (0, 0)
        self._linked = False
        self._warned = False

    def tell(self) -> None:
        """Post the report if there is a new one."""
        try:
            self._tell()
        except (httpx.HTTPError, PrefectException, RefinerError, OSError) as error:
            if not self._warned:
                self._warned = True
                get_run_logger().warning("the sweep's report is not shown: %s", error)

    def _tell(self) -> None:
        folder = Workspace.read_only(self._story.workspace).layout.reports / self._sweep
        try:
            found = (folder / TEXT).stat()
        except FileNotFoundError:
            return
        seen = (found.st_mtime_ns, found.st_size)
        if seen == self._seen:
            return
        text = (folder / TEXT).read_text(encoding="utf-8")
        create_markdown_artifact(
            _shortened(text, folder / TEXT),
            key=artifact_key(self._sweep, "report"),
            description=f"What the arms of {self._sweep} have shown",
        )
        self._seen = seen
        if not self._linked and (folder / PAGE).exists():
            create_link_artifact(
                (folder / PAGE).as_uri(),
                link_text=str(folder / PAGE),
                key=artifact_key(self._sweep, "report", "page"),
                description=f"The whole report of {self._sweep}: `{folder / PAGE}`",
            )
            self._linked = True


def _shortened(text: str, path: Path) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    whole = text[:_MOST_CHARACTERS].rpartition("\n")[0]
    return f"{whole}\n\nThe rest is in `{path}`.\n"

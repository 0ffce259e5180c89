"""Small JSON files of a workspace, read with errors that say which one is damaged, and what to do.

In: paths below a workspace. Out: values and records. What is common to the records of stages
(:mod:`infra.store.stage_records`) and of runs (:mod:`infra.store.run_records`).
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from infra.store import atomic
from infra.store.layout import Layout
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.records import RECORD_VERSION, from_json

T = TypeVar("T")


def now_text() -> str:
    """The time for people (UTC, ISO 8601). Never compared with another node's."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class RecordFiles:
    """Reads the files of a workspace."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def root(self) -> Path:
        """The workspace's folder."""
        return self.layout.control

    def read_control(self, path: Path) -> dict[str, Any] | None:
        """A small JSON object of this workspace; None if it is not there.

        Raises
        ------
        WorkspaceError
            It is damaged or may not be read.
        """
        try:
            value = atomic.read_json(path)
        except (ValueError, OSError) as error:
            raise WorkspaceError(
                f"{path} cannot be read: {error}",
                expected="a JSON file that refiner has written",
                fix=self._way_out(path),
            ) from error
        return value if isinstance(value, dict) or value is None else {"value": value}

    def _way_out(self, path: Path) -> str:
        """What to do about a damaged file: the smallest folder that can go, and what that means."""
        for root, meaning in (
            (self.layout.stages, "the same command then makes the stage again"),
            (self.layout.runs, "stages and their results stay, only that call is forgotten"),
        ):
            if path.is_relative_to(root):
                return f"restore it, or delete {root / path.relative_to(root).parts[0]}: {meaning}"
        return "restore it, or name another folder with `workspace=DIR`"

    def _load(self, kind: type[T], path: Path) -> T | None:
        data = self.read_control(path)
        if data is None:
            return None
        version = data.get("version", 0)
        if isinstance(version, int) and version > RECORD_VERSION:
            raise WorkspaceError(
                f"{path} has version {version}",
                expected=f"version {RECORD_VERSION} or older",
                fix="use the refiner that wrote it, or a newer one",
            )
        try:
            return from_json(kind, data)
        except (TypeError, AttributeError, KeyError) as error:
            raise WorkspaceError(
                f"{path} is not a {kind.__name__}: {error}",
                expected="a file that refiner has written",
                fix=self._way_out(path),
            ) from error

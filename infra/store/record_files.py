"""Small JSON files of a workspace, read with errors that say which one is damaged, and what to do.

In: paths below a workspace. Out: values and records. What is common to the records of stages
(:mod:`infra.store.stage_records`) and of runs (:mod:`infra.store.run_records`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from infra.host.reading import again
from infra.store import atomic
from infra.store.layout import Layout
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.records import RECORD_VERSION, from_json

T = TypeVar("T")
log = logging.getLogger(__name__)

#: In the name of one that was set aside.
DAMAGED_FILE = ".damaged-"
#: For how long a damaged file must stand still before it is set aside, seconds.
_STILL_S = 1.0


def now_text() -> str:
    """The time for people (UTC, ISO 8601). Never compared with another node's."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class RecordFiles:
    """Reads the files of a workspace.

    Attributes
    ----------
    sets_aside
        Whether a damaged file of an attempt is renamed, so that what it said can be said anew; who
        only looks leaves it.
    """

    sets_aside = False

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._told: set[Path] = set()

    @property
    def root(self) -> Path:
        """The workspace's folder."""
        return self.layout.control

    def read_versioned(
        self, path: Path, kind: type[T], newest: int, *, what: str, fix: str
    ) -> T | None:
        """A record with a version of its own; None if it is not there.

        Raises
        ------
        WorkspaceError
            It is damaged, or of a version later than ``newest``.
        """
        data = self.read_control(path)
        if data is None:
            return None
        version = data.get("version", 0)
        if not isinstance(version, int) or version > newest:
            raise WorkspaceError(
                f"{path} has version {version}", expected=f"version {newest}", fix=fix
            )
        try:
            return from_json(kind, data)
        except (TypeError, AttributeError, KeyError) as error:
            raise WorkspaceError(
                f"{path} is not a {what}: {error}", expected="a file of refiner", fix=fix
            ) from error

    def read_control(self, path: Path) -> dict[str, Any] | None:
        """A small JSON object of this workspace; None if it is not there.

        Raises
        ------
        WorkspaceError
            It is damaged, or (with an ``errno``) could not be read.
        """
        try:
            value = atomic.read_json(path)
        except OSError as error:
            unread = WorkspaceError(
                f"{path} cannot be read: {error.strerror or error}",
                expected="a file system that answers, and to be allowed to read there",
                fix="look whether `ls` shows the folder, and run the same command again",
            )
            unread.errno = error.errno
            raise unread from error
        except ValueError as error:
            raise WorkspaceError(
                f"{path} cannot be read: {error}",
                expected="a JSON file that refiner has written",
                fix=self._way_out(path),
            ) from error
        return value if isinstance(value, dict) or value is None else {"value": value}

    def read_or_set_aside(
        self, path: Path, check: Callable[[dict[str, Any]], object] = lambda _: None
    ) -> dict[str, Any] | None:
        """As :meth:`read_control`, for a file without which one can go on: one that is damaged, or
        that ``check`` cannot make sense of, counts as not there. It is kept as evidence, as
        ``NAME.damaged-TIME``.

        Raises
        ------
        WorkspaceError
            It could not be read.
        """
        try:
            value = self.read_control(path)
            if value is not None:
                check(value)
        except WorkspaceError as error:
            if error.errno is not None:
                raise
            self._set_aside(path, str(error))
            return None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            self._set_aside(path, f"{path} makes no sense: {error!r}")
            return None
        return value

    def tell_once(self, path: Path, text: str) -> None:
        """Log what is wrong with a file that is looked at again and again."""
        if path not in self._told:
            log.warning("%s", text)
        self._told.add(path)

    def _set_aside(self, path: Path, why: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        aside = path.with_name(f"{path.name}{DAMAGED_FILE}{stamp}")
        try:
            before, is_still = again(path.read_bytes), False
            if self.sets_aside:
                time.sleep(_STILL_S)  # without hard links, somebody may just be writing it
                is_still = again(path.read_bytes) == before
            if is_still:
                path.rename(aside)
        except FileNotFoundError:
            return  # somebody else has just done it
        except OSError as error:
            self.tell_once(path, f"{why}; it is left out, and cannot be set aside: {error}")
            return
        self.tell_once(
            path, f"{why}; it is " + (f"kept as {aside.name}" if is_still else "left out")
        )

    def _way_out(self, path: Path) -> str:
        """What to do about a damaged file: the least that can go, and what that means."""
        if path.parent.parent.name == "attempts":
            return f"restore it, or move it away (`mv {path} {path}.damaged`) and go on without it"
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
        return self._built(kind, data, path)

    def _built(self, kind: type[T], data: Any, path: Path) -> T:
        """A record from what ``path`` holds."""
        try:
            return from_json(kind, data)
        except (TypeError, AttributeError, KeyError) as error:
            raise WorkspaceError(
                f"{path} is not a {kind.__name__}: {error}",
                expected="a file that refiner has written",
                fix=self._way_out(path),
            ) from error

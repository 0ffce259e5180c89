"""Small JSON files of a workspace, read with errors that say which one is damaged, and what to do.

In: paths below a workspace. Out: values, and records of any type (:meth:`RecordFiles.load`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from infra.host.reading import again
from infra.store import atomic
from infra.store.layout import AttemptPaths, Layout
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.records import RECORD_VERSION, from_json

T = TypeVar("T")
Part = Literal["config", "inputs", "batch", "scheduler", "resumed"]
log = logging.getLogger(__name__)

#: Which file of an attempt a part stands in; each was a file of its own before.
_PARTS: dict[Part, str] = {
    "config": "intent.json",
    "inputs": "intent.json",
    "batch": "job.json",
    "scheduler": "job.json",
    "resumed": "started.json",
}
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

    def load(
        self, kind: type[T], path: Path, *, newest: int = RECORD_VERSION, fix: str = ""
    ) -> T | None:
        """A record; None if it is not there.

        Parameters
        ----------
        kind
            Its dataclass.
        newest
            The newest version of it that is known here.
        fix
            What to do about one that is damaged or newer, where that is something special.

        Raises
        ------
        WorkspaceError
            It is damaged, or of a version later than ``newest``.
        """
        data = self.read_control(path)
        if data is None:
            return None
        version = data.get("version", 0)
        if isinstance(version, int) and version > newest:
            raise WorkspaceError(
                f"{path} has version {version}",
                expected=f"version {newest} or older",
                fix=fix or "use the refiner that wrote it, or a newer one",
            )
        try:
            return from_json(kind, data)
        except (TypeError, AttributeError, KeyError) as error:
            raise WorkspaceError(
                f"{path} is not a {kind.__name__}: {error}",
                expected="a file that refiner has written",
                fix=fix or self._way_out(path),
            ) from error

    def part(
        self, attempt: AttemptPaths, name: Part, said: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """A part of what an attempt's files say; empty where nobody has said it.

        ``said`` is what its file says, where that was read already.

        Raises
        ------
        WorkspaceError
            It is damaged, or could not be read.
        """
        if said is None:
            said = self.read_control(attempt.control / _PARTS[name]) or {}
        found = said.get(name)
        if found is None:  # written by an earlier version
            needed = name in ("config", "inputs")
            read = self.read_control if needed else self.read_or_set_aside
            found = read(attempt.control / f"{name}.json")
        return found or {}

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

    def glance(self, path: Path) -> dict[str, Any] | None:
        """What a file says; None, and a warning, for one that is damaged or does not let itself be
        read."""
        try:
            return self.read_control(path)
        except WorkspaceError as error:
            self.tell_once(path, str(error))
            return None

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

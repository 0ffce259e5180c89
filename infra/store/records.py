"""Small JSON files of a workspace, and the records of calls.

Errors name the damaged file and its fix (:class:`RecordFiles`). Calls: their configuration, the
process that works on them, and requests to end them (:class:`RunRecords`). Every file has one
writer; each request to cancel is a file of its own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from infra.host.files import again, exists, make_folder, names_in
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.layout import AttemptPaths, Layout
from refiner_core.contract.errors import ConfigurationError, WorkspaceError
from refiner_core.contract.records import RECORD_VERSION, RunRecord, from_json, to_json

T = TypeVar("T")
Part = Literal["config", "inputs", "batch", "scheduler", "resumed"]

#: The file that holds a part of an attempt; each part was a separate file before.
_PARTS: dict[Part, str] = {
    "config": "intent.json",
    "inputs": "intent.json",
    "batch": "job.json",
    "scheduler": "job.json",
    "resumed": "started.json",
}
#: In the name of a file that was set aside.
DAMAGED_FILE = ".damaged-"
#: A damaged file must be unchanged for this time before it is set aside, seconds.
_STILL_S = 1.0


def now_text() -> str:
    """The present time for people (UTC, ISO 8601). Never compared with another node's."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class RecordFiles:
    """Reads the files of a workspace.

    Attributes
    ----------
    sets_aside
        Whether a damaged file of an attempt is renamed, so that it can be written again; read-only
        callers leave it.
    """

    sets_aside = False

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        #: For files that are read again and again.
        self.complaints = atomic.WarningLog()

    @property
    def root(self) -> Path:
        """The workspace's folder."""
        return self.layout.control

    def replace(self, path: Path, value: Any, doing: str) -> None:
        """Replace a record.

        Raises
        ------
        NoSpaceError
            It did not fit; the old record is still there.
        """
        with no_space_guard(self.root, doing):
            make_folder(path.parent)
            atomic.write_json(path, to_json(value))

    def create(self, path: Path, value: Any, doing: str) -> bool:
        """Write a record unless it exists; True for the writer that did. Errors as in
        :meth:`replace`."""
        with no_space_guard(self.root, doing):
            make_folder(path.parent)
            return atomic.create_json(path, to_json(value))

    def load(self, kind: type[T], path: Path, *, newest: int = RECORD_VERSION) -> T | None:
        """A record; None if it does not exist.

        Parameters
        ----------
        kind
            Its dataclass.
        newest
            The newest version that this code knows.

        Raises
        ------
        WorkspaceError
            It is damaged or of a version later than ``newest``.
        """
        data = self.read_control(path)
        if data is None:
            return None
        version = data.get("version", 0)
        if isinstance(version, int) and version > newest:
            raise WorkspaceError(
                f"{path} has version {version}",
                expected=f"version {newest} or older",
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

    def part(
        self, attempt: AttemptPaths, name: Part, said: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """A part of an attempt's files; empty if it was never written.

        ``said`` is the content of its file, if it was read already.

        Raises
        ------
        WorkspaceError
            It is damaged or could not be read.
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
        """A small JSON object of this workspace; None if it does not exist.

        Raises
        ------
        WorkspaceError
            It is damaged or (with an ``errno``) could not be read.
        """
        try:
            value = atomic.read_json(path)
        except OSError as error:
            unread = WorkspaceError(
                f"{path} cannot be read: {error.strerror or error}",
                expected="a file system that answers, and permission to read there",
                fix="check that `ls` shows the folder, and run the same command again",
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
        """Like :meth:`read_control`, for a file that is not essential: if it is damaged, or
        ``check`` raises for it, it counts as missing. It is kept as evidence, as
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
        """Contents of a file; None, and a warning, if it is damaged or unreadable."""
        try:
            return self.read_control(path)
        except WorkspaceError as error:
            self.complaints.warn(path, "%s", error)
            return None

    def _set_aside(self, path: Path, why: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        aside = path.with_name(f"{path.name}{DAMAGED_FILE}{stamp}")
        try:
            before, is_still = again(path.read_bytes), False
            if self.sets_aside:
                time.sleep(_STILL_S)  # without hard links, a writer may be in the middle of it
                is_still = again(path.read_bytes) == before
            if is_still:
                path.rename(aside)
        except FileNotFoundError:
            return  # another process has just done it
        except OSError as error:
            text = "%s; it is left out, and cannot be set aside: %s"
            self.complaints.warn(path, text, why, error)
            return
        kept = f"kept as {aside.name}" if is_still else "left out"
        self.complaints.warn(path, "%s; it is %s", why, kept)

    def _way_out(self, path: Path) -> str:
        """Fix for a damaged file: the least that can be removed, and the consequence."""
        if path.parent.parent.name == "attempts":
            return f"restore it, or move it away (`mv {path} {path}.damaged`) and continue without"
        for root, meaning in (
            (self.layout.stages, "the same command then makes the stage again"),
            (self.layout.runs, "stages and their results stay, only that call is forgotten"),
            (self.root / "proofs", "`refiner prove-resume` makes another one"),
            (self.root / "certificates", "`refiner certify` makes another one"),
        ):
            if path.is_relative_to(root):
                return f"restore it, or delete {root / path.relative_to(root).parts[0]}: {meaning}"
        return "restore it, or name another folder with `workspace=DIR`"


class RunRecords(RecordFiles):
    """The part of a workspace with calls of `refiner run`."""

    def new_run_id(self, recipe: str) -> str:
        """A new id that sorts by time: ``20261121-153012-tiny-3f2a`` (UTC). Creates its folder."""
        name = "".join(c if c.isalnum() or c in "-_" else "-" for c in recipe)[:40] or "run"
        with no_space_guard(self.root, "starting a run"):
            while True:
                stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
                run_id = f"{stamp}-{name}-{secrets.token_hex(2)}"
                try:
                    self.layout.run(run_id).folder.mkdir(parents=True)
                except FileExistsError:
                    continue
                return run_id

    def write_run(self, run: RunRecord) -> None:
        """Record a call."""
        self.replace(self.layout.run(run.run).record, run, "recording the run")

    def keep_run(self, run: RunRecord) -> None:
        """Record a call unless it is recorded: a full disk must not end one that is resumed."""
        if not exists(self.layout.run(run.run).record) or self.read_run(run.run) != run:
            self.write_run(run)

    def read_run(self, run_id: str) -> RunRecord:
        """One call.

        Raises
        ------
        ConfigurationError
            There is no call of that id.
        """
        run = self.load(RunRecord, self.layout.run(run_id).record)
        if run is None:
            known = self.run_ids()[-5:]
            raise ConfigurationError(
                f"{self.root} has no run {run_id!r}",
                expected=f"one of: {', '.join(known)}" if known else "a workspace with runs",
                fix="name one of these, or another `workspace=DIR`"
                if known
                else "name another `workspace=DIR`, or start a run with `refiner run RECIPE`",
            )
        return run

    def run_ids(self) -> list[str]:
        """All recorded calls, oldest first."""
        return [n for n in names_in(self.layout.runs) if exists(self.layout.run(n).record)]

    def runs(self, *, newest_first: bool = False) -> Iterator[RunRecord]:
        """All recorded calls, by default oldest first; one with a damaged record is logged and left
        out."""
        for run_id in sorted(self.run_ids(), reverse=newest_first):
            try:
                yield self.read_run(run_id)
            except WorkspaceError as error:
                if error.errno is not None:
                    raise
                self.complaints.warn(self.layout.run(run_id).record, "%s; it is left out", error)

    def write_label(self, run_id: str, value: Mapping[str, Any]) -> None:
        """Record a call's ``note`` and ``tags``; of several writers the last one counts."""
        self.replace(self.layout.run(run_id).label, value, "recording the note")

    def read_label(self, run_id: str) -> dict[str, Any]:
        """The note and tags that a call was given later; empty if there are none."""
        return self.glance(self.layout.run(run_id).label) or {}

    def write_people(self, run_id: str, form: str, value: Mapping[str, Any]) -> None:
        """Record people's labels of a run's answers, replacing earlier ones in the same form."""
        path = self.layout.run(run_id).people
        known = (self.read_control(path) or {}).get("forms") or {}
        content = {"version": 1, "forms": {**known, form: value}}
        self.replace(path, content, "recording people's labels")

    def people_of(self, run_id: str) -> list[dict[str, Any]]:
        """Means corrected by people's labels, as entries of evaluations, each with its ``form``; of
        several forms about one number the last one read counts."""
        forms = (self.read_control(self.layout.run(run_id).people) or {}).get("forms") or {}
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for form, value in sorted(forms.items(), key=lambda item: str(item[1]["at"])):
            for entry in value["corrected"]:
                key = tuple(str(entry[name]) for name in ("evaluation", "decoding", "metric"))
                found[key] = {**entry, "form": form}
        return list(found.values())

    # ------------------------------------------------------------ the process that works on it

    def write_orchestrator(self, run_id: str, value: Mapping[str, Any]) -> None:
        """Record which process works on a call, and later its end. One writer: that process."""
        path = self.layout.run(run_id).orchestrator
        self.replace(path, value, "recording the orchestrator")

    def read_orchestrator(self, run_id: str) -> dict[str, Any] | None:
        """The recorded process that works on a call; None if there is none."""
        return self.read_control(self.layout.run(run_id).orchestrator)

    def take_turn(self, run_id: str, after: int, value: Mapping[str, Any]) -> bool:
        """Take a call over as turn ``after`` + 1 (0: the first); False if another process was
        faster. So exactly one of several simultaneous takers wins."""
        path = self.layout.run(run_id).turns / f"{after + 1:04d}.json"
        return self.create(path, value, "taking up the run")

    def newest_turn(self, run_id: str) -> tuple[int, dict[str, Any]]:
        """The last process that took a call over; ``(0, {})`` if none did."""
        found = atomic.json_files(self.layout.run(run_id).turns)
        return (int(found[-1].stem), self.read_control(found[-1]) or {}) if found else (0, {})

    def withdraw_cancel(self, run_id: str) -> bool:
        """Withdraw all requests to end, when a call is taken over; False if there were none."""
        folder = self.layout.run(run_id).cancel
        try:
            with no_space_guard(self.root, "taking up the run"):
                folder.rename(folder.with_name(f"cancelled-{secrets.token_hex(4)}"))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def request_cancel(self, run_id: str, by: str, stages: Sequence[str] = ()) -> bool:
        """Request the end of a call, or of some of its stages (by name; none: all of them).

        Returns
        -------
        bool
            False if all of it was requested before.
        """
        asked = (self.cancel_asked(run_id) or {}).get("stages")
        if asked == [] or (asked and stages and {*stages} <= {*asked}):
            return False
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        path = self.layout.run(run_id).cancel / f"{stamp}-{secrets.token_hex(4)}.json"
        value = {"by": by, "stages": list(stages), "at": now_text()}
        self.replace(path, value, "requesting the end of a run")
        return True

    def cancel_asked(self, run_id: str) -> dict[str, Any] | None:
        """The requests to end a call; None if there are none.

        Returns
        -------
        dict
            ``by`` and ``at`` of the newest request; ``stages``: all requested names, none if the
            whole call is to end.
        """
        found = map(self.read_control, atomic.json_files(self.layout.run(run_id).cancel))
        requests = [r for r in found if r is not None]
        if not requests:
            return None
        named: list[list[str]] = [r["stages"] for r in requests]
        stages = sorted({name for names in named for name in names}) if all(named) else []
        return {**requests[-1], "stages": stages}

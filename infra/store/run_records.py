"""Records of calls: what was asked for, which process works on it, who wants it to end.

In: :class:`RunRecord` values, facts about orchestrators, requests to cancel. Out: the same, read
from any shell. Every file has one writer; each request to cancel is a file of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from infra.host.reading import exists, make_folder, names_in
from infra.store import atomic
from infra.store.record_files import RecordFiles, now_text
from infra.store.room import no_space_guard
from refiner_core.contract.errors import ConfigurationError, WorkspaceError
from refiner_core.contract.records import RunRecord, to_json


class RunRecords(RecordFiles):
    """The part of a workspace that knows calls of `refiner run`."""

    def new_run_id(self, recipe: str) -> str:
        """A fresh id that sorts by time: ``20261121-153012-tiny-3f2a`` (UTC). Makes its folder."""
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
        paths = self.layout.run(run.run)
        with no_space_guard(self.root, "recording the run"):
            make_folder(paths.folder)
            atomic.write_json(paths.record, to_json(run))

    def keep_run(self, run: RunRecord) -> None:
        """Record a call unless it is: a full disk must end none that is taken up again."""
        if not exists(self.layout.run(run.run).record) or self.read_run(run.run) != run:
            self.write_run(run)

    def read_run(self, run_id: str) -> RunRecord:
        """One call.

        Raises
        ------
        ConfigurationError
            There is none of that id.
        """
        run = self.load(RunRecord, self.layout.run(run_id).record)
        if run is None:
            known = self.run_ids()[-5:]
            raise ConfigurationError(
                f"{self.root} has no run {run_id!r}",
                expected=f"one of: {', '.join(known)}" if known else "a workspace with runs",
                fix="name one of these, or another `workspace=DIR`"
                if known
                else "name another `workspace=DIR`, or begin a run with `refiner run RECIPE`",
            )
        return run

    def run_ids(self) -> list[str]:
        """All recorded calls, oldest first."""
        return [n for n in names_in(self.layout.runs) if exists(self.layout.run(n).record)]

    def runs(self, *, newest_first: bool = False) -> Iterator[RunRecord]:
        """All recorded calls, oldest first unless said otherwise; one whose record is damaged is
        named, and left out."""
        for run_id in sorted(self.run_ids(), reverse=newest_first):
            try:
                yield self.read_run(run_id)
            except WorkspaceError as error:
                if error.errno is not None:
                    raise
                self.tell_once(self.layout.run(run_id).record, f"{error}; it is left out")

    # ------------------------------------------------------------ the process that works on it

    def write_orchestrator(self, run_id: str, value: Mapping[str, Any]) -> None:
        """Say which process works on a call, and later how it ended. One writer: that process.

        Raises
        ------
        NoSpaceError
            It did not fit; what was said before is still there.
        """
        paths = self.layout.run(run_id)
        with no_space_guard(self.root, "recording the orchestrator"):
            make_folder(paths.folder)
            atomic.write_json(paths.orchestrator, dict(value))

    def read_orchestrator(self, run_id: str) -> dict[str, Any] | None:
        """Which process works on a call; None if none has said so."""
        return self.read_control(self.layout.run(run_id).orchestrator)

    def take_turn(self, run_id: str, after: int, value: Mapping[str, Any]) -> bool:
        """Take a call up, as the one after turn ``after`` (0: the first); False if somebody else
        has been faster. So of several that resume a call at once, one does."""
        folder = self.layout.run(run_id).turns
        with no_space_guard(self.root, "taking up the run"):
            make_folder(folder)
            return atomic.create_json(folder / f"{after + 1:04d}.json", dict(value))

    def newest_turn(self, run_id: str) -> tuple[int, dict[str, Any]]:
        """Who has taken a call up last; ``(0, {})`` if nobody has."""
        folder = self.layout.run(run_id).turns
        found = [folder / n for n in names_in(folder) if n[0].isdigit() and n.endswith(".json")]
        return (int(found[-1].stem), self.read_control(found[-1]) or {}) if found else (0, {})

    def withdraw_cancel(self, run_id: str) -> bool:
        """Forget what was asked to end, when a call is taken up again; False if nothing was."""
        folder = self.layout.run(run_id).cancel
        try:
            with no_space_guard(self.root, "taking up the run"):
                folder.rename(folder.with_name(f"cancelled-{secrets.token_hex(4)}"))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def ask_cancel(self, run_id: str, by: str, stages: Sequence[str] = ()) -> bool:
        """Ask for the end of a call, or of some of its stages (by name; none: all of them).

        Returns
        -------
        bool
            False if all that was asked for before.
        """
        asked = self.cancel_asked(run_id)
        if asked is not None and (
            not asked["stages"] or (stages and {*stages} <= {*asked["stages"]})
        ):
            return False
        folder = self.layout.run(run_id).cancel
        with no_space_guard(self.root, "asking for the end of a run"):
            make_folder(folder)
            stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
            value = {"by": by, "stages": list(stages), "at": now_text()}
            atomic.write_json(folder / f"{stamp}-{secrets.token_hex(4)}.json", value)
        return True

    def cancel_asked(self, run_id: str) -> dict[str, Any] | None:
        """What somebody wants to end; None if nobody wants anything.

        Returns
        -------
        dict
            ``by`` and ``at`` of the newest request; ``stages``: all names asked for, none if the
            whole call is to end.
        """
        folder = self.layout.run(run_id).cancel
        found = [folder / n for n in names_in(folder) if n[0] != "." and n.endswith(".json")]
        requests = [r for r in map(self.read_control, found) if r is not None]
        if not requests:
            return None
        named: list[list[str]] = [r["stages"] for r in requests]
        stages = sorted({name for names in named for name in names}) if all(named) else []
        return {**requests[-1], "stages": stages}

"""Records of calls: what was asked for, which process works on it, who wants it to end.

In: :class:`RunRecord` values, facts about orchestrators, requests to cancel. Out: the same, read
from any shell. Every file has one writer; each request to cancel is a file of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from infra.store import atomic
from infra.store.record_files import RecordFiles, now_text
from infra.store.room import no_space_guard
from refiner_core.contract.errors import ConfigurationError
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
            paths.folder.mkdir(parents=True, exist_ok=True)
            atomic.write_json(paths.record, to_json(run))

    def read_run(self, run_id: str) -> RunRecord:
        """One call.

        Raises
        ------
        ConfigurationError
            There is none of that id.
        """
        run = self._load(RunRecord, self.layout.run(run_id).record)
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
        try:
            names = [p.name for p in self.layout.runs.iterdir() if (p / "run.json").exists()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(names)

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
            paths.folder.mkdir(parents=True, exist_ok=True)
            atomic.write_json(paths.orchestrator, dict(value))

    def read_orchestrator(self, run_id: str) -> dict[str, Any] | None:
        """Which process works on a call; None if none has said so."""
        return self.read_control(self.layout.run(run_id).orchestrator)

    def take_turn(self, run_id: str, after: int, value: Mapping[str, Any]) -> bool:
        """Take a call up, as the one after turn ``after`` (0: the first); False if somebody else
        has been faster. So of several that resume a call at once, one does."""
        folder = self.layout.run(run_id).turns
        with no_space_guard(self.root, "taking up the run"):
            folder.mkdir(parents=True, exist_ok=True)
            return atomic.create_json(folder / f"{after + 1:04d}.json", dict(value))

    def newest_turn(self, run_id: str) -> tuple[int, dict[str, Any]]:
        """Who has taken a call up last; ``(0, {})`` if nobody has."""
        try:
            found = sorted(self.layout.run(run_id).turns.glob("[0-9]*.json"))
        except (FileNotFoundError, NotADirectoryError):
            found = []
        return (int(found[-1].stem), self.read_control(found[-1]) or {}) if found else (0, {})

    def withdraw_cancel(self, run_id: str) -> bool:
        """Forget what was asked to end, when a call is taken up again; False if nothing was."""
        folder = self.layout.run(run_id).cancel
        try:
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
            folder.mkdir(parents=True, exist_ok=True)
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
        try:
            found = sorted(self.layout.run(run_id).cancel.glob("[!.]*.json"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        requests = [r for r in map(self.read_control, found) if r is not None]
        if not requests:
            return None
        named: list[list[str]] = [r["stages"] for r in requests]
        stages = sorted({name for names in named for name in names}) if all(named) else []
        return {**requests[-1], "stages": stages}

"""Records of a nightly evaluation in a workspace: its nights, its history, alerts.

In: values. Out: the same, read from any shell. There are no locks: a file that two processes may
write at once is created exclusively by one of them, so a night that runs late, twice, or beside
another one never counts double.

    nightly/<name>/nights/2026-11-21/turns/0001.json   who has worked on the night, in order
                                     runs/CHECKPOINT-0001.json   its calls of `refiner run`
                                     missed/CHECKPOINT.json      why there is no number
                                     ended.json                  nothing is left to do
                   history/2026-11-21--CHECKPOINT--PROTOCOL.json   one line of the table
                   values/STAGE--PROTOCOL.json         watched metrics, prompt by prompt
                   alerts/ID/alert.json not-told.json            channels that failed
                   page.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.host.files import names_in
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.layout import night_call
from infra.store.orchestrators import OrchestratorProcess, orchestrator_of, take_turn
from infra.store.records import RecordFiles, now_text
from infra.store.workspace import Workspace
from refiner_core.contract.records import to_json
from refiner_core.nightly.changes import Values
from refiner_core.nightly.definition import ROW_VERSION, NightRow


class NightlyRecords(RecordFiles):
    """The records of one nightly evaluation; they need not exist."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        super().__init__(workspace.layout)
        self._workspace, self.name = workspace, name
        self.folder = workspace.layout.nightly / name

    # ------------------------------------------------------------ nights

    def nights(self) -> list[str]:
        """All nights that were started or followed up, in order."""
        return [name for name in names_in(self.folder / "nights") if name[0].isdigit()]

    def worker_of(self, night: str) -> OrchestratorProcess:
        """The last process that took a night over."""
        who = orchestrator_of(self._workspace, night_call(self.name, night))
        has_left = (self._night(night) / "turns" / f"{who.turn:04d}.left").exists()
        return replace(who, standing="ended") if has_left else who

    def take_night(self, night: str, after: int) -> bool:
        """Take a night over as turn ``after`` + 1; False if another process was faster."""
        return take_turn(self._workspace, night_call(self.name, night), after)

    def leave_night(self, night: str, turn: int) -> None:
        """Record that no process works on it any more, complete or not."""
        self._create(self._night(night) / "turns" / f"{turn:04d}.left", {"at": now_text()})

    def end_night(self, night: str, value: Mapping[str, Any]) -> bool:
        """Record that nothing is left to do in a night; once."""
        return self._create(self._night(night) / "ended.json", {**value, "at": now_text()})

    def ended(self, night: str) -> dict[str, Any] | None:
        """Record of a night's end."""
        return self.read_control(self._night(night) / "ended.json")

    def note_run(self, night: str, checkpoint: str, run: str, digest: str) -> None:
        """Record which call evaluates a checkpoint in a night, and its weights."""
        folder = self._night(night) / "runs"
        number = len(self.runs_of(night, checkpoint)) + 1
        value = {"run": run, "digest": digest, "checkpoint": checkpoint}
        while not self._create(folder / f"{checkpoint}-{number:04d}.json", value):
            number += 1

    def runs_of(self, night: str, checkpoint: str) -> list[dict[str, Any]]:
        """Calls that evaluate a checkpoint in a night, oldest first."""
        found = map(self.read_control, atomic.json_files(self._night(night) / "runs"))
        return [r for r in found if r is not None and r["checkpoint"] == checkpoint]

    def miss(self, night: str, checkpoint: str, why: str) -> None:
        """Record why a checkpoint has no number in a night, and will have none."""
        path = self._night(night) / "missed" / f"{checkpoint}.json"
        self._create(path, {"checkpoint": checkpoint, "why": why, "at": now_text()})

    def missed(self, night: str) -> dict[str, str]:
        """Checkpoint -> why it has no number in a night."""
        found = map(self.read_control, atomic.json_files(self._night(night) / "missed"))
        return {r["checkpoint"]: r["why"] for r in found if r is not None}

    # ------------------------------------------------------------ the history

    def add_row(self, row: NightRow) -> bool:
        """Write a line of the table; False if it exists."""
        return self._create(self.folder / "history" / f"{row.key}.json", to_json(row))

    def rows(self) -> list[NightRow]:
        """The whole table, by night, then by file name.

        Raises
        ------
        WorkspaceError
            A line is damaged or of a newer version.
        """
        paths = atomic.json_files(self.folder / "history")
        found = (self.load(NightRow, path, newest=ROW_VERSION) for path in paths)
        return [row for row in found if row is not None]

    def keep_values(self, stage: str, protocol: str, values: Mapping[str, Values]) -> None:
        """Store watched metrics of an evaluation by prompt: outputs may be reclaimed."""
        for metric, found in values.items():
            kept = {"prompts": list(found.prompts), "values": [float(v) for v in found.values]}
            self._create(self.folder / "values" / f"{stage}--{protocol}--{metric}.json", kept)

    def values(self, stage: str, protocol: str, metric: str) -> Values | None:
        """A metric of an evaluation by prompt; None if it was not watched then."""
        path = self.folder / "values" / f"{stage}--{protocol}--{metric}.json"
        found = self.read_control(path)
        return None if found is None else Values.of(found["prompts"], found["values"])

    # ------------------------------------------------------------ alerts

    def raise_alert(self, alert: str, value: Mapping[str, Any]) -> bool:
        """Record an alert; True for the process that did, which then sends it."""
        path = self.folder / "alerts" / alert / "alert.json"
        return self._create(path, {"at": now_text(), **value, "id": alert})

    def alerts(self) -> list[dict[str, Any]]:
        """All alerts, by the night that confirmed them."""
        folder = self.folder / "alerts"
        found = map(self.read_control, (folder / name / "alert.json" for name in names_in(folder)))
        return sorted((a for a in found if a is not None), key=lambda a: (a["night"], a["id"]))

    def note_unsent(self, alert: str, whys: Mapping[str, str]) -> None:
        """Record which channels did not accept an alert, and why."""
        self._create(self.folder / "alerts" / alert / "not-told.json", whys)

    def unsent(self, alert: str) -> dict[str, str]:
        """Channel -> why it did not accept an alert."""
        return self.read_control(self.folder / "alerts" / alert / "not-told.json") or {}

    # ------------------------------------------------------------ parts

    def write_page(self, text: str) -> Path:
        """Replace the trend page."""
        path = self.folder / "page.html"
        with no_space_guard(self.root, "writing the trend page"):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, text)
        return path

    def _night(self, night: str) -> Path:
        return self.folder / "nights" / night

    def _create(self, path: Path, value: Mapping[str, Any]) -> bool:
        return self.create(path, value, "recording a nightly evaluation")

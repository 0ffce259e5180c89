"""An orchestrator that does no work: ``python -m tests.support.recorded_call WORKSPACE RUN``.

It takes a recorded run up and shows it in Prefect as a real one does; each line of its standard
input is an event that it notes, and ``{"end": CODE}`` its last word. What its console would say
goes to standard output.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from flows.running.background import attach
from infra.host.processes import ProcessId
from infra.orchestrator.members import EventLog, stage_event
from infra.store import atomic
from infra.store.orchestrators import take_up
from infra.store.workspace import Workspace
from refiner_core.contract.records import StageResult, to_json
from refiner_core.contract.types import Progress, StageView
from tests.support.plans import claim, run_record, small_plan


class RecordedCall:
    """A run that the test plays."""

    def __init__(self, root: Path, *stages: str) -> None:
        self.room, self.plan = Workspace.open(root), small_plan(*stages)
        self.record = run_record(self.room, self.plan)
        self.room.write_run(self.record)
        self.run = self.record.run
        self.said: list[str] = []
        self.warned: list[str] = []

    @contextmanager
    def worked_on(self) -> Iterator[psutil.Process]:
        """Let a process take the run up; it is killed at the end, if it still lives."""
        command = [sys.executable, "-m", "tests.support.recorded_call"]
        with subprocess.Popen(
            [*command, str(self.room.root), self.run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as self._process:
            threading.Thread(target=self._listen, daemon=True).start()
            try:
                yield psutil.Process(self._process.pid)
            finally:
                self._process.kill()

    def shows(self, stage: str, state: str, attempt: int = 1, **more: Any) -> None:
        """Note how a stage is; its first attempt is claimed, a report makes it done."""
        planned, report = self.plan.by_name[stage], more.pop("report", None)
        if attempt and self.room.read_record(planned.id) is None:
            claim(self.room, self.plan, stage)
        if report is not None:
            result = StageResult(1, attempt, "", (), report, {}, 1.0, "2026-11-21T00:00:00+00:00")
            self.room.publish_result(planned.id, result)
        view = StageView(stage, planned.kind, planned.fingerprint, state, attempt, **more)
        self.note(stage_event(view))

    def progress(self, stage: str, progress: Progress) -> None:
        """As the stage's worker tells it."""
        path = self.room.layout.attempt(self.plan.by_name[stage].id, 1).heartbeat
        atomic.write_json(path, {"beat": progress.done, "progress": to_json(progress)})

    def log(self, stage: str, line: str) -> None:
        """As the stage's worker writes it."""
        path = self.room.layout.attempt(self.plan.by_name[stage].id, 1).log
        with path.open("a") as file:
            file.write(f"{line}\n")

    def note(self, event: Mapping[str, Any]) -> None:
        """Have an event noted."""
        self._process.stdin.write(json.dumps(event) + "\n")
        self._process.stdin.flush()

    def end(self, code: int = 0) -> None:
        """Have the orchestrator end."""
        self.note({"end": code})
        self._process.wait(400)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            how, text = json.loads(line)
            (self.said if how == "note" else self.warned).append(text)


class _Console:
    def note(self, message: str) -> None:
        print(json.dumps(["note", message]), flush=True)

    def warn(self, message: str) -> None:
        print(json.dumps(["warn", message]), flush=True)


def main(root: str, run: str) -> None:
    """Do as standard input says."""
    room = Workspace.open(root)
    take_up(room, run)
    event_log = EventLog(room, run)
    event_log.note({"event": "begin", "process": str(ProcessId.of())})
    event_log.write_orchestrator("running", None)
    attach(room, run, _Console(), sys.stdout)
    for line in sys.stdin:
        event = json.loads(line)
        if "end" in event:
            event_log.write_orchestrator("ended", event["end"])
            return
        event_log.note(event)


if __name__ == "__main__":
    main(*sys.argv[1:])

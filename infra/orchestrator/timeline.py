"""Incidents of a run: what failed, when, at what cost, and how the run continued.

In: a workspace and a run (records, last heartbeats and the event log are read), or a
:class:`StageHistory` for each stage and the run's events. Out: :class:`Incident` values in the
order of time, for terminals, Prefect, reports and cards.

    03:12 EDQUOT (errno 122) while saving step 100 on n3; 52.2 GiB reclaimed; resumed from step 99
    after 4 min; 14 GPU-minutes lost

*Lost* are the steps between the last one that an attempt finished and the one that the next attempt
resumed from, and the same share of the attempt's time, times its devices. Times come from the
writers' own clocks: they are shown, and decide nothing. Disk events are assigned to attempts by the
order of lines in the event log, not by the clock. Lines cut off by a crash and stages that never
started are left out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from infra.jobs.failures import in_words
from infra.store.workspace import Workspace
from refiner_core.contract.kinds import section_name
from refiner_core.contract.records import (
    Attempt,
    AttemptOutcome,
    RunRecord,
    StageRecord,
)
from refiner_core.report.printing import size

Event = Mapping[str, Any]

_DISK_EVENTS = ("short", "reclaimed", "room")
_STEP = re.compile(r"sav\w+ .*?step (\d+)")


@dataclass(frozen=True)
class StageHistory:
    """The input of a timeline for one stage.

    Attributes
    ----------
    name, stage_id, record
        The stage, and its attempts with their outcomes.
    beats
        Attempt number -> its last heartbeat.
    gpus
        GPUs of all its nodes, which multiply its time; 0: its CPU, as one device.
    """

    name: str
    stage_id: str
    record: StageRecord
    beats: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    gpus: int = 0

    @classmethod
    def read(
        cls, workspace: Workspace, name: str, stage_id: str, record: StageRecord, gpus: int = 0
    ) -> StageHistory:
        """A stage with the heartbeats of its attempts."""
        numbers = [attempt.number for attempt in record.attempts]
        beats = {n: workspace.read_heartbeat(stage_id, n) or {} for n in numbers}
        return cls(name, stage_id, record, beats, gpus)

    def seconds(self, attempt: Attempt) -> float | None:
        """Time that an attempt has worked, by its record or its last heartbeat."""
        known = attempt.seconds
        return self.beats.get(attempt.number, {}).get("seconds") if known is None else known


@dataclass(frozen=True)
class Incident:
    """One failure.

    Attributes
    ----------
    at
        Time of its writer's clock (ISO 8601).
    attempt
        Its number; 0 if no attempt was running.
    failure
        A failure class; ``no_room`` for a stage that lacked space to start.
    text
        One line for people, without the time.
    lost_steps, lost_seconds
        Work that was repeated; device seconds (GPU or CPU). None if it is not known (yet).
    resolved
        Another attempt has resumed, or the stage is done.
    """

    at: str
    stage: str
    attempt: int
    failure: str
    text: str
    lost_steps: int | None = None
    lost_seconds: float | None = None
    resolved: bool = False

    @property
    def key(self) -> str:
        """Key of the incident within its run: ``grpo/2``."""
        return f"{self.stage}/{self.attempt}"

    @property
    def line(self) -> str:
        """``2026-11-21 03:12 grpo: text``."""
        return f"{clock_text(self.at)} {self.stage}: {self.text}"


def incidents_of(stages: Iterable[StageHistory], events: Sequence[Event] = ()) -> list[Incident]:
    """All incidents of a run, oldest first."""
    found: list[Incident] = []
    for stage in stages:
        around = _disk_events(stage, events)
        attempts = stage.record.attempts
        for position, attempt in enumerate(attempts):
            outcome = attempt.outcome
            if outcome is None or outcome.failure == "none":
                continue
            later = attempts[position + 1 :]
            # An attempt that died before it resumed does not show what was lost.
            worked = (a for a in later if _came_to_work(stage, a))
            after = next(worked, later[0] if later else None)
            found.append(_incident(stage, attempt, outcome, after, around.get(attempt.number, ())))
        found += _before_any_attempt(stage, around.get(0, ()))
    return sorted(found, key=lambda incident: incident.at)


def _came_to_work(stage: StageHistory, attempt: Attempt) -> bool:
    open_or_done = attempt.outcome is None or attempt.outcome.failure == "none"
    resumed = attempt.resumed_from_step is not None
    return resumed or open_or_done or last_step(stage, attempt) is not None


def _incident(
    stage: StageHistory,
    attempt: Attempt,
    outcome: AttemptOutcome,
    after: Attempt | None,
    disk: Sequence[Event],
) -> Incident:
    lost_steps, lost_seconds = _lost(stage, attempt, after)
    parts = [
        _what(stage, attempt, outcome),
        *_disk_texts(disk, after is None),
        *_onward(attempt, outcome, after),
    ]
    if lost_seconds is not None and lost_seconds >= 0.5:
        lost = device_time(lost_seconds, "GPU" if stage.gpus else "CPU")
        parts.append(f"{lost} lost")
    return Incident(
        at=attempt.ended_at or attempt.claimed_at,
        stage=stage.name,
        attempt=attempt.number,
        failure=outcome.failure,
        text="; ".join(parts),
        lost_steps=lost_steps,
        lost_seconds=lost_seconds,
        resolved=after is not None or stage.record.result is not None,
    )


# ---------------------------------------------------------------- what happened


def _what(stage: StageHistory, attempt: Attempt, outcome: AttemptOutcome) -> str:
    """``EDQUOT (errno 122) while saving step 100 on n3``."""
    what = in_words(outcome.failure)
    if outcome.errno is not None:
        name = errno.errorcode.get(outcome.errno, "error")
        said = f"{name} (errno {outcome.errno})"
        what = said if outcome.failure == "disk_full" else f"{what}: {said}"
    elif outcome.failure == "bug" and outcome.message:
        what = f"bug: {first_line(outcome.message)}"
    elif outcome.failure == "killed" and "was ended by" in outcome.message:  # another rank's
        what = f"killed: {first_line(outcome.message).partition('. Expected')[0].rstrip('.')}"
    elif outcome.failure == "hung" and outcome.message:
        what = f"hung: {first_line(outcome.message, 200).partition('. Expected')[0]}"
    elif outcome.rank is not None:
        what = f"{what} in rank {outcome.rank}"
    where, node = _where(stage, attempt, outcome), outcome.node or attempt.node
    return " ".join(filter(None, [what, where, f"on {node}" if node else ""]))


def _where(stage: StageHistory, attempt: Attempt, outcome: AttemptOutcome) -> str:
    """At which step, and whether in a save."""
    if attempt.started_at is None:
        return "before it began"
    if found := _STEP.search(outcome.message):
        return f"while saving step {found[1]}"
    step = last_step(stage, attempt)
    if stage.beats.get(attempt.number, {}).get("saving"):
        return f"while saving after step {step}" if step is not None else "while saving"
    return f"after step {step}" if step else ""


def last_step(stage: StageHistory, attempt: Attempt) -> int | None:
    """The last step that an attempt is known to have finished; None if unknown."""
    if attempt.outcome is not None and attempt.outcome.step is not None:
        return attempt.outcome.step
    progress = stage.beats.get(attempt.number, {}).get("progress") or {}
    done = progress.get("done")
    return None if done is None else int(done)


def _onward(attempt: Attempt, outcome: AttemptOutcome, after: Attempt | None) -> list[str]:
    """``resumed from step 99 after 4 min``, or why no attempt followed."""
    if after is None:
        return ["not tried again by itself"] if outcome.decision == "stop" else ["not resumed yet"]
    step = after.resumed_from_step
    if step is not None:
        how = f"resumed from step {step}"
    elif after.started_at is None:
        return ["is being resumed"]
    else:
        how = "started over"
    pause = seconds_between(attempt.ended_at, after.started_at)
    if after.restart > attempt.restart and attempt.seconds is not None:
        # Slurm restarted the same job: its successor noted the end when it began.
        since = seconds_between(attempt.started_at, after.started_at)
        pause = pause if since is None else max(pause or 0.0, since - attempt.seconds)
    return [how if pause is None else f"{how} after {rough(pause)}"]


# ---------------------------------------------------------------- what it cost


def _lost(
    stage: StageHistory, attempt: Attempt, after: Attempt | None
) -> tuple[int | None, float | None]:
    """Repeated steps, and lost device seconds: the attempt's time by the share of its steps.

    An attempt that finished no step of its own lost all its time; one whose last step was saved
    lost none.
    """
    began, reached = attempt.resumed_from_step or 0, last_step(stage, attempt)
    seconds = stage.seconds(attempt)
    if attempt.started_at is None:
        return 0, 0.0  # it never began
    if after is None or (after.started_at is None and after.resumed_from_step is None):
        return None, None  # what is kept is known only once it resumes
    kept = after.resumed_from_step or 0
    done = None if reached is None else max(reached - began, 0)
    lost = None if reached is None else max(reached - kept, 0)
    if seconds is None:
        return lost, None
    share = 1.0 if not done or lost is None else min(1.0, lost / done)
    return lost, round(float(seconds) * share * max(stage.gpus, 1), 1)


# ---------------------------------------------------------------- the disk


def _disk_events(stage: StageHistory, events: Sequence[Event]) -> dict[int, list[Event]]:
    """Attempt -> disk events between its claim and the next one's."""
    found: dict[int, list[Event]] = {}
    current = 0
    for event in events:
        if event.get("event") == "claim" and event.get("stage") == stage.name:
            current = int(event.get("attempt") or 0)
        mine = event.get("stage_id") == stage.stage_id or event.get("stage") == stage.name
        if mine and event.get("event") in _DISK_EVENTS:
            found.setdefault(int(event.get("attempt") or current), []).append(event)
    return found


def _disk_texts(events: Sequence[Event], open_still: bool) -> list[str]:
    """``52.2 GiB reclaimed``, ``waited 4 min for space``; ``open_still``: not resumed yet."""
    texts = []
    reclaimed = sum(int(e.get("bytes") or 0) for e in events if e.get("event") == "reclaimed")
    if reclaimed:
        texts.append(f"{size(reclaimed)} reclaimed")
    waited = sum(float(e.get("waited_s") or 0.0) for e in events if e.get("event") == "room")
    short = sum(e.get("event") == "short" for e in events)
    if waited:
        texts.append(f"waited {rough(waited)} for space")
    elif short and open_still:
        texts.append("waits for space")
    return texts


def _before_any_attempt(stage: StageHistory, events: Sequence[Event]) -> list[Incident]:
    """A stage that could not start: not even its control files fitted."""
    first = next((e for e in events if e.get("event") == "short"), None)
    if first is None:
        return []
    need = size(int(first.get("need_bytes") or 0))
    text = "; ".join([f"no space to start ({need} needed)", *_disk_texts(events, True)])
    over = any(e.get("event") == "room" for e in events)
    at = str(first.get("at", ""))
    return [Incident(at, stage.name, 0, "no_room", text, 0, 0.0, over or bool(stage.record.result))]


# ---------------------------------------------------------------- words


def first_line(text: str, limit: int = 100) -> str:
    """First line of a message without its fix, cut to ``limit`` characters."""
    line = text.strip().partition("\n")[0].partition(" To fix it: ")[0]
    return line if len(line) <= limit else line[: limit - 1] + "…"


def clock_text(at: str) -> str:
    """``2026-11-21 03:12`` of an ISO time."""
    return at[:16].replace("T", " ")


def seconds_between(before: str | None, after: str | None) -> float | None:
    """Seconds from one time to another, at least 0; None if one is missing or not a time."""
    if before is None or after is None:
        return None
    try:
        passed = datetime.fromisoformat(after) - datetime.fromisoformat(before)
    except (ValueError, TypeError):
        return None
    return max(0.0, passed.total_seconds())


def rough(seconds: float) -> str:
    """``40 s``, ``4 min``, ``2.5 h``."""
    return " ".join(_in_units(seconds, "s", "min", "h"))


def device_time(seconds: float, device: str) -> str:
    """``14 GPU-minutes``, ``40 CPU-seconds``, ``3.2 GPU-hours``."""
    return f" {device}-".join(_in_units(seconds, "seconds", "minutes", "hours"))


def _in_units(seconds: float, *units: str) -> tuple[str, str]:
    if seconds < 90:
        return f"{seconds:.0f}", units[0]
    minutes = seconds / 60
    return (f"{minutes:.0f}", units[1]) if seconds < 5400 else (f"{minutes / 60:.1f}", units[2])


def run_incidents(workspace: Workspace, run: RunRecord) -> list[Incident]:
    """Incidents in the stages of a run, oldest first."""
    begun = filter(None, (stage_history(workspace, run, name) for name in run.stages))
    return incidents_of(begun, run_events(workspace, run.run))


def stage_history(workspace: Workspace, run: RunRecord, name: str) -> StageHistory | None:
    """One stage of a run; None if it never started."""
    stage_id = run.stages[name]
    record = workspace.read_record(stage_id)
    if record is None:
        return None
    gpus = devices_of(run.config, record.spec.kind)
    return StageHistory.read(workspace, name, stage_id, record, gpus)


def devices_of(config: Mapping[str, Any], kind: str, name: str = "gpus", least: int = 0) -> int:
    """GPUs (or cores) of all nodes that a recipe gives to a kind of stage; 0 GPUs: it is on
    CPUs."""
    resources = (config.get(section_name(kind)) or {}).get("resources") or {}
    return int(resources.get(name) or least) * int(resources.get("nodes") or 1)


def run_events(workspace: Workspace, run_id: str) -> list[dict[str, Any]]:
    """The event log of a run, oldest first."""
    return read_events(workspace.layout.run(run_id).events)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a log, oldest first; none where there is no log."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return list(events_in(path.read_text(encoding="utf-8").splitlines()))
    return []


def events_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Events of a log's lines; a line that its writer was killed in is left out."""
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event

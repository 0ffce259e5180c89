"""The incident timeline: the text and the cost of each way in which an attempt can end."""

from dataclasses import replace
from typing import Any

import pytest

from infra.orchestrator.timeline import Incident, StageHistory, incidents_of
from refiner_core.contract.records import (
    Attempt,
    AttemptOutcome,
    FailureClass,
    StageRecord,
    StageResult,
    StageSpec,
)

SPEC = StageSpec(1, "grpo", "grpo", "f" * 64, "grpo", 1, {}, {}, {})
BEGAN = {
    "claimed_at": "2026-11-21T01:00:00.000+00:00",
    "started_at": "2026-11-21T01:01:00.000+00:00",
}
ENDED = {"ended_at": "2026-11-21T03:12:00.000+00:00", "seconds": 5000.0}
FIRST = Attempt(
    1, "refiner-grpo", "slurm", "login:1:1.00", **BEGAN, **ENDED, resumed_from_step=50, node="n3"
)
AGAIN = {
    "claimed_at": "2026-11-21T03:13:00.000+00:00",
    "started_at": "2026-11-21T03:16:00.000+00:00",
}
SECOND = replace(FIRST, number=2, **AGAIN, ended_at=None, resumed_from_step=99, seconds=None)
ANEW = replace(SECOND, resumed_from_step=None)
FULL = "No space left in /scratch/checkpoints while saving the checkpoint of step 100: 122"
QUOTA = AttemptOutcome("disk_full", "resume", FULL, 5, step=100, errno=122)


def ended(failure: FailureClass, step: int | None = None, message: str = "") -> Attempt:
    decision = "stop" if failure in ("bug", "cancelled") else "resume"
    return replace(FIRST, outcome=AttemptOutcome(failure, decision, message, step=step))


def timeline(
    *attempts: Attempt,
    events: tuple[dict[str, Any], ...] = (),
    beats: dict[int, dict[str, Any]] | None = None,
    result: StageResult | None = None,
    gpus: int = 8,
) -> list[Incident]:
    record = StageRecord(SPEC, attempts, result)
    history = StageHistory("grpo", "grpo-ffff", record, beats or {}, gpus)
    return incidents_of([history], events)


def test_a_requeue_is_counted_from_the_last_sign_of_life() -> None:
    """The restarted job records the end of its last start a moment before it continues."""
    first = replace(
        ended("preempted"), started_at="2026-11-21T03:00:00+00:00", seconds=720.0,
        ended_at="2026-11-21T03:15:59+00:00",
    )  # fmt: skip
    again = replace(SECOND, started_at="2026-11-21T03:16:00+00:00", restart=1)
    (found,) = timeline(first, again)
    assert "resumed from step 99 after 4 min" in found.text


def test_the_step_100_story_reads_as_one_line() -> None:
    events = (
        {"event": "claim", "stage": "grpo", "attempt": 1},
        {"event": "reclaimed", "stage_id": "grpo-ffff", "bytes": 56_000_000_000, "items": []},
        {"event": "claim", "stage": "grpo", "attempt": 2},
    )
    (found,) = timeline(replace(FIRST, outcome=QUOTA), SECOND, events=events)
    assert found.line == (
        "2026-11-21 03:12 grpo: EDQUOT (errno 122) while saving step 100 on n3; 52.2 GiB "
        "reclaimed; resumed from step 99 after 4 min; 13 GPU-minutes lost"
    )
    assert (found.lost_steps, found.lost_seconds) == (1, 5000 / 50 * 8)
    assert found.resolved


@pytest.mark.parametrize(
    ("attempt", "after", "steps", "seconds"),
    [
        (ended("preempted", 99), SECOND, 0, 0.0),  # its last step was saved
        (ended("killed", 100), SECOND, 1, 800.0),  # one of fifty steps, on eight GPUs
        (ended("killed", 100), ANEW, 100, 40000.0),  # all of it
        (ended("killed", 50), replace(SECOND, resumed_from_step=50), 0, 40000.0),  # not one step
        (ended("killed", 100), replace(ANEW, started_at=None), None, None),
        (replace(ended("killed", 100), seconds=None), SECOND, 1, None),
    ],
)
def test_costs_of_incidents(attempt, after, steps, seconds) -> None:
    (found,) = timeline(attempt, after)
    assert (found.lost_steps, found.lost_seconds) == (steps, seconds)


def test_the_last_heartbeat_gives_the_step() -> None:
    beats = {1: {"progress": {"done": 100}, "seconds": 5000.0, "saving": True}}
    (found,) = timeline(replace(ended("killed"), seconds=None), SECOND, beats=beats, gpus=0)
    assert "while saving after step 100" in found.text
    assert found.text.endswith("2 CPU-minutes lost")
    assert found.lost_steps == 1


def test_a_later_attempt_gives_the_resumed_step() -> None:
    """It once read "started over", though the attempt after it resumed from step 99."""
    at_once = replace(
        SECOND,
        resumed_from_step=None,
        ended_at=SECOND.started_at,
        outcome=replace(QUOTA, step=None),
    )
    third = replace(SECOND, number=3, started_at="2026-11-21T03:20:00.000+00:00")
    first = timeline(replace(FIRST, outcome=QUOTA), at_once, third)[0]
    assert "resumed from step 99 after 8 min" in first.text
    assert first.lost_steps == 1


def test_a_wait_for_space_belongs_to_the_attempt_before_it() -> None:
    events = (
        {"event": "claim", "stage": "grpo", "attempt": 1},
        {"event": "short", "stage_id": "grpo-ffff", "need_bytes": 10**9},
        {"event": "short", "stage_id": "another", "need_bytes": 10**9},
    )
    (found,) = timeline(replace(FIRST, outcome=QUOTA), events=events)
    assert "not resumed" in found.text
    events = (*events, {"event": "room", "stage_id": "grpo-ffff", "waited_s": 240.0})
    (found,) = timeline(replace(FIRST, outcome=QUOTA), SECOND, events=events)
    assert "; waited 4 min for space; resumed from step 99" in found.text


def test_a_stage_without_space_to_begin_is_an_incident() -> None:
    events = ({"at": "2026-11-21T03:12", "event": "short", "stage": "grpo", "need_bytes": 1 << 20},)
    (found,) = timeline(events=events)
    assert "1.0 MiB" in found.text
    assert (found.attempt, found.failure, found.resolved) == (0, "no_room", False)

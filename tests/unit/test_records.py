"""Records survive JSON, newer keys and missing optional ones."""

from __future__ import annotations

import json

import pytest

from refiner_core.contract.records import (
    Attempt,
    Outcome,
    OutputFile,
    StageRecord,
    StageResult,
    StageSpec,
    from_json,
    to_json,
)

SPEC = StageSpec(1, "sft", "sft", "f" * 64, "sft", 1, {"seed": 1}, {}, {"data": "d" * 64})
ATTEMPT = Attempt(1, "refiner-x", "local", "host:1:2", "2026-01-01T00:00:00Z")
RESULT = StageResult(
    1, 1, "attempts/0001/output", (OutputFile("a", 1, "b"),), {"x": 1}, {}, 2.5, "2026-01-01"
)


def test_round_trip() -> None:
    outcome = Outcome("killed", "resume", "gone", 1)
    record = StageRecord(SPEC, (ATTEMPT, Attempt(**{**vars(ATTEMPT), "outcome": outcome})), RESULT)
    assert from_json(StageRecord, json.loads(json.dumps(to_json(record)))) == record


def test_keys_of_a_newer_version_are_ignored_and_missing_ones_are_not() -> None:
    data = to_json(ATTEMPT)
    assert from_json(Attempt, {**data, "mood": "good"}) == ATTEMPT
    assert from_json(Attempt, {**data, "seconds": 3}).seconds == 3, "a whole number is a number"
    del data["comment"]
    with pytest.raises(TypeError, match="comment"):
        from_json(Attempt, data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("number", "one"),
        ("number", True),
        ("executor", None),
        ("outcome", "gone"),
        ("outcome", {"failure": 3, "decision": "stop"}),
    ],
)
def test_a_value_of_another_type_is_named_where_it_is_read(key: str, value: object) -> None:
    """And not where somebody works with it, in another process, hours later."""
    with pytest.raises(TypeError, match=f"Attempt.{key}"):
        from_json(Attempt, {**to_json(ATTEMPT), key: value})

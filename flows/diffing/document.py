"""Everything in which two sides differ, as one value.

In: two :class:`~flows.diffing.sides.Side`. Out: a :class:`Difference`; JSON by :func:`as_json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flows.diffing.numbers import NumberChange, SampleChange, number_changes, sample_changes
from flows.diffing.rows import FileRows, row_changes
from flows.diffing.settings import (
    Change,
    CodeChange,
    FieldChange,
    StageChange,
    code_change,
    environment_changes,
    field_changes,
    judge_changes,
    rubric_changes,
    source_changes,
    stage_changes,
)
from flows.diffing.sides import Half, Pair, Side, pairs_of
from flows.diffing.training import Divergence, divergences
from infra.orchestrator.history import run_incidents
from refiner_core.contract.records import to_json

DIFF_VERSION = 1


@dataclass(frozen=True)
class AttemptChange:
    """How often a stage was tried on each side, and the steps that later attempts went on from."""

    stage: str
    a: int
    b: int
    a_resumed: tuple[int, ...] = ()
    b_resumed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Difference:
    """In what two sides differ.

    ``equal`` is about what came out: every stage of both is there, and outputs, rows, steps and
    numbers are bitwise the same. Other machines, code or execution settings alone are listed, and
    make nothing unequal. None: not all of it is done yet, and what is done is equal.
    """

    a: str
    b: str
    a_workspace: str
    b_workspace: str
    equal: bool | None
    stages: tuple[StageChange, ...]
    fields: tuple[FieldChange, ...]
    sources: tuple[Change, ...]
    rows: tuple[FileRows, ...]
    code: CodeChange | None
    judge: tuple[Change, ...]
    rubrics: tuple[Change, ...]
    environment: tuple[Change, ...]
    training: tuple[Divergence, ...]
    samples: tuple[SampleChange, ...]
    numbers: tuple[NumberChange, ...]
    attempts: tuple[AttemptChange, ...]
    incidents: tuple[tuple[str, ...], tuple[str, ...]]


def diff_sides(a: Side, b: Side) -> Difference:
    """In what two sides differ; reads records and files, imports nothing heavy."""
    pairs = pairs_of(a, b)
    stages = stage_changes(pairs)
    rows, training = row_changes(pairs), divergences(pairs)
    samples, numbers = sample_changes(pairs), number_changes(pairs)
    return Difference(
        a=a.label,
        b=b.label,
        a_workspace=str(a.workspace.root),
        b_workspace=str(b.workspace.root),
        equal=_equal(stages, rows, training, samples, numbers),
        stages=tuple(stages),
        fields=tuple(field_changes(a, b, pairs)),
        sources=tuple(source_changes(pairs)),
        rows=tuple(rows),
        code=code_change(a, b, pairs),
        judge=tuple(judge_changes(pairs)),
        rubrics=tuple(rubric_changes(pairs)),
        environment=tuple(environment_changes(pairs)),
        training=tuple(training),
        samples=tuple(samples),
        numbers=tuple(numbers),
        attempts=tuple(_attempts(pairs)),
        incidents=(_incidents(a), _incidents(b)),
    )


#: Output files that say where and when, beside what came out.
_OF_A_MOMENT = ("README.md", "refiner.json", "results.json", "report.json")
#: Kinds whose output is a copy with a card on it: what came out is said by the others.
_COPIES = ("publish", "card", "fetch", "serve")


def _equal(
    stages: Sequence[StageChange],
    rows: Sequence[FileRows],
    training: Sequence[Divergence],
    samples: Sequence[SampleChange],
    numbers: Sequence[NumberChange],
) -> bool | None:
    if any(s.relation in ("only a", "only b") for s in stages):
        return False
    if rows or samples or any(d.step is not None or d.note for d in training):
        return False
    if any(not n.same for n in numbers):
        return False
    counted = [s for s in stages if (s.a or "").rpartition("-")[0] not in _COPIES]
    if any(_weighty(s.outputs) for s in counted if s.outputs is not None):
        return False
    return None if any(s.outputs is None for s in counted) else True


def _weighty(outputs: tuple[str, ...]) -> bool:
    return any(path.rpartition("/")[2] not in _OF_A_MOMENT for path in outputs)


def _attempts(pairs: Sequence[Pair]) -> list[AttemptChange]:
    found = []
    for pair in pairs:
        if (both := pair.both) is None:
            continue
        (one, resumed), (other, resumed_too) = (_tried(half) for half in both)
        if (one, resumed) != (other, resumed_too):
            found.append(AttemptChange(pair.name, one, other, resumed, resumed_too))
    return found


def _tried(half: Half) -> tuple[int, tuple[int, ...]]:
    attempts = half.record.attempts if half.record is not None else ()
    steps = (a.resumed_from_step for a in attempts)
    return len(attempts), tuple(step for step in steps if step is not None)


def _incidents(side: Side) -> tuple[str, ...]:
    if side.run is None:
        return ()
    found = run_incidents(side.workspace, side.run)
    return tuple(i.line for i in found if i.stage in side.stages)


def as_json(found: Difference) -> dict[str, Any]:
    """All of it, JSON-ready."""
    value: dict[str, Any] = to_json(found)
    for entry, number in zip(value["numbers"], found.numbers, strict=True):
        entry["same"] = number.same
    return {"version": DIFF_VERSION, **value}

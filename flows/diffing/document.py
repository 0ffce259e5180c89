"""Everything in which two sides differ, as one value, as JSON, and for a terminal.

In: two :class:`~flows.diffing.sides.Side`. Out: a :class:`Difference`; lines and JSON of it, and
the commands that go on from it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.diffing import changes
from flows.diffing.changes import Row
from flows.diffing.sides import Pair, Side, both_of, find_side, pairs_of
from infra.orchestrator.timeline import run_incidents
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.records import to_json
from refiner_core.contract.services import CONSUMERS
from refiner_core.report.pages import template_of

DIFF_VERSION = 1


@dataclass(frozen=True)
class Difference:
    """In what two sides differ.

    ``equal`` is about what came out: every stage of both is there, and outputs, rows, steps and
    numbers are bitwise the same. Other machines, code or execution settings alone are listed, and
    make nothing unequal. None: not all of it is done yet, and what is done is equal. The other
    fields are as ``refiner diff --json`` has them (:mod:`flows.diffing.changes`).
    """

    a: str
    b: str
    a_workspace: str
    b_workspace: str
    equal: bool | None
    stages: Sequence[Row]
    fields: Sequence[Row]
    sources: Sequence[Row]
    rows: Sequence[Row]
    code: Row | None
    judge: Sequence[Row]
    rubrics: Sequence[Row]
    environment: Sequence[Row]
    training: Sequence[Row]
    samples: Sequence[Row]
    numbers: Sequence[Row]
    attempts: Sequence[Row]
    incidents: Sequence[Sequence[str]]


def diff_runs(
    a: str,
    b: str,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    other: str | Path | None = None,
) -> Difference:
    """In what two runs, trials or stages differ, down to the first step that is not the same.

    Parameters
    ----------
    a, b
        Runs, trials (``SWEEP:ARM/seed1``) or stages (``RUN:STAGE``).
    workspace
        The folder that they are recorded in.
    other
        The workspace of ``b``, where it is another one.

    Returns
    -------
    Difference
        ``equal`` is True where what came out is bitwise the same, None where not all is there.

    Raises
    ------
    ConfigurationError
        One of them is not there; names the nearest.
    """
    room = Workspace.read_only(workspace)
    second = room if other is None else Workspace.read_only(other)
    return diff_sides(find_side(room, a), find_side(second, b))


def diff_sides(a: Side, b: Side) -> Difference:
    """In what two sides differ; reads records and files, imports nothing heavy."""
    pairs = pairs_of(a, b)
    numbers, samples = changes.evaluation_changes(pairs)
    found = Difference(
        a=a.label,
        b=b.label,
        a_workspace=str(a.workspace.root),
        b_workspace=str(b.workspace.root),
        equal=None,
        stages=[changes.stage_change(pair) for pair in pairs],
        fields=changes.field_changes(a, b, pairs),
        sources=changes.changes(pairs, changes.sources_of),
        rows=list(changes.row_changes(pairs)),
        code=changes.code_change(a, b, pairs),
        judge=changes.changes(pairs, changes.judge_of, *CONSUMERS),
        rubrics=changes.changes(pairs, changes.rubrics_of, *CONSUMERS),
        environment=changes.changes(pairs, changes.environment_of),
        training=list(changes.divergences(pairs)),
        samples=samples,
        numbers=numbers,
        attempts=list(_attempt_changes(pairs)),
        incidents=(_incidents(a), _incidents(b)),
    )
    return replace(found, equal=_equal(found))


#: Output files that say where and when, beside what came out.
_OF_A_MOMENT = ("README.md", "refiner.json", "results.json", "report.json")
#: Kinds whose output is a copy with a card on it: what came out is said by the others.
_COPIES = ("publish", "card", "fetch", "serve")


def _equal(found: Difference) -> bool | None:
    if any(s["relation"] in ("only a", "only b") for s in found.stages):
        return False
    if found.rows or found.samples:
        return False
    if any(d["step"] is not None or d["note"] for d in found.training):
        return False
    counted = [s for s in found.stages if (s["a"] or "").rpartition("-")[0] not in _COPIES]
    outputs = [path for s in counted for path in s["outputs"] or ()]
    weighty = any(path.rpartition("/")[2] not in _OF_A_MOMENT for path in outputs)
    if weighty or not all(n["same"] for n in found.numbers):
        return False
    return None if any(s["outputs"] is None for s in counted) else True


def _attempt_changes(pairs: Sequence[Pair]) -> Iterator[Row]:
    """Attempts at a stage on each side, and the steps that later ones went on from."""
    for name, *halves in both_of(pairs):
        counts = [len(half.attempts) for half in halves]
        steps = [
            [t.resumed_from_step for t in half.attempts if t.resumed_from_step is not None]
            for half in halves
        ]
        if counts[0] != counts[1] or steps[0] != steps[1]:
            resumed = {"a_resumed": steps[0], "b_resumed": steps[1]}
            yield {"stage": name, "a": counts[0], "b": counts[1], **resumed}


def _incidents(side: Side) -> tuple[str, ...]:
    if side.run is None:
        return ()
    found = run_incidents(side.workspace, side.run)
    return tuple(i.line for i in found if i.stage in side.stages)


def as_json(found: Difference) -> dict[str, Any]:
    """All of it, JSON-ready."""
    return {"version": DIFF_VERSION, **to_json(found)}


def difference_lines(found: Difference) -> Iterator[str]:
    """All sections in which there is something to say; first whether what came out is equal."""
    text = template_of(__package__, "difference.txt.jinja")
    yield from text.render(d=found, verdict=verdict(found), show=_show).splitlines()


def verdict(found: Difference) -> str:
    """Verdict on what came out: equal, or where it first is not."""
    if found.stages and all(s["relation"] == "same" for s in found.stages):
        return "The same stages: whatever they made is one and the same."
    if found.equal:
        return "What came out is bitwise the same on both sides."
    if found.equal is None:
        return "Not all of it is done; what is done is the same on both sides."
    first = _first(found)
    return f"They differ{': first in ' + first if first else ''}."


def _first(found: Difference) -> str:
    for rows in found.rows:
        return f"the rows of {rows['stage']} ({rows['file']})"
    for training in (t for t in found.training if t["step"] is not None):
        return f"step {training['step']} of {training['stage']}"
    for sample in found.samples:
        return f"the samples of {sample['stage']}"
    for alone in (s for s in found.stages if s["relation"] in ("only a", "only b")):
        return f"that only {alone['relation'][-1].upper()} has {alone['stage']}"
    return ""


def _show(value: Any, limit: int = 60) -> str:
    digest = isinstance(value, str) and len(value) == 64
    return value[:12] if digest else changes.shortened(value, limit)


def next_commands(found: Difference) -> list[str]:
    """Exact commands that look further into the first thing that differs."""
    commands = []
    parted = next((t for t in found.training if t["step"] is not None), None)
    if parted is not None and (rollout := parted["rollout"]) is not None:
        words = ["scores", f"step{parted['step']}", found.a.partition(":")[0]]
        words += [f"workspace={found.a_workspace}", "--sample"]
        words.append(f"{rollout['sample_id']}#{rollout['sample_index']}")
        commands.append(shlex.join(["refiner", "why", *words]))
    if found.code is not None and found.code["folders"] is not None:
        commands.append(shlex.join(["diff", "-ru", *found.code["folders"]]))
    return commands

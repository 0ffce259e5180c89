"""Everything in which two sides differ, as one value, as JSON, and for a terminal.

In: two :class:`~flows.diffing.sides.Side`. Out: a :class:`Difference`; lines and JSON of it, and
the commands that go on from it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.diffing import outcomes, settings
from flows.diffing.sides import Pair, Side, both_of, find_side, pairs_of
from infra.orchestrator.timeline import run_incidents
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.records import to_json
from refiner_core.contract.services import CONSUMERS
from refiner_core.report.printing import counted, measured

DIFF_VERSION = 1


@dataclass(frozen=True)
class AttemptChange:
    """Attempts at a stage on each side, and the steps that later ones went on from."""

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
    stages: tuple[settings.StageChange, ...]
    fields: tuple[settings.FieldChange, ...]
    sources: tuple[settings.Change, ...]
    rows: tuple[outcomes.FileRows, ...]
    code: settings.CodeChange | None
    judge: tuple[settings.Change, ...]
    rubrics: tuple[settings.Change, ...]
    environment: tuple[settings.Change, ...]
    training: tuple[outcomes.Divergence, ...]
    samples: tuple[outcomes.SampleChange, ...]
    numbers: tuple[outcomes.NumberChange, ...]
    attempts: tuple[AttemptChange, ...]
    incidents: tuple[tuple[str, ...], tuple[str, ...]]


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
    numbers, samples = outcomes.evaluation_changes(pairs)
    found = Difference(
        a=a.label,
        b=b.label,
        a_workspace=str(a.workspace.root),
        b_workspace=str(b.workspace.root),
        equal=None,
        stages=tuple(map(settings.stage_change, pairs)),
        fields=tuple(settings.field_changes(a, b, pairs)),
        sources=settings.changes(pairs, settings.sources_of),
        rows=tuple(outcomes.row_changes(pairs)),
        code=settings.code_change(a, b, pairs),
        judge=settings.changes(pairs, settings.judge_of, *CONSUMERS),
        rubrics=settings.changes(pairs, settings.rubrics_of, *CONSUMERS),
        environment=settings.changes(pairs, settings.environment_of),
        training=tuple(outcomes.divergences(pairs)),
        samples=tuple(samples),
        numbers=tuple(numbers),
        attempts=tuple(_attempt_changes(pairs)),
        incidents=(_incidents(a), _incidents(b)),
    )
    return replace(found, equal=_equal(found))


#: Output files that say where and when, beside what came out.
_OF_A_MOMENT = ("README.md", "refiner.json", "results.json", "report.json")
#: Kinds whose output is a copy with a card on it: what came out is said by the others.
_COPIES = ("publish", "card", "fetch", "serve")


def _equal(found: Difference) -> bool | None:
    if any(s.relation in ("only a", "only b") for s in found.stages):
        return False
    if found.rows or found.samples or any(d.step is not None or d.note for d in found.training):
        return False
    counted = [s for s in found.stages if (s.a or "").rpartition("-")[0] not in _COPIES]
    outputs = [path for s in counted for path in s.outputs or ()]
    weighty = any(path.rpartition("/")[2] not in _OF_A_MOMENT for path in outputs)
    if weighty or not all(n.same for n in found.numbers):
        return False
    return None if any(s.outputs is None for s in counted) else True


def _attempt_changes(pairs: Sequence[Pair]) -> Iterator[AttemptChange]:
    for name, a, b in both_of(pairs):
        one, other = (
            tuple(t.resumed_from_step for t in h.attempts if t.resumed_from_step is not None)
            for h in (a, b)
        )
        if (len(a.attempts), one) != (len(b.attempts), other):
            yield AttemptChange(name, len(a.attempts), len(b.attempts), one, other)


def _incidents(side: Side) -> tuple[str, ...]:
    if side.run is None:
        return ()
    found = run_incidents(side.workspace, side.run)
    return tuple(i.line for i in found if i.stage in side.stages)


def as_json(found: Difference) -> dict[str, Any]:
    """All of it, JSON-ready."""
    return {"version": DIFF_VERSION, **to_json(found)}


_MOST = 20


def difference_lines(found: Difference) -> Iterator[str]:
    """All sections in which there is something to say; first whether what came out is equal."""
    identity = [f for f in found.fields if f.mark == "identity"]
    sections: dict[str, Iterable[str]] = {
        "Stages": map(_stage, found.stages),
        "Configuration that decides what is computed": [
            _changed(f.field, f, "changes ") for f in identity
        ],
        "Configuration that decides where and how only": [
            _changed(f.field, f) for f in found.fields if f not in identity
        ],
        "Sources": _changes(found.sources),
        "Rows": (line for rows in found.rows for line in _rows(rows)),
        "Rubrics": _changes(found.rubrics),
        "Judge": _changes(found.judge),
        "Code": _code(found.code),
        "Environment": _changes(found.environment),
        "Training": (line for training in found.training for line in _training(training)),
        "Numbers": _numbers(found),
        "Attempts": _attempts(found),
    }
    yield from (f"A: {found.a}", f"B: {found.b}", "", verdict(found))
    for title, section in sections.items():
        if lines := list(section):
            yield from ("", title, *(f"  {line}" for line in lines[:_MOST]))
        if len(lines) > _MOST:
            yield f"  … and {len(lines) - _MOST} more (--json has all)"


def verdict(found: Difference) -> str:
    """Verdict on what came out: equal, or where it first is not."""
    if found.stages and all(s.relation == "same" for s in found.stages):
        return "The same stages: whatever they made is one and the same."
    if found.equal:
        return "What came out is bitwise the same on both sides."
    if found.equal is None:
        return "Not all of it is done; what is done is the same on both sides."
    first = _first(found)
    return f"They differ{': first in ' + first if first else ''}."


def _first(found: Difference) -> str:
    if found.rows:
        return f"the rows of {found.rows[0].stage} ({found.rows[0].file})"
    for training in found.training:
        if training.step is not None:
            return f"step {training.step} of {training.stage}"
    if found.samples:
        return f"the samples of {found.samples[0].stage}"
    alone = [s for s in found.stages if s.relation in ("only a", "only b")]
    return f"that only {alone[0].relation[-1].upper()} has {alone[0].stage}" if alone else ""


def _stage(stage: settings.StageChange) -> str:
    if stage.relation == "same":
        return f"{stage.stage}: same stage ({stage.a})"
    if stage.relation.startswith("only"):
        return f"{stage.stage}: only {stage.relation[-1].upper()} has it"
    if stage.relation == "alike":
        return f"{stage.stage}: same fingerprint, done twice; {_outputs(stage)}"
    why = "; ".join(stage.because[:4]) + ("; …" if len(stage.because) > 4 else "")
    return f"{stage.stage}: {stage.a} → {stage.b} ({why}); {_outputs(stage)}"


def _outputs(stage: settings.StageChange) -> str:
    if stage.outputs is None:
        return "not both are done"
    if not stage.outputs:
        return "outputs bitwise the same"
    return f"other output: {', '.join(stage.outputs[:3])}" + (" …" if stage.outputs[3:] else "")


def _changes(found: Iterable[settings.Change]) -> list[str]:
    return [_changed(change.what, change) for change in found]


def _changed(what: str, found: settings.Change | settings.FieldChange, before: str = "") -> str:
    stages = f"   ({before}{', '.join(found.stages)})" if found.stages else ""
    return f"{what}: {_show(found.a)} → {_show(found.b)}{stages}"


def _rows(rows: outcomes.FileRows) -> Iterator[str]:
    before, after = ("no" if n is None else n for n in (rows.a_rows, rows.b_rows))
    yield f"{rows.stage}/{rows.file}: {before} → {after} rows"
    named = (("only in A", rows.only_a), ("only in B", rows.only_b), ("changed", rows.changed))
    for (words, count), examples in zip(named, rows.examples, strict=True):
        if count:
            more = ", …" if count > len(examples) else ""
            yield f"  {count} {words} ({', '.join(examples)}{more})"
    if rows.columns:
        yield f"  the first changed one in {', '.join(rows.columns)}"
    if rows.order is not None:
        yield f"  another order from row {rows.order + 1} on"


def _code(code: settings.CodeChange | None) -> Iterator[str]:
    if code is None:
        return
    yield from _changes(code.git)
    if code.files is None:
        yield f"{code.a} → {code.b}; not both snapshots are kept"
    elif code.a != code.b:
        yield f"{code.a} → {code.b}: {len(code.files)} files differ"
        yield from (f"  {f.path}  +{f.added} -{f.removed}" for f in code.files)


def _training(found: outcomes.Divergence) -> Iterator[str]:
    if found.step is None:
        note = f"; {found.note}" if found.note else ""
        yield f"{found.stage}: {found.same_steps} steps are bitwise the same{note}"
        return
    before = f"{found.same_steps} steps before it are the same" if found.same_steps else "the first"
    yield f"{found.stage}: first differing step {found.step} ({before})"
    if (rollout := found.rollout) is not None:
        where = f"rollout {rollout.sample_id}#{rollout.sample_index}"
        yield f"  {where} differs in {', '.join(rollout.fields[:6])}"
        yield from (f"    A: {rollout.a}", f"    B: {rollout.b}")
    for name, (a, b) in list(found.metrics.items())[:6]:
        yield f"  {name}: {a!r} → {b!r}"
    if len(found.metrics) > 6:
        yield f"  … and {len(found.metrics) - 6} more numbers"


def _numbers(found: Difference) -> Iterator[str]:
    for number in found.numbers:
        name = f"{number.stage} {number.decoding} {number.metric}"
        if number.refused:
            fields = ", ".join(number.refused)
            yield f"{name}: not comparable, the protocols differ in {fields}"
        elif not number.same:
            paired = ""
            if number.difference is not None:
                paired = f"; paired {number.difference:+.3f}"
                if number.low is not None and number.high is not None:
                    paired += f" [{number.low:+.3f}, {number.high:+.3f}]"
            yield f"{name}: {measured(number.a)} → {measured(number.b)}{paired}"
    if same := sum(n.same for n in found.numbers):
        yield f"{same} of {len(found.numbers)} numbers are the same"
    for change in found.samples:
        yield (
            f"{change.stage} {change.decoding}: {change.count} of {change.of} samples differ, "
            f"first {change.sample_id} in {', '.join(change.fields[:5])}"
        )


def _attempts(found: Difference) -> Iterator[str]:
    for c in found.attempts:
        yield f"{c.stage}: {_tries(c.a, c.a_resumed)} → {_tries(c.b, c.b_resumed)}"
    for side, incidents in zip("AB", found.incidents, strict=True):
        yield from (f"{side}: {line}" for line in incidents)


def _tries(count: int, resumed: Sequence[int]) -> str:
    text = counted(count, "attempt")
    return text + (f", resumed from step {', '.join(map(str, resumed))}" if resumed else "")


def _show(value: Any) -> str:
    digest = isinstance(value, str) and len(value) == 64
    return value[:12] if digest else settings.shortened(value, 60)


def next_commands(found: Difference) -> list[str]:
    """Exact commands that look further into the first thing that differs."""
    commands = []
    parted = next((t for t in found.training if t.step is not None), None)
    if parted is not None and (rollout := parted.rollout) is not None:
        words = ["scores", f"step{parted.step}", found.a.partition(":")[0]]
        words += [f"workspace={found.a_workspace}", "--sample"]
        words.append(f"{rollout.sample_id}#{rollout.sample_index}")
        commands.append(shlex.join(["refiner", "why", *words]))
    if found.code is not None and found.code.folders is not None:
        commands.append(shlex.join(["diff", "-ru", *found.code.folders]))
    return commands

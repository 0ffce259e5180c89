"""Everything in which two sides differ, as one value, as JSON, and for a terminal.

In: two :class:`~flows.diffing.sides.Side`. Out: a :class:`Difference`; lines and JSON of it, and
the commands that go on from it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.diffing.outcomes import (
    Divergence,
    FileRows,
    NumberChange,
    SampleChange,
    divergences,
    number_changes,
    row_changes,
    sample_changes,
)
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
from flows.diffing.sides import Half, Pair, Side, find_side, pairs_of
from infra.orchestrator.timeline import run_incidents
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
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
        attempts=tuple(_attempt_changes(pairs)),
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


def _attempt_changes(pairs: Sequence[Pair]) -> list[AttemptChange]:
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


_MOST = 20


def difference_lines(found: Difference) -> list[str]:
    """All sections in which there is something to say; first whether what came out is equal."""
    lines = [f"A: {found.a}", f"B: {found.b}", "", verdict(found)]
    lines += _section("Stages", _stages(found.stages))
    identity = [f for f in found.fields if f.mark == "identity"]
    execution = [f for f in found.fields if f.mark == "execution"]
    lines += _section(
        "Configuration that decides what is computed",
        [
            f"{f.field}: {_show(f.a)} → {_show(f.b)}"
            + (f"   (changes {', '.join(f.stages)})" if f.stages else "")
            for f in identity
        ],
    )
    lines += _section(
        "Configuration that decides where and how only",
        [f"{f.field}: {_show(f.a)} → {_show(f.b)}" for f in execution],
    )
    lines += _section("Sources", _changes(found.sources))
    lines += _section("Rows", [line for rows in found.rows for line in _rows(rows)])
    lines += _section("Rubrics", _changes(found.rubrics))
    lines += _section("Judge", _changes(found.judge))
    lines += _section("Code", _code(found.code))
    lines += _section("Environment", _changes(found.environment))
    lines += _section("Training", [line for d in found.training for line in _training(d)])
    lines += _section("Numbers", _numbers(found))
    lines += _section("Attempts", _attempt_lines(found))
    return lines


def verdict(found: Difference) -> str:
    """Whether what came out is equal, and where it first is not."""
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
    if alone:
        side = alone[0].relation.rpartition(" ")[2].upper()
        return f"that only {side} has {alone[0].stage}"
    return ""


def _section(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    shown = [f"  {line}" for line in lines[:_MOST]]
    if len(lines) > _MOST:
        shown.append(f"  … and {len(lines) - _MOST} more (--json has all)")
    return ["", title, *shown]


def _stages(stages: Iterable[StageChange]) -> list[str]:
    lines = []
    for stage in stages:
        if stage.relation == "same":
            lines.append(f"{stage.stage}: same stage ({stage.a})")
        elif stage.relation.startswith("only"):
            side = stage.relation.rpartition(" ")[2].upper()
            lines.append(f"{stage.stage}: only {side} has it")
        elif stage.relation == "alike":
            lines.append(f"{stage.stage}: same fingerprint, done twice; {_outputs(stage)}")
        else:
            why = "; ".join(stage.because[:4]) + ("; …" if len(stage.because) > 4 else "")
            lines.append(f"{stage.stage}: {stage.a} → {stage.b} ({why}); {_outputs(stage)}")
    return lines


def _outputs(stage: StageChange) -> str:
    if stage.outputs is None:
        return "not both are done"
    if not stage.outputs:
        return "outputs bitwise the same"
    return f"other output: {', '.join(stage.outputs[:3])}" + (" …" if stage.outputs[3:] else "")


def _changes(changes: Iterable[Change]) -> list[str]:
    return [
        f"{c.what}: {_show(c.a)} → {_show(c.b)}"
        + (f"   ({', '.join(c.stages)})" if c.stages else "")
        for c in changes
    ]


def _rows(rows: FileRows) -> list[str]:
    head = f"{rows.stage}/{rows.file}: {_count(rows.a_rows)} → {_count(rows.b_rows)} rows"
    parts = []
    named = (("only in A", rows.only_a), ("only in B", rows.only_b), ("changed", rows.changed))
    for (words, count), examples in zip(named, rows.examples, strict=True):
        if count:
            more = ", …" if count > len(examples) else ""
            parts.append(f"{count} {words} ({', '.join(examples)}{more})")
    if rows.columns:
        parts.append(f"the first changed one in {', '.join(rows.columns)}")
    if rows.order is not None:
        parts.append(f"another order from row {rows.order + 1} on")
    return [head, *(f"  {part}" for part in parts)]


def _count(rows: int | None) -> str:
    return "no" if rows is None else str(rows)


def _code(code: CodeChange | None) -> list[str]:
    if code is None:
        return []
    lines = _changes(code.git)
    if code.files is None:
        return [*lines, f"{code.a} → {code.b}; not both snapshots are kept"]
    if code.a != code.b:
        lines.append(f"{code.a} → {code.b}: {len(code.files)} files differ")
        lines += [f"  {f.path}  +{f.added} -{f.removed}" for f in code.files]
    return lines


def _training(found: Divergence) -> list[str]:
    if found.step is None:
        words = f"{found.stage}: {found.same_steps} steps are bitwise the same"
        return [f"{words}; {found.note}" if found.note else words]
    before = f"{found.same_steps} steps before it are the same" if found.same_steps else "the first"
    lines = [f"{found.stage}: first differing step {found.step} ({before})"]
    if (rollout := found.rollout) is not None:
        where = f"rollout {rollout.sample_id}#{rollout.sample_index}"
        lines.append(f"  {where} differs in {', '.join(rollout.fields[:6])}")
        lines += [f"    A: {rollout.a}", f"    B: {rollout.b}"]
    shown = list(found.metrics.items())
    for name, (a, b) in shown[:6]:
        lines.append(f"  {name}: {a!r} → {b!r}")
    if len(shown) > 6:
        lines.append(f"  … and {len(shown) - 6} more numbers")
    return lines


def _numbers(found: Difference) -> list[str]:
    lines = []
    for number in found.numbers:
        name = f"{number.stage} {number.decoding} {number.metric}"
        if number.refused:
            fields = ", ".join(number.refused)
            lines.append(f"{name}: not comparable, the protocols differ in {fields}")
            continue
        if number.same:
            continue
        text = f"{name}: {_interval(number.a)} → {_interval(number.b)}"
        if number.difference is not None:
            text += f"; paired {number.difference:+.3f}"
            if number.low is not None and number.high is not None:
                text += f" [{number.low:+.3f}, {number.high:+.3f}]"
        lines.append(text)
    same = sum(n.same for n in found.numbers)
    if same:
        lines.append(f"{same} of {len(found.numbers)} numbers are the same")
    for change in found.samples:
        lines.append(
            f"{change.stage} {change.decoding}: {change.count} of {change.of} samples differ, "
            f"first {change.sample_id} in {', '.join(change.fields[:5])}"
        )
    return lines


def _interval(entry: Any) -> str:
    value, low, high = entry.get("value"), entry.get("low"), entry.get("high")
    if low is None or high is None:
        return f"{value:.3f}"
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _attempt_lines(found: Difference) -> list[str]:
    lines = [
        f"{c.stage}: {_tries(c.a, c.a_resumed)} → {_tries(c.b, c.b_resumed)}"
        for c in found.attempts
    ]
    for side, incidents in zip("AB", found.incidents, strict=True):
        lines += [f"{side}: {line}" for line in incidents]
    return lines


def _tries(count: int, resumed: Sequence[int]) -> str:
    text = f"{count} attempt{'' if count == 1 else 's'}"
    return text + (f", resumed from step {', '.join(map(str, resumed))}" if resumed else "")


def _show(value: Any) -> str:
    if isinstance(value, str) and len(value) == 64:
        return value[:12]
    text = str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def next_commands(found: Difference) -> list[str]:
    """Exact commands that look further into the first thing that differs."""
    commands = []
    where = [f"workspace={found.a_workspace}"]
    for training in found.training:
        if training.step is None:
            continue
        if training.rollout is not None:
            sample = f"{training.rollout.sample_id}#{training.rollout.sample_index}"
            words = ["scores", f"step{training.step}", found.a.partition(":")[0], *where]
            commands.append(shlex.join(["refiner", "why", *words, "--sample", sample]))
        break
    if found.code is not None and found.code.folders is not None:
        commands.append(shlex.join(["diff", "-ru", *found.code.folders]))
    return commands

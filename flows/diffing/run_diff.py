"""Differences of two runs, trials or stages in settings and outputs: as a value, as JSON, and for a
terminal.

In: two names, and their workspaces. Out: a :data:`Difference`: configuration, sources, code,
environment; prepared rows, training steps (the first whose metrics or rollouts are not bitwise the
same), metrics; its lines and JSON, and suggested commands. A name gives a :class:`_DiffSide`, two
sides give the :class:`_StagePair` values of matching stages. Identity fields are separated from
execution fields. Metrics under different protocols are refused, with the names of the fields that
differ.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from flows.running.status import required_run, stage_names
from flows.stored import field_values, rollouts_by_step, the_stage
from infra.store.layout import AttemptPaths
from infra.store.sweep_records import sweep_versions
from infra.store.traces import read_metrics, read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.kinds import KINDS, TRAINED
from refiner_core.contract.loading import leaves
from refiner_core.contract.proofs import MEASURED
from refiner_core.contract.records import RunRecord, StageRecord, StageResult, StageSpec
from refiner_core.report.pages import template_of


@dataclass(frozen=True)
class _DiffSide:
    """One side of a comparison.

    Attributes
    ----------
    label
        Its name: the word, or the run's id.
    run
        The call; None for a stage by its own id.
    stages
        Names of stages -> ids; only one if a stage was named.
    """

    label: str
    workspace: Workspace
    run: RunRecord | None
    stages: Mapping[str, str]

    @property
    def single(self) -> bool:
        """True if it is one stage."""
        return len(self.stages) == 1

    @property
    def config(self) -> Mapping[str, Any]:
        """The whole configuration; for a stage id, that of its newest attempt."""
        if self.run is not None:
            return self.run.config
        found: Mapping[str, Any] = {}
        for stage_id in self.stages.values():
            paths = self.workspace.layout.stage(stage_id)
            for number in paths.attempt_numbers():
                found = self.workspace.part(paths.attempt(number), "config") or found
        return found


@dataclass
class _StageSide:
    """One side's part of a pair; read on demand."""

    side: _DiffSide
    stage_id: str

    @cached_property
    def record(self) -> StageRecord | None:
        """Record of the stage; None before it has begun."""
        return self.side.workspace.read_record(self.stage_id)

    @property
    def spec(self) -> StageSpec | None:
        """Specification of the stage; None before it has begun."""
        return None if self.record is None else self.record.spec

    @property
    def sources(self) -> Mapping[str, Any]:
        """Digests of its sources; empty before it has begun."""
        return {} if self.spec is None else self.spec.sources

    @property
    def result(self) -> StageResult | None:
        """Result of the stage; None if it is not done."""
        return None if self.record is None else self.record.result

    @property
    def paths(self) -> AttemptPaths | None:
        """Files of the attempt with the complete history."""
        if self.record is None or not self.record.attempts:
            return None
        number = self.result.attempt if self.result else self.record.attempts[-1].number
        return self.side.workspace.layout.attempt(self.stage_id, number)

    @property
    def output(self) -> Path | None:
        """Folder of its output; None if it is not done."""
        return self.side.workspace.output_dir(self.stage_id)

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of its output files."""
        return {} if self.result is None else {f.path: f.sha256 for f in self.result.files}

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Provenance of its worker; empty before it has begun."""
        if self.result is not None:
            return self.result.provenance
        paths = self.paths
        started = None if paths is None else self.side.workspace.read_control(paths.started)
        return (started or {}).get("provenance") or {}

    @property
    def report(self) -> Mapping[str, Any]:
        """Report of the stage; empty if it is not done."""
        return {} if self.result is None else self.result.report


class _StagePair(NamedTuple):
    """A stage of each side; None if a side has none of that name."""

    name: str
    a: _StageSide | None
    b: _StageSide | None

    @property
    def kind(self) -> str:
        """``data``, ``grpo`` …"""
        half = self.a or self.b
        assert half is not None, "a pair has a stage"
        return half.stage_id.rpartition("-")[0]

    @property
    def same(self) -> bool:
        """True if both are the same stage: nothing about it can differ."""
        if self.a is None or self.b is None:
            return False
        one, other = ((h.stage_id, h.side.workspace.root) for h in (self.a, self.b))
        return one == other


def _both_of(
    pairs: Iterable[_StagePair], *kinds: str
) -> Iterator[tuple[str, _StageSide, _StageSide]]:
    """Name and halves of the pairs (of these kinds) with two different halves."""
    for pair in pairs:
        wanted = not kinds or pair.kind in kinds
        if wanted and pair.a is not None and pair.b is not None and not pair.same:
            yield pair.name, pair.a, pair.b


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> both values, for those that differ."""
    keys = dict.fromkeys([*one, *other])
    return {k: (one.get(k), other.get(k)) for k in keys if one.get(k) != other.get(k)}


def _pairs_of(a: _DiffSide, b: _DiffSide) -> list[_StagePair]:
    """Matching stages: by name, in the order of the first side; or the two that were named."""
    if a.single and b.single:
        (name_a, id_a), (name_b, id_b) = *a.stages.items(), *b.stages.items()
        name = name_a if name_a == name_b else f"{name_a}, {name_b}"
        return [_StagePair(name, _StageSide(a, id_a), _StageSide(b, id_b))]
    names = [*a.stages, *(n for n in b.stages if n not in a.stages)]
    if a.single or b.single:  # a stage against a run: that stage of it
        names = [n for n in names if n in a.stages and n in b.stages] or names
    return [_StagePair(name, _half(a, name), _half(b, name)) for name in names]


def _half(side: _DiffSide, name: str) -> _StageSide | None:
    return _StageSide(side, side.stages[name]) if name in side.stages else None


def find_side(workspace: Workspace, word: str) -> _DiffSide:
    """The side of a name.

    Parameters
    ----------
    word
        A run's id or a unique part of it; ``RUN:STAGE``; a stage's id; a trial as
        ``SWEEP:ARM/seedN``.

    Raises
    ------
    ConfigurationError
        There is none, or several; the message suggests the nearest.
    """
    first, colon, rest = word.partition(":")
    if colon and sweep_versions(workspace, first):  # ARM/seedN:STAGE is a stage of a trial
        trial, with_stage, stage = rest.partition(":")
        label = f"{first}:{trial}"
        return _of_run(workspace, label, stage if with_stage else None, label)
    if colon:
        return _of_run(workspace, first, rest)
    if workspace.layout.stage(word).spec.exists():
        record = workspace.read_record(word)
        assert record is not None, "a stage with a specification has a record"
        return _DiffSide(word, workspace, None, {record.spec.name: word})
    return _of_run(workspace, word)


def _of_run(
    workspace: Workspace, word: str, stage: str | None = None, label: str = ""
) -> _DiffSide:
    """A run with its stages in the order of work, so that the first difference comes first; or one
    stage of it."""
    run = required_run(workspace, word, "a run to compare")
    if stage is not None:
        stages = {stage: the_stage(run, stage)}
        return _DiffSide(f"{run.run}:{stage}", workspace, run, stages)
    return _DiffSide(label or run.run, workspace, run, {n: run.stages[n] for n in stage_names(run)})


#: Fields covered by a stage's own fields, or names for people.
_NO_NEWS = ("description", "workspace")
#: One difference, by name, in the form of `--json`.
Row = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


# ---------------------------------------------------------------- configuration


def field_changes(a: _DiffSide, b: _DiffSide, pairs: Sequence[_StagePair]) -> list[Row]:
    """Fields that differ, identity first, with the stages that each changes."""
    found = []
    for path, info, (one, other) in field_values([a.config, b.config]):
        if path in _NO_NEWS or one == other:
            continue
        stages: tuple[str, ...] = ()
        if info.mark == "identity":
            stages = tuple(pair.name for pair in pairs if _has_field(pair, path))
            if not stages and (a.single or b.single):
                continue  # it belongs to other stages of these runs
        found.append({"field": path, "mark": info.mark, "a": one, "b": other, "stages": stages})
    return sorted(found, key=lambda change: change["mark"] != "identity")


def _has_field(pair: _StagePair, path: str) -> bool:
    """True if the stage's own identity has the field; without a record, if its kind has it."""
    specs = [half.spec for half in (pair.a, pair.b) if half is not None and half.spec is not None]
    if specs:
        return any(path in spec.identity for spec in specs)
    prefixes = KINDS[pair.kind].fields if pair.kind in KINDS else ()
    return any(path == p or path.startswith(f"{p}.") for p in prefixes)


# ---------------------------------------------------------------- stages


def stage_change(pair: _StagePair) -> Row:
    """Relation of a pair of stages: ``same`` (one stage), ``alike`` (one fingerprint, another
    execution), ``different``, ``only a``, ``only b``; ``because`` has the differences, and
    ``outputs`` the output files that are not bitwise the same (None unless both are done)."""
    a, b = pair.a, pair.b
    relation, because = "same", tuple[str, ...]()
    outputs: tuple[str, ...] | None = ()
    if a is None or b is None:
        relation, outputs = "only b" if a is None else "only a", None
    elif not pair.same:
        alike = a.stage_id == b.stage_id
        relation, because = ("alike", ()) if alike else ("different", tuple(_because(a, b)))
        done = a.result is not None and b.result is not None
        outputs = tuple(differing(a.digests, b.digests)) if done else None
    ids = {"stage": pair.name, "a": a and a.stage_id, "b": b and b.stage_id}
    return {**ids, "relation": relation, "because": because, "outputs": outputs}


def _because(a: _StageSide, b: _StageSide) -> Iterator[str]:
    """Differences of two specifications, by name."""
    one, other = a.spec, b.spec
    if one is None or other is None:
        yield "one of them has not begun"
        return
    for key, (x, y) in differing(one.identity, other.identity).items():
        yield f"{key} {shortened(x, 40)} → {shortened(y, 40)}"
    yield from (f"source {key}" for key in differing(one.sources, other.sources))
    inputs = differing(one.input_fingerprints, other.input_fingerprints)
    yield from (f"input {key}" for key in inputs)
    if one.stage_version != other.stage_version:
        yield f"stage version {one.stage_version} → {other.stage_version}"


def shortened(value: Any, limit: int) -> str:
    """The beginning of a long text, on one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


# ---------------------------------------------------------------- sources, environment


def _environment(half: _StageSide) -> Mapping[str, Any]:
    """Versions, machine and devices of a worker."""
    provenance, host = half.provenance, half.provenance.get("host") or {}
    said = {"Python": provenance.get("python"), "host": host.get("name")}
    said |= {"processor": host.get("cpu"), "GPUs": host.get("gpus")}
    return {**(provenance.get("versions") or {}), **said} if provenance else {}


def _changes(
    pairs: Iterable[_StagePair], facts: Callable[[_StageSide], Mapping[str, Any]]
) -> list[Row]:
    """Facts that differ, once each, with their stages."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name, a, b in _both_of(pairs):
        one, other = facts(a), facts(b)
        for what, (x, y) in differing(one, other).items() if one and other else ():
            row = found.setdefault((what, str(x), str(y)), {"what": what, "a": x, "b": y})
            row["stages"] = (*row.get("stages", ()), name)
    return list(found.values())


# ---------------------------------------------------------------- code


def code_change(a: _DiffSide, b: _DiffSide, pairs: Sequence[_StagePair]) -> Row | None:
    """Code of both runs; for single stages that of their workers. None if it is the same or
    unknown.
    ``files`` is None if one of the snapshots is gone."""
    one, other = _code(a, [p.a for p in pairs]), _code(b, [p.b for p in pairs])
    if not one or not other or one == other:
        return None
    folders = [side.workspace.layout.code / code for side, code in ((a, one), (b, other))]
    if not all(folder.is_dir() for folder in folders):
        return {"a": one, "b": other, "files": None, "folders": None}
    files = sorted(differing(*map(_texts, folders)))
    return {"a": one, "b": other, "files": files, "folders": list(map(str, folders))}


def _code(side: _DiffSide, halves: Sequence[_StageSide | None]) -> str:
    if side.single and halves[0] is not None and (worked := halves[0].provenance.get("code")):
        return str(worked)
    return side.run.code if side.run is not None else ""


def _texts(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


FILES = ("sft_train.parquet", "sft_val.parquet", "rl_train.parquet", "rl_test.parquet")


def row_changes(pairs: Iterable[_StagePair]) -> Iterator[Row]:
    """Prepared rows that differ, over all `data` stages. Rows are identified by ``sample_id`` and
    compared by a hash of all their columns: large sets are read in batches, not held in memory.

    ``a_rows`` and ``b_rows`` are None if a side has no such file; ``examples`` are a few ids of the
    rows of one side only, and of the changed ones.
    """
    for stage, a, b in _both_of(pairs, "data"):
        for name in FILES:
            if (digest := a.digests.get(name)) is not None and digest == b.digests.get(name):
                continue
            one, other = (_hashes(half.output / name if half.output else None) for half in (a, b))
            if list((one or {}).items()) == list((other or {}).items()):
                continue
            ids: list[list[str]] = [[], [], []]
            if one is not None and other is not None:
                ids = [[k for k in one if k not in other], [k for k in other if k not in one]]
                ids.append([k for k in one if one[k] != other.get(k, one[k])])
            yield {
                **{"stage": stage, "file": name},
                **{"a_rows": one and len(one), "b_rows": other and len(other)},
                **dict(zip(("only_a", "only_b", "changed"), map(len, ids), strict=True)),
                "examples": [some[:5] for some in ids],
            }


def _hashes(path: Path | None) -> dict[str, str] | None:
    """``sample_id`` -> hash of the row, in the file's order; None without a file."""
    import pyarrow.parquet as pq

    if path is None or not path.exists():
        return None
    found = {}
    for batch in pq.ParquetFile(path).iter_batches(batch_size=512):
        for row in batch.to_pylist():
            text = json.dumps(row, sort_keys=True, default=str)
            found[str(row["sample_id"])] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


# ---------------------------------------------------------------- training


#: Fields in the order in which a rollout is made.
_FIELDS = (
    *("prompt_index", "sample_id", "response_ids", "response_text", "logprobs", "finish_reason"),
    *("status", "judgements", "reward", "advantage"),
)
_CUT = 160
_OF_NUMBER = ("value", "low", "high", "n")


def divergences(pairs: Iterable[_StagePair]) -> Iterator[Row]:
    """Each pair of training stages with logs on both sides. Rollouts of a step are sampled before
    its metrics are logged, so a differing rollout comes first. Measurements (times, speed, the
    judge's server) are ignored.

    ``step`` is the first that differs (None if none does, as far as both have gone),
    ``same_steps`` the number of bitwise equal steps before it, ``metrics`` the differing metrics.
    """
    for stage, a, b in _both_of(pairs, "sample", *TRAINED):
        one, other = _steps(a), _steps(b)
        if one and other:
            yield _divergence(stage, one, other)


def _steps(half: _StageSide) -> dict[int, tuple[dict[str, Any], Path | None]]:
    """Metrics of each training step, where later lines replace earlier ones, and its rollouts."""
    if (paths := half.paths) is None:
        return {}
    numbers: dict[int, dict[str, Any]] = {}
    for line in read_metrics(paths.metrics):
        numbers.setdefault(line.step, {}).update(
            {k: v for k, v in line.metrics.items() if not k.startswith(MEASURED)}
        )
    rollouts = rollouts_by_step(paths.rollouts)
    return {s: (numbers.get(s, {}), rollouts.get(s)) for s in sorted({*numbers, *rollouts})}


def _divergence(
    stage: str,
    one: Mapping[int, tuple[dict[str, Any], Path | None]],
    other: Mapping[int, tuple[dict[str, Any], Path | None]],
) -> Row:
    last, same = (max(one), max(other)), 0
    found: dict[str, Any] = {"stage": stage, "a_steps": last[0], "b_steps": last[1]}
    for step in (s for s in sorted({*one, *other}) if s <= min(last)):
        (numbers, rollouts), (others, more) = (s.get(step, ({}, None)) for s in (one, other))
        metrics, rollout = differing(numbers, others), _first_rollout(rollouts, more)
        if metrics or rollout is not None:
            parted = {"step": step, "same_steps": same, "metrics": metrics, "rollout": rollout}
            return {**found, **parted, "note": ""}
        same += 1
    gone = f"one has gone to step {last[0]}, the other to step {last[1]}"
    found |= {"step": None, "same_steps": same, "metrics": {}, "rollout": None}
    return {**found, "note": gone if last[0] != last[1] else ""}


def _first_rollout(a: Path | None, b: Path | None) -> Row | None:
    """The first rollout that differs, its differing fields, and the first of them; None if a side
    has no rollouts of the step."""
    if a is None or b is None or a.read_bytes() == b.read_bytes():
        return None
    one, other = read_rollouts(a), read_rollouts(b)
    for x, y in zip_longest(one, other):
        row = x or y
        which: dict[str, Any] = {"sample_id": str(row.get("sample_id"))}
        which["sample_index"] = int(row.get("sample_index") or 0)
        if x is None or y is None:
            return {**which, "fields": ("count",), "a": str(len(one)), "b": str(len(other))}
        if apart := differing(x, y):
            fields = sorted(apart, key=lambda f: _FIELDS.index(f) if f in _FIELDS else len(_FIELDS))
            before, after = (shortened(value, _CUT) for value in apart[fields[0]])
            return {**which, "fields": tuple(fields), "a": before, "b": after}
    return None


# ---------------------------------------------------------------- evaluations


def number_changes(pairs: Iterable[_StagePair]) -> Iterator[Row]:
    """Every metric of both sides.

    ``difference`` is second minus first, paired over prompts (of these two checkpoints); None if
    the protocols differ, with the reasons in ``refused``. ``same``: both are equal.
    """
    for stage, a, b in _both_of(pairs, "evaluate"):
        one, other = _entries(a), _entries(b)
        rows: dict[str, list[Rows]] = {}
        for decoding, metric in (key for key in one if key in other):
            x, y = one[decoding, metric], other[decoding, metric]
            apart = x["protocol"] != y["protocol"]
            if not apart and decoding not in rows:
                rows[decoding] = _samples((a, x), (b, y))
            yield {
                **{"stage": stage, "decoding": decoding, "metric": metric, "a": x, "b": y},
                **_paired([] if apart else rows[decoding], metric),
                "refused": sorted(differing(_protocol(a, x), _protocol(b, y))) * apart,
                "same": not apart and all(x.get(n) == y.get(n) for n in _OF_NUMBER),
            }


def _entries(half: _StageSide) -> dict[tuple[str, str], Mapping[str, Any]]:
    entries = half.report.get("evaluations") or ()
    return {(str(e["decoding"]), str(e["metric"])): e for e in entries}


def _protocol(half: _StageSide, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a protocol, without the source of its prompts, which is no part of them."""
    found = (half.report.get("protocols") or {}).get(entry["protocol"]) or {}
    return dict(leaves("", {k: v for k, v in found.items() if k != "data"}))


def _samples(*sides: tuple[_StageSide, Mapping[str, Any]]) -> list[Rows]:
    """The samples behind two metrics; none if they are gone."""
    from refiner_core.evaluation.metrics import load_samples

    folders = [(half.output, str(entry["samples_file"])) for half, entry in sides]
    try:
        return [load_samples(folder / file) for folder, file in folders if folder is not None]
    except RefinerError:  # the metrics themselves are shown nevertheless
        return []


def _paired(rows: Sequence[Rows], metric: str) -> dict[str, float | None]:
    """Paired difference with its interval, second minus first."""
    from refiner_core.evaluation.statistics import paired_difference_over_seeds

    nothing = dict.fromkeys(("difference", "low", "high"))
    try:
        found = paired_difference_over_seeds(rows[1:], rows[:1], metric) if rows else None
    except RefinerError:
        return nothing
    if found is None or not found.n:
        return nothing
    return {"difference": found.value, "low": found.low, "high": found.high}


#: Version of the JSON that `diff --json` prints.
DIFF_VERSION = 1
#: Differences of two sides, in the form of ``refiner diff --json``. ``equal`` is about outputs:
#: every stage exists on both sides, and outputs, rows, steps and metrics are bitwise the same.
#: Other machines, code or execution settings are listed, and make nothing unequal. None: some
#: stages are not done, and the finished ones are equal.
Difference = dict[str, Any]


def diff_runs(
    a: str,
    b: str,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    other: str | Path | None = None,
) -> Difference:
    """Compare two runs, trials or stages, down to the first step that differs.

    Parameters
    ----------
    a, b
        Runs, trials (``SWEEP:ARM/seed1``) or stages (``RUN:STAGE``).
    workspace
        The folder that has their records.
    other
        The workspace of ``b``, if it is another one.

    Returns
    -------
    dict
        ``equal`` is True if the outputs are bitwise the same, None if some are missing; otherwise
        the content of ``refiner diff --json``.

    Raises
    ------
    ConfigurationError
        One of them does not exist; the message names the nearest.
    """
    ws = Workspace.read_only(workspace)
    second = ws if other is None else Workspace.read_only(other)
    return diff_sides(find_side(ws, a), find_side(second, b))


def diff_sides(a: _DiffSide, b: _DiffSide) -> Difference:
    """Compare two sides; reads records and files, imports nothing heavy."""
    pairs = _pairs_of(a, b)
    found: Difference = {
        **{"version": DIFF_VERSION, "a": a.label, "b": b.label},
        **{"a_workspace": str(a.workspace.root), "b_workspace": str(b.workspace.root)},
        "equal": None,
        "stages": [stage_change(pair) for pair in pairs],
        "fields": field_changes(a, b, pairs),
        # Digests of rows, weights, rubric sets, the judge's prompts.
        "sources": _changes(pairs, lambda half: half.sources),
        "rows": list(row_changes(pairs)),
        "code": code_change(a, b, pairs),
        "environment": _changes(pairs, _environment),
        "training": list(divergences(pairs)),
        "numbers": list(number_changes(pairs)),
    }
    return found | {"equal": _equal(found)}


#: Output files that record place and time.
_OF_A_MOMENT = ("README.md", "refiner.json", "results.json", "report.json")
#: Kinds whose output is a copy with a card: the other stages cover it.
_COPIES = ("publish", "card", "fetch", "serve")


def _equal(found: Difference) -> bool | None:
    if _first(found) or any(training["note"] for training in found["training"]):
        return False
    counted = [s for s in found["stages"] if (s["a"] or "").rpartition("-")[0] not in _COPIES]
    outputs = [path for s in counted for path in s["outputs"] or ()]
    weighty = any(path.rpartition("/")[2] not in _OF_A_MOMENT for path in outputs)
    if weighty or not all(n["same"] for n in found["numbers"]):
        return False
    return None if any(s["outputs"] is None for s in counted) else True


def difference_lines(found: Difference) -> Iterator[str]:
    """All sections with content: whether the outputs are equal, what was set and what clearly
    changed, then the rest."""
    text = template_of(__package__, "difference.txt.jinja")
    clear = [n for n in found["numbers"] if n["low"] is not None and not n["low"] <= 0 <= n["high"]]
    said = text.render(d=found, verdict=verdict(found), clear=clear, show=_show)
    yield from said.splitlines()


def verdict(found: Difference) -> str:
    """Verdict on the outputs: equal, or the first difference."""
    if found["stages"] and all(s["relation"] == "same" for s in found["stages"]):
        return "The same stages, so the same outputs."
    if found["equal"]:
        return "The outputs are bitwise the same on both sides."
    if found["equal"] is None:
        return "Some stages are not done; the finished ones are the same on both sides."
    first = _first(found)
    return f"They differ{': first in ' + first if first else ''}."


def _first(found: Difference) -> str:
    for rows in found["rows"]:
        return f"the rows of {rows['stage']} ({rows['file']})"
    for training in (t for t in found["training"] if t["step"] is not None):
        return f"step {training['step']} of {training['stage']}"
    for alone in (s for s in found["stages"] if s["relation"] in ("only a", "only b")):
        return f"{alone['stage']}, which only {alone['relation'][-1].upper()} has"
    return ""


def _show(value: Any, limit: int = 60) -> str:
    digest = isinstance(value, str) and len(value) == 64
    return value[:12] if digest else shortened(value, limit)


def next_commands(found: Difference) -> list[str]:
    """Exact commands that examine the first difference."""
    commands = []
    parted = next((t for t in found["training"] if t["step"] is not None), None)
    if parted is not None and (rollout := parted["rollout"]) is not None:
        words = ["scores", f"step{parted['step']}", found["a"].partition(":")[0]]
        words += [f"workspace={found['a_workspace']}", "--sample"]
        words.append(f"{rollout['sample_id']}#{rollout['sample_index']}")
        commands.append(shlex.join(["refiner", "why", *words]))
    where = found["a_workspace"]
    if where == found["b_workspace"] and found["numbers"] and len(found["stages"]) > 1:
        words = ["refiner", "report", found["a"], found["b"], f"workspace={where}"]
        commands.append(shlex.join(words))
    if found["code"] is not None and found["code"]["folders"] is not None:
        commands.append(shlex.join(["diff", "-ru", *found["code"]["folders"]]))
    return commands

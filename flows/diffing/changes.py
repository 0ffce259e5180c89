"""In what two sides were made otherwise, and came out differently.

In: two sides and their pairs of stages. Out: values for :mod:`flows.diffing.document`:
configuration, sources, judge, rubrics, code, environment; prepared rows, training steps (the first
whose numbers or rollouts are not bitwise the same), samples, numbers. Fields that decide what is
computed (identity) are told from those that decide where and how (execution). Numbers of different
protocols are refused, with the names of the fields in which these differ.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from flows.diffing.sides import Half, Pair, Side, both_of, differing
from flows.stored import recorded_field, rollouts_by_step
from infra.store.traces import read_metrics, read_rollouts
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.kinds import KINDS, TRAINED
from refiner_core.contract.marks import ABSENT, Mark, walk
from refiner_core.contract.proofs import MEASURED

#: Of these a stage's own fields say all that matters, or they are names for people.
_NO_NEWS = ("description", "workspace")


@dataclass(frozen=True)
class FieldChange:
    """A configuration field that differs, and the stages that it makes others."""

    field: str
    mark: Mark
    a: Any
    b: Any
    stages: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageChange:
    """One pair of stages: ``relation`` is ``same`` (one stage), ``alike`` (one fingerprint, another
    execution), ``different``, ``only a``, ``only b``; ``because`` says in what they differ, and
    ``outputs`` which output files are not bitwise the same (None: not both are done)."""

    stage: str
    a: str | None
    b: str | None
    relation: str
    because: tuple[str, ...] = ()
    outputs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Change:
    """Something named that differs, in these stages (none: of the whole run)."""

    what: str
    a: Any
    b: Any
    stages: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileChange:
    """One file of the code: ``added`` and ``removed`` lines from the first to the second side."""

    path: str
    added: int
    removed: int


@dataclass(frozen=True)
class CodeChange:
    """Two code snapshots. ``files`` is None where one of them is not kept any more."""

    a: str
    b: str
    files: tuple[FileChange, ...] | None
    git: tuple[Change, ...] = ()
    folders: tuple[str, str] | None = None


# ---------------------------------------------------------------- configuration


def field_changes(a: Side, b: Side, pairs: Sequence[Pair]) -> list[FieldChange]:
    """Fields that differ, identity first."""
    left, right = a.config, b.config
    found = []
    for path, info in walk(RecipeConfig):
        if path in _NO_NEWS:
            continue
        default = info.default if info.legacy_value is ABSENT else info.legacy_value
        one, other = (recorded_field(config, path, default) for config in (left, right))
        if one == other:
            continue
        stages: tuple[str, ...] = ()
        if info.mark == "identity":
            stages = tuple(pair.name for pair in pairs if _has_field(pair, path))
            if not stages and (a.single or b.single):
                continue  # other stages of these runs have it
        found.append(FieldChange(path, info.mark, one, other, stages))
    return sorted(found, key=lambda change: change.mark != "identity")


def _has_field(pair: Pair, path: str) -> bool:
    """Yes where the stage's own identity has the field; where none is recorded, where its kind
    has."""
    specs = [half.spec for half in (pair.a, pair.b) if half is not None and half.spec is not None]
    if specs:
        return any(path in spec.identity for spec in specs)
    prefixes = KINDS[pair.kind].fields if pair.kind in KINDS else ()
    return any(path == p or path.startswith(f"{p}.") for p in prefixes)


# ---------------------------------------------------------------- stages


def stage_change(pair: Pair) -> StageChange:
    """Relation of a pair of stages."""
    a, b = pair.a, pair.b
    if a is None or b is None:
        ids = (a.stage_id if a else None, b.stage_id if b else None)
        return StageChange(pair.name, *ids, "only b" if a is None else "only a")
    if pair.same:
        return StageChange(pair.name, a.stage_id, b.stage_id, "same", outputs=())
    alike = a.stage_id == b.stage_id
    done = a.result is not None and b.result is not None
    return StageChange(
        pair.name,
        a.stage_id,
        b.stage_id,
        "alike" if alike else "different",
        () if alike else tuple(_because(a, b)),
        tuple(differing(a.digests, b.digests)) if done else None,
    )


def _because(a: Half, b: Half) -> Iterator[str]:
    """In what two specifications differ, by name."""
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


# ---------------------------------------------------------------- sources, judge, rubrics


def changes(
    pairs: Iterable[Pair], values: Callable[[Half], Mapping[str, Any]], *kinds: str
) -> tuple[Change, ...]:
    """Differences of such values, each once, with the stages (of these kinds) that have them."""
    found: dict[tuple[str, str, str], tuple[Any, Any, list[str]]] = {}
    for name, a, b in both_of(pairs, *kinds):
        one, other = values(a), values(b)
        if not one or not other:
            continue
        for what, (x, y) in differing(one, other).items():
            found.setdefault((what, str(x), str(y)), (x, y, []))[2].append(name)
    return tuple(Change(k[0], x, y, tuple(names)) for k, (x, y, names) in found.items())


def sources_of(half: Half) -> Mapping[str, Any]:
    """Digests of what came from outside: rows, weights, rubric sets, prompts of the judge."""
    return {} if half.spec is None else half.spec.sources


def judge_of(half: Half) -> dict[str, Any]:
    """The judge: its fields, the digest of its prompts, what its server called itself."""
    found: dict[str, Any] = {}
    if half.spec is not None:
        found = {k: v for k, v in half.spec.identity.items() if k.startswith("judge.")}
        if "judge_prompt" in half.spec.sources:
            found["prompt digest"] = half.spec.sources["judge_prompt"]
    for protocol in (half.report.get("protocols") or {}).values():
        if digest := (protocol.get("judge") or {}).get("prompt_digest"):
            found["prompt digest"] = digest
    usage = half.report.get("judge") or half.report.get("judge_usage") or {}
    if models := usage.get("models"):
        found["server says it is"] = sorted(models)
    return found


def rubrics_of(half: Half) -> dict[str, Any]:
    """Rubrics, and what the sets said."""
    if half.spec is None:
        return {}
    names = ("rubric_source", "static_rubrics", "instance_rubrics_only", "rubric_aggregation")
    identity = half.spec.identity
    found = {f"reward.{n}": identity[f"reward.{n}"] for n in names if f"reward.{n}" in identity}
    if "rubrics" in half.spec.sources:
        found["rubric set's digest"] = half.spec.sources["rubrics"]
    return found


def environment_of(half: Half) -> dict[str, Any]:
    """Versions of libraries, Python, machine and devices of the worker."""
    if not (provenance := half.provenance):
        return {}
    host = provenance.get("host") or {}
    return {
        **(provenance.get("versions") or {}),
        "Python": provenance.get("python"),
        "host": host.get("name"),
        "processor": host.get("cpu"),
        "GPUs": host.get("gpus"),
    }


# ---------------------------------------------------------------- code


def code_change(a: Side, b: Side, pairs: Sequence[Pair]) -> CodeChange | None:
    """The code of both runs; of single stages that of their workers. None: it is the same, or
    nobody knows."""
    one, other = _code(a, [p.a for p in pairs]), _code(b, [p.b for p in pairs])
    git = _git(a, b)
    if not one or not other or (one == other and not git):
        return None
    if one == other:
        return CodeChange(one, other, (), git)
    folders = (a.workspace.layout.code / one, b.workspace.layout.code / other)
    if not all(folder.is_dir() for folder in folders):
        return CodeChange(one, other, None, git)
    files = tuple(_file_changes(*folders))
    return CodeChange(one, other, files, git, (str(folders[0]), str(folders[1])))


def _code(side: Side, halves: Sequence[Half | None]) -> str:
    if side.single and halves[0] is not None and (worked := halves[0].provenance.get("code")):
        return str(worked)
    return side.run.code if side.run is not None else ""


def _git(a: Side, b: Side) -> tuple[Change, ...]:
    if a.run is None or b.run is None:
        return ()
    names = {"commit": "commit", "dirty": "uncommitted changes", "diff_sha256": "their digest"}
    apart = differing(a.run.provenance, b.run.provenance)
    return tuple(Change(names[name], *apart[name]) for name in names if name in apart)


def _file_changes(a: Path, b: Path) -> Iterator[FileChange]:
    for path, texts in sorted(differing(_texts(a), _texts(b)).items()):
        before, after = ((text or b"").decode(errors="replace").splitlines() for text in texts)
        lines = list(difflib.unified_diff(before, after, n=0))[2:]
        added = sum(line.startswith("+") for line in lines)
        yield FileChange(path, added, sum(line.startswith("-") for line in lines))


def _texts(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


FILES = ("sft_train.parquet", "sft_val.parquet", "rl_train.parquet", "rl_test.parquet")
_FEW_ROWS = 5


@dataclass(frozen=True)
class FileRows:
    """One file of prepared rows.

    Attributes
    ----------
    a_rows, b_rows
        How many; None where a side has no such file (any more).
    only_a, only_b, changed
        How many rows one side alone has, and how many both have with other content.
    examples
        A few ids for each of the three.
    order
        The first position at which the rows that both have stand in another order; None: nowhere.
    columns
        Of the first changed row, the columns that differ.
    """

    stage: str
    file: str
    a_rows: int | None
    b_rows: int | None
    only_a: int = 0
    only_b: int = 0
    changed: int = 0
    examples: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    order: int | None = None
    columns: tuple[str, ...] = ()


def row_changes(pairs: Iterable[Pair]) -> Iterator[FileRows]:
    """Prepared rows that differ, over all `data` stages. Rows are known by ``sample_id`` and
    compared by a hash of all their columns: large sets are read in batches and not held."""
    for stage, a, b in both_of(pairs, "data"):
        for name in FILES:
            if (digest := a.digests.get(name)) is not None and digest == b.digests.get(name):
                continue
            paths = [path for h in (a, b) if (path := _output_file(h, name)) is not None]
            if len(paths) == 2:
                yield from _changed_rows(stage, name, *paths)
            elif paths:
                count = len(_hashes(paths[0]))
                there = _output_file(a, name) is not None
                yield FileRows(stage, name, *((count, None) if there else (None, count)))


def _output_file(half: Half, name: str) -> Path | None:
    path = None if half.output is None else half.output / name
    return path if path is not None and path.exists() else None


def _changed_rows(stage: str, name: str, a: Path, b: Path) -> Iterator[FileRows]:
    one, other = _hashes(a), _hashes(b)
    if list(one.items()) == list(other.items()):
        return
    only_a = [k for k in one if k not in other]
    only_b = [k for k in other if k not in one]
    changed = [k for k in one if k in other and one[k] != other[k]]
    common = ([k for k in one if k in other], [k for k in other if k in one])
    columns = differing(*(_row(path, changed[0]) for path in (a, b))) if changed else ()
    yield FileRows(
        stage,
        name,
        len(one),
        len(other),
        len(only_a),
        len(only_b),
        len(changed),
        (tuple(only_a[:_FEW_ROWS]), tuple(only_b[:_FEW_ROWS]), tuple(changed[:_FEW_ROWS])),
        next((i for i, (x, y) in enumerate(zip(*common, strict=True)) if x != y), None),
        tuple(columns),
    )


def _hashes(path: Path) -> dict[str, str]:
    """``sample_id`` -> hash of the row, in the file's order."""
    import pyarrow.parquet as pq

    found = {}
    for batch in pq.ParquetFile(path).iter_batches(batch_size=512):
        for row in batch.to_pylist():
            text = json.dumps(row, sort_keys=True, default=str)
            found[str(row["sample_id"])] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _row(path: Path, sample_id: str) -> dict[str, object]:
    import pyarrow.parquet as pq

    rows = pq.read_table(path, filters=[("sample_id", "==", sample_id)]).to_pylist()
    return dict(rows[0]) if rows else {}


# ---------------------------------------------------------------- training


#: In the order in which a rollout comes about.
_FIELDS = (
    *("prompt_index", "sample_id", "response_ids", "response_text", "logprobs", "finish_reason"),
    *("status", "judgements", "reward", "advantage"),
)
_CUT = 160


@dataclass(frozen=True)
class RolloutChange:
    """The first rollout of a step that differs: in which fields, and the first of them."""

    sample_id: str
    sample_index: int
    fields: tuple[str, ...]
    a: str
    b: str


@dataclass(frozen=True)
class Divergence:
    """Divergence of two trainings: how far they are the same.

    Attributes
    ----------
    step
        The first that differs; None where none does, as far as both have gone.
    same_steps
        How many steps before that are bitwise the same.
    a_steps, b_steps
        The last step that each has logged.
    metrics
        At that step: name -> both values, those that differ.
    rollout
        The first rollout of that step that differs; None where none does, or none are kept.
    note
        What could not be compared.
    """

    stage: str
    step: int | None
    same_steps: int
    a_steps: int
    b_steps: int
    metrics: Mapping[str, tuple[Any, Any]]
    rollout: RolloutChange | None = None
    note: str = ""


def divergences(pairs: Iterable[Pair]) -> Iterator[Divergence]:
    """Each pair of training stages of which both sides have logged something. Rollouts of a step
    are sampled before its numbers are logged, so that of the two a rollout that differs is the
    earlier. What only measures (times, speed, what the judge's server did) is left aside."""
    for stage, a, b in both_of(pairs, "sample", *TRAINED):
        one, other = _steps(a), _steps(b)
        if one and other:
            yield _divergence(stage, one, other)


def _steps(half: Half) -> dict[int, tuple[dict[str, Any], Path | None]]:
    """Traces of each step of a training: its numbers, later lines going before earlier ones,
    and its rollouts."""
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
) -> Divergence:
    last, same = (max(one), max(other)), 0
    for step in (s for s in sorted({*one, *other}) if s <= min(last)):
        (numbers, rollouts), (others, more) = (s.get(step, ({}, None)) for s in (one, other))
        metrics, rollout = differing(numbers, others), _first_rollout(rollouts, more)
        if metrics or rollout is not None:
            return Divergence(stage, step, same, *last, metrics, rollout)
        same += 1
    gone = f"one has gone to step {last[0]}, the other to step {last[1]}"
    return Divergence(stage, None, same, *last, {}, None, gone if last[0] != last[1] else "")


def _first_rollout(a: Path | None, b: Path | None) -> RolloutChange | None:
    """The first rollout that differs; where one side keeps none of the step, nothing is said."""
    if a is None or b is None or a.read_bytes() == b.read_bytes():
        return None
    one, other = read_rollouts(a), read_rollouts(b)
    for x, y in zip_longest(one, other):
        row = x or y
        which = (str(row.get("sample_id")), int(row.get("sample_index") or 0))
        if x is None or y is None:
            return RolloutChange(*which, ("count",), str(len(one)), str(len(other)))
        apart = differing(x, y)
        if apart:
            fields = (*(f for f in _FIELDS if f in apart), *(f for f in apart if f not in _FIELDS))
            return RolloutChange(*which, fields, *map(_cut, apart[fields[0]]))
    return None


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _CUT else f"{text[:_CUT]}…"


# ---------------------------------------------------------------- evaluations


@dataclass(frozen=True)
class NumberChange:
    """One metric of one model. ``difference`` is second minus first, paired over prompts (of these
    two checkpoints); None where the protocols differ, which ``refused`` names. ``same``: both are
    the same number under the same protocol."""

    stage: str
    decoding: str
    metric: str
    a: Mapping[str, Any]
    b: Mapping[str, Any]
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    refused: tuple[str, ...] = ()
    same: bool = False


@dataclass(frozen=True)
class SampleChange:
    """The first sample of an evaluation that differs, and in which columns; ``count`` samples do
    so."""

    stage: str
    decoding: str
    sample_id: str
    fields: tuple[str, ...]
    count: int
    of: int


Rows = Sequence[Mapping[str, Any]]


def evaluation_changes(pairs: Iterable[Pair]) -> tuple[list[NumberChange], list[SampleChange]]:
    """Every metric that both sides have; and evaluations under one protocol whose samples are not
    bitwise the same."""
    numbers: list[NumberChange] = []
    samples: list[SampleChange] = []
    for stage, a, b in both_of(pairs, "evaluate"):
        one, other = _entries(a), _entries(b)
        rows: dict[str, tuple[Rows, Rows] | None] = {}
        for key in (k for k in one if k in other):
            x, y = one[key], other[key]
            if x["protocol"] != y["protocol"]:
                apart = _protocols_apart(_protocol(a, x), _protocol(b, y))
                numbers.append(NumberChange(stage, *key, x, y, refused=tuple(apart)))
                continue
            if key[0] not in rows:
                rows[key[0]] = _samples(a, x, b, y)
            same = all(x.get(n) == y.get(n) for n in ("value", "low", "high", "n"))
            paired = _paired(rows[key[0]], key[1])
            numbers.append(NumberChange(stage, *key, x, y, *paired, same=same))
        for decoding, both in rows.items():
            if both is not None:
                samples += _sample_changes(stage, decoding, *both)
    return numbers, samples


def _entries(half: Half) -> dict[tuple[str, str], Mapping[str, Any]]:
    entries = half.report.get("evaluations") or ()
    return {(str(e["decoding"]), str(e["metric"])): e for e in entries}


def _protocol(half: Half, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a protocol, without where its prompts came from: that is no part of them."""
    found = (half.report.get("protocols") or {}).get(entry["protocol"]) or {}
    return {k: v for k, v in found.items() if k != "data"}


def _protocols_apart(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, (x, y) in sorted(differing(a, b).items()):
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from _protocols_apart(x, y, f"{prefix}{key}.")
        else:
            yield prefix + key


def _samples(
    a: Half, x: Mapping[str, Any], b: Half, y: Mapping[str, Any]
) -> tuple[Rows, Rows] | None:
    """The samples behind two numbers; None where they are gone."""
    from refiner_core.evaluation.metrics import load_samples

    assert a.output is not None, "a stage with a report is done"
    assert b.output is not None, "a stage with a report is done"
    try:
        one = load_samples(a.output / str(x["samples_file"]))
        return one, load_samples(b.output / str(y["samples_file"]))
    except RefinerError:  # the numbers themselves are shown all the same
        return None


def _paired(
    rows: tuple[Rows, Rows] | None, metric: str
) -> tuple[float | None, float | None, float | None]:
    """Paired difference with its interval, second minus first."""
    from refiner_core.evaluation.statistics import paired_difference_over_seeds

    if rows is None:
        return None, None, None
    try:
        found = paired_difference_over_seeds([rows[1]], [rows[0]], metric)
    except RefinerError:
        return None, None, None
    return (found.value, found.low, found.high) if found.n else (None, None, None)


def _sample_changes(stage: str, decoding: str, one: Rows, other: Rows) -> Iterator[SampleChange]:
    changed = [(x, apart) for x, y in zip(one, other, strict=False) if (apart := differing(x, y))]
    if changed:
        (row, apart), count = changed[0], len(changed)
        name = str(row.get("sample_id"))
        yield SampleChange(stage, decoding, name, tuple(apart), count, len(one))

"""In what two sides were made otherwise: configuration, sources, judge, rubrics, code, environment.

In: two sides and their pairs of stages. Out: values for :mod:`flows.diffing.document`. Fields that
decide what is computed (identity) are told from those that decide where and how (execution).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.diffing.sides import Half, Pair, Side
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.marks import ABSENT, Mark, walk
from refiner_core.contract.records import StageSpec
from refiner_core.contract.services import CONSUMERS

#: Of these a stage's own fields say all that matters, or they are names for people.
_NO_NEWS = ("description",)


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
    specs = {p.name: _specs(p) for p in pairs}
    found = []
    for path, info in walk(RecipeConfig):
        if path in _NO_NEWS or path == "workspace":
            continue
        old = ABSENT if info.legacy_value is ABSENT else info.legacy_value
        default = info.default if old is ABSENT else old
        one, other = (_plain(_value(c, path, default)) for c in (left, right))
        if one == other:
            continue
        stages = _touched(path, specs) if info.mark == "identity" else ()
        if info.mark == "identity" and not stages and (a.single or b.single):
            continue  # other stages of these runs have it
        found.append(FieldChange(path, info.mark, one, other, stages))
    return sorted(found, key=lambda change: change.mark != "identity")


def _specs(pair: Pair) -> tuple[str, list[StageSpec]]:
    halves = (h for h in (pair.a, pair.b) if h is not None)
    return pair.kind, [h.record.spec for h in halves if h.record is not None]


def _touched(path: str, specs: Mapping[str, tuple[str, list[StageSpec]]]) -> tuple[str, ...]:
    """Stages whose own identity has the field; where none is recorded, whose kind has it."""
    found = []
    for name, (kind, recorded) in specs.items():
        prefixes = KINDS[kind].fields if kind in KINDS else ()
        by_kind = any(path == p or path.startswith(f"{p}.") for p in prefixes)
        if any(path in s.identity for s in recorded) or (not recorded and by_kind):
            found.append(name)
    return tuple(found)


def _value(config: Mapping[str, Any], path: str, default: Any) -> Any:
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# ---------------------------------------------------------------- stages


def stage_changes(pairs: Iterable[Pair]) -> list[StageChange]:
    """How each pair of stages stands."""
    return [_stage_change(pair) for pair in pairs]


def _stage_change(pair: Pair) -> StageChange:
    ids = (pair.a.stage_id if pair.a else None, pair.b.stage_id if pair.b else None)
    if pair.a is None or pair.b is None:
        return StageChange(pair.name, *ids, "only b" if pair.a is None else "only a")
    if pair.same:
        return StageChange(pair.name, *ids, "same", outputs=())
    alike = ids[0] == ids[1]
    return StageChange(
        pair.name,
        *ids,
        "alike" if alike else "different",
        () if alike else tuple(_because(pair.a, pair.b)),
        _outputs(pair.a, pair.b),
    )


def _because(a: Half, b: Half) -> list[str]:
    """In what two specifications differ, by name."""
    if a.record is None or b.record is None:
        return ["one of them has not begun"]
    one, other = a.record.spec, b.record.spec
    found = [
        f"{k} {_short(x)} → {_short(y)}" for k, x, y in _differing(one.identity, other.identity)
    ]
    found += [f"source {k}" for k, _, _ in _differing(one.sources, other.sources)]
    inputs = _differing(one.input_fingerprints, other.input_fingerprints)
    found += [f"input {k}" for k, _, _ in inputs]
    if one.stage_version != other.stage_version:
        found.append(f"stage version {one.stage_version} → {other.stage_version}")
    return found


def _outputs(a: Half, b: Half) -> tuple[str, ...] | None:
    results = [h.record.result if h.record is not None else None for h in (a, b)]
    if results[0] is None or results[1] is None:
        return None
    one, other = ({f.path: f.sha256 for f in r.files} for r in results if r is not None)
    return tuple(path for path, _, _ in _differing(one, other))


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    keys = dict.fromkeys([*one, *other])
    return [(k, one.get(k), other.get(k)) for k in keys if one.get(k) != other.get(k)]


def _short(value: Any, limit: int = 40) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


# ---------------------------------------------------------------- sources, judge, rubrics


def source_changes(pairs: Iterable[Pair]) -> list[Change]:
    """Digests of what came from outside: rows, weights, rubric sets, prompts of the judge."""
    return _gather(pairs, lambda h: h.record.spec.sources if h.record is not None else {})


def judge_changes(pairs: Iterable[Pair]) -> list[Change]:
    """The judge: its fields, the digest of its prompts, what its server called itself."""
    return _gather((p for p in pairs if p.kind in CONSUMERS), _judge)


def rubric_changes(pairs: Iterable[Pair]) -> list[Change]:
    """Which rubrics, and what the sets said."""
    return _gather((p for p in pairs if p.kind in CONSUMERS), _rubrics)


def environment_changes(pairs: Iterable[Pair]) -> list[Change]:
    """Versions of libraries, Python, machines and devices of the workers."""
    return _gather(pairs, _environment)


def _judge(half: Half) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if half.record is not None:
        identity = half.record.spec.identity
        found = {k: v for k, v in identity.items() if k.startswith("judge.")}
        if "judge_prompt" in half.record.spec.sources:
            found["prompt digest"] = half.record.spec.sources["judge_prompt"]
    for protocol in (half.report.get("protocols") or {}).values():
        if digest := (protocol.get("judge") or {}).get("prompt_digest"):
            found["prompt digest"] = digest
    usage = half.report.get("judge") or half.report.get("judge_usage") or {}
    if models := usage.get("models"):
        found["server says it is"] = sorted(models)
    return found


def _rubrics(half: Half) -> dict[str, Any]:
    if half.record is None:
        return {}
    spec = half.record.spec
    names = ("rubric_source", "static_rubrics", "instance_rubrics_only", "rubric_aggregation")
    fields = [f"reward.{name}" for name in names]
    found = {name: spec.identity[name] for name in fields if name in spec.identity}
    if "rubrics" in spec.sources:
        found["rubric set's digest"] = spec.sources["rubrics"]
    return found


def _environment(half: Half) -> dict[str, Any]:
    provenance = half.provenance
    if not provenance:
        return {}
    host = provenance.get("host") or {}
    found: dict[str, Any] = dict(provenance.get("versions") or {})
    found["Python"] = provenance.get("python")
    found["host"] = host.get("name")
    found["processor"] = host.get("cpu")
    found["GPUs"] = host.get("gpus")
    return found


def _gather(pairs: Iterable[Pair], values: Any) -> list[Change]:
    """What differs, each once, with the stages in which it does so."""
    found: dict[tuple[str, str, str], tuple[Any, Any, list[str]]] = {}
    for pair in pairs:
        if (both := pair.both) is None:
            continue
        one, other = values(both[0]), values(both[1])
        if not one or not other:
            continue
        for what, x, y in _differing(one, other):
            entry = found.setdefault((what, str(x), str(y)), (x, y, []))
            entry[2].append(pair.name)
    return [Change(k[0], x, y, tuple(names)) for k, (x, y, names) in found.items()]


# ---------------------------------------------------------------- code


def code_change(a: Side, b: Side, pairs: Sequence[Pair]) -> CodeChange | None:
    """The code of both runs; of single stages that of their workers. None: it is the same, or
    nobody knows."""
    one, other = _code(a, pairs, "a"), _code(b, pairs, "b")
    git = _git(a, b)
    if not one or not other or (one == other and not git):
        return None
    folders = (a.workspace.layout.code / one, b.workspace.layout.code / other)
    if one == other:
        return CodeChange(one, other, (), tuple(git))
    kept = all(folder.is_dir() for folder in folders)
    files = tuple(_file_changes(*folders)) if kept else None
    shown = (str(folders[0]), str(folders[1])) if kept else None
    return CodeChange(one, other, files, tuple(git), shown)


def _code(side: Side, pairs: Sequence[Pair], which: str) -> str:
    if side.single:
        half: Half | None = getattr(pairs[0], which)
        worked = half.provenance.get("code") if half is not None else None
        if worked:
            return str(worked)
    return side.run.code if side.run is not None else ""


def _git(a: Side, b: Side) -> list[Change]:
    if a.run is None or b.run is None:
        return []
    one, other = a.run.provenance, b.run.provenance
    names = {"commit": "commit", "dirty": "uncommitted changes", "diff_sha256": "their digest"}
    return [
        Change(words, one.get(name), other.get(name))
        for name, words in names.items()
        if one.get(name) != other.get(name)
    ]


def _file_changes(a: Path, b: Path) -> list[FileChange]:
    one, other = _texts(a), _texts(b)
    found = []
    for path in sorted({*one, *other}):
        if one.get(path) == other.get(path):
            continue
        before, after = (side.get(path, b"").decode(errors="replace") for side in (one, other))
        lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0))[2:]
        added = sum(line.startswith("+") for line in lines)
        removed = sum(line.startswith("-") for line in lines)
        found.append(FileChange(path, added, removed))
    return found


def _texts(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }

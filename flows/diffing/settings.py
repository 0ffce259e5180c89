"""In what two sides were made otherwise: configuration, sources, judge, rubrics, code, environment.

In: two sides and their pairs of stages. Out: values for :mod:`flows.diffing.document`. Fields that
decide what is computed (identity) are told from those that decide where and how (execution).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.diffing.sides import Half, Pair, Side, both_of, differing
from flows.stored import recorded_field
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.marks import ABSENT, Mark, walk

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

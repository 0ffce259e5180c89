"""Sides of a comparison: two runs, trials or stages by their names.

In: a word and a workspace. Out: a :class:`DiffSide`, and for two sides the :class:`StagePair`
values of matching stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from flows.running.status import find_run, stage_names
from flows.stored import the_stage
from infra.store.layout import AttemptPaths
from infra.store.sweep_records import sweep_versions
from infra.store.workspace import Workspace
from refiner_core.contract.records import RunRecord, StageRecord, StageResult, StageSpec


@dataclass(frozen=True)
class DiffSide:
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
class StageSide:
    """One side's part of a pair; read on demand."""

    side: DiffSide
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


class StagePair(NamedTuple):
    """A stage of each side; None if a side has none of that name."""

    name: str
    a: StageSide | None
    b: StageSide | None

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


def both_of(pairs: Iterable[StagePair], *kinds: str) -> Iterator[tuple[str, StageSide, StageSide]]:
    """Name and halves of the pairs (of these kinds) with two different halves."""
    for pair in pairs:
        wanted = not kinds or pair.kind in kinds
        if wanted and pair.a is not None and pair.b is not None and not pair.same:
            yield pair.name, pair.a, pair.b


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> both values, for those that differ."""
    keys = dict.fromkeys([*one, *other])
    return {k: (one.get(k), other.get(k)) for k in keys if one.get(k) != other.get(k)}


def pairs_of(a: DiffSide, b: DiffSide) -> list[StagePair]:
    """Matching stages: by name, in the order of the first side; or the two that were named."""
    if a.single and b.single:
        (name_a, id_a), (name_b, id_b) = *a.stages.items(), *b.stages.items()
        name = name_a if name_a == name_b else f"{name_a}, {name_b}"
        return [StagePair(name, StageSide(a, id_a), StageSide(b, id_b))]
    names = [*a.stages, *(n for n in b.stages if n not in a.stages)]
    if a.single or b.single:  # a stage against a run: that stage of it
        names = [n for n in names if n in a.stages and n in b.stages] or names
    return [StagePair(name, _half(a, name), _half(b, name)) for name in names]


def _half(side: DiffSide, name: str) -> StageSide | None:
    return StageSide(side, side.stages[name]) if name in side.stages else None


def find_side(workspace: Workspace, word: str) -> DiffSide:
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
        return _of_run(workspace, find_run(workspace, label), stage if with_stage else None, label)
    if colon:
        return _of_run(workspace, find_run(workspace, first), rest)
    if workspace.layout.stage(word).spec.exists():
        record = workspace.read_record(word)
        assert record is not None, "a stage with a specification has a record"
        return DiffSide(word, workspace, None, {record.spec.name: word})
    return _of_run(workspace, find_run(workspace, word))


def _of_run(
    workspace: Workspace, run: RunRecord | None, stage: str | None = None, label: str = ""
) -> DiffSide:
    """A run with its stages in the order of work, so that the first difference comes first; or one
    stage of it."""
    assert run is not None, "a named run is found or refused"
    if stage is not None:
        stages = {stage: the_stage(run, stage)}
        return DiffSide(f"{run.run}:{stage}", workspace, run, stages)
    return DiffSide(label or run.run, workspace, run, {n: run.stages[n] for n in stage_names(run)})

"""What is compared: two runs, trials or stages by their names.

In: a word and a workspace. Out: a :class:`Side`, and of two sides the :class:`Pair` values of
stages that answer to each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.running.status import find_run, stage_names
from infra.store.sweep_records import read_sweep, sweep_versions, trial_run
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.records import RunRecord, StageRecord

_ATTEMPT = re.compile(r"^(?P<rest>.+)#(?P<number>\d+)$")


@dataclass(frozen=True)
class Side:
    """One of the two.

    Attributes
    ----------
    label
        What to call it: the word, or the run's id.
    run
        The call; None for a stage by its own id.
    stages
        Names of stages -> ids; one only, where a stage was named.
    attempt
        The attempt that was named with ``STAGE#N``; None: the one that counts.
    """

    label: str
    workspace: Workspace
    run: RunRecord | None
    stages: Mapping[str, str]
    attempt: int | None = None
    single: bool = False

    @property
    def config(self) -> Mapping[str, Any]:
        """The whole configuration; of a stage by its id, that of its newest attempt."""
        if self.run is not None:
            return self.run.config
        found: Mapping[str, Any] = {}
        for stage_id in self.stages.values():
            paths = self.workspace.layout.stage(stage_id)
            for number in paths.attempt_numbers():
                found = self.workspace.part(paths.attempt(number), "config") or found
        return found


@dataclass
class Half:
    """One side's part of a pair; read when it is needed."""

    side: Side
    name: str
    stage_id: str
    _record: StageRecord | None = field(default=None, repr=False)
    _read: bool = field(default=False, repr=False)

    @property
    def record(self) -> StageRecord | None:
        """What is known of the stage; None where nobody has begun it."""
        if not self._read:
            self._record = self.side.workspace.read_record(self.stage_id)
            self._read = True
        return self._record

    @property
    def attempt(self) -> int | None:
        """The attempt whose files tell the whole story."""
        record = self.record
        if self.side.attempt is not None:
            return self.side.attempt
        if record is None or not record.attempts:
            return None
        return record.result.attempt if record.result else record.attempts[-1].number

    @property
    def output(self) -> Path | None:
        """Where its output lies; None where it is not done."""
        return self.side.workspace.output_dir(self.stage_id)

    def file(self, name: str) -> Path | None:
        """One of the attempt's files or folders: ``metrics``, ``rollouts``, ``started`` …"""
        if self.attempt is None:
            return None
        paths = self.side.workspace.layout.attempt(self.stage_id, self.attempt)
        found: Path = getattr(paths, name)
        return found

    @property
    def provenance(self) -> Mapping[str, Any]:
        """What its worker ran on; empty where it has not begun."""
        if self.record is not None and self.record.result is not None:
            return self.record.result.provenance
        path = self.file("started")
        started = self.side.workspace.read_control(path) if path is not None else None
        return (started or {}).get("provenance") or {}

    @property
    def report(self) -> Mapping[str, Any]:
        """What the stage said of itself; empty where it is not done."""
        record = self.record
        return record.result.report if record is not None and record.result is not None else {}


@dataclass(frozen=True)
class Pair:
    """A stage of each side; None where a side has none of that name."""

    name: str
    a: Half | None
    b: Half | None

    @property
    def kind(self) -> str:
        """``data``, ``grpo`` …"""
        half = self.a or self.b
        assert half is not None, "a pair has a stage"
        return half.stage_id.rpartition("-")[0]

    @property
    def same(self) -> bool:
        """One and the same stage: nothing about it can differ."""
        if self.a is None or self.b is None:
            return False
        roots = {self.a.side.workspace.root, self.b.side.workspace.root}
        attempts = (self.a.side.attempt, self.b.side.attempt)
        return self.a.stage_id == self.b.stage_id and len(roots) == 1 and attempts[0] == attempts[1]

    @property
    def both(self) -> tuple[Half, Half] | None:
        """The two, where there are two that are not the same."""
        if self.a is None or self.b is None or self.same:
            return None
        return self.a, self.b


def pairs_of(a: Side, b: Side) -> list[Pair]:
    """Stages that answer to each other: by name, in the order of the first; or the two that were
    named."""
    if a.single and b.single:
        (name_a, id_a), (name_b, id_b) = *a.stages.items(), *b.stages.items()
        name = name_a if name_a == name_b else f"{name_a}, {name_b}"
        return [Pair(name, Half(a, name_a, id_a), Half(b, name_b, id_b))]
    names = [*a.stages, *(n for n in b.stages if n not in a.stages)]
    if a.single or b.single:  # a stage against a run: that stage of it
        names = [n for n in names if n in a.stages and n in b.stages] or names
    return [
        Pair(
            name,
            Half(a, name, a.stages[name]) if name in a.stages else None,
            Half(b, name, b.stages[name]) if name in b.stages else None,
        )
        for name in names
    ]


def find_side(workspace: Workspace, word: str) -> Side:
    """The side that a word names.

    Parameters
    ----------
    word
        A run's id or a part of it that no other has; ``RUN:STAGE``; a stage's id; a trial as
        ``SWEEP:ARM/seedN``; with a stage also ``#N``, an attempt.

    Raises
    ------
    ConfigurationError
        There is none, or several; suggests the nearest.
    """
    match = _ATTEMPT.match(word)
    rest, number = (match["rest"], int(match["number"])) if match else (word, None)
    side = _find(workspace, rest)
    if number is None:
        return side
    if not side.single:
        raise ConfigurationError(
            f"{word!r} names attempt {number} of a whole run.",
            expected="an attempt of one stage",
            fix=f"name the stage: RUN:STAGE#{number}",
        )
    (stage_id,) = side.stages.values()
    known = workspace.layout.stage(stage_id).attempt_numbers()
    if number not in known:
        raise ConfigurationError(
            f"{stage_id} has no attempt {number}.",
            expected=f"one of: {', '.join(map(str, known)) or '(there are none)'}",
            fix="name one of these",
        )
    return Side(word, workspace, side.run, side.stages, number, single=True)


def _find(workspace: Workspace, word: str) -> Side:
    first, colon, rest = word.partition(":")
    if colon and sweep_versions(workspace, first):
        return _trial(workspace, first, rest)
    if colon:
        return _stage_of_run(workspace, find_run(workspace, first), rest)
    if workspace.layout.stage(word).spec.exists():
        record = workspace.read_record(word)
        assert record is not None, "a stage with a specification has a record"
        return Side(word, workspace, None, {record.spec.name: word}, single=True)
    if sweep_versions(workspace, word):
        trials = [t.name for t in read_sweep(workspace, word).trials]
        raise ConfigurationError(
            f"{word} is a sweep of {len(trials)} trials.",
            expected="two runs, trials or stages",
            fix=f"name a trial, e.g. {word}:{trials[0] if trials else 'ARM/seed1'}; or compare all "
            f"arms with `refiner report {word}`",
        )
    sweep, at, _ = word.rpartition("@")
    if at and sweep_versions(workspace, sweep):
        raise ConfigurationError(
            f"{word} is a version of a sweep: what was asked for, not a run.",
            expected="two runs, trials or stages",
            fix=f"name two trials, as {sweep}:ARM/seedN (`refiner status {sweep}` shows them)",
        )
    run = find_run(workspace, word)
    assert run is not None, "a run that is named is found or refused"
    return Side(run.run, workspace, run, _in_order(run))


def _trial(workspace: Workspace, sweep: str, name: str) -> Side:
    """A trial of a sweep; ``ARM/seedN:STAGE`` is a stage of it."""
    trial, colon, stage = name.partition(":")
    known = [t.name for t in read_sweep(workspace, sweep).trials]
    if trial not in known:
        raise ConfigurationError(
            f"Sweep {sweep} has no trial {trial!r}.{suggest(trial, known)}",
            expected=f"one of: {', '.join(known[:12])}",
            fix="name one of these",
        )
    run_id = trial_run(workspace, sweep, trial)
    if run_id is None:
        raise ConfigurationError(
            f"Trial {trial} of sweep {sweep} has not begun.",
            expected="a trial that somebody has worked on",
            fix=f"wait for it (`refiner status {sweep}`), or name another one",
        )
    run = workspace.read_run(run_id)
    if colon:
        return _stage_of_run(workspace, run, stage)
    return Side(f"{sweep}:{trial}", workspace, run, _in_order(run))


def _in_order(run: RunRecord) -> dict[str, str]:
    """A run's stages in the order in which they are done: what differs first, is named first."""
    return {name: run.stages[name] for name in stage_names(run)}


def _stage_of_run(workspace: Workspace, run: RunRecord | None, name: str) -> Side:
    assert run is not None, "a run that is named is found or refused"
    if name not in run.stages:
        raise ConfigurationError(
            f"Run {run.run} has no stage {name!r}.{suggest(name, list(run.stages))}",
            expected=f"one of: {', '.join(run.stages)}",
            fix="name one of these",
        )
    return Side(f"{run.run}:{name}", workspace, run, {name: run.stages[name]}, single=True)

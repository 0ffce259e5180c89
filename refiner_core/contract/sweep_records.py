"""What a workspace remembers of sweeps. Values; ``infra.store.sweep_records`` reads and writes
them.

A sweep is known by its name. Each time that it is launched as something else (an arm or seed was
added), it gets another *version*; older ones stay. A trial is a run: its :class:`RunRecord` says in
``provenance["sweep"]`` which trial of which sweep it is (:func:`trial_of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SWEEP_VERSION = 1


@dataclass(frozen=True)
class ArmRecord:
    """One setting of all factors: labels and values, by dotted field."""

    name: str
    levels: Mapping[str, str]
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class TrialRecord:
    """One arm with one seed, and the stages (name -> id) that it is made of."""

    arm: str
    seed: int
    overrides: tuple[str, ...]
    stages: Mapping[str, str]

    @property
    def name(self) -> str:
        """Unique in its sweep: ``citation-0.2/seed1``."""
        return f"{self.arm}/seed{self.seed}"


@dataclass(frozen=True)
class SweepRecord:
    """One version of a sweep, as it was launched.

    Attributes
    ----------
    number
        Versions of one sweep are counted from 1.
    recipe, folder, text
        The recipe, the folder that paths are relative to, the sweep file word for word.
    limits, question
        As in the file (:class:`sweeps.values.Limits`, :class:`sweeps.values.Question`).
    forecast
        What was expected of it before it began, as JSON.
    code
        Id of the code snapshot that its jobs import.
    """

    version: int
    number: int
    name: str
    recipe: str
    folder: str
    text: str
    arms: tuple[ArmRecord, ...]
    baseline: str
    seeds: tuple[int, ...]
    trials: tuple[TrialRecord, ...]
    limits: Mapping[str, Any]
    question: Mapping[str, Any]
    forecast: Mapping[str, Any]
    code: str
    started_at: str
    provenance: Mapping[str, Any] = field(default_factory=dict)


def trial_of(provenance: Mapping[str, Any]) -> tuple[str, str, int] | None:
    """Sweep, arm and seed of a run's provenance; None for a run of its own."""
    found = provenance.get("sweep")
    if not isinstance(found, Mapping):
        return None
    return str(found["name"]), str(found["arm"]), int(found["seed"])

"""The values that rooms exchange about sweeps. Data only.

:class:`SweepFile` is what a person has written, checked for form; arms and :class:`Trial` values
are what it stands for; :class:`SweepPlan` is all of it with the stages, each known by fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.marks import STRICT
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import ArmRecord

#: A whole number stays one: what was recorded before is the same sweep.
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Annotated[int, Field(ge=0)]


@section(frozen=True, config=STRICT)
class Limits:
    """Limits of a sweep; None is no limit.

    Attributes
    ----------
    concurrency
        Trials at a time.
    gpu_hours
        Of all attempts at stages of this sweep; no trial is begun that would pass it.
    disk_gb
        Without effect: ``disk.limit_gb`` limits the whole workspace.
    judge_calls
        Calls of a judge, training and evaluations together.
    """

    concurrency: Annotated[int, Field(ge=1)] | None = None
    gpu_hours: _Amount | None = None
    disk_gb: _Amount | None = None
    judge_calls: Annotated[int, Field(ge=0)] | None = None


@section(frozen=True, config=STRICT)
class Question:
    """Question that the sweep is to answer: which number decides, and how small a change matters.

    Attributes
    ----------
    text
        In words, for the report.
    metric, decoding
        The number that arms are compared on first, e.g. ``oracle`` under ``sampled``.
    protocol
        Name of the evaluation protocol that it is taken from; empty: the recipe's own.
    model
        Which model of the recipe; empty: the last that it trains.
    smallest_effect
        The smallest change that would matter, in units of the metric; None: nobody has said.
    """

    text: str = ""
    metric: str = ""
    decoding: str = ""
    protocol: str = ""
    model: str = ""
    smallest_effect: (
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | Annotated[int, Field(gt=0)] | None
    ) = None


@dataclass(frozen=True)
class SweepFile:
    """A sweep as it was written.

    Attributes
    ----------
    name
        The file's stem, or ``name:``; the sweep's name in the workspace.
    recipe, overrides
        What every trial starts from.
    factors
        Grid: field -> {label: value}. A list in the file has its values as labels.
    labelled
        The factors whose labels a person has chosen; they stand in names of arms as they are.
    zipped
        Groups of fields that change together: each group is field -> values, all of one length.
    zip_labels
        For each group its labels; none: its values as text.
    arms
        Named settings: name -> {field: value}; together with factors each is combined with all.
    exclude
        Settings that are left out: {field: value or label}, all must match.
    baseline
        Name of the arm that the others are held against, or {field: value or label} that only
        that arm has; empty: the first.
    seeds
        Run seeds; each arm is tried with each.
    text, origin
        The file, word for word, and its path.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    factors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    labelled: frozenset[str] = frozenset()
    zipped: tuple[Mapping[str, tuple[Any, ...]], ...] = ()
    zip_labels: tuple[tuple[str, ...], ...] = ()
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    exclude: tuple[Mapping[str, Any], ...] = ()
    baseline: str | Mapping[str, Any] = ""
    seeds: tuple[int, ...] = (1, 2, 3)
    limits: Limits = field(default_factory=Limits)
    question: Question = field(default_factory=Question)
    text: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Trial:
    """One arm with one seed: a run of the recipe with these ``overrides``."""

    arm: str
    seed: int
    overrides: tuple[str, ...]
    plan: Plan

    @property
    def name(self) -> str:
        """Unique in its sweep: ``citation-0.2/seed1``."""
        return f"{self.arm}/seed{self.seed}"


@dataclass(frozen=True)
class SweepPlan:
    """A sweep with all its trials, seeds first: all arms of the first seed, then of the next, so
    that a sweep that ends early can still be compared in pairs."""

    sweep: SweepFile
    arms: tuple[ArmRecord, ...]
    baseline: str
    trials: tuple[Trial, ...]
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> RecipeConfig:
        """Settings that all trials have in common: where and how they run."""
        return self.trials[0].plan.config

    def stages(self) -> dict[str, PlannedStage]:
        """Every stage by id, each once however many trials share it, in an order in which inputs
        come first."""
        return {s.id: s for trial in self.trials for s in trial.plan.stages}

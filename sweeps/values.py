"""Values shared between packages about sweeps. Data only.

:class:`SweepFile` is the checked content of a file; arms and :class:`Trial` values follow from it;
:class:`SweepPlan` has them with all stages, each identified by fingerprint.
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

#: An integer stays one, so that records of the same sweep stay equal.
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Annotated[int, Field(ge=0)]


@section(frozen=True, config=STRICT)
class Limits:
    """Limits of a sweep; None is no limit.

    Attributes
    ----------
    concurrency
        Trials at a time.
    gpu_hours
        Limit of all attempts at stages of this sweep; no trial begins that would exceed it.
    disk_gb
        No effect: ``disk.limit_gb`` limits the whole workspace.
    judge_calls
        Judge calls, training and evaluations together.
    """

    concurrency: Annotated[int, Field(ge=1)] | None = None
    gpu_hours: _Amount | None = None
    disk_gb: _Amount | None = None
    judge_calls: Annotated[int, Field(ge=0)] | None = None


@section(frozen=True, config=STRICT)
class Question:
    """Question of a sweep: the deciding metric, and the smallest change that matters.

    Attributes
    ----------
    text
        Text for the report.
    metric, decoding
        The metric that arms are first compared on, e.g. ``oracle`` under ``sampled``.
    protocol
        Name of its evaluation protocol; empty: the recipe's own.
    model
        Model of the recipe; empty: the last that it trains.
    smallest_effect
        The smallest change that would matter, in units of the metric; None: not given.
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
    """A sweep as written in its file.

    Attributes
    ----------
    name
        The file's stem, or ``name:``; its name in the workspace.
    recipe, overrides
        Common base of all trials.
    factors
        Grid: field -> {label: value}. A list in the file has its values as labels.
    labelled
        Factors with labels chosen in the file; names of arms contain them unchanged.
    zipped
        Groups of fields that change together: each group is field -> values, of equal lengths.
    zip_labels
        Labels of each group; none: its values as text.
    arms
        Named settings: name -> {field: value}; each is combined with all factors.
    exclude
        Excluded settings: {field: value or label}, all must match.
    baseline
        Name of the arm that the others are compared with, or {field: value or label} of only that
        arm; empty: the first.
    seeds
        Run seeds; each arm runs with each.
    text, origin
        The file's exact text, and its path.
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
        """Name within its sweep: ``citation-0.2/seed1``."""
        return f"{self.arm}/seed{self.seed}"


@dataclass(frozen=True)
class SweepPlan:
    """A sweep with all its trials, ordered by seed: all arms of the first seed, then of the next,
    so that a sweep that ends early can still be compared in pairs."""

    sweep: SweepFile
    arms: tuple[ArmRecord, ...]
    baseline: str
    trials: tuple[Trial, ...]
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> RecipeConfig:
        """Common settings of all trials: where and how they run."""
        return self.trials[0].plan.config

    def stages(self) -> dict[str, PlannedStage]:
        """Every stage by id, each once, inputs first."""
        return {s.id: s for trial in self.trials for s in trial.plan.stages}

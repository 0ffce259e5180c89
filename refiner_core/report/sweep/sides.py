"""The arms of one comparison while it is put together.

In: what each arm was measured with. Out: :class:`Side` values, which the estimates fill in
(:mod:`refiner_core.report.sweep.numbers`) and which are said at last
(:mod:`refiner_core.report.sweep.said`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from refiner_core.evaluation.statistics import (
    Difference,
)
from refiner_core.report.drift import UNKNOWN, Drift

Floats = npt.NDArray[np.float64]
ALPHA = 0.05


class BySeed(NamedTuple):
    """What each seed says: the mean over the prompts that have a value, and their number."""

    means: list[float]
    counts: list[int]


@dataclass
class Side:
    """One arm of a comparison, as it is put together."""

    arm: str
    seeds: tuple[int, ...]
    shared: tuple[int, ...] = ()
    mean: Difference | None = None
    found: Difference | None = None
    drift: Drift = UNKNOWN
    values: Floats | None = None  # [seeds, prompts]
    differences: Floats | None = None  # [shared seeds, prompts]
    by_seed: BySeed | None = None
    changes: BySeed | None = None
    refused: str = ""
    agents: bool = False
    notes: list[str] = field(default_factory=list)
    p_adjusted: float | None = None


@dataclass(frozen=True)
class Setting:
    """What comparisons of a sweep have in common.

    ``absent`` maps arm and seed to why there is no evaluation.
    """

    baseline: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    absent: Mapping[tuple[str, int], str] = field(default_factory=dict)

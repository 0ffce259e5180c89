"""Results of arms, drawn with stated spreads: the truth is known, so methods can be tried on it.

Values are [repetitions, arms, seeds, prompts], arm 0 is the baseline::

    value = mean + effect of the arm + prompt + arm x prompt + arm x seed + residual

``prompt`` is how hard a prompt is, the same for all arms, and leaves a paired difference; what an
arm does with a prompt (``interaction``), how a seed of an arm came out (``seed``: each arm with
each seed is a training of its own) and the residual stay. ``yes_no`` results are 1 where that sum,
normally distributed, lies above a threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """Standard deviations of what a result is made of; ``yes_no`` is the baseline's share of ones,
    None for results that are numbers."""

    seed: float = 0.0
    prompt: float = 0.3
    interaction: float = 0.1
    residual: float = 0.3
    yes_no: float | None = None

    @property
    def name(self) -> str:
        """``seed 0.05, interaction 0.1, yes in 50 %``."""
        kind = "numbers" if self.yes_no is None else f"yes in {100 * self.yes_no:.0f} %"
        return f"seed {self.seed:g}, interaction {self.interaction:g}, {kind}"

    @property
    def spread(self) -> float:
        """Of one latent value, all together."""
        parts = (self.seed, self.prompt, self.interaction, self.residual)
        return float(np.sqrt(sum(part**2 for part in parts)))

    def truth(self, effect: float) -> float:
        """The true difference that an effect makes."""
        if self.yes_no is None:
            return effect
        limit = norm.ppf(self.yes_no)
        return float(norm.cdf(limit + effect / self.spread) - self.yes_no)

    def draw(
        self, rng: np.random.Generator, shape: tuple[int, int, int], effects: Sequence[float]
    ) -> Floats:
        """Results of ``shape`` (repetitions, seeds, prompts), arms second."""
        repeats, seeds, prompts = shape
        arms = len(effects)

        def part(spread: float, *dims: int) -> Floats:
            if not spread:
                return np.zeros((1, 1, 1, 1), np.float32)
            return np.float32(spread) * rng.standard_normal(dims, dtype=np.float32)

        latent = part(self.residual, repeats, arms, seeds, prompts)
        latent = latent + part(self.prompt, repeats, 1, 1, prompts)
        latent += part(self.interaction, repeats, arms, 1, prompts)
        latent += part(self.seed, repeats, arms, seeds, 1)
        latent += np.array(effects, np.float32)[None, :, None, None]
        if self.yes_no is None:
            return latent
        threshold = -norm.ppf(self.yes_no) * self.spread
        return (latent > threshold).astype(np.float32)

    def chunks(
        self,
        rng: np.random.Generator,
        shape: tuple[int, int, int],
        effects: Sequence[float],
        limit: int = 8_000_000,
    ) -> Iterator[Floats]:
        """The same in pieces that memory can hold."""
        repeats, seeds, prompts = shape
        at_once = max(1, limit // (len(effects) * seeds * prompts))
        while repeats > 0:
            yield self.draw(rng, (min(at_once, repeats), seeds, prompts), effects)
            repeats -= at_once

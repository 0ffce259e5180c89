"""Whether the report's statistics keep their word, on results whose truth is known.

    python -m tests.prove.statistics             everything, a quarter of an hour
    python -m tests.prove.statistics --small     what CI runs

1. Cells: seeds x prompts x spread of seeds x interaction x kind of result. In every one: no more
   than 6 % false positives at 5 %, and 92 to 98 % of the 95 % intervals hold the true difference,
   of arms that do not differ and of arms that do.
2. The methods that do not: a hierarchical bootstrap over seeds and prompts, McNemar's test pooled
   over seeds, t over prompts alone.
3. Through the report itself: a judge that became more lenient is not reported as progress, a family
   of arms without effect is left alone (Holm), an effect of the size that the report calls
   detectable is found in 80 % of sweeps, other prompts are refused.

Prints a line per cell and ends with 1 where something does not hold.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import binomtest, t

from refiner_core.evaluation.statistics import mean_spread, two_way_means
from refiner_core.report.sweep.comparing import make_report
from refiner_core.report.sweep.sweep_report import ArmNumber
from tests.support.made_evidence import made_from
from tests.support.results import World

Floats = npt.NDArray[np.float64]
FALSE_POSITIVES, COVERED = 0.06, (0.92, 0.98)
SEEDS, PROMPTS = (3, 5), (50, 200)
SEED_SPREADS, INTERACTIONS, KINDS = (0.0, 0.03, 0.1, 0.2), (0.0, 0.1, 0.4), (None, 0.5, 0.1)
EFFECT = 0.1


class Cell(NamedTuple):
    """What is drawn: spreads, and how many seeds and prompts."""

    world: World
    seeds: int
    prompts: int

    @property
    def name(self) -> str:
        return f"{self.seeds} seeds, {self.prompts:3} prompts, {self.world.name}"


class Counted(NamedTuple):
    """Shares of repetitions."""

    false_positives: float
    covered_null: float
    covered_effect: float

    @property
    def holds(self) -> bool:
        low, high = COVERED
        covered = (self.covered_null, self.covered_effect)
        return self.false_positives <= FALSE_POSITIVES and all(low <= c <= high for c in covered)

    @property
    def line(self) -> str:
        return (
            f"false positives {100 * self.false_positives:4.1f} %, intervals hold the truth in "
            f"{100 * self.covered_null:4.1f} % (no effect), {100 * self.covered_effect:4.1f} %"
        )


#: Differences [repetitions, seeds, prompts] to (p-values, half widths), both [repetitions].
Method = Callable[[Floats], tuple[Floats, Floats]]


def ours(differences: Floats) -> tuple[Floats, Floats]:
    """The report's own."""
    found = two_way_means(differences)
    p_values = np.array([1.0 if f.p_value is None else f.p_value for f in found])
    half = np.array([0.0 if f.high is None else f.high - f.value for f in found])
    return p_values, half


def over_prompts(differences: Floats) -> tuple[Floats, Floats]:
    """t over prompts, the seeds taken for all that there are."""
    variance = mean_spread(differences.mean(axis=1, keepdims=True)).variance
    freedom = differences.shape[2] - 1.0
    mean, error = differences.mean(axis=(1, 2)), np.sqrt(np.maximum(variance, 1e-300))
    return 2 * t.sf(np.abs(mean) / error, freedom), t.ppf(0.975, freedom) * error


def pooled(differences: Floats) -> tuple[Floats, Floats]:
    """McNemar's exact test over all pairs of all seeds (of yes or no); no interval."""
    up, down = ((differences * sign > 0).sum(axis=(1, 2)) for sign in (1, -1))
    known: dict[tuple[int, int], float] = {}
    for pair in zip(up.tolist(), down.tolist(), strict=True):
        if pair not in known:
            known[pair] = float(binomtest(pair[0], sum(pair)).pvalue) if sum(pair) else 1.0
    p_values = [known[pair] for pair in zip(up.tolist(), down.tolist(), strict=True)]
    return np.array(p_values), np.full(len(differences), np.nan)


def bootstrap(differences: Floats, resamples: int = 400) -> tuple[Floats, Floats]:
    """Hierarchical: seeds are drawn again, then prompts; percentiles as if they were symmetric."""
    repeats, seeds, prompts = differences.shape
    rng = np.random.default_rng(0)
    drawn = np.empty((repeats, resamples))
    for i in range(resamples):
        of_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=repeats)
        of_prompts = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=repeats)
        weighted = np.einsum("rs,rsp,rp->r", of_seeds, differences, of_prompts, optimize=True)
        drawn[:, i] = weighted / (seeds * prompts)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=1)
    mean = differences.mean(axis=(1, 2))
    outside = (low > 0) | (high < 0)
    return np.where(outside, 0.0, 1.0), np.maximum(high - mean, mean - low)


def count(cell: Cell, method: Method, repeats: int) -> Counted:
    """How a method does in a cell."""
    positives = null = effect = 0
    for added in (0.0, EFFECT):
        rng = np.random.default_rng(7)
        truth = cell.world.truth(added)
        shape = (repeats, cell.seeds, cell.prompts)
        for values in cell.world.chunks(rng, shape, (0.0, added)):
            differences = (values[:, 1] - values[:, 0]).astype(np.float64)
            p_values, half = method(differences)
            held = np.abs(differences.mean(axis=(1, 2)) - truth) <= half + 1e-12
            if added:
                effect += int(held.sum())
            else:
                null += int(held.sum())
                positives += int((p_values < 0.05).sum())
    return Counted(positives / repeats, null / repeats, effect / repeats)


def cells(*, small: bool = False) -> Iterator[Cell]:
    """The whole grid, or the corners where methods fail first."""
    grid = itertools.product(SEEDS, PROMPTS, SEED_SPREADS, INTERACTIONS, KINDS)
    if small:
        grid = itertools.product((3, 5), (50,), (0.0, 0.1), (0.0, 0.4), (None, 0.5))
    for seeds, prompts, of_seeds, interaction, kind in grid:
        yield Cell(World(of_seeds, interaction=interaction, yes_no=kind), seeds, prompts)


# ---------------------------------------------------------------- through the report


@dataclass(frozen=True)
class Asked:
    """One question to the report, again and again: the share of sweeps in which an arm is called
    better or worse."""

    name: str
    share: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.low <= self.share <= self.high

    @property
    def line(self) -> str:
        return (
            f"{self.name}: {100 * self.share:.1f} % ({100 * self.low:.0f} to {100 * self.high:.0f})"
        )


def leniency(repeats: int, *, shift: float, noise: float, policy: float = 1.0) -> Asked:
    """A judge that gives the arm's evaluations ``policy`` x ``shift`` more, and the copier's
    answers ``shift``; the arm itself does nothing. How often is it called better?"""
    world = World(seed=0.02, interaction=0.05, residual=0.2)
    rng = np.random.default_rng(11)
    better = 0
    for _ in range(repeats):
        values = 0.5 + world.draw(rng, (1, 3, 100), (0.0, 0.0))[0]
        floor = np.broadcast_to(rng.random(100), values.shape) * 0.4
        floor = floor + noise * rng.standard_normal(values.shape)
        values[1] += policy * shift
        floor[1] += shift
        better += _arm(values, floor).verdict == "better"
    name = f"lenient by {shift:g}, noise {noise:g}, {policy:g} x on the arm's answers: better"
    return Asked(name, better / repeats, 0.0, 0.05)


def family(repeats: int, of_seeds: float, arms: int = 6) -> Asked:
    """Sweeps in which no arm differs: how often is any called better or worse?"""
    world = World(seed=of_seeds)
    rng = np.random.default_rng(12)
    wrong = 0
    for _ in range(repeats):
        values = world.draw(rng, (1, 3, 50), (0.0,) * arms)[0]
        report = make_report(made_from(values).evidence())
        assert report.primary is not None
        wrong += any(n.verdict in ("better", "worse") for n in report.primary.numbers)
    name = f"{arms - 1} arms without effect, seeds that spread by {of_seeds:g}: any better or worse"
    return Asked(name, wrong / repeats, 0.0, 0.06)


def _arm(values: Floats, reference: Floats | None = None) -> ArmNumber:
    report = make_report(made_from(values, reference=reference).evidence())
    assert report.primary is not None
    return report.primary.numbers[1]


def questions(repeats: int) -> Iterator[Asked]:
    """All of the third part."""
    yield leniency(repeats, shift=0.15, noise=0.0)
    for shift, noise in itertools.product((0.01, 0.05, 0.15), (0.02, 0.2)):
        yield leniency(repeats, shift=shift, noise=noise)
    yield leniency(repeats, shift=0.05, noise=0.02, policy=2.0)
    yield leniency(repeats, shift=-0.05, noise=0.02, policy=-1.0)
    for of_seeds in (0.0, 0.05, 0.1):
        yield family(repeats, of_seeds)


def main() -> int:
    """All of it; exits with 1 where something does not hold."""
    small = "--small" in sys.argv[1:]
    repeats, begun = (4_000 if small else 40_000), time.monotonic()
    failed = 0
    print(f"1. Every cell, {repeats} repetitions, arm against baseline", flush=True)
    for cell in cells(small=small):
        found = count(cell, ours, repeats)
        failed += not found.holds
        print(f"{'holds' if found.holds else 'FAILS':6}{cell.name}: {found.line}", flush=True)
    print("\n2. The methods that the report does not use", flush=True)
    hard = Cell(World(seed=0.1, interaction=0.1, yes_no=0.5), 3, 200)
    for name, method in (
        ("ours", ours),
        ("t over prompts alone", over_prompts),
        ("McNemar pooled over seeds", pooled),
        ("hierarchical bootstrap", bootstrap),
    ):
        found = count(hard, method, 2_000 if method is bootstrap else repeats)
        print(f"{name:28}{found.line}", flush=True)
    print("\n3. Through the report", flush=True)
    for asked in questions(100 if small else 1_000):
        failed += not asked.holds
        print(f"{'holds' if asked.holds else 'FAILS':6}{asked.line}", flush=True)
    print(f"\n{failed} do not hold; {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The effects that a planned sweep can detect."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from flows.running.calls import make_recipe_plan
from flows.sweeping.planning import detectable_json, detectable_lines
from refiner_core.evaluation.power import (
    VarianceComponents,
    detectable_effect,
    likely_components,
    power_of,
    variance_components,
)
from sweeps.power import SpreadEvidence, aim_of, assumed, detectable
from sweeps.values import Question, SweepFile, SweepPlan, Trial

KNOWN = SpreadEvidence(VarianceComponents(0.0001, 0.01, 0.05, 3, 100), "pairs", "measured", 0.5)


@functools.cache
def _plan(
    seeds: tuple[int, ...] = (1, 2, 3), arms: int = 2, question: Question | None = None, *own: str
) -> SweepPlan:
    trials = [
        Trial(
            f"arm{arm}",
            seed,
            (),
            make_recipe_plan("tiny", (f"grpo.beta={0.001 * (arm + 1)}", f"seed={seed}", *own)),
        )
        for seed in seeds
        for arm in range(arms)
    ]
    return SweepPlan(
        SweepFile("s", "tiny", question=question or Question()), (), "arm0", tuple(trials)
    )


@pytest.fixture(scope="module")
def plan() -> SweepPlan:
    return _plan()


def _asks(plan: SweepPlan, **question: object) -> SweepPlan:
    return replace(plan, sweep=replace(plan.sweep, question=Question(**question)))


def test_more_prompts_show_smaller_effects_and_an_unknown_number_none(plan: SweepPlan) -> None:
    few, many = (detectable(plan, n, KNOWN).effect for n in (50, 400))
    assert 0 < many < few
    unknown = detectable(plan, None, KNOWN)
    assert unknown.effect is None
    assert "unknown before the data are made" in detectable_lines(unknown)[0]


@pytest.mark.slow
def test_the_formulas_are_evaluated_at_the_planned_size() -> None:
    known = KNOWN.components
    found = detectable(_asks(_plan(arms=4), smallest_effect=0.06), 100, KNOWN)
    strict = 0.05 / 3
    assert (found.seeds, found.prompts, found.arms) == (3, 100, 3)
    assert found.effect == detectable_effect(known, 3, 100, 0.8, strict)
    assert found.power_for_wanted == power_of(known, 3, 100, 0.06, strict)
    assert detectable(_plan(arms=1), 100, KNOWN).arms == 0
    two = detectable(_plan(arms=2), 2, KNOWN)
    assert two.effect == detectable_effect(known, 3, 2, 0.8, 0.05)
    assert detectable(_plan(arms=2), 1, KNOWN).effect is None


@pytest.mark.slow
def test_the_suggested_size_is_the_least_sufficient_one(plan: SweepPlan) -> None:
    known = KNOWN.components
    for wanted in (0.02, 0.03, 0.05, 0.06, 0.079):
        found = detectable(_asks(plan, smallest_effect=wanted), 100, KNOWN)
        seeds, prompts = found.would_do["seeds"], found.would_do["prompts"]
        if seeds is not None:
            at, below = (power_of(known, s, 100, wanted) for s in (seeds, seeds - 1))
            assert at >= 0.8 > below
        if prompts is not None:
            at, below = (power_of(known, 3, p, wanted) for p in (prompts, prompts - 1))
            assert at >= 0.8 > below
        assert (seeds is None) == (power_of(known, 20, 100, wanted) < 0.8)
        assert (prompts is None) == (power_of(known, 3, 6400, wanted) < 0.8)
        ways = [f"{n} {of}" for n, of in ((seeds, "seeds"), (prompts, "prompts")) if n]
        told = f"{' or '.join(ways)} would do" if ways else "neither 20 seeds nor 64 times the"
        assert told in found.warnings[0]
    enough = detectable(_asks(plan, smallest_effect=0.09), 100, KNOWN)
    assert (enough.would_do, enough.warnings) == (None, ())
    quiet = replace(KNOWN, components=VarianceComponents(0.0, 0.0, 0.05, 3, 100))
    one = detectable(_asks(_plan((1,)), smallest_effect=0.06), 100, quiet)
    assert one.would_do["seeds"] == 4, "two differ by too much to show it"


def test_the_deciding_number_follows_from_what_is_measured() -> None:
    assert aim_of(_plan((1,), 1)) == Question("", "oracle", "sampled", model="grpo")
    greedy = _plan((1,), 1, None, "evaluate.decoding=[greedy]")
    assert aim_of(greedy).decoding == "greedy"
    asked = Question(metric="citation_f1", model="sft", decoding="sampled", protocol="p")
    assert aim_of(_plan((1,), 1, asked)) == asked
    agents = (Trial("a", 1, (), make_recipe_plan("tiny-tools", ())),)
    assert aim_of(SweepPlan(SweepFile("s", "tiny-tools"), (), "a", agents)).metric == "pass@1"
    nothing = _plan((1,), 1, None, "stages=[data,sft]")
    assert aim_of(nothing).model == ""


def test_shares_have_a_worst_case_and_other_numbers_none(plan: SweepPlan) -> None:
    assert detectable(plan, 1000, assumed("oracle")).effect is not None
    # Two independent coins, each with a variance of 1/4.
    assert assumed("oracle").components == (None, 0.0, 0.5, 0, 0)
    found = detectable(_asks(plan, metric="length_tokens"), 100, assumed("length_tokens"))
    assert found.effect is None
    assert "no bounds" in found.evidence.text


def test_a_few_earlier_seeds_give_a_range_and_not_a_number(plan: SweepPlan) -> None:
    """Three seeds say within a factor of three how far seeds differ; one number says otherwise."""
    found = detectable(plan, 100, KNOWN)
    low, high = found.effect_range
    assert low < found.effect < 1.5 * found.effect < high
    told = detectable_lines(found)[1]
    assert told.startswith(f"  likely between {low:.3f} and {high:.3f}: 3 seeds say little")
    assert detectable_json(found)["effect_range"] == [low, high]
    more = SpreadEvidence(KNOWN.components._replace(seeds=30), "pairs", "measured", 0.5)
    narrow = detectable(plan, 100, more).effect_range
    assert low <= narrow[0] <= found.effect < narrow[1] < high
    one_seed = SpreadEvidence(
        VarianceComponents(None, 0.06, 0.0, 1, 100), "one seed", "measured", 0.5
    )
    assert detectable(plan, 100, one_seed).effect_range is None
    assert detectable_json(detectable(plan, None, KNOWN))["effect_range"] is None


@pytest.mark.slow
@pytest.mark.parametrize("seed_sd", [0.0, 0.02, 0.06])
def test_the_range_holds_the_truth_about_as_often_as_it_says(seed_sd: float) -> None:
    """From one earlier pair of arms with three seeds."""
    rng = np.random.default_rng(5)
    truth = detectable_effect(VarianceComponents(seed_sd**2, 0.002, 0.05), 3, 100)
    held = 0
    for _ in range(80):
        values = rng.normal(0, seed_sd or 1e-12, (3, 1)) + rng.normal(0, 0.002**0.5, (1, 100))
        values = values + rng.normal(0, 0.05**0.5, (3, 100))
        limits = likely_components(variance_components(values))
        low, high = (detectable_effect(c, 3, 100) for c in limits)
        held += (
            low <= truth * 1.1 and truth <= high * 1.1
        )  # what prompts spread is an estimate, too
    assert held >= 0.72 * 80

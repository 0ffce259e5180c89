"""Whether a sweep can answer its question, before it is launched."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq

from flows.running.calls import make_recipe_plan
from flows.sweeping.planning import detectable_json, detectable_lines
from refiner_core.evaluation.power import (
    Components,
    detectable_effect,
    likely_components,
    power_of,
    variance_components,
)
from sweeps.power import Evidence, aim_of, assumed, detectable
from sweeps.values import Question, SweepFile, SweepPlan, Trial

KNOWN = Evidence(Components(0.0001, 0.01, 0.05, 3, 100), "pairs", "measured", 0.5)


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
    return replace(plan, sweep=replace(plan.sweep, question=Question(**question)))  # type: ignore[arg-type]


def test_without_a_question_the_last_model_is_compared_on_what_is_true(plan: SweepPlan) -> None:
    assert aim_of(plan) == Question("", "oracle", "sampled", model="grpo")


def test_more_prompts_show_smaller_effects_and_an_unknown_number_none(plan: SweepPlan) -> None:
    few, many = (detectable(plan, n, KNOWN).effect for n in (50, 400))
    assert few is not None
    assert many is not None
    assert 0 < many < few
    unknown = detectable(plan, None, KNOWN)
    assert unknown.effect is None
    assert "unknown before the data are made" in detectable_lines(unknown)[0]


def test_an_effect_too_small_to_be_seen_is_warned_of_with_what_would_do(plan: SweepPlan) -> None:
    """Else the sweep runs for days and shows an interval that holds everything."""
    found = detectable(_asks(plan, smallest_effect=0.06), 100, KNOWN)
    assert found.effect is not None
    assert found.effect > 0.06
    (warning,) = found.warnings
    assert warning.startswith("The smallest effect that matters (0.06) is less than")
    assert found.would_do is not None
    assert found.would_do["seeds"] is not None
    assert found.would_do["seeds"] > 3
    assert f"{found.would_do['seeds']} seeds" in warning
    again = detectable(
        _asks(_plan(tuple(range(found.would_do["seeds"]))), smallest_effect=0.06), 100, KNOWN
    )
    assert again.warnings == ()
    assert detectable_json(found)["would_do"]["seeds"] == found.would_do["seeds"]


def test_one_seed_cannot_speak_of_recipes(plan: SweepPlan) -> None:
    found = detectable(_plan((1,)), 100, KNOWN)
    assert any(
        w.startswith("One seed: a difference is one of these checkpoints") for w in found.warnings
    )


def test_an_unknown_spread_of_seeds_is_shown_as_a_range(plan: SweepPlan) -> None:
    one_seed = Evidence(Components(None, 0.06, 0.0, 1, 100), "one seed", "measured", 0.5)
    found = detectable(plan, 100, one_seed)
    assert found.effect is not None
    effects = [effect for _, effect in found.if_seeds_spread]
    assert found.effect < effects[0] < effects[1]
    assert "if seeds do not matter" in detectable_lines(found)[1]


def test_a_few_earlier_seeds_give_a_range_and_not_a_number(plan: SweepPlan) -> None:
    """Three seeds say within a factor of three how far seeds differ; one number says otherwise."""
    found = detectable(plan, 100, KNOWN)
    assert found.effect is not None
    assert found.effect_range is not None
    low, high = found.effect_range
    assert low < found.effect < 1.5 * found.effect < high
    told = detectable_lines(found)[1]
    assert told.startswith(f"  likely between {low:.3f} and {high:.3f}: 3 seeds say little")
    assert detectable_json(found)["effect_range"] == [low, high]
    more = Evidence(KNOWN.components._replace(seeds=30), "pairs", "measured", 0.5)  # type: ignore[union-attr]
    narrow = detectable(plan, 100, more).effect_range
    assert narrow is not None
    assert low <= narrow[0] <= found.effect < narrow[1] < high
    one_seed = Evidence(Components(None, 0.06, 0.0, 1, 100), "one seed", "measured", 0.5)
    assert detectable(plan, 100, one_seed).effect_range is None
    assert detectable_json(detectable(plan, None, KNOWN))["effect_range"] is None


@pytest.mark.parametrize("seed_sd", [0.0, 0.02, 0.06])
def test_the_range_holds_the_truth_about_as_often_as_it_says(seed_sd: float) -> None:
    """From one earlier pair of arms with three seeds."""
    rng = np.random.default_rng(5)
    truth = detectable_effect(Components(seed_sd**2, 0.002, 0.05), 3, 100)
    held = 0
    for _ in range(80):
        values = rng.normal(0, seed_sd or 1e-12, (3, 1)) + rng.normal(0, 0.002**0.5, (1, 100))
        values = values + rng.normal(0, 0.05**0.5, (3, 100))
        limits = likely_components(variance_components(values))
        assert limits is not None
        low, high = (detectable_effect(c, 3, 100) for c in limits)
        held += (
            low <= truth * 1.1 and truth <= high * 1.1
        )  # what prompts spread is an estimate, too
    assert held >= 0.72 * 80


def test_spreads_of_seeds_that_are_tried_are_those_of_the_difference_of_two_runs(
    plan: SweepPlan,
) -> None:
    """Both arms have a seed's effect of their own, so its variance counts twice."""
    one_seed = Evidence(Components(None, 0.06, 0.0, 1, 100), "one seed", "measured", 0.5)
    expected = tuple(
        (sd, detectable_effect(Components(2 * sd**2, 0.06, 0.0), 3, 100, 0.8, 0.05))
        for sd in (0.02, 0.05)
    )
    assert detectable(plan, 100, one_seed).if_seeds_spread == expected
    # One seed cannot tell its effect from an arm's: 95 % of what it may be comes on top.
    parts = Components(None, 0.04, 0.02, 1, 100)
    alone = detectable_effect(parts, 1, 100, 0.8, 0.05)
    found = detectable(_plan((1,)), 100, replace(one_seed, components=parts)).if_seeds_spread
    hidden = [1.96 * (2 * sd**2) ** 0.5 for sd in (0.02, 0.05)]
    assert [sd for sd, _ in found] == [0.02, 0.05]
    assert [effect for _, effect in found] == pytest.approx([alone + h for h in hidden])
    assert detectable(plan, 100, KNOWN).if_seeds_spread == ()
    numbers = _asks(plan, metric="length_tokens")
    assert detectable(numbers, 100, one_seed).if_seeds_spread == ()


def test_what_is_told_are_the_formulas_at_the_planned_size() -> None:
    known = KNOWN.components
    assert known is not None
    found = detectable(_asks(_plan(arms=4), smallest_effect=0.06), 100, KNOWN)
    strict = 0.05 / 3
    assert (found.seeds, found.prompts, found.arms) == (3, 100, 3)
    assert found.effect == detectable_effect(known, 3, 100, 0.8, strict)
    assert found.effect_alone == detectable_effect(known, 3, 100, 0.8, 0.05)
    assert found.power_for_wanted == power_of(known, 3, 100, 0.06, strict)
    likely = likely_components(known)
    assert likely is not None
    assert found.effect_range == tuple(detectable_effect(c, 3, 100, 0.8, strict) for c in likely)
    assert detectable(_plan((1,)), 100, KNOWN).effect_range is None
    assert detectable(_plan((1, 2)), 100, KNOWN).effect_range is not None
    assert detectable(_plan(arms=1), 100, KNOWN).arms == 0
    two = detectable(_plan(arms=2), 2, KNOWN)
    assert two.effect == two.effect_alone == detectable_effect(known, 3, 2, 0.8, 0.05)
    assert detectable(_plan(arms=2), 1, KNOWN).effect is None


def test_what_would_do_is_the_least_that_does(plan: SweepPlan) -> None:
    known = KNOWN.components
    assert known is not None
    for wanted in (0.02, 0.03, 0.05, 0.06, 0.079):
        found = detectable(_asks(plan, smallest_effect=wanted), 100, KNOWN)
        assert found.would_do is not None
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
    quiet = replace(KNOWN, components=Components(0.0, 0.0, 0.05, 3, 100))
    one = detectable(_asks(_plan((1,)), smallest_effect=0.06), 100, quiet)
    assert one.would_do is not None
    assert one.would_do["seeds"] == 4, "two differ by too much to show it"


@pytest.mark.parametrize(("seeds", "prompts"), [(20, 100), (3, 6400)])
def test_twenty_seeds_and_64_times_the_prompts_are_the_most_that_is_proposed(
    plan: SweepPlan, seeds: int, prompts: int
) -> None:
    noise = Components(0.0, 0.0, 0.25, 3, 100)
    evidence = Evidence(noise, "pairs", "measured", 0.5)
    just = brentq(lambda d: power_of(noise, seeds, prompts, d) - 0.8, 0.001, 0.5, rtol=1e-9)

    def proposed(wanted: float) -> int | None:
        remedy = detectable(_asks(plan, smallest_effect=wanted), 100, evidence).would_do
        assert remedy is not None
        return remedy["seeds" if seeds == 20 else "prompts"]

    assert proposed(just * 1.00002) in (20, 6400)
    assert proposed(just * 0.995) is None


def test_each_warning_comes_where_it_applies_and_not_one_earlier(plan: SweepPlan) -> None:
    def warned(plan: SweepPlan, prompts: int | None = 100, mean: float | None = 0.5) -> list[str]:
        found = detectable(plan, prompts, replace(KNOWN, mean=mean))
        return [" ".join(text.split()[:3]) for text in found.warnings]

    assert warned(plan) == warned(plan, None) == warned(plan, 2) == []
    assert warned(plan, 1) == ["1 held-out prompts:"]
    assert warned(_plan((1,))) == ["One seed: a"]
    assert warned(_plan((1, 2))) == ["Two seeds: 95"]
    assert warned(plan, mean=0.97) == warned(plan, mean=0.03) == ["oracle has stood"]
    assert warned(plan, mean=0.969) == warned(plan, mean=0.031) == warned(plan, mean=None) == []
    assert warned(_asks(plan, metric="length_tokens"), mean=0.99) == []


def test_effects_of_a_unit_and_more_are_told_in_three_digits(plan: SweepPlan) -> None:
    numbers = Evidence(Components(0.0, 0.0, 1e6, 3, 100), "pairs", "measured", 500.0)
    asked = _asks(plan, metric="length_tokens", smallest_effect=1.0)
    found = detectable(asked, 100, numbers)
    assert found.effect is not None
    assert 100 < found.effect < 1000
    assert f"(1) is less than what this sweep can see ({found.effect:.0f})" in found.warnings[0]


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
    assert "No stage evaluates any model:" in detectable(nothing, 9, KNOWN).warnings[0]


def test_holm_over_many_arms_makes_the_smallest_effect_larger() -> None:
    found = detectable(_plan(arms=8), 100, KNOWN)
    assert found.effect is not None
    assert found.effect_alone is not None
    assert found.effect > found.effect_alone


def test_a_metric_at_its_ceiling_or_floor_is_warned_of(plan: SweepPlan) -> None:
    for mean, word in ((0.99, "better"), (0.01, "worse")):
        found = detectable(plan, 100, replace(KNOWN, mean=mean))
        assert any(f"room for an arm to be {word}" in w for w in found.warnings)


def test_a_sweep_that_evaluates_nothing_says_so() -> None:
    found = detectable(_plan((1, 2), 2, None, "stages=[data,sft,grpo]"), None, KNOWN)
    assert found.warnings[0].startswith("No stage evaluates")


def test_shares_have_a_worst_case_and_other_numbers_none(plan: SweepPlan) -> None:
    assert detectable(plan, 1000, assumed("oracle")).effect is not None
    # Two independent coins, each with a variance of 1/4.
    assert assumed("oracle").components == (None, 0.0, 0.5, 0, 0)
    found = detectable(_asks(plan, metric="length_tokens"), 100, assumed("length_tokens"))
    assert found.effect is None
    assert "no bounds" in found.evidence.text


def test_one_planned_seed_of_what_only_seeds_spread_has_an_answer() -> None:
    assert detectable_effect(Components(0.01, 0.0, 0.0), seeds=1, prompts=50) == 0.0

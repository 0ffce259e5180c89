"""Whether a sweep can answer its question, before it is launched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flows.running.calls import make_recipe_plan
from flows.sweeping.before import detectable_json, detectable_lines
from refiner_core.evaluation.power import Components, detectable_effect
from sweeps.power import Aim, Evidence, aim_of, assumed, detectable
from sweeps.values import Question, SweepFile, SweepPlan, Trial

KNOWN = Evidence(Components(0.0001, 0.01, 0.05, 3, 100), "pairs", "measured", 0.5)


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
    assert aim_of(plan) == Aim("grpo", "oracle", "sampled", "")


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
    assert warning.startswith("The smallest effect that matters (0.060) is less than")
    assert found.remedy is not None
    assert found.remedy.seeds is not None
    assert found.remedy.seeds > 3
    assert f"{found.remedy.seeds} seeds" in warning
    again = detectable(
        _asks(_plan(tuple(range(found.remedy.seeds))), smallest_effect=0.06), 100, KNOWN
    )
    assert again.warnings == ()
    assert detectable_json(found)["would_do"]["seeds"] == found.remedy.seeds


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


def test_holm_over_many_arms_makes_the_smallest_effect_larger() -> None:
    found = detectable(_plan(arms=8), 100, KNOWN)
    assert found.effect is not None
    assert found.effect_alone is not None
    assert found.effect > found.effect_alone
    assert any("7 arms are compared" in w for w in found.warnings)


def test_a_metric_at_its_ceiling_or_floor_is_warned_of(plan: SweepPlan) -> None:
    for mean, word in ((0.99, "better"), (0.01, "worse")):
        found = detectable(plan, 100, replace(KNOWN, mean=mean))
        assert any(f"room for an arm to be {word}" in w for w in found.warnings)


def test_arms_with_judges_of_their_own_need_a_protocol() -> None:
    """Each is measured with its own yardstick: no number of theirs may be compared."""
    trials = [
        Trial(name, 1, (), make_recipe_plan("tiny", (f"reward.rubric_source={name}",)))
        for name in ("instance", "static")
    ]
    plan = SweepPlan(SweepFile("s", "tiny"), (), "instance", tuple(trials))
    found = detectable(plan, 100, KNOWN)
    assert any("measured in different ways (reward.rubric_source)" in w for w in found.warnings)


def test_a_sweep_that_evaluates_nothing_says_so() -> None:
    found = detectable(_plan((1, 2), 2, None, "stages=[data,sft,grpo]"), None, KNOWN)
    assert found.warnings[0].startswith("No stage evaluates")


def test_shares_have_a_worst_case_and_other_numbers_none(plan: SweepPlan) -> None:
    assert detectable(plan, 1000, assumed("oracle")).effect is not None
    found = detectable(_asks(plan, metric="length_tokens"), 100, assumed("length_tokens"))
    assert found.effect is None
    assert "no bounds" in found.evidence.text


def test_one_planned_seed_of_what_only_seeds_spread_has_an_answer() -> None:
    assert detectable_effect(Components(0.01, 0.0, 0.0), seeds=1, prompts=50) == 0.0

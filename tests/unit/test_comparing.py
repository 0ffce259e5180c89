"""Comparisons in the report of a sweep: verdicts, refusals, drift of the judge."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from refiner_core.evaluation.statistics import two_way_mean
from refiner_core.report.sweep.comparing import make_report
from refiner_core.report.sweep.rendering import markdown, page
from refiner_core.report.sweep.sweep_report import ArmNumber, Comparison, SweepReport
from tests.support.made_evidence import PROTOCOL, MadeSweep, made_from, prompt_names

RNG = np.random.default_rng(0)
PROMPTS = 60


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Each test draws the same, whichever others run."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def drawn(effect: float = 0.0, prompts: int = PROMPTS) -> Any:
    return np.clip(0.5 + effect + 0.2 * RNG.standard_normal(prompts), 0, 1)


def comparison(report: SweepReport, metric: str = "rubric_score") -> Comparison:
    (found,) = [c for c in report.comparisons if c.key.metric == metric]
    return found


def number(report: SweepReport, arm: str, metric: str = "rubric_score") -> ArmNumber:
    (found,) = [n for n in comparison(report, metric).numbers if n.arm == arm]
    return found


def test_a_clear_gain_has_its_difference_and_interval() -> None:
    values = 0.5 + 0.05 * RNG.standard_normal((3, 3, PROMPTS))
    values[1] += 0.2
    report = make_report(made_from(values).evidence())
    better, same, base = (number(report, arm) for arm in ("arm1", "arm2", "base"))
    assert better.verdict == "better"
    assert same.verdict == "not clear"
    assert base.verdict is None
    assert base.difference is None
    exact = two_way_mean(values[1] - values[0])
    assert (better.difference, better.difference_low) == pytest.approx((exact.value, exact.low))
    assert better.p == pytest.approx(exact.p_value)
    assert better.p_adjusted == pytest.approx(2 * exact.p_value)  # two arms, the smaller p first
    assert [p["seed"] for p in better.points] == [1, 2, 3]
    assert better.points[0]["difference"] == pytest.approx((values[1] - values[0])[0].mean())
    assert report.primary.key.metric == "rubric_score"


def test_less_of_what_is_bad_is_better_and_a_length_is_neither() -> None:
    made = MadeSweep(("base", "new"))
    for seed in made.seeds:
        for arm, low in (("base", 2.0), ("new", 1.0)):
            noise = 0.1 * RNG.random(PROMPTS)
            made.add(arm, seed, {"uncited": low + noise, "length_tokens": 50 * low + noise})
    report = make_report(made.evidence())
    assert number(report, "new", "uncited").verdict == "better"
    assert number(report, "new", "length_tokens").verdict is None
    assert comparison(report, "length_tokens").higher_is_better is None


def test_a_trial_that_failed_leaves_the_seeds_that_both_arms_have() -> None:
    made = MadeSweep(("base", "new"))
    for arm, seed in (("base", 1), ("base", 2), ("base", 3), ("new", 1), ("new", 3)):
        made.add(arm, seed, {"rubric_score": drawn()})
    made.fail("new", 2, "not_finite in grpo")
    report = make_report(made.evidence())
    found = number(report, "new")
    assert found.seeds == 2
    assert "seed 2 is missing: evaluate-grpo is not done" in found.note
    assert "not_finite in grpo" in found.note
    assert "two seeds" in found.note
    assert [p["value"] is None for p in found.points] == [False, True, False]
    assert any("has failed: not_finite in grpo" in w for w in report.warnings)


def test_a_baseline_that_failed_leaves_nothing_to_compare_with() -> None:
    made = MadeSweep(("base", "new"))
    for seed in made.seeds:
        made.add("new", seed, {"rubric_score": drawn()})
        made.fail("base", seed, "bug")
    report = make_report(made.evidence())
    found = number(report, "new")
    assert found.value is not None
    assert (found.verdict, found.difference) == ("not comparable", None)
    assert "the baseline base was not measured in this way" in found.note
    assert report.primary is None
    assert any("Nothing answers" in w for w in report.warnings)


@pytest.mark.parametrize(
    "other",
    [
        {"content": "edited"},
        {"prompts": prompt_names(PROMPTS + 1)[1:]},
        {"content": "two", "protocol": {**PROTOCOL, "file": "f"}, "protocol_file": "f"},
    ],
)
def test_other_prompts_in_one_seed_refuse_its_arm(other: dict[str, Any]) -> None:
    made = MadeSweep(("base", "new"))
    for seed in made.seeds:
        made.add("base", seed, {"rubric_score": drawn()})
        made.add("new", seed, {"rubric_score": drawn(0.4)}, **(other if seed == 2 else {}))
    assert number(make_report(made.evidence()), "new").verdict == "not comparable"


def test_another_judge_is_another_comparison_and_a_common_protocol_answers() -> None:
    other = {**PROTOCOL, "judge": {**PROTOCOL["judge"], "model": "judge-70b"}}
    made = MadeSweep(("base", "new"))
    for seed in made.seeds:
        made.add("base", seed, {"rubric_score": drawn()})
        made.add("new", seed, {"rubric_score": drawn(0.4)}, protocol=other)
    report = make_report(made.evidence())
    assert len(report.comparisons) == 2
    assert all(n.difference is None for c in report.comparisons for n in c.numbers)
    assert any("No protocol is common to all arms" in w for w in report.warnings)
    for seed in made.seeds:
        made.add("base", seed, {"rubric_score": drawn()}, protocol=other, protocol_file="held-out")
    report = make_report(made.evidence())
    assert report.primary.key.protocol_name == "held-out"
    assert [n.arm for n in report.primary.numbers] == ["base", "new"]
    assert not any("common" in w for w in report.warnings)


def test_the_reward_is_compared_only_where_it_is_the_same() -> None:
    made = MadeSweep(("base", "new", "same"))
    for seed in made.seeds:
        for arm, weight in (("base", 0.2), ("new", 0.5), ("same", 0.2)):
            protocol = {**PROTOCOL, "reward": {"paper_citation_weight": weight}}
            values = {"rubric_score": drawn(), "reward": 10 * drawn()}
            made.add(arm, seed, values, protocol=protocol)
    report = make_report(made.evidence())
    with_base, alone = [c for c in report.comparisons if c.key.metric == "reward"]
    assert [n.arm for n in with_base.numbers] == ["base", "same"]
    assert [(n.arm, n.verdict) for n in alone.numbers] == [("new", "not comparable")]
    assert len(comparison(report, "rubric_score").numbers) == 3


def test_a_yes_or_no_of_one_checkpoint_against_one_has_mcnemar_s_test() -> None:
    protocol = {**PROTOCOL, "decoding": "greedy"}
    made = MadeSweep(("base", "new"), seeds=(1,))
    made.add("base", 1, {"format_valid": [1.0] + [0.0] * 19}, protocol=protocol)
    made.add("new", 1, {"format_valid": [0.0] + [1.0] * 8 + [0.0] * 11}, protocol=protocol)
    found = number(make_report(made.evidence()), "new", "format_valid")
    assert found.p == pytest.approx(2 * 10 / 512)
    assert "McNemar" in found.interval


def test_shared_models_are_not_compared() -> None:
    made = MadeSweep(("base", "new"))
    for seed in made.seeds:
        for arm in made.arms:
            made.add(arm, seed, {"oracle": drawn()}, model="sft", stage=f"evaluate-sft-{seed}")
            made.add(arm, seed, {"oracle": drawn()})
    assert {c.key.model for c in make_report(made.evidence()).comparisons} == {"grpo"}


def test_the_question_chooses_what_is_compared_first() -> None:
    made = MadeSweep(("base", "new"), question={"metric": "citation_f1", "smallest_effect": 0.05})
    for seed in made.seeds:
        for arm in made.arms:
            made.add(arm, seed, {"oracle": drawn(), "citation_f1": drawn()})
    report = make_report(made.evidence())
    assert report.primary is report.comparisons[0]
    assert report.primary.key.metric == "citation_f1"
    assert report.detectable["smallest_effect"] == 0.05
    assert 0 < report.detectable["effect"] < 0.5
    made.question = {"metric": "pass@1"}
    report = make_report(made.evidence())
    assert report.primary is None
    assert any("pass@1" in w for w in report.warnings)


# ---------------------------------------------------------------- a judge that moved


def judged(shift: float, gain: float = 0.0, noise: float = 0.0, policy: float = 1.0) -> Any:
    """Base and arm; the arm's evaluations were judged by ``shift`` more leniently."""
    values = 0.5 + 0.1 * RNG.standard_normal((2, 5, 100))
    floor = np.broadcast_to(0.3 + 0.1 * RNG.random(100), values.shape).copy()
    floor += noise * RNG.standard_normal(floor.shape)
    values[1] += gain + policy * shift
    floor[1] += shift
    return number(make_report(made_from(values, reference=floor).evidence()), "arm1")


@pytest.mark.parametrize(
    ("shift", "gain", "noise", "verdict"),
    [
        (0.15, 0.0, 0.02, "judge moved"),  # a more lenient judge is no progress
        (0.0, 0.15, 0.0, "better"),
        (0.01, 0.3, 0.01, "better"),  # a gain far beyond the drift of the judge
    ],
)
def test_a_gain_counts_only_beyond_the_drift_of_the_judge(
    shift: float, gain: float, noise: float, verdict: str
) -> None:
    found = judged(shift, gain=gain, noise=noise)
    assert found.verdict == verdict
    assert ("the judge moved" in found.note) == bool(shift)
    assert found.p < 1e-3


def test_the_noise_of_a_judge_widens_the_interval() -> None:
    steady, noisy = judged(0.0, gain=0.04), judged(0.0, gain=0.04, noise=0.4)
    assert steady.verdict == "better"
    assert noisy.verdict in ("not clear", "judge moved")
    assert "judge" in noisy.note


def test_a_drift_in_one_trial_alone_is_seen() -> None:
    values = 0.5 + 0.05 * RNG.standard_normal((2, 3, 100))
    values[1] += 0.05
    floor = np.full((2, 3, 100), 0.3) + 0.1 * RNG.random(100)
    floor[1, 2] += 0.1 + 0.01 * RNG.standard_normal(100)
    found = number(make_report(made_from(values, reference=floor).evidence()), "arm1")
    assert found.verdict == "judge moved"


# ---------------------------------------------------------------- matrix, curves


def test_judges_that_put_arms_in_other_orders_disagree() -> None:
    held_out = {**PROTOCOL, "judge": {**PROTOCOL["judge"], "model": "held-out-judge"}}
    made = MadeSweep(("base", "one", "two"))
    for seed in made.seeds:
        for i, arm in enumerate(made.arms):
            made.add(arm, seed, {"rubric_score": np.full(9, 0.2 + 0.1 * i)})
            made.add(arm, seed, {"rubric_score": np.full(9, 0.8 - 0.1 * i)},
                     protocol=held_out, protocol_file="held-out")  # fmt: skip
    report = make_report(made.evidence())
    own, other = report.matrix
    assert own["trains"] == ("base", "one", "two")
    assert other["trains"] == ()
    assert [c["rank"] for c in own["cells"]] == [3, 2, 1]
    assert [c["rank"] for c in other["cells"]] == [1, 2, 3]


def test_an_arm_whose_judge_has_moved_has_no_rank() -> None:
    values = 0.5 + 0.1 * RNG.standard_normal((3, 3, 40))
    floor = np.broadcast_to(0.3 + 0.1 * RNG.random(40), values.shape).copy()
    values[1] += 0.2
    values[2] += 0.3
    floor[2] += 0.3
    made = made_from(values, reference=floor, metric="rubric_score")
    (row,) = make_report(made.evidence()).matrix
    assert [c["rank"] for c in row["cells"]] == [2, 1, None]
    assert [c["moved"] for c in row["cells"]] == [False, False, True]


def test_flips_put_first_what_moved_most_and_count_the_seeds() -> None:
    values = np.full((2, 3, 20), 0.5)
    values[1, :, 4] = 1.0
    values[1, 0, 7] = 0.0
    report = make_report(made_from(values).evidence())
    first, second = report.flips
    assert (first["sample_id"], first["seeds_agree"]) == ("p0004", 3)
    assert (first["baseline"], first["value"]) == (0.5, 1)
    assert (second["sample_id"], second["seeds_agree"]) == ("p0007", 1)
    assert second["value"] == pytest.approx(0.5 - 0.5 / 3)


def test_stopped_arms_are_named_and_compared_at_equal_steps() -> None:
    values = 0.5 + 0.05 * RNG.standard_normal((2, 2, PROMPTS))
    evidence = made_from(values).evidence()
    whole = {0: 0.5, 10: 0.6, 20: 0.7}

    def monitored(gold: dict[int, float], **told: Any) -> dict[str, Any]:
        series = {"gold": [*map(list, gold.items())], "proxy": [[s, 0.1 * s] for s in gold]}
        return {**series, "golds": ["g"], "rows": 64, "alarm": None, "stopped": None, **told}

    trials = [
        replace(
            trial,
            monitor=monitored(whole, best=20)
            if trial.row["arm"] == "base"
            else monitored({0: 0.5, 10: 0.3}, best=10, alarm=10, stopped=10),
        )
        for trial in evidence.trials
    ]
    report = make_report(replace(evidence, trials=tuple(trials)))
    base, other = report.monitors
    assert (base["at"], base["gold_equal"], base["gold_end"]) == pytest.approx((10, 0.6, 0.7))
    assert (other["stopped"], other["gold_equal"]) == ([10, 10], pytest.approx(0.3))
    stops = [text for text in report.warnings if "stopped by its monitor at step 10" in text]
    assert len(stops) == 2
    assert "2 (step 10, 10)" in markdown(report)
    assert 'id="monitors"' in page(report)

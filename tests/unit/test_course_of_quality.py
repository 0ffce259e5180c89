"""The course of quality: metrics of answers that a reward may not see."""

from __future__ import annotations

import pytest

from refiner_core.rewards.course import course_of_quality

PROMPT = (
    "<query>q</query>\n<tool_output>\n<snippet id=S_1> the old lamp of Buldos is namp "
    "bade</snippet>\n<snippet id=S_2> a second text about something else "
    "entirely</snippet>\n</tool_output>"
)
HONEST = "<answer>Its lamp <snippet id=S_1>is called namp bade by all</snippet></answer>"
COPIED = (
    "<answer><snippet id=S_1>the old lamp of Buldos is namp bade</snippet>"
    "<snippet id=S_2>a second text about something else entirely</snippet></answer>"
)


def of(*answers: str, judgements: tuple[dict[str, object], ...] = ()) -> dict[str, float]:
    return course_of_quality([PROMPT] * len(answers), answers, [judgements] * len(answers))


def test_copying_is_seen() -> None:
    assert of(HONEST)["quality/copied_share"] < 0.3
    assert of(COPIED)["quality/copied_share"] == 1.0


def test_repetition_and_text_outside_are_seen() -> None:
    claim = "<snippet id=S_1>namp bade</snippet>"
    found = of(f"<answer>{claim}{claim}</answer>")
    assert (found["quality/claims"], found["quality/repeated_share"]) == (1.0, 0.5)
    assert of(HONEST)["quality/outside_share"] == 0.0
    assert of(f"{'x' * 3000}{HONEST}")["quality/outside_share"] > 0.9
    assert of("no answer at all")["quality/outside_share"] == 1.0


def test_citations_are_counted_if_they_are_sound() -> None:
    assert of(COPIED)["quality/cited_share"] == 1.0
    assert of("<answer>plain</answer>")["quality/cited_share"] == 0.0


def test_judgements_without_a_score_and_criteria_that_all_meet() -> None:
    met = {"kind": "rubric", "criterion": "a", "polarity": "positive", "score": 1.0}
    avoided = {"kind": "rubric", "criterion": "b", "polarity": "negative", "score": 0.0}
    unusable = {"kind": "rubric", "criterion": "c", "polarity": "positive", "score": None}
    found = of(HONEST, HONEST, judgements=(met, avoided, unusable))
    assert found["quality/unusable_judgements"] == pytest.approx(1 / 3)
    assert found["quality/saturated"] == pytest.approx(2 / 3)


def test_a_step_without_answers_or_judgements_has_no_such_metrics() -> None:
    assert of() == {}
    assert not {"quality/saturated", "quality/unusable_judgements"} & of(HONEST).keys()

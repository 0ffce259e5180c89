"""What a run's page makes of answers, prompts, curves and rewards, without a browser."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from refiner_core.answers import parse_answer
from refiner_core.report.drawing import shares
from refiner_core.report.printing import plain
from refiner_core.report.run.document import StageRow
from refiner_core.report.run.rendering import page
from refiner_core.report.transcripts import answer_markup, evidence_of, spans
from tests.support.run_reports import empty_report, hostile_report, part

_PIECES = (
    "<answer>", "</answer>", "<answer x>", "<snippet id=S_1>", "<snippet id='S_2, S_9'>",
    "<snippet>", "<SNIPPET id=S_1>", "</snippet>", "<snippet id=S_1", "<webpage id=W_1>", " it is",
    " & so", "\n", ".", "\ud800",
)  # fmt: skip
_PROMPT = "<tool_output><snippet id=S_1> one</snippet><snippet id=S_2> two</snippet></tool_output>"


def test_claims_are_numbered_as_the_judge_numbers_them_whatever_was_sampled() -> None:
    rng = random.Random(1)
    evidence = evidence_of(_PROMPT, (), "e0")
    single = 0
    for _ in range(4_000):
        text = "".join(rng.choice(_PIECES) for _ in range(rng.randrange(12)))
        if rng.random() < 0.7:
            text = f"<answer>{text.replace('<answer>', '').replace('</answer>', '')}</answer>"
        parsed = parse_answer(text)
        markup = answer_markup(text, evidence)
        numbers = [int(n) for n in re.findall(r'data-n="(\d+)"', markup)]
        assert numbers == list(range(1, len(parsed.claims) + 1)), text
        shown = re.sub("<[^>]*>", "", markup)
        assert shown.replace("&#39;", "'").replace("&lt;", "<").replace("&gt;", ">").replace(
            "&amp;", "&"
        ) == plain(text), "nothing is lost or added"
        single += parsed.body is not None
    assert single > 2_000


def test_pieces_of_a_text_make_the_text_again() -> None:
    rng = random.Random(2)
    for _ in range(2_000):
        text = "".join(rng.choice(_PIECES) for _ in range(rng.randrange(14)))
        for any_case in (False, True):
            found = list(spans(text, any_case=any_case))
            assert "".join(s.before + s.text + s.after for s in found) == text


def test_ids_of_elements_are_not_repeated() -> None:
    prompt = f"{_PROMPT}<tool_output><snippet id=S_1> again</snippet></tool_output>"
    found = re.findall(r' id="([^"]+)"', evidence_of(prompt, (), "e3").markup)
    assert found == ["e3-s0", "e3-s1", "e3-s2"]


def test_what_was_only_measured_is_no_part_of_the_sum() -> None:
    parts = (
        part("rubric", 0.5, 8.0, 4.0),
        part("format", 1.0, 0.0, 0.0),
        part("citation", None, 2.0, None),
        part("penalty", 1.0, -0.5, -0.5),
    )
    counted, measured = shares(parts)
    assert [s["part"]["name"] for s in counted] == ["rubric", "penalty"]
    assert [p["name"] for p in measured] == ["format", "citation"]


@pytest.mark.parametrize("make", [hostile_report, empty_report])
def test_a_page_is_text_that_a_file_can_hold(make: object) -> None:
    assert callable(make)
    text = page(make())
    text.encode("utf-8")
    assert "\x00" not in text
    assert "default-src 'none'" in text


@pytest.mark.parametrize(
    ("state", "stage", "says", "never"),
    [
        ("done", "done", "Nothing went wrong.", "so far"),
        ("running", "running", "Nothing went wrong so far.", "None is recorded"),
        ("stopped", "killed", "None is recorded yet: sft ended while nobody", "othing went wrong"),
    ],
)
def test_nothing_went_wrong_is_only_said_where_it_is_so(
    state: str, stage: str, says: str, never: str
) -> None:
    row = StageRow(name="sft", kind="sft", id="sft-1", fingerprint="1", state=stage)
    text = page(replace(empty_report(), state=state, stages=(row,), incidents=()))
    assert says in text
    assert never not in text


def test_a_run_in_which_all_was_there_already_counts_no_stages_of_none() -> None:
    row = StageRow(name="sft", kind="sft", id="sft-1", fingerprint="1", state="done", skipped=True)
    text = page(replace(empty_report(), state="done", stages=(row,)))
    assert "nothing had to run" in text
    assert "of 0" not in text

"""Evidence comes from prompts only, claims from answers only, and every fault has a result."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refiner_core.answers import (
    Problem,
    parse_answer,
    parse_evidence,
    read_attributes,
    strip_tags,
)
from tests.support.real_rows import RL_ROWS, SFT_ROWS


def tool_output(*snippets: str) -> str:
    return "<query>q</query>\n<tool_output>\n" + "\n".join(snippets) + "\n</tool_output>"


# ---------------------------------------------------------------- evidence


@pytest.mark.parametrize("opening", ["id=S_a1B9xQ2", 'id="S_a1B9xQ2"', "id='S_a1B9xQ2'"])
def test_quotes_around_an_evidence_id_are_optional(opening: str) -> None:
    evidence = parse_evidence(tool_output(f"<snippet {opening}>text</snippet>"))
    assert evidence.texts == {"S_a1B9xQ2": "text"}


def test_web_pages_and_ids_with_dashes_are_evidence() -> None:
    prompt = tool_output(
        "<webpage id=1f0c9a2b-3 url=http://x.org/?a=b>page</webpage>",
        '<webpage url=http://x.org/?a=b id="p-2">second</webpage>',
    )
    assert parse_evidence(prompt).texts == {"1f0c9a2b-3": "page", "p-2": "second"}


def test_an_example_of_the_notation_in_the_instructions_is_no_evidence() -> None:
    prompt = "Cite as <snippet id=ID1,ID2>claim</snippet>.\n" + tool_output(
        "<snippet id=a>text</snippet>"
    )
    assert set(parse_evidence(prompt).texts) == {"a"}


def test_an_unclosed_mention_before_the_tool_output_is_no_evidence() -> None:
    prompt = "Use <snippet id=ID1> tags. " + tool_output("<snippet id=a>text</snippet>")
    assert set(parse_evidence(prompt).texts) == {"a"}


def test_a_web_page_around_tool_output_is_evidence_and_shares_its_snippets() -> None:
    prompt = "<webpage id=w>intro <tool_output><snippet id=a>text</snippet></tool_output></webpage>"
    assert parse_evidence(prompt).texts == {"a": "text", "w": "intro text"}


def test_without_any_tool_output_tag_the_whole_prompt_is_read() -> None:
    assert parse_evidence("q <snippet id=a>text</snippet>").texts == {"a": "text"}


def test_cut_evidence_reaches_to_the_next_element_or_the_end_of_its_tool_output() -> None:
    prompt = tool_output("<snippet id=a>one", "<snippet id=b>two") + " instructions"
    assert parse_evidence(prompt).texts == {"a": "one", "b": "two"}


def test_repeated_ids_join_and_elements_without_id_are_skipped() -> None:
    prompt = tool_output("<snippet id=a>x</snippet><snippet id=a>y</snippet><snippet>z</snippet>")
    evidence = parse_evidence(prompt)
    assert evidence.texts == {"a": "x\ny"}
    assert evidence.text_of(("a", "unknown")) == "x\ny"


def test_text_that_looks_like_tags_stays_evidence() -> None:
    prompt = tool_output("<snippet id=a>p <0.05 and <snippets> and <b>bold</b></snippet>")
    assert parse_evidence(prompt).texts == {"a": "p <0.05 and <snippets> and <b>bold</b>"}


# ---------------------------------------------------------------- ids


@pytest.mark.parametrize(
    "attributes",
    ['id="a,b"', 'id="a, b"', "id='a ,b'", "id=a,b", "id=a, b", 'ID="a,b"', 'id = "a,,b,"'],
)
def test_a_comma_list_names_both_ids(attributes: str) -> None:
    assert read_attributes(f" {attributes} ") == (("a", "b"), ())


def test_ids_attribute_is_reported_and_cites_nothing() -> None:
    parsed = parse_answer('<answer><snippet ids="a,b">claim</snippet></answer>', {"a", "b"})
    (claim,) = parsed.claims
    assert claim.ids == ()
    assert claim.tagged
    assert not claim.cited
    assert parsed.problems == {Problem.IDS_ATTRIBUTE: 1}
    assert not parsed.malformed
    assert not parsed.well_formed


@pytest.mark.parametrize(
    ("attributes", "ids", "problem"),
    [
        ("", (), Problem.NO_ID),
        (' id=""', (), Problem.NO_ID),
        (' id=","', (), Problem.NO_ID),
        (' id="a', (), Problem.BAD_ATTRIBUTES),
        (" id=a b", ("a",), Problem.BAD_ATTRIBUTES),
        (" id=a /", ("a",), Problem.BAD_ATTRIBUTES),
        (" id=a source=web", ("a",), Problem.BAD_ATTRIBUTES),
        (" a", (), Problem.NO_ID),
    ],
)
def test_bad_attributes_have_defined_results(
    attributes: str, ids: tuple[str, ...], problem: Problem
) -> None:
    (claim,) = parse_answer(f"<answer><snippet{attributes}>claim</snippet></answer>").claims
    assert claim.ids == ids
    assert problem in claim.problems


def test_the_same_id_twice_in_a_claim_counts_once() -> None:
    assert read_attributes(' id="a,a,b"').ids == ("a", "b")


# ---------------------------------------------------------------- claims


def test_cited_spans_and_the_plain_text_between_them_are_claims() -> None:
    parsed = parse_answer(
        '<answer> Lead<snippet id="a, b">one</snippet>. More '
        "<snippet id=c>two</snippet>\n</answer>",
        {"a", "b", "c"},
    )
    assert [(c.text, c.ids, c.tagged) for c in parsed.claims] == [
        ("Lead", (), False),
        ("one", ("a", "b"), True),
        (". More", (), False),
        ("two", ("c",), True),
    ]
    assert parsed.well_formed
    assert not parsed.outside
    assert parsed.cited_ids == ("a", "b", "c")


def test_two_claims_with_the_same_text_are_two_claims() -> None:
    parsed = parse_answer(
        "<answer><snippet id=a>same</snippet><snippet id=b>same</snippet></answer>"
    )
    assert [c.ids for c in parsed.claims] == [("a",), ("b",)]


def test_claims_come_from_inside_the_answer_only() -> None:
    parsed = parse_answer(
        "<snippet id=a>before</snippet><answer>inside</answer><snippet id=a>after</snippet>"
    )
    assert [c.text for c in parsed.claims] == ["inside"]
    assert parsed.outside
    assert parsed.body == "inside"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", Problem.NO_ANSWER),
        ("plain text", Problem.NO_ANSWER),
        ("text</answer>", Problem.NO_ANSWER),
        ("<Answer>x</Answer>", Problem.NO_ANSWER),
        ("<answer final>x</answer>", Problem.NO_ANSWER),
        ("<answer>x", Problem.UNCLOSED_ANSWER),
        ("</answer>x<answer>", Problem.UNCLOSED_ANSWER),
        ("<answer>x</answer><answer>y</answer>", Problem.MANY_ANSWERS),
        ("<answer><answer>x</answer></answer>", Problem.MANY_ANSWERS),
        ("<answer>x</answer></answer>", Problem.MANY_ANSWERS),
        ("<answer></answer>", Problem.EMPTY_ANSWER),
        ("<answer> … </answer>", Problem.EMPTY_ANSWER),
        ("<answer><snippet id=a> </snippet></answer>", Problem.EMPTY_ANSWER),
    ],
)
def test_without_one_answer_that_says_something_it_is_malformed(
    text: str, problem: Problem
) -> None:
    parsed = parse_answer(text)
    assert problem in parsed.problems
    assert parsed.malformed
    assert not parsed.well_formed


def test_a_nested_tag_ends_the_claim_around_it_and_marks_both() -> None:
    parsed = parse_answer(
        "<answer><snippet id=a>one <snippet id=b>two</snippet> three</snippet></answer>"
    )
    assert [(c.text, c.ids) for c in parsed.claims] == [
        ("one", ("a",)),
        ("two", ("b",)),
        ("three", ()),
    ]
    assert parsed.problems == {Problem.NESTED_TAG: 2, Problem.STRAY_CLOSE: 1}
    assert not any(c.well_formed for c in parsed.claims)


def test_an_unclosed_claim_reaches_to_the_end_of_the_answer() -> None:
    parsed = parse_answer("<answer><snippet id=a>one two</answer>")
    assert [(c.text, c.problems) for c in parsed.claims] == [("one two", (Problem.UNCLOSED_TAG,))]
    assert not parsed.malformed


def test_an_id_that_is_not_in_the_evidence_is_reported() -> None:
    parsed = parse_answer("<answer><snippet id=a,z>one</snippet></answer>", {"a"})
    assert parsed.problems == {Problem.UNKNOWN_ID: 1}
    assert parsed.claims[0].ids == ("a", "z")


def test_tags_of_prompts_in_an_answer_are_reported_and_their_text_kept() -> None:
    parsed = parse_answer(
        "<answer><webpage id=a>one</webpage> <SNIPPET id=a>two</SNIPPET></answer>"
    )
    assert parsed.problems == {Problem.FOREIGN_TAG: 4}
    assert " ".join(parsed.claims[0].text.split()) == "one two"
    assert parsed.cited_ids == ()


def test_a_tag_without_end_stays_in_the_text() -> None:
    parsed = parse_answer("<answer>see <snippet id=a the end</answer>")
    assert parsed.problems == {Problem.BROKEN_TAG: 1}
    assert parsed.claims[0].text == "see <snippet id=a the end"


def test_strip_tags_keeps_nothing_that_stands_in_a_tag() -> None:
    assert strip_tags('a<snippet id="secret">b</snippet>').split() == ["a", "b"]


# ---------------------------------------------------------------- robustness

_TAGS = ["<answer>", "</answer>", "<snippet id=a>", '<snippet id="a, b">', "</snippet>", "<snippet"]
_OTHERS = ["<webpage id=w>", "</webpage>", "<tool_output>", "</tool_output>", " ", "text"]
_PIECES = [*_TAGS, *_OTHERS, "<", ">", '"', "=", ",", "ids=", "/"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=40).map("".join))
def test_every_text_has_a_result_and_no_text_is_lost(text: str) -> None:
    parsed = parse_answer(text, {"a"})
    parse_evidence(text)
    assert parsed.single_block == (parsed.body is not None)
    assert parsed.malformed or parsed.claims
    if parsed.body is not None and Problem.EMPTY_ANSWER not in parsed.problems:
        said = "".join(c.text for c in parsed.claims)
        assert said.count("text") == strip_tags(parsed.body).count("text")


HOSTILE = (
    "<snippet id=a>",
    "<snippet id=a>x</snippet>",
    "<snippet ",
    "<snippet id=",
    '<snippet id="a',
    "<snippet id='a>",
    "</snippet>",
    "</snippet",
    "<answer>",
    "</answer>",
    "<answer",
    "<tool_output>",
    "<webpage id=a>x",
    "<",
    "=a ",
    "x=1 ",
    "a",
    " ",
    "id=a,",
    '"',
)


@pytest.mark.parametrize("unit", HOSTILE)
def test_hostile_text_is_read_in_linear_time(unit: str) -> None:
    """Four times the text takes four times as long; where work is quadratic, sixteen times.

    A busy machine can only make a reading look slow, so that one good comparison is enough.
    """

    def seconds(characters: int) -> float:
        filler = unit * (characters // len(unit))
        started = time.process_time()
        parse_answer(f"<answer>{filler}</answer>", {"a"})
        parse_answer(f"<answer><snippet {filler}>x</snippet></answer>", {"a"})
        parse_answer(filler, {"a"})
        parse_evidence(f"<tool_output>{filler}")
        return time.process_time() - started

    short, long = math.inf, math.inf
    for _ in range(8):
        short, long = min(short, seconds(25_000)), min(long, seconds(100_000))
        if long < 8 * short + 0.01:
            return
    pytest.fail(f"{long / short:.1f} times as long for 4 times the text")


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that ``work`` held at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_ids_that_repeat_with_long_lists_take_the_room_of_their_text() -> None:
    """1,000 ids on each of 100 elements: 100 MB, if each id had its own copy of every text."""
    ids = ",".join(f"i{n}" for n in range(1000))
    prompt = tool_output(*[f"<snippet id={ids}>{'x' * 1000}</snippet>"] * 100)
    assert peak_bytes(lambda: parse_evidence(prompt)) < 20e6
    evidence = parse_evidence(prompt)
    assert len(evidence.texts) == 1000
    assert evidence.texts["i7"] == "\n".join(["x" * 1000] * 100)


@pytest.mark.parametrize("path", [SFT_ROWS, RL_ROWS], ids=["sft", "rl"])
def test_all_real_rows_parse(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        turns = json.loads(line)["conversations"]
        prompt = turns[0]["content"]
        evidence = parse_evidence(prompt)
        assert len(evidence.texts) == prompt.count("<snippet ")
        assert all(evidence.texts.values())
        for turn in turns[1:]:
            parsed = parse_answer(turn["content"], evidence.texts)
            assert not parsed.malformed
            assert not parsed.outside

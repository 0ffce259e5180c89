"""Parsing: evidence from prompts only, claims from answers only, and a report of every fault."""

import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refiner_core.answers import Problem, parse_answer, parse_evidence, read_attributes, strip_tags
from tests.support.real_rows import RL_ROWS, SFT_ROWS


def tool_output(*snippets: str) -> str:
    return "<query>q</query>\n<tool_output>\n" + "\n".join(snippets) + "\n</tool_output>"


# ---------------------------------------------------------------- evidence


NESTED = "<webpage id=w>intro <tool_output><snippet id=a>text</snippet></tool_output></webpage>"
#: prompt -> the text of each id in its evidence.
EVIDENCE: dict[str, dict[str, str]] = {
    tool_output("<snippet id=S_a>x</snippet>", "<snippet id='S_b'>y</snippet>"): {
        "S_a": "x",
        "S_b": "y",
    },
    tool_output(
        "<webpage id=1f0c9a2b-3 url=http://x.org/?a=b>page</webpage>",
        '<webpage url=http://x.org/?a=b id="p-2">second</webpage>',
    ): {"1f0c9a2b-3": "page", "p-2": "second"},
    # Instructions are no evidence, neither an example of the notation nor an unclosed mention.
    "Cite as <snippet id=ID1,ID2>c</snippet>. " + tool_output("<snippet id=a>t</snippet>"): {
        "a": "t"
    },
    "Use <snippet id=ID1> tags. " + tool_output("<snippet id=a>text</snippet>"): {"a": "text"},
    NESTED: {"a": "text", "w": "intro text"},
    "no tool output, <snippet id=a>text</snippet>": {"a": "text"},
    # Cut evidence reaches to the next element or to the end of its tool output.
    tool_output("<snippet id=a>one", "<snippet id=b>two") + " more": {"a": "one", "b": "two"},
    tool_output("<snippet id=a>x</snippet><snippet id=a>y</snippet><snippet>z</snippet>"): {
        "a": "x\ny"
    },
    tool_output("<snippet id=a>p <0.05 and <snippets> and <b>bold</b></snippet>"): {
        "a": "p <0.05 and <snippets> and <b>bold</b>"
    },
}


@pytest.mark.parametrize("prompt", EVIDENCE)
def test_evidence_is_the_text_of_elements_in_tool_output(prompt: str) -> None:
    evidence = parse_evidence(prompt)
    assert evidence.texts == EVIDENCE[prompt]
    assert evidence.text_of((*evidence.texts, "unknown")) == "\n\n".join(evidence.texts.values())


# ---------------------------------------------------------------- ids


@pytest.mark.parametrize(
    "attributes", ['id="a,b"', "id='a ,b'", "id=a, b", 'ID="a,b"', 'id = "a,,b,"', 'id="a,a,b"']
)
def test_a_comma_list_names_each_id_once(attributes: str) -> None:
    assert read_attributes(f" {attributes} ") == (("a", "b"), ())


@pytest.mark.parametrize(
    ("attributes", "ids", "problem"),
    [
        ("", (), Problem.NO_ID),
        (' id=","', (), Problem.NO_ID),
        (' id="a', (), Problem.BAD_ATTRIBUTES),
        (" id=a b", ("a",), Problem.BAD_ATTRIBUTES),
        (" id=a source=web", ("a",), Problem.BAD_ATTRIBUTES),
    ],
)
def test_bad_attributes_have_defined_results(
    attributes: str, ids: tuple[str, ...], problem: Problem
) -> None:
    (claim,) = parse_answer(f"<answer><snippet{attributes}>claim</snippet></answer>").claims
    assert claim.ids == ids
    assert problem in claim.problems


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
        ("plain text", Problem.NO_ANSWER),
        ("<Answer>x</Answer>", Problem.NO_ANSWER),
        ("<answer>x", Problem.UNCLOSED_ANSWER),
        ("</answer>x<answer>", Problem.UNCLOSED_ANSWER),
        ("<answer>x</answer><answer>y</answer>", Problem.MANY_ANSWERS),
        ("<answer><answer>x</answer></answer>", Problem.MANY_ANSWERS),
        ("<answer> … </answer>", Problem.EMPTY_ANSWER),
        ("<answer><snippet id=a> </snippet></answer>", Problem.EMPTY_ANSWER),
    ],
)
def test_a_text_without_exactly_one_answer_is_malformed(text: str, problem: Problem) -> None:
    parsed = parse_answer(text)
    assert problem in parsed.problems
    assert parsed.malformed
    assert not parsed.well_formed


@pytest.mark.parametrize(
    ("inside", "claims", "problems"),
    [
        (
            "<snippet id=a>one <snippet id=b>two</snippet> three</snippet>",
            [("one", ("a",)), ("two", ("b",)), ("three", ())],
            {Problem.NESTED_TAG: 2, Problem.STRAY_CLOSE: 1},
        ),
        ("<snippet id=a>one two", [("one two", ("a",))], {Problem.UNCLOSED_TAG: 1}),
        ('<snippet ids="a,b">claim</snippet>', [("claim", ())], {Problem.IDS_ATTRIBUTE: 1}),
        ("<snippet id=a,z>one</snippet>", [("one", ("a", "z"))], {Problem.UNKNOWN_ID: 1}),
        (
            "<webpage id=a>one</webpage> <SNIPPET id=a>two</SNIPPET>",
            [("one two", ())],
            {Problem.FOREIGN_TAG: 4},
        ),
        ("see <snippet id=a the end", [("see <snippet id=a the end", ())], {Problem.BROKEN_TAG: 1}),
    ],
)
def test_faulty_tags_are_reported_and_their_text_is_kept(
    inside: str, claims: list[tuple[str, tuple[str, ...]]], problems: dict[Problem, int]
) -> None:
    parsed = parse_answer(f"<answer>{inside}</answer>", {"a", "b"})
    assert [(" ".join(c.text.split()), c.ids) for c in parsed.claims] == claims
    assert parsed.problems == problems
    assert not parsed.malformed
    assert not any(c.well_formed for c in parsed.claims)


# ---------------------------------------------------------------- robustness

_TAGS = ["<answer>", "</answer>", "<snippet id=a>", '<snippet id="a, b">', "</snippet>", "<snippet"]
_OTHERS = ["<webpage id=w>", "</webpage>", "<tool_output>", "</tool_output>", " ", "text"]
_PIECES = [*_TAGS, *_OTHERS, "<", ">", '"', "=", ",", "ids=", "/"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=40).map("".join))
def test_every_text_has_a_result_and_no_text_is_lost(text: str) -> None:
    parsed = parse_answer(text, {"a"})
    parse_evidence(text)
    assert parsed.malformed or parsed.claims
    if parsed.body is not None and Problem.EMPTY_ANSWER not in parsed.problems:
        said = "".join(c.text for c in parsed.claims)
        assert said.count("text") == strip_tags(parsed.body).count("text")


HOSTILE = (
    "<snippet id=a>",
    "<snippet ",
    '<snippet id="a',
    "<answer>",
    "<tool_output>",
    "<webpage id=a>x",
    "<",
    "id=a,",
    '"',
)


@pytest.mark.parametrize("unit", HOSTILE)
def test_hostile_text_is_read_in_linear_time(unit: str) -> None:
    """Four times the text takes four times as long, not sixteen times as quadratic work would.

    A busy machine only makes a reading look slow: one good comparison is enough.
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

"""Text to a tool call: what counts as a turn, and the name of each kind of bad turn."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refiner_core.environments.protocol import ToolCall
from refiner_core.environments.turns import MAX_DEPTH, call_text, parse_turn

MOST = 1000


def status(text: str, **options: bool) -> str:
    turn = parse_turn(text, MOST, **options)
    assert (turn.call is not None) == (turn.status == "ok")
    assert bool(turn.why) == (turn.status != "ok"), "a bad turn has a reason"
    return turn.status


def wrapped(inner: str) -> str:
    return f"<tool_call>{inner}</tool_call>"


def with_argument(text: str) -> str:
    return wrapped('{"name": "f", "arguments": {"a": ' + text + "}}")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        '\n <tool_call>\n{"arguments": {"a": 1},\t"name": "f"}\n</tool_call>\n\n',
        '<think>\n\n</think>\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    ],
)
def test_one_call_is_a_turn(text: str) -> None:
    assert parse_turn(text, MOST).call == ToolCall("f", {"a": 1})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no_call"),
        ('{"name": "f", "arguments": {}}', "no_call"),
        ("Sure! " + wrapped('{"name": "f", "arguments": {}}'), "no_call"),
        (wrapped('{"name": "f", "arguments": {}}') + " Done.", "no_call"),
        ("<think>I add</think>" + wrapped('{"name": "f", "arguments": {}}'), "no_call"),
        # Two, one after the other, with words between them, and one in the other.
        (wrapped('{"name": "f", "arguments": {}}') * 2, "many_calls"),
        (wrapped('{"name": "f", "arguments": {}}') + " and " + wrapped("{}"), "many_calls"),
        (wrapped("<tool_call>{}"), "many_calls"),
        ("<tool_call>", "cut"),
        (wrapped(""), "bad_json"),
        (wrapped('{"name": "f", "arguments": {}'), "bad_json"),
        (wrapped('{"name": "f", "name": "g", "arguments": {}}'), "bad_json"),
        (with_argument('{"b": 1, "b": 2}'), "bad_json"),
        (with_argument("NaN"), "bad_json"),
        (with_argument(str(2**64)), "bad_json"),
        (with_argument('"a\nb"'), "bad_json"),
        (with_argument(r'"\ud83d"'), "bad_json"),
        (with_argument('"</tool_call>"'), "no_call"),
        (wrapped("null"), "bad_shape"),
        (wrapped('{"name": "f"}'), "bad_shape"),
        (wrapped('{"name": "f", "arguments": {}, "id": 3}'), "bad_shape"),
        (wrapped('{"name": "f", "arguments": "{}"}'), "bad_shape"),
        (wrapped('{"name": "", "arguments": {}}'), "bad_shape"),
    ],
)
def test_bad_turns(text: str, expected: str) -> None:
    assert status(text) == expected


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        (str(2**63), 2**63),
        (r'"\ud83d\ude00"', "😀"),
        (r'"\u0000"', "\0"),
        (r'"<\/tool_call>"', "</tool_call>"),
        ('"<tool_call>"', "<tool_call>"),
        ('"<|im_end|>"', "<|im_end|>"),
    ],
)
def test_odd_arguments_that_are_sound(argument: str, value: object) -> None:
    call = parse_turn(with_argument(argument), MOST).call
    assert call is not None
    assert call.arguments == {"a": value}


def test_a_turn_that_ran_out_of_tokens_is_cut_wherever_it_stood() -> None:
    for text in ("Let me", "<tool_call>", '<tool_call>{"name": "f", "arguments": {}}', ""):
        assert status(text, ran_out=True) == "cut"
    whole = wrapped('{"name": "f", "arguments": {}}')
    assert status(whole, ran_out=True) == "ok", "its last token was the limit's"


def test_length_is_counted_in_bytes_and_before_parsing() -> None:
    frame = len('{"name": "f", "arguments": {"a": ""}}')
    assert status(with_argument('"' + "ä" * ((MOST - frame) // 2) + '"')) == "ok"
    assert status(with_argument('"' + "ä" * (MOST // 2) + '"')) == "too_long"
    assert status(with_argument("[" * 2**20)) == "too_long"


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("deep", [MAX_DEPTH, 900, 100_000])
def test_deep_nesting_is_bad_json_at_any_depth_of_the_stack(opening: str, deep: int) -> None:
    closing = "]" if opening == "[" else "}"
    text = with_argument(opening * deep + "1" + closing * deep)

    def parse(levels: int) -> str:
        return parse(levels - 1) if levels else parse_turn(text, 10**7).status

    assert {parse(0), parse(sys.getrecursionlimit() // 2)} == {"bad_json"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip),
    st.dictionaries(st.text(st.characters(codec="utf-8")), JSON, max_size=4),
)
def test_what_is_written_is_read(name: str, arguments: dict[str, object]) -> None:
    text = call_text(ToolCall(name, arguments))
    assert text.count("</tool_call>") == 1, "sampling would stop at the first"
    assert parse_turn(text, 10**6).call == ToolCall(name, arguments)


@given(st.text(alphabet='<>/tool_call{}[]":,name arguments\\u0d8\n-1e9', max_size=80))
def test_no_text_raises(text: str) -> None:
    parse_turn(text, MOST)
    parse_turn(wrapped(text), MOST)

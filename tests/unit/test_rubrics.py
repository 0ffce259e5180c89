"""Rubrics of rows come in two forms, static ones in files; both end as the same values."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.stages.work import judged_as_planned
from refiner_core.contract.config import RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.records import StageSpec
from refiner_core.rubrics import (
    Rubric,
    hold_rubrics,
    load_rubric_set,
    normalise_rubrics,
    parse_rubrics,
    rubric_set_digest,
    select_rubrics,
)
from tests.support.real_rows import RL_ROWS, SFT_ROWS

PINNED = {
    "v3": "4cf5e50e9dedd8273665e8ce2b091373a11357c98709d714826b2af60a1173a5",
    "grounded-v1": "300e0509cc8549e3bd13554af2b989fbbd6fa960e25bf89c79ec246a421b5def",
    "reader-v1": "115449232efed8797a04f72f8aa0e4264eee0b3f274bdcefb22528278ad714ad",
}
ROW = json.dumps(
    {
        "positive_rubrics": [{"title": "p", "description": "says p", "weight": 0.5}],
        "negative_rubrics": [{"title": "n", "description": "says n"}],
    }
)


def test_the_first_form_keeps_its_lists_and_weight_is_1_where_none_is_given() -> None:
    assert parse_rubrics(ROW) == (
        Rubric("p", "says p", "positive", 0.5),
        Rubric("n", "says n", "negative", 1.0),
    )


def test_the_rl_form_marks_negative_rubrics_by_their_weight() -> None:
    truth = {
        "query": "q",
        "rubrics": [
            {"title": "n", "description": "says n", "weight": -2},
            {"title": "p", "description": "says p", "weight": 3},
        ],
    }
    expected = {
        "positive_rubrics": [{"title": "p", "description": "says p", "weight": 3.0}],
        "negative_rubrics": [{"title": "n", "description": "says n", "weight": 2.0}],
    }
    assert normalise_rubrics(truth) == expected
    assert normalise_rubrics(json.dumps(truth)) == expected
    assert normalise_rubrics(truth["rubrics"]) == expected


def test_a_negative_weight_marks_a_negative_rubric_in_either_list() -> None:
    entry = {"title": "n", "description": "says n", "weight": -2}
    for key in ("positive_rubrics", "negative_rubrics"):
        (rubric,) = parse_rubrics({key: [entry]})
        assert (rubric.polarity, rubric.weight, rubric.signed_weight) == ("negative", 2.0, -2.0)


@pytest.mark.parametrize(
    "empty", [None, "", " ", "{}", "null", {"positive_rubrics": []}, {"negative_rubrics": None}, []]
)
def test_a_row_may_have_no_rubrics(empty: Any) -> None:
    assert parse_rubrics(empty) == ()


@pytest.mark.parametrize(
    ("obj", "named"),
    [
        ("{not json", "not JSON"),
        ({"positive": []}, "positive"),
        ({"rubrics": [], "positive_rubrics": []}, "mix"),
        ({"positive_rubrics": "text"}, "positive_rubrics"),
        ({"positive_rubrics": ["text"]}, r"positive_rubrics\[0\]"),
        ({"rubrics": [{"description": "d"}, {"title": "t"}]}, r"rubrics\[1\].*description"),
        ({"rubrics": [{"title": 3, "description": "d"}]}, r"rubrics\[0\].title"),
        ({"rubrics": [{"description": "d", "weight": "2"}]}, r"rubrics\[0\].weight"),
        ({"rubrics": [{"description": "d", "weight": True}]}, "weight"),
        ({"rubrics": [{"description": "d", "weight": math.nan}]}, "weight"),
        ('{"rubrics": [{"description": "d", "weight": Infinity}]}', "weight"),
        (3, "int"),
    ],
)
def test_what_does_not_fit_is_named(obj: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        normalise_rubrics(obj)


_ENTRIES = st.lists(
    st.fixed_dictionaries(
        {"title": st.text(), "description": st.text(min_size=1).filter(str.strip)},
        optional={"weight": st.floats(-9, 9)},
    )
)


@settings(deadline=None)
@given(_ENTRIES, _ENTRIES)
def test_normalising_twice_is_normalising_once(positive: list[Any], negative: list[Any]) -> None:
    once = normalise_rubrics({"positive_rubrics": positive, "negative_rubrics": negative})
    assert normalise_rubrics(json.dumps(once)) == once
    assert sum(map(len, once.values())) == len(positive) + len(negative)


# ---------------------------------------------------------------- static sets


def test_v3_has_its_three_rubrics_and_the_last_two_are_negative() -> None:
    v3 = load_rubric_set("v3")
    assert [(r.title, r.polarity, r.weight, r.source) for r in v3.rubrics] == [
        ("Citation Discipline", "positive", 1.0, "v3"),
        ("Off-Query Padding", "negative", 1.0, "v3"),
        ("Wrong-Entity Confabulation", "negative", 1.0, "v3"),
    ]
    assert v3.version == 3
    assert all('"' not in r.description for r in v3.rubrics)


@pytest.mark.parametrize("name", ["v3", "grounded-v1", "reader-v1"])
def test_the_wording_of_shipped_sets_is_pinned(name: str) -> None:
    """Finished runs name their set: another wording is another set (add a file)."""
    assert rubric_set_digest(name) == PINNED[name]


def test_a_user_adds_a_set_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rubrics:\n  - {title: t, description: d}\n")
    mine = load_rubric_set(str(path))
    assert mine.rubrics == (Rubric("t", "d", "positive", 1.0, "mine"),)
    before = rubric_set_digest(str(path))
    path.write_text("# note\nversion: 2\nrubrics:\n  - {title: t, description: d, weight: 1}\n")
    assert rubric_set_digest(str(path)) == before
    path.write_text("rubrics:\n  - {title: t, description: another}\n")
    assert rubric_set_digest(str(path)) != before


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("- a\n", "rubrics"),
        ("rubrics: []\n", "at least 1"),
        ("rubrics: [text]\n", r"rubrics\[0\]"),
        ("rubrics: [{title: t, descripton: d}]\n", "descripton"),
        ("rubrics: [{title: t}]\n", "description"),
        ("rubrics: [{title: t, description: d, polarity: minus}]\n", "polarity"),
        ("rubrics: [{title: t, description: d, weight: -1}]\n", "polarity: negative"),
        ("rubrics: [{title: t, description: d, weight: .nan}]\n", "weight"),
        ("version: three\nrubrics: [{title: t, description: d}]\n", "version"),
        ("license: 2\nrubrics: [{title: t, description: d}]\n", "license"),
        ("rubrics: [{title: t, description: d, source: 3}]\n", "source"),
        ("rubrics: [{title: t, description: d, accept: yes}]\n", "accept"),
        ("rubrics: [{title: t, description: d, weight: 1.0e+300}]\n", "less than or equal to"),
        ("a: [\n", "cannot be read"),
    ],
)
def test_a_set_that_does_not_fit_is_refused(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=named):
        load_rubric_set(str(path))


@pytest.mark.parametrize("name", ["v99", "nowhere.yaml", ".", "x" * 5000])
def test_an_unknown_set_is_refused_and_the_known_ones_listed(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"v3.*reward\.static_rubrics"):
        load_rubric_set(name)


# ---------------------------------------------------------------- what was planned


def write_set(path: Path, wording: str) -> Path:
    path.write_text(f"rubrics:\n  - {{title: t, description: {wording}}}\n")
    return path


def test_a_set_that_was_edited_after_planning_is_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path / "mine.yaml", "as planned")
    planned = rubric_set_digest(str(path))
    with hold_rubrics(str(path), planned) as held:
        assert held.digest() == planned
    path.write_text(f"# a note, and another version\nversion: 2\n{path.read_text()}")
    with hold_rubrics(str(path), planned) as held:
        assert held.version == 2  # nothing that is judged
    write_set(path, "edited meanwhile")
    changed = rf"changed.*{planned[:12]}.*run the recipe again"
    with pytest.raises(ConfigurationError, match=changed), hold_rubrics(str(path), planned):
        pass
    path.unlink()
    with pytest.raises(ConfigurationError, match="no rubric set"), hold_rubrics(str(path), planned):
        pass


def test_a_stage_judges_by_one_wording_to_its_end(tmp_path: Path) -> None:
    """An edit during a training of days would split its rewards in two without a trace."""
    path = write_set(tmp_path / "mine.yaml", "as planned")
    reward = RewardConfig(rubric_source="static", static_rubrics=str(path))
    spec = stage_spec({"rubrics": rubric_set_digest(str(path))})
    with judged_as_planned(spec, replace(RecipeConfig(), reward=reward)):
        write_set(path, "edited meanwhile")
        assert [r.description for r in select_rubrics(None, reward)] == ["as planned"]
        path.unlink()
        assert [r.description for r in select_rubrics(None, reward)] == ["as planned"]
    write_set(path, "edited meanwhile")
    assert [r.description for r in select_rubrics(None, reward)] == ["edited meanwhile"]
    with (
        pytest.raises(ConfigurationError, match="has changed since this stage was planned"),
        judged_as_planned(spec, replace(RecipeConfig(), reward=reward)),
    ):
        pytest.fail("the stage has begun")


def stage_spec(sources: dict[str, str]) -> StageSpec:
    return StageSpec(1, "grpo", "grpo", "f" * 64, "grpo", 1, {}, sources, {})


# ---------------------------------------------------------------- selection


@pytest.mark.parametrize(
    ("source", "only_instance", "titles"),
    [
        ("none", False, []),
        ("instance", False, ["p", "n"]),
        ("static", False, ["C", "O", "W"]),
        ("instance+static", False, ["p", "n", "C", "O", "W"]),
        ("instance+static", True, ["p", "n"]),
        ("instance", True, ["p", "n"]),
        ("static", True, []),
    ],
)
def test_the_source_decides_which_rubrics_judge(
    source: Any, only_instance: bool, titles: list[str]
) -> None:
    reward = replace(RewardConfig(), rubric_source=source, instance_rubrics_only=only_instance)
    chosen = [r.title if len(r.title) == 1 else r.title[0] for r in select_rubrics(ROW, reward)]
    assert chosen == titles


@pytest.mark.parametrize("path", [SFT_ROWS, RL_ROWS], ids=["sft", "rl"])
def test_all_real_rows_parse(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["rubrics"]
        assert len(parse_rubrics(text)) == sum(map(len, json.loads(text).values()))

"""`refiner rubrics`: faults of rubrics are reported before a run depends on them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.data.synthetic import generate_rows
from refiner_core.rubrics import Rubric, load_rubric_set, shipped_rubric_sets
from refiner_core.rubrics.lint import check_file, wording
from tests.support.command import Finished, called

SOUND = "Names the year in which the bridge was opened."


def told(description: str, polarity: Any = "positive", weight: float = 1.0) -> set[str]:
    """The rules that a description breaks by its wording."""
    return {rule for rule, _ in wording(Rubric("t", description, polarity, weight))}


def set_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def rows_file(tmp_path: Path, *rows: Any) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def row(*positive: Any, negative: Any = ()) -> dict[str, Any]:
    """A row in the first form; texts stand for entries."""
    lists = {"positive_rubrics": positive, "negative_rubrics": negative}
    written = {
        key: [{"title": e, "description": e} if isinstance(e, str) else e for e in entries]
        for key, entries in lists.items()
    }
    return {"conversations": [], "rubrics": json.dumps(written)}


def rules_of(name: str) -> Counter[str]:
    return Counter(f.rule for f in check_file(name).findings)


# ---------------------------------------------------------------- what is clean


@pytest.mark.parametrize("name", shipped_rubric_sets())
def test_the_shipped_sets_are_clean(name: str) -> None:
    checked = check_file(name)
    assert checked.findings == []


def test_rows_of_the_embedded_world_are_clean(tmp_path: Path) -> None:
    """Their quoted phrases are meant literally, their negative rubrics name what is said."""
    rows = [*generate_rows("sft", 60, seed=1), *generate_rows("rl", 60, seed=1)]
    checked = check_file(rows_file(tmp_path, *rows))
    assert checked.findings == []
    assert (checked.rows, checked.rows_without) == (120, 0)
    assert checked.rubrics > 240


# ---------------------------------------------------------------- wording


@pytest.mark.parametrize(
    ("description", "polarity", "rule"),
    [
        ("Does not mention the architect.", "negative", "negated"),
        ("The answer fails to say when it was opened.", "negative", "negated"),
        ("The answer avoids speculation about the cause.", "negative", "polarity"),
        ("The answer should avoid speculation about the cause.", "positive", "polarity"),
        ("Must not name the wrong architect.", "positive", "polarity"),
    ],
)  # fmt: skip
def test_misleading_wording_is_reported(description: str, polarity: Any, rule: str) -> None:
    assert rule in told(description, polarity)


@pytest.mark.parametrize(
    ("description", "polarity"),
    [
        (SOUND, "positive"),
        ("The answer should discuss the pros and cons of steel and concrete.", "positive"),
        ("Confuses the bridge with another one that does not cross the river.", "negative"),
        ("States that latency fell by 40% at 3 points of load.", "positive"),
        ('States that the year of opening is "1931"', "positive"),
        ("Names the year. Fully true if it is exact; true in part if the decade is; "
         "not true otherwise.", "positive"),
        ("The wording is clear. Full marks if no sentence has to be read twice, none if most "
         "have.", "positive"),
    ],
)  # fmt: skip
def test_wording_that_is_fine_is_left_alone(description: str, polarity: Any) -> None:
    assert told(description, polarity) == set()


@pytest.mark.timeout(60)
def test_hostile_descriptions_are_read_in_reasonable_time() -> None:
    """Rows may come from anywhere; a pattern that backtracks would hang the check."""
    for unit in ('"', '" and ', "and ", "the answer ", "it should ", "good ", "; ", "such as "):
        told(unit * (40_000 // len(unit)))


# ---------------------------------------------------------------- set files


def test_all_faults_of_a_file_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    """Loading refuses with the first fault; a check that did the same would be asked ten times."""
    name = set_file(
        tmp_path,
        "version: three\nrubrics:\n"
        "  - title: a\n    descripton: x\n"
        f"  - {{title: b, description: {SOUND}, polarity: minus}}\n"
        f"  - {{title: c, description: {SOUND}, weight: -1}}\n"
        "  - just text\n"
        f"  - {{title: e, description: {SOUND}, weight: .nan}}\n",
    )
    found = [(f.line, f.place, f.rule) for f in check_file(name).findings]
    assert found == [
        (1, "", "schema"),
        *((3, "rubrics[0]", "schema") for _ in range(2)),  # the unknown key, no description
        (5, "rubrics[1]", "schema"),
        (6, "rubrics[2]", "schema"),
        (7, "rubrics[3]", "schema"),
        (8, "rubrics[4]", "schema"),
    ]
    with pytest.raises(ConfigurationError, match="and 6 more"):
        load_rubric_set(name)


@pytest.mark.parametrize("text", ["a: [", "rubrics: \t- a", "- a", "", "rubrics: []", "x" * 10])
def test_a_malformed_file_is_an_error(tmp_path: Path, text: str) -> None:
    checked = check_file(set_file(tmp_path, text))
    assert checked.errors == 1
    assert checked.findings[0].rule in ("unreadable", "schema")


ONE = "Names the year in which the old bridge was opened to traffic."
FAULT = "Confuses the bridge with the one in the next town."


@pytest.mark.parametrize(
    ("entries", "rules"),
    [
        (
            [f"{{title: Same, description: {ONE}}}",
             "{title: same, description: Names the architect of the new town hall.}",
             f"{{title: c, description: '{ONE.upper()}'}}"],
            {"duplicate-title": 1, "duplicate-description": 1},
        ),
        (
            [f"{{title: a, description: {FAULT}, polarity: negative}}",
             f"{{title: b, description: {SOUND}, weight: 0}}"],
            {"only-faults": 1, "weightless": 1},  # an answer that says nothing would be paid
        ),
        ([f"{{title: a, weight: 1, description: {SOUND}, weight: 5}}"], {"duplicate-key": 1}),
    ],
)  # fmt: skip
def test_sets_with_conflicting_rubrics_are_reported(tmp_path, entries, rules) -> None:
    name = set_file(tmp_path, "rubrics:\n" + "".join(f"  - {entry}\n" for entry in entries))
    assert rules_of(name) == rules


# ---------------------------------------------------------------- rows


def test_rows_of_both_forms_are_checked_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [
        json.dumps(row(SOUND)),
        "{cut off",
        json.dumps({"messages": [], "ground_truth": json.dumps({"rubrics": [{"title": "t"}]})}),
        "",
        json.dumps({"other": 1}),
        json.dumps([1]),
        json.dumps({"conversations": [], "rubrics": "{not json"}),
        json.dumps({"conversations": []}),
        json.dumps(row("Should not speculate.", negative=["Lacks a date."])),
    ]
    path.write_text("\n".join(lines))
    checked = check_file(str(path))
    assert [(f.line, f.rule) for f in checked.findings] == [
        (2, "unreadable"),
        (3, "schema"),
        (5, "schema"),
        (6, "schema"),
        (7, "schema"),
        (9, "negated"),
        (9, "polarity"),
    ]
    assert (checked.rows, checked.rubrics, checked.rows_without) == (7, 4, 4)


def test_contradictory_signs_and_unknown_keys_are_reported(tmp_path: Path) -> None:
    against = {"title": "a", "description": SOUND, "weight": -1}
    said = {"title": "b", "description": "Names the architect.", "polarity": "negative"}
    assert rules_of(rows_file(tmp_path, row(against, said))) == {"contradictory-sign": 2}
    rl_form = {"messages": [], "ground_truth": {"rubrics": [against, {**said, "weight": -1}]}}
    assert rules_of(rows_file(tmp_path, rl_form)) == {"only-faults": 1}  # there the sign is meant
    mistyped = row({"title": "a", "description": SOUND, "wieght": 5})
    (finding,) = check_file(rows_file(tmp_path, mistyped)).findings
    assert finding.rule == "unread-key"
    assert "wieght" in finding.what


def test_parquet_rows_are_checked_as_lines_are(tmp_path: Path) -> None:
    rows = [row(SOUND), row("Should not speculate.")]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"rubrics": [r["rubrics"] for r in rows], "other": [1, 2]}), path)
    checked = check_file(str(path))
    assert [(f.line, f.rule) for f in checked.findings] == [(2, "polarity")]
    assert checked.rows == 2
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a complete Parquet file"):
        check_file(str(path))


# ---------------------------------------------------------------- the command


def test_the_command_exits_by_its_findings(tmp_path: Path) -> None:
    def check(*words: str) -> Finished:
        return called("rubrics", "check", *words)

    warned = set_file(tmp_path, "rubrics:\n  - {title: a, description: Should not speculate.}\n")
    assert check("v3").code == check(warned).code == 0
    assert f"{warned}:2 rubrics[0] 'a'" in check(warned).stdout
    assert check(warned, "--strict").code == 3
    wrong = rows_file(tmp_path, *[row({"title": "t", "description": ""})] * 5)
    assert check(wrong).code == 3
    assert "(2 more: --all)" in check(wrong).stdout
    assert "more: --all" not in check(wrong, "--all").stdout
    found = check(warned, "--json").json
    assert (found["warnings"], found["errors"]) == (1, 0)
    assert {"line", "rule", "what", "why", "fix", "severity"} <= set(found["findings"][0])
    assert check(str(tmp_path / "nowhere.yaml")).code == 2

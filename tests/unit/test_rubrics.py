"""Rubrics: forms of rows, static sets, selection, their faults, and what criteria teach."""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.checking.sources import resolve_sources
from flows.stages.work import judged_as_planned
from refiner_core.contract.config import DataConfig, RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import make_plan
from refiner_core.contract.records import StageSpec
from refiner_core.contract.types import PromptRow
from refiner_core.data.random_baseline import random_baseline_answers
from refiner_core.data.rows import parse_row
from refiner_core.data.sources import read_rows, resolve_source
from refiner_core.data.synthetic import generate_rows
from refiner_core.evaluation.protocol import make_protocol
from refiner_core.judges.lexical import LexicalJudge
from refiner_core.report.printing import document
from refiner_core.rescoring.criteria import criteria_report, rubric_credits, sections
from refiner_core.rescoring.rollouts import StoredRollout
from refiner_core.rewards import RewardInput, compute_rewards
from refiner_core.rubrics import (
    Rubric,
    load_rubric_set,
    normalise_rubrics,
    parse_rubrics,
    rubric_set_digest,
    select_rubrics,
    shipped_rubric_sets,
)
from refiner_core.rubrics.lint import check_file, wording
from tests.support.command import Finished, called
from tests.support.judged_worlds import draw_criteria, judge_answers
from tests.support.real_rows import RL_ROWS
from tests.support.rewarding import GOOD, by_kind, reward_of, rollout

PINNED = {
    "v3": "4cf5e50e9dedd8273665e8ce2b091373a11357c98709d714826b2af60a1173a5",
    "grounded-v1": "300e0509cc8549e3bd13554af2b989fbbd6fa960e25bf89c79ec246a421b5def",
    "reader-v1": "115449232efed8797a04f72f8aa0e4264eee0b3f274bdcefb22528278ad714ad",
    "overall-v1": "60771006fadf960a47ef7f84885acd6b3f557581f4de8f9e3397fbbcdb4c325f",
}
ROW = json.dumps(
    {
        "positive_rubrics": [{"title": "p", "description": "says p", "weight": 0.5}],
        "negative_rubrics": [{"title": "n", "description": "says n"}],
    }
)


def test_both_forms_of_rubrics_are_read_and_a_negative_weight_marks_a_fault() -> None:
    assert parse_rubrics(ROW) == (
        Rubric("p", "says p", "positive", 0.5),
        Rubric("n", "says n", "negative", 1.0),
    )
    entry = {"title": "n", "description": "says n", "weight": -2}
    truth = {"query": "q", "rubrics": [entry, {"title": "p", "description": "says p", "weight": 3}]}
    expected = {
        "positive_rubrics": [{"title": "p", "description": "says p", "weight": 3.0}],
        "negative_rubrics": [{"title": "n", "description": "says n", "weight": 2.0}],
    }
    for form in (truth, json.dumps(truth), truth["rubrics"]):
        assert normalise_rubrics(form) == expected
    for key in ("positive_rubrics", "negative_rubrics"):
        (rubric,) = parse_rubrics({key: [entry]})
        assert (rubric.polarity, rubric.weight, rubric.signed_weight) == ("negative", 2.0, -2.0)
    for empty in (None, " ", "{}", "null", {"negative_rubrics": None}, []):
        assert parse_rubrics(empty) == ()


@pytest.mark.parametrize(
    ("obj", "named"),
    [
        ("{not json", "not JSON"),
        ({"positive_rubrics": ["text"]}, r"positive_rubrics\[0\]"),
        ({"rubrics": [{"description": "d"}, {"title": "t"}]}, r"rubrics\[1\].*description"),
        ({"rubrics": [{"description": "d", "weight": math.nan}]}, "weight"),
        ('{"rubrics": [{"description": "d", "weight": Infinity}]}', "weight"),
    ],
)
def test_malformed_rubrics_are_refused_with_their_place(obj: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        normalise_rubrics(obj)


# ---------------------------------------------------------------- static sets


@pytest.mark.parametrize("name", PINNED)
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


@pytest.mark.parametrize("name", ["v99", "nowhere.yaml", ".", "x" * 5000])
def test_an_unknown_set_is_refused_and_the_known_ones_listed(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"v3.*reward\.static_rubrics"):
        load_rubric_set(name)


# ---------------------------------------------------------------- what was planned


def write_set(path: Path, wording: str) -> Path:
    path.write_text(f"rubrics:\n  - {{title: t, description: {wording}}}\n")
    return path


def test_a_stage_judges_by_its_planned_wording_and_is_refused_once_it_was_edited(tmp_path) -> None:
    path = write_set(tmp_path / "mine.yaml", "as planned")
    reward = RewardConfig(rubric_source="static", static_rubrics=str(path))
    config = replace(RecipeConfig(), reward=reward)
    planned = rubric_set_digest(str(path))
    spec = StageSpec(1, "grpo", "grpo", "f" * 64, "grpo", 1, {}, {"rubrics": planned}, {})
    path.write_text(f"# a note, and another version\nversion: 2\n{path.read_text()}")
    with judged_as_planned(spec, config):
        path.unlink()
        assert [r.description for r in select_rubrics(None, reward)] == ["as planned"]
    write_set(path, "edited meanwhile")
    assert [r.description for r in select_rubrics(None, reward)] == ["edited meanwhile"]
    changed = rf"changed.*{planned[:12]}.*run the recipe again"
    with pytest.raises(ConfigurationError, match=changed), judged_as_planned(spec, config):
        pytest.fail("the stage has begun")
    path.unlink()
    with pytest.raises(ConfigurationError, match="no rubric set"), judged_as_planned(spec, config):
        pytest.fail("the stage has begun")


# ---------------------------------------------------------------- selection


@pytest.mark.parametrize(
    ("source", "only_instance", "titles"),
    [
        ("none", False, ""),
        ("instance", False, "pn"),
        ("static", False, "COW"),
        ("instance+static", False, "pnCOW"),
        ("instance+static", True, "pn"),
    ],
)
def test_the_source_decides_which_rubrics_are_asked(source, only_instance, titles) -> None:
    """``instance_rubrics_only`` costs no judgement of a static rubric."""
    reward = replace(RewardConfig(), rubric_source=source, instance_rubrics_only=only_instance)
    assert "".join(r.title[0] for r in select_rubrics(ROW, reward)) == titles
    judge = by_kind()
    result = reward_of(rollout(GOOD, ROW), judge, **vars(reward))
    logged = [j["title"][0] for j in result.judgements if j["kind"] == "rubric"]
    assert "".join(logged) == titles
    assert len([r for r in judge.asked if r.kind == "rubric"]) == len(titles)
    assert result.components["no_rubrics"] == float(not titles)


# ---------------------------------------------------------------- files of a recipe

SET = "name: mine\nrubrics:\n  - {title: t, description: Names the year of the opening.}\n"
STATIC = "reward.rubric_source=instance+static"


def experiment(folder: Path) -> Path:
    """A recipe with a rubric file beside it."""
    (folder / "rubrics").mkdir(parents=True)
    (folder / "rubrics" / "mine.yaml").write_text(SET)
    recipe = folder / "recipe.yaml"
    recipe.write_text("include: tiny\nreward:\n  rubric_source: instance+static\n"
                      "  static_rubrics: ./rubrics/mine.yaml\n")  # fmt: skip
    return recipe


def test_a_file_is_found_beside_its_recipe_or_its_override(tmp_path, monkeypatch) -> None:
    recipe = experiment(tmp_path / "mine")
    beside = load_recipe(str(recipe))
    monkeypatch.chdir(tmp_path / "mine")
    overridden = load_recipe("tiny", [STATIC, "reward.static_rubrics=rubrics/mine.yaml"])
    missing = load_recipe("tiny", [STATIC, "reward.static_rubrics=no/such.yaml"])
    (tmp_path / "mine" / "v3").write_text(SET)
    shipped = load_recipe("tiny", ["reward.static_rubrics=v3"])
    monkeypatch.chdir("/")  # a job
    for config in (beside, overridden):
        assert load_rubric_set(config.reward.static_rubrics).name == "mine"
        assert Path(config.reward.static_rubrics).is_absolute()
    with pytest.raises(ConfigurationError, match=r"no/such\.yaml"):
        resolve_sources(missing)
    assert shipped.reward.static_rubrics == "v3", "names of shipped sets stay names"


def test_stages_and_protocols_depend_on_the_content_of_rubrics_alone(tmp_path) -> None:
    def fingerprint(config: RecipeConfig) -> str:
        return make_plan(config, resolve_sources(config)).by_name["grpo"].fingerprint

    here, there = (load_recipe(str(experiment(tmp_path / name))) for name in ("here", "there"))
    assert fingerprint(here) == fingerprint(there)
    protocols = [make_protocol(c, [], "greedy", "d") for c in (here, there)]
    assert protocols[0] == protocols[1]
    assert protocols[0].rubrics["static"] == "mine"
    Path(there.reward.static_rubrics).write_text(SET.replace("year", "date"))
    assert fingerprint(here) != fingerprint(there)
    v3 = replace(here, reward=replace(here.reward, static_rubrics="v3"))
    assert make_protocol(v3, [], "greedy", "d").rubrics["static"] == "v3"
    assert "reward.static_rubrics" in make_plan(v3, resolve_sources(v3)).by_name["grpo"].identity


# ---------------------------------------------------------------- checks of rubrics


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


# ---------------------------------------------------------------- what criteria teach


def test_known_parameters_are_recovered_and_few_criteria_keep_the_order() -> None:
    made = draw_criteria(1, criteria=24)
    found = criteria_report(judge_answers(made, 1, prompts=120))
    rows, inside = found["criteria"], made.informative
    assert [row["state"] for row in rows[:8]] == ["saturated"] * 4 + ["dead"] * 4
    assert not any(row["state"] for row in rows[inside])
    slopes = np.array([row["slope"] for row in rows][inside])
    places = np.array([row["place"] for row in rows][inside])
    assert np.abs(slopes - made.slopes[inside]).mean() < 0.3
    assert np.abs(places - made.places[inside]).mean() < 0.2
    smaller = found["smaller"]
    assert smaller["reached"]
    assert len(smaller["kept"]) <= 0.5 * len(rows)
    assert smaller["low"] < smaller["spearman"] < smaller["high"]
    assert smaller["spearman"] > 0.93
    assert not {kept["title"] for kept in smaller["kept"]} & {r["title"] for r in rows[:8]}


def test_two_criteria_that_say_the_same_are_named_and_one_is_enough() -> None:
    rows = judge_answers(draw_criteria(2, criteria=3), 2, prompts=60)
    twin = rows[rows["criterion"] == "criterion 2"].assign(criterion="twin", title="twin")
    found = criteria_report(pd.concat([rows, twin], ignore_index=True))
    (pair,) = found["redundant"]
    assert (pair["first"], pair["second"]) == ("criterion 2", "twin")
    kept = {one["title"]: one["weight"] for one in found["smaller"]["kept"]}
    assert len(kept.keys() & {"criterion 2", "twin"}) == 1
    assert max(kept.values()) == pytest.approx(2.0, abs=0.1), "one stands for both"


def test_answers_without_a_score_are_counted_and_left_out() -> None:
    rows = judge_answers(draw_criteria(3, criteria=3), 3, prompts=20)
    rows.loc[0, "credit"] = np.nan
    found = criteria_report(rows)
    assert found["unusable"] == 1
    assert {row["answers"] for row in found["criteria"]} == {159}


def real_rollouts(reward: RewardConfig) -> list[StoredRollout]:
    """Answers that copy at random, to real questions with their own rubrics."""
    source = resolve_source(DataConfig(rl_path=str(RL_ROWS)), "rl")
    made = []
    for raw in read_rows(source):
        row = parse_row(raw, "rl")
        prompt = PromptRow(
            *(row.sample_id, row.question, row.prompt_text, ()),
            *(row.rubrics, row.refiner_mode, None),
        )
        for index in range(4):
            text = random_baseline_answers(row.prompt_text, random.Random(index))
            made.append((prompt, index, text))
    results = compute_rewards([RewardInput(p, t, True) for p, _, t in made], reward, LexicalJudge())
    return [
        StoredRollout(f"step 1, {p.sample_id}", 1, index, p, text, True, result, None)
        for (p, index, text), result in zip(made, results, strict=True)
    ]


def test_real_rows_have_numbers_for_what_they_share_and_counts_for_what_they_do_not() -> None:
    reward = RewardConfig(rubric_source="instance+static", static_rubrics="v3")
    found = criteria_report(rubric_credits(real_rollouts(reward)))
    assert [row["source"] for row in found["criteria"]] == ["v3"] * 3
    (own,) = found["of_prompts"]
    assert own["prompts"] == found["prompts"] == 6
    assert own["criteria"] > 20
    text = document("Criteria", "", sections(found))
    assert "Citation Discipline" in text
    assert "each has too few answers" in text

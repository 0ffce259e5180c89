"""The synthetic world: schema, truth, rubrics, and the random copier as a floor."""

import json
import random
import re
from statistics import mean

import pytest

from refiner_core import synthetic_words
from refiner_core.data.synthetic import generate_rows
from refiner_core.evaluation.metrics import score_truth
from refiner_core.rewards.attacks import random_baseline_answers

TRUTH = {
    "facts": [
        {"entity": "Nabsuf", "attribute": "crop", "value": "velm rota", "ids": ["S_1", "S_2"]},
        {"entity": "Nabsuf", "attribute": "river", "value": "dorn luma", "ids": ["S_3"]},
    ],
    "gold_ids": ["S_1", "S_2", "S_3"],
}


def _user(row: dict) -> str:
    return row["conversations"][0]["content"]


def _demonstration(row: dict) -> str:
    return row["conversations"][1]["content"]


def test_rows_follow_the_schema_and_depend_on_their_seed_alone():
    assert generate_rows("sft", 20, 3)[:5] == generate_rows("sft", 5, 3)
    assert generate_rows("sft", 5, 3) != generate_rows("sft", 5, 4)
    for kind, roles in (("sft", ["user", "assistant"]), ("rl", ["user"])):
        for row in generate_rows(kind, 50, 1):
            assert [turn["role"] for turn in row["conversations"]] == roles
            assert set(row) == {"conversations", "rubrics", "metadata", "truth"}
            assert row["metadata"]["refiner_mode"] == "answer_only"
            assert {"sample_id", "tool_query"} <= set(row["metadata"])
            json.dumps(row)


def test_prompts_have_snippets_that_answer_and_rubrics_that_quote_them():
    for row in generate_rows("rl", 300, 5):
        evidence = re.findall(r"<snippet id=(S_\w{4})> (.*?)</snippet>", _user(row))
        texts = dict(evidence)
        assert 3 <= len(texts) == len(evidence) <= 5
        assert len(row["truth"]["gold_ids"]) in (1, 2)
        for fact in row["truth"]["facts"]:
            assert fact["ids"] == [i for i, text in evidence if fact["value"] in text]
            assert all(fact["entity"] in texts[i] for i in fact["ids"])
            assert fact["attribute"] in texts[fact["ids"][0]]
        rubrics = json.loads(row["rubrics"])
        values = {fact["value"] for fact in row["truth"]["facts"]}
        quoted = [re.findall(r'"([^"]+)"', r["description"]) for r in rubrics["positive_rubrics"]]
        assert {phrase for phrases in quoted for phrase in phrases} == values
        for rubric in rubrics["negative_rubrics"]:
            (phrase,) = re.findall(r'"([^"]+)"', rubric["description"])
            assert phrase in _user(row)
            assert phrase not in values
        # A missing fact costs more than all forbidden phrases together.
        forbidden = sum(r["weight"] for r in rubrics["negative_rubrics"])
        assert all(r["weight"] >= 2 * forbidden for r in rubrics["positive_rubrics"])


def test_a_demonstration_is_perfect_exactly_where_it_has_no_flaw():
    for row in generate_rows("sft", 500, 10):
        perfect = score_truth(_demonstration(row), row["truth"])["oracle"] == 1.0
        if row["metadata"]["flaw"] is None:
            assert perfect
        elif row["metadata"]["flaw"] != "format_slip":
            assert not perfect


def test_no_name_value_or_id_is_of_the_half_that_the_base_model_has_seen():
    first, second = synthetic_words.FIRST_SYLLABLES, synthetic_words.SECOND_SYLLABLES
    rng = random.Random(0)
    names = {synthetic_words.draw_name(rng) for _ in range(5000)}
    names |= {synthetic_words.similar_name(rng, name) for name in sorted(names)}
    assert all((first.index(n[:3]) + second.index(n[3:])) % 2 for n in names)
    for draw in (synthetic_words.draw_name, synthetic_words.draw_value, synthetic_words.draw_id):
        assert len({draw(rng) for _ in range(5000)}) > 1500


def test_a_full_answer_scores_one():
    text = (
        "<answer> Nabsuf crop<snippet id=S_1, S_2> It is velm rota.</snippet>"
        "<snippet id=S_3> The river of Nabsuf is dorn luma.</snippet></answer>"
    )
    scores = score_truth(text, TRUTH)
    assert scores["fact_recall"] == scores["citation_f1"] == scores["oracle"] == 1.0
    assert scores["claims"] == 2


def test_without_one_answer_block_and_a_claim_all_is_zero():
    said = " The crop of Nabsuf is velm rota."
    unopened = f"<snippet id=S_1>{said}</snippet>"
    mistyped = f"<answer><snippet ids=S_1>{said}</snippet></answer>"
    for text in ("", unopened, f"<answer>{unopened}", f"<answer>{said}</answer>", mistyped):
        assert set(score_truth(text, TRUTH).values()) == {0.0}


def test_a_value_counts_at_word_boundaries_and_with_its_entity_and_attribute():
    def recall(inside: str) -> float:
        return score_truth(f"<answer>{inside}</answer>", TRUTH)["fact_recall"]

    assert recall("<snippet id=S_1> The crop of Nabsuf is Velm Rota.</snippet>") == 0.5
    assert recall("<snippet id=S_1> The crop of Nabsuf is velm rotas.</snippet>") == 0.0
    assert recall("<snippet id=S_1> The crop of Nabsut is velm rota.</snippet>") == 0.0
    assert recall("<snippet id=S_1> It is velm rota.</snippet>") == 0.0
    assert recall(" Nabsuf crop velm rota<snippet id=S_1> It is.</snippet>") == 0.0


def test_a_citation_is_right_only_where_its_id_states_its_claim():
    crop = " The crop of Nabsuf is velm rota.</snippet>"
    wrong = score_truth(f"<answer><snippet id=S_3>{crop}</answer>", TRUTH)
    assert (wrong["fact_recall"], wrong["citation_precision"], wrong["citation_f1"]) == (0.5, 0, 0)
    half = score_truth(f"<answer><snippet id=S_1,S_3>{crop}</answer>", TRUTH)
    assert half["citation_precision"] == 0.5
    assert half["citation_recall"] == pytest.approx(1 / 3)


def test_the_random_copier_is_well_formed_and_scores_near_its_known_floor():
    rows, rng = generate_rows("rl", 800, 11), random.Random(0)
    scores = []
    for row in rows:
        text = random_baseline_answers(_user(row), rng)
        cited = re.findall(r"<snippet id=(\S+?)>", text)
        assert set(cited) <= set(re.findall(r"<snippet id=(\S+?)>", _user(row)))
        assert len(set(cited)) == len(cited) >= 1
        scores.append(score_truth(text, row["truth"]))
    assert 0.30 < mean(s["citation_f1"] for s in scores) < 0.42
    assert 0.30 < mean(s["oracle"] for s in scores) < 0.43


def test_the_random_copier_cites_what_may_be_cited_and_no_example_of_the_notation():
    shown = "Cite like <snippet id=EXAMPLE>this</snippet>.\n<tool_output>\n"
    evidence = "<snippet id=S_1>One fact.</snippet><snippet id=S_2>Cut short\n</tool_output>"
    answers = {random_baseline_answers(shown + evidence, random.Random(seed)) for seed in range(20)}
    cited = {i for answer in answers for i in re.findall(r"id=(\S+?)>", answer)}
    assert cited == {"S_1", "S_2"}

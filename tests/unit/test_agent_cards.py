"""Cards of agents: tables of tasks and failures that can be recomputed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from refiner_core.cards.build import Sentences, build_card
from refiner_core.cards.evidence import evidence_text
from refiner_core.cards.facts import CardFacts, unmarked
from refiner_core.cards.lint import lint_card
from refiner_core.cards.results import result_tables
from refiner_core.evaluation.episodes import evaluate_episodes
from tests.support.card_facts import card_numbers
from tests.support.playing import (
    Desk,
    Player,
    agent_config,
    by_attempt,
    task_rows,
    world_seed,
    write_tasks,
)
from tests.support.stage_io import FolderStageIO

B0, B1, O0, O1 = (f"{d}/{d}-test-00{i}" for d in ("bookings", "orders") for i in (0, 1))
BASE = {B0: ("expert", "flawed", "nothing", "nothing"), O1: ("expert",) * 4}
OWN = {
    B0: ("expert", "expert", "nothing", "expert"),
    B1: ("words", "nothing", "expert", "flawed"),
    O1: ("expert",) * 4,
}
CONFIG = agent_config(evaluate__temperature=0.8, evaluate__top_k=20)


def measured(root: Path, name: str, played: Any, fails: frozenset[int]) -> dict[str, Any]:
    player_of = task_rows(CONFIG, _tokenizer(), 2)
    player = Player(CONFIG, player_of, by_attempt(played))
    return evaluate_episodes(
        CONFIG,
        data_dir=write_tasks(root / "data", player_of),
        data_digest="d" * 64,
        model_ref="builtin:tiny",
        model_name=name,
        output_dir=root / name,
        io=FolderStageIO(root / f"{name}-io"),
        generator=player,
        tokenizer=player.tokenizer,
        environment=Desk(CONFIG, fails),
    )


def _tokenizer() -> Any:
    from refiner_core.models import tiny_tokenizer

    return tiny_tokenizer()


def facts_of(*results: dict[str, Any], **changes: Any) -> CardFacts:
    entries = [e for r in results for e in (*r["evaluations"], *r["reference"])]
    given: dict[str, Any] = {
        "repo_id": "somebody/desk-agent",
        "config": CONFIG,
        "stage": "grpo",
        "step": 100,
        "final": True,
        "command": "refiner run tiny",
        "evaluations": entries,
        "protocols": {k: v for r in results for k, v in r["protocols"].items()},
    }
    return CardFacts(**{**given, **changes})


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> CardFacts:
    root = tmp_path_factory.mktemp("cards")
    fails = frozenset(world_seed(CONFIG, "sampled", *place) for place in ((B0, 2), (O1, 0)))
    base = measured(root, "base", BASE, frozenset())
    return facts_of(base, measured(root, "grpo", OWN, fails))


def test_the_table_has_tasks_overall_and_by_domain(facts: CardFacts) -> None:
    tables = result_tables(facts, Sentences(facts).protocol)
    main = next(t for t in tables if "sampled" in t["title"] and "pass" in t["about"])
    assert "4 held-out tasks × 4 attempts per task" in main["about"]
    assert "top_k 20" in main["about"]
    assert "user: scripted" in main["about"]
    assert "pass^k that all of k do" in main["about"]
    assert main["header"] == ("metric", "base", "ends at once (floor)", "**GRPO (this model)**")
    rows = {row[0]: [unmarked(c) for c in row[1:]] for row in main["rows"]}
    assert rows["`pass@1`"][0].startswith("0.312")
    assert rows["`pass@4/orders`"][0].endswith("n = 2")
    assert rows["`pass@2`"][1] == "—", "one attempt has no pass@2"
    assert "`pass@2/orders`" not in rows
    assert "`pass^1`" not in rows, "it is pass@1 by another name"
    assert "`success`" not in rows, "it is pass@1 by another name"
    assert "n = 4" in unmarked(main["title"])


def test_a_card_claims_no_more_of_held_out_tasks_than_rows_tell() -> None:
    """Demonstrations that name no task may be at any of them."""
    split = {"held_out_questions": 5, "questions": 9}
    sft = {"read": 8, "kept": 7, "domains": {"retail": 7}}
    data = {"split": split, "sft": sft}
    said = unmarked(Sentences(facts_of(reports={"data": data, "sft": {}})).lines("rows")[-1])
    assert said.endswith("none of them is trained on.")
    data = {"split": split, "sft": {**sft, "unnamed_task": 3}}
    said = unmarked(Sentences(facts_of(reports={"data": data, "sft": {}})).lines("rows")[-1])
    assert said.endswith("as far as demonstrations name their tasks: 3 demonstrations name none.")
    assert "best attempts (rejection fine-tuning)" in build_card(facts_of(stage="rft"))


def test_a_card_of_an_agent_is_fit_to_be_published(facts: CardFacts) -> None:
    evidence = evidence_text(facts, ())
    card = build_card(facts)
    assert lint_card(card, evidence) == []
    assert lint_card(card) == [], "nor does anything contradict itself"
    assert "fewer than 4 valid attempts" in card
    numbers = {n.fact for n in card_numbers(facts) if n.section == "Results"}
    assert any(fact.endswith(".numerator") for fact in numbers)
    assert all(record is None for record in {n.record for n in card_numbers(facts)})


def changed(card: str, row: str, old: str, new: str) -> str:
    lines = card.split("\n")
    place = next(i for i, line in enumerate(lines) if line.startswith(f"| `{row}` |"))
    assert old in lines[place]
    lines[place] = lines[place].replace(old, new, 1)
    return "\n".join(lines)


def test_a_number_that_no_attempts_give_is_refused(facts: CardFacts) -> None:
    card = build_card(facts)
    sampled = card[card.index("sampled decoding") :]
    head = card[: card.index("sampled decoding")]
    shown = re.search(r"\| `pass@1` \| (\d\.\d{3})", sampled)
    wrong = head + changed(sampled, "pass@1", shown[1], "0.330")
    problems = " ".join(lint_card(wrong, evidence_text(facts, ())))
    assert "0.330" in problems
    # Of 5 tasks with 4 attempts each nothing is 14.3 %, with or without evidence.
    alone = (
        "# x\n\n4 attempts per task.\n\n| model | n | pass@1 |\n|---|---|---|\n| a | 5 | 14.3% |\n"
    )
    assert any("14.3" in p for p in lint_card(alone))
    uneven = alone.replace("4 attempts per task.", "4 attempts per task; some have fewer than 4 "
                           "valid attempts.")  # fmt: skip
    assert not any("share" in p for p in lint_card(uneven.replace("14.3", "13.3")))
    assert any("share" in p for p in lint_card(alone.replace("14.3", "13.3")))

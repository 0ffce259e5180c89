"""The evidence of a card: it makes the same card again, has every number, and holds no secret."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import evidence_text, facts_from_json, facts_to_json, load_evidence
from refiner_core.cards.facts import AttemptNote, CardFacts
from refiner_core.cards.public import public_address, public_command, public_text
from refiner_core.contract.checks.environment import ONLY_OF_AGENTS
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.marks import walk
from tests.support.card_facts import card_numbers, full_facts, published_facts, sft_facts

CONFIG = RecipeConfig()
EVALUATION = {
    "stage": "grpo",
    "protocol": "c3f6a31879aa",
    "protocol_name": "held-out/greedy/lexical-1@v1-c3f6a318",
    "decoding": "greedy",
    "metric": "format_valid",
    "value": 0.25,
    "low": 0.1,
    "high": 0.5,
    "n": 4,
}


def facts(**changes: Any) -> CardFacts:
    given: dict[str, Any] = {
        "repo_id": "somebody/refiner-step50",
        "config": CONFIG,
        "stage": "grpo",
        "step": 50,
        "final": False,
        "command": "refiner run tiny seed=1",
        "evaluations": [EVALUATION],
    }
    return CardFacts(**{**given, **changes})


# ---------------------------------------------------------------- the same card again


ODD = facts(
    config=replace_fields(CONFIG, {"grpo.stop_strings": ["</answer>", "/x\n"], "seed": 7}),
    command="a/b ~.\\ :=@\n'\"{",
    description="{{ x }} | \ud800\n",
    evaluations=[
        {**EVALUATION, "value": math.nan, "low": math.inf, "high": None},
        {**EVALUATION, "metric": "reward", "value": -5},
    ],
    attempts=[AttemptNote("grpo", 1, "something_new", None, 60, None)],
    reports={"grpo": {"steps": 3, "curves": {"scores": []}}, "command": {}},
    cost={"gpu_hours": 1e5, "price": 0.0},
    recipe_file="",
    template="{{ front_matter }}{{ command }} {{ facts.config['seed'] }}",
)


@pytest.mark.parametrize("given", [full_facts(), sft_facts(), facts(), ODD])
def test_evidence_of_any_facts_makes_the_same_card(given: CardFacts) -> None:
    evidence = evidence_text(given, [])
    again = load_evidence(evidence)
    assert build_card(again.facts) == build_card(given)
    assert evidence_text(again.facts, []) == evidence, "evidence of evidence is the same evidence"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "not JSON"),
        ('{"kind": "something"}', "not the evidence of a card"),
        ('{"kind": "refiner publication", "format": 2}', "format 2"),
        ('{"kind": "refiner publication", "format": 1, "facts": {}}', "incomplete or damaged"),
    ],
)
def test_invalid_evidence_is_refused(text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        load_evidence(text)


def test_evidence_with_facts_of_a_newer_version_is_refused_rather_than_read_in_part() -> None:
    for more in ({"carbon": 3}, {"config": {"grpo.new_option": 1}}):
        content = json.loads(evidence_text(facts(), []))
        content["facts"] |= more
        with pytest.raises(DataError, match=r"carbon|new_option"):
            load_evidence(json.dumps(content))


# ---------------------------------------------------------------- nothing private


def _canary(path: str, value_type: Any, default: Any) -> Any:
    if value_type in (str, str | None):
        return f"/canary/{path}/user/inside"
    if default == () and "str" in str(value_type):
        return ["/canary/list/x"]
    return default


def test_nothing_of_an_execution_setting_or_a_folder_is_in_the_evidence() -> None:
    """Holds for every field of the configuration, later ones too."""
    canaries = {
        path: _canary(path, info.type, info.default)
        for path, info in walk(RecipeConfig)
        if info.mark == "execution" and info.type in (str, str | None)
    }
    folders = {
        "data.sft_path": "/canary/me/demos.jsonl",
        "model.name_or_path": "~/canary/qwen3-mine",
        "publish.path": "/canary/published",
        "publish.card_template": "/canary/template.jinja",
        "reward.static_rubrics": "../canary/strict.yaml",
        "judge.model": "/canary/models/judge",
        "command.run": "torchrun /canary/train.py --data '/canary/my data' --log file:/canary/x",
        "command.env": ["HF_HOME=/canary/cache"],
        "model.chat_template": "{{ 'canary' }}\n",
    }
    config = replace_fields(CONFIG, {**canaries, **folders})
    command = (
        "refiner run /canary/mine.yaml data.sft_path='/canary/my demos.jsonl' workspace=/canary/w "
        "judge.base_url=http://canary-node:8000/v1 dispatch.profile=canary seed=3"
    )
    given = facts(
        config=config,
        command=command,
        description="Made from /canary/me/notes.md with http://me:canary@example.org/x.",
        recipe_file="workspace: /canary/w\n",
        reports={
            "grpo": {"steps": 3, "target": "/canary/w", "model_ref": "/canary/m", "host": "canary"},
            "command": {"source": "/canary/run/checkpoint-50"},
        },
        evaluations=[{**EVALUATION, "model_ref": "/canary/m", "node": "canary-17"}],
        tracking={"grpo": "http://canary:8080/run", "sft": "https://wandb.ai/a/b?token=canary"},
        provenance={"host": "/canary/host"},
        sources={"/canary/rl.jsonl": "a" * 64},
        records={"config": "/canary/runs/1.json"},
    )
    text = evidence_text(given, [])
    assert "canary" not in text, [line for line in text.splitlines() if "canary" in line]
    assert "canary" not in build_card(given)
    for kept in ("demos.jsonl", "qwen3-mine", "strict.yaml", "torchrun train.py", "mine.yaml"):
        assert kept in text
    assert published_facts(given).command == (
        "refiner run mine.yaml 'data.sft_path=my demos.jsonl' seed=3"
    )


@pytest.mark.parametrize(
    ("public", "said", "shown"),
    [
        (public_command, "refiner run ./here.yaml seed=1", "refiner run here.yaml seed=1"),
        (public_command, "run publish.repo_id='a/{step}'", "run publish.repo_id='a/{step}'"),
        (public_command, "an 'unfinished quote /home/me/x", "an 'unfinished quote x"),
        (public_text, "see /home/me/a/b.txt and C:\\Users\\me\\c.txt", "see b.txt and c.txt"),
        (public_text, "https://github.com/owner/repo, a/b", "https://github.com/owner/repo, a/b"),
        (public_text, "HF_HOME=~/cache/hf", "HF_HOME=hf"),
        (public_address, "https://wandb.ai/me/p/runs/1", "https://wandb.ai/me/p/runs/1"),
        (public_address, "https://me:key@wandb.ai/x?key=1", "https://wandb.ai/x"),
        (public_address, "https://localhost:8080/x", None),
        (public_address, "https://10.0.0.3/x", None),
        (public_address, "https://tracker.internal/x", None),
    ],
)
def test_texts_lose_folders_and_private_addresses_and_nothing_else(
    public: Callable[[str], str | None], said: str, shown: str | None
) -> None:
    assert public(said) == shown


# ---------------------------------------------------------------- by which rules


def test_a_card_names_the_version_of_its_rules() -> None:
    """What counts as the same question, and how often a claim counts, has changed once: a number
    from before is no match for one from after."""
    known = {"num_prompts": 4, "samples_per_prompt": 1, "split": "held-out", "version": 2}
    given = facts(versions={"data": 2, "grpo": 2}, protocols={EVALUATION["protocol"]: known})
    card = build_card(given)
    assert "Stage `data` by version 2 of its rules: questions that differ in punctuation" in card
    assert "Stage `grpo` by version 2 of its rules: a claim counts once" in card
    assert "; rewards of version 2: a claim counts once in the citation reward" in card
    assert build_card(facts_from_json(facts_to_json(given))) == card


def section(card: str, title: str) -> str:
    return card.split(f"## {title}\n")[1].split("\n## ")[0]


# ---------------------------------------------------------------- from a number to its record


@pytest.mark.parametrize("given", [full_facts(), sft_facts()], ids=["grpo", "sft"])
@pytest.mark.parametrize("title", ["Results", "Training curve", "Hardware and cost", "Known notes"])
def test_no_number_of_results_curve_cost_or_notes_is_without_a_fact(
    given: CardFacts, title: str
) -> None:
    """Every number has a source."""
    if f"## {title}\n" not in build_card(given):
        assert given.stage == "sft", "everything is recorded of the other one"
        return
    text = section(build_card(given), title)
    text = re.sub(r"`[^`\n]*`", "", text)  # names, fingerprints
    text = re.sub(r"95 %|\(scale[^)]*\)|step \d+|^\d+ held-out prompts.*$", "", text, flags=re.M)
    known = [n.text for n in card_numbers(given) if n.section == title]
    for number in sorted(known, key=len, reverse=True):
        text = text.replace(number, "", 1)
    assert not re.search(r"\d", text), text


def test_a_number_leads_to_the_evaluation_and_the_record_it_was_read_from() -> None:
    given = full_facts()
    (found,) = [n for n in card_numbers(given) if n.text == "0.211"]
    assert found == ("0.211", "Results", "evaluations.0.value", "stages/evaluate-0/results.json")
    assert given.evaluations[0]["samples_file"] == "samples-greedy.parquet"
    (low,) = [n for n in card_numbers(given) if n.text == "0.161"]
    assert low.fact == "evaluations.0.low"
    reward, *_ = [n for n in card_numbers(given) if n.text == "3.714"]
    assert reward.fact == "reports.grpo.curves.scores.11.1"
    assert reward.record == "stages/grpo-1/result.json#report"


# ---------------------------------------------------------------- from a fact to the card


def test_every_identity_setting_behind_a_model_is_among_the_facts_that_are_seen() -> None:
    used = {p for kind in ("data", "sft", "grpo") for p in KINDS[kind].fields}
    behind = [
        path
        for path, info in walk(RecipeConfig)
        if info.mark == "identity"
        and any(path == u or path.startswith(f"{u}.") for u in used)
        and not path.startswith(ONLY_OF_AGENTS)  # this model is none
    ]
    known = facts_to_json(full_facts())["config"]
    assert set(behind) <= set(known)

"""Every number of a card has a fact behind it, and every fact is seen in the card."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import facts_from_json, facts_to_json
from refiner_core.cards.facts import CardFacts
from refiner_core.contract.checks.environment import ONLY_OF_AGENTS
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.marks import walk
from refiner_core.contract.recipes import load_protocol
from tests.support.card_facts import card_numbers, full_facts, sft_facts

pytestmark = pytest.mark.slow


def section(card: str, title: str) -> str:
    return card.split(f"## {title}\n")[1].split("\n## ")[0]


# ---------------------------------------------------------------- from a number to its record


@pytest.mark.parametrize("given", [full_facts(), sft_facts()], ids=["grpo", "sft"])
@pytest.mark.parametrize("title", ["Results", "Training curve", "Hardware and cost", "Known notes"])
def test_no_number_of_results_curve_cost_or_notes_is_without_a_fact(
    given: CardFacts, title: str
) -> None:
    """Otherwise nobody knows where it came from."""
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

#: Facts that change no card, and why that is right.
NOT_SHOWN = {
    r"evaluations\.\d+\.(numerator|denominator|interval|samples_file)": "how a number was "
    "made: for whoever goes from the card to the samples",
    r"evaluations\.[1-9]\.protocol_name": "a table has the name that its first entry gives it",
    r"protocols\.\w+\.(version|data|prompts|decoding|sampling\.top_k|judge\.kind)": "covered by "
    "the protocol's fingerprint, which is shown",
    r"reports\.data\.\w+\.modes\.\w+": "the card tells which modes there are, not how often",
    r"reports\.data\.split\.rl_without_rubrics": "static rubrics judge these prompts, too",
    r"reports\.sft\.train_loss\..*": "the course of an earlier stage is in that stage's own card",
    r"reports\.grpo\.curves\..*\.(3|8)\.[01]": "two of twelve points: a table has ten of them",
    r"attempts\.0\.(stage|number)": "an attempt that succeeded at once is no news",
    r"records\..*": "where the facts were read: for whoever checks them",
    r"config\.(command|evaluate|publish)\..*": "says nothing of how this model was trained; "
    "numbers bring their protocol along",
}
FIELDS = dict(walk(RecipeConfig))
Keys = tuple[str | int, ...]


def leaves(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, dict | list) and inner:
            yield from leaves(inner, (*keys, key))
        else:
            yield (*keys, key), inner


def changed(keys: Keys, value: Any) -> Any:
    """Another value that the fact could have."""
    if keys == ("config", "evaluate.protocols"):
        return [load_protocol("held-out-greedy-v1").text]
    if keys[0] == "config":
        kind = FIELDS[str(keys[1])].type
        options = [k for k in (kind, *get_args(kind)) if get_origin(k) is Literal]
        if options:
            return next(o for o in get_args(options[0]) if o != value)
        if value in (None, []):
            one = 3 if int in get_args(kind) else "some/thing"
            return [one] if value == [] else one
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value * 3 + 1
    return value * 1.7 + 0.9 if isinstance(value, float) else f"x{value}"


def unseen(given: CardFacts) -> list[str]:
    """Facts that may be changed without a change of the card."""
    known, card = facts_to_json(given), build_card(given)
    found = []
    for keys, value in leaves(known):
        if value is None and keys[0] != "config":
            continue  # not recorded
        other = copy.deepcopy(known)
        holder = other
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = changed(keys, value)
        if build_card(facts_from_json(other)) == card:
            found.append(".".join(map(str, keys)))
    return found


def test_every_fact_is_seen_in_the_card_or_there_is_a_reason_why_not() -> None:
    """A record that is not what was published must make another card."""
    found = unseen(full_facts())
    assert [f for f in found if not any(re.fullmatch(p, f) for p in NOT_SHOWN)] == []
    idle = [p for p in NOT_SHOWN if not any(re.fullmatch(p, f) for f in found)]
    assert idle == [], "these reasons are needed no more"


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
    assert not any(re.fullmatch(p, f"config.{path}") for p in NOT_SHOWN for path in behind)

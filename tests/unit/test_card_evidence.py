"""The evidence of a card: it makes the same card again, has every number, and holds no secret."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import evidence_text, facts_from_json, facts_to_json, load_evidence
from refiner_core.cards.facts import AttemptNote, CardFacts, record_of
from refiner_core.cards.public import public_address, public_command, public_text
from refiner_core.contract.checks.environment import ONLY_OF_AGENTS
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.marks import walk
from refiner_core.contract.recipes import load_protocol
from refiner_core.contract.records import OutputFile
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

texts = st.text(max_size=12) | st.text("ab/~.\\ :=@\n'\"{", max_size=14)
names = st.sampled_from(["base", "random_copier", "sft", "grpo", "grpo-step50", "grpo-step70"])
numbers = st.one_of(
    st.none(), st.integers(-5, 10**6), st.floats(allow_nan=True, allow_infinity=True)
)
reports = st.dictionaries(
    st.sampled_from(["data", "sft", "grpo", "command"]),
    st.sampled_from([{}, *full_facts().reports.values(), {"steps": 3, "curves": {"scores": []}}]),
    max_size=3,
)
entries = st.lists(
    st.builds(
        lambda stage, metric, decoding, value, low, n: {
            **EVALUATION,
            **{"stage": stage, "metric": metric, "decoding": decoding},
            **{"value": value, "low": low, "high": value, "n": n},
        },
        names,
        st.sampled_from(["reward", "citation_f1"]),
        st.sampled_from(["greedy", "sampled"]),
        numbers,
        numbers,
        st.integers(1, 99),
    ),
    unique_by=lambda e: (e["stage"], e["metric"], e["decoding"]),
    max_size=5,
)
notes = st.lists(
    st.builds(
        AttemptNote,
        st.sampled_from(["sft", "grpo"]),
        st.integers(1, 9),
        st.sampled_from(["none", "preempted", "hub_outage", "something_new"]),
        st.none() | st.integers(0, 60),
        st.none() | st.integers(0, 60),
        st.none() | st.just("2026-11-21T03:12:41.123+00:00"),
    ),
    max_size=3,
)
any_facts = st.builds(
    facts,
    stage=st.sampled_from(["sft", "grpo", "command"]),
    final=st.booleans(),
    config=st.sampled_from(
        [
            CONFIG,
            replace_fields(CONFIG, {"grpo.stop_strings": ["</answer>", "/x\n"], "seed": 7}),
            replace_fields(CONFIG, {"model.chat_template": "a\nb", "judge.kind": "openai"}),
        ]
    ),
    command=texts,
    description=texts,
    measured_as=st.sampled_from(["", "grpo-step50"]),
    reports=reports,
    evaluations=entries,
    attempts=notes,
    cost=st.dictionaries(
        st.sampled_from(["gpu_hours", "core_hours", "lost_gpu_hours", "price"]), st.floats(0, 1e5)
    ),
    sources=st.dictionaries(texts, st.just("ab" * 32), max_size=2),
    recipe_file=st.none() | texts,
    template=st.sampled_from([None, "{{ front_matter }}{{ command }} {{ facts.config['seed'] }}"]),
    tracking=st.dictionaries(st.just("grpo"), st.just("https://wandb.ai/a/b") | texts),
    base_model=st.none() | texts,
    provenance=st.dictionaries(st.sampled_from(["commit", "host"]), texts),
    records=st.dictionaries(st.sampled_from(["config", "reports.data"]), texts),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(any_facts)
def test_evidence_of_any_facts_makes_the_same_card(given: CardFacts) -> None:
    evidence = evidence_text(given, [])
    again = load_evidence(evidence)
    assert build_card(again.facts) == build_card(given)
    assert evidence_text(again.facts, []) == evidence, "evidence of evidence is the same evidence"


def test_evidence_lists_published_files_without_itself() -> None:
    files = [
        OutputFile("model.safetensors", 4, "a" * 64),
        OutputFile("README.md", 1, "b" * 64),
        OutputFile("config.json", 2, "c" * 64),
        OutputFile("refiner.json", 1, "d" * 64),
    ]
    found = load_evidence(evidence_text(facts(fingerprint="f" * 64), files))
    assert [f.path for f in found.files] == ["config.json", "model.safetensors"]
    assert (found.step, found.final, found.fingerprint) == (50, False, "f" * 64)


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
    content = {**facts_to_json(facts()), "carbon": 3}
    with pytest.raises(DataError, match="carbon"):
        facts_from_json(content)
    content = facts_to_json(facts())
    content["config"]["grpo.new_option"] = 1
    with pytest.raises(DataError, match="new_option"):
        facts_from_json(content)


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
    ("said", "shown"),
    [
        ("refiner run tiny seed=1", "refiner run tiny seed=1"),
        ("refiner run ./here.yaml", "refiner run here.yaml"),
        (
            "refiner run tiny publish.repo_id='a/{step}'",
            "refiner run tiny publish.repo_id='a/{step}'",
        ),
        ("an 'unfinished quote /home/me/x", "an 'unfinished quote x"),
    ],
)
def test_a_command_loses_its_folders_and_nothing_else(said: str, shown: str) -> None:
    assert public_command(said) == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("see /home/me/a/b.txt and C:\\Users\\me\\c.txt", "see b.txt and c.txt"),
        (
            "https://github.com/owner/repo and a/b or c",
            "https://github.com/owner/repo and a/b or c",
        ),
        ("HF_HOME=~/cache/hf", "HF_HOME=hf"),
    ],
)
def test_a_sentence_loses_its_folders_and_nothing_else(said: str, shown: str) -> None:
    assert public_text(said) == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("https://wandb.ai/me/p/runs/1", "https://wandb.ai/me/p/runs/1"),
        ("https://me:key@wandb.ai/x?key=1", "https://wandb.ai/x"),
        ("https://localhost:8080/x", None),
        ("https://10.0.0.3/x", None),
        ("https://tracker.internal/x", None),
    ],
)
def test_only_addresses_that_others_can_open_are_shown(said: str, shown: str | None) -> None:
    assert public_address(said) == shown


# ---------------------------------------------------------------- where facts come from


def test_a_fact_knows_the_record_it_was_read_from() -> None:
    given = facts(records={"reports.data": "stages/data-1/result.json#report", "config": "run"})
    assert record_of(given, "reports.data.rl.kept") == "stages/data-1/result.json#report"
    assert record_of(given, "config.grpo.beta") == "run"
    assert record_of(given, "cost.gpu_hours") is None
    assert record_of(published_facts(given), "reports.data.rl") is not None


def test_an_evaluation_that_came_twice_keeps_the_record_of_the_first() -> None:
    other = {**EVALUATION, "metric": "reward"}
    given = facts(
        evaluations=[EVALUATION, dict(EVALUATION), other],
        records={"evaluations.0": "one", "evaluations.1": "two", "evaluations.2": "three"},
    )
    assert [record_of(given, f"evaluations.{i}.value") for i in (0, 1)] == ["one", "three"]
    assert replace(given).records == given.records


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


@pytest.mark.slow
def test_every_fact_is_seen_in_the_card_or_there_is_a_reason_why_not() -> None:
    """Each changed fact makes another card."""
    given = full_facts()
    grpo = given.reports["grpo"]
    short = {name: points[:2] for name, points in grpo["curves"].items()}
    given = full_facts(
        evaluations=[given.evaluations[place] for place in (0, 2, 4, 6)],
        reports={**given.reports, "grpo": {**grpo, "curves": short}},
    )
    found = unseen(given)
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

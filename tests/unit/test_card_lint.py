"""The lint of cards and their evidence: impossible numbers, wrong claims, leaks, hostile input."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import evidence_text, facts_from_json, facts_to_json, load_evidence
from refiner_core.cards.facts import AttemptNote, CardFacts
from refiner_core.cards.lint import CardFinding, check_card, differences, lint_card
from refiner_core.cards.public import public_address, public_command, public_text
from refiner_core.contract.checks.environment import ONLY_OF_AGENTS
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.marks import walk
from refiner_core.evaluation.statistics import wilson
from tests.support.card_facts import card_numbers, full_facts, published_facts, sft_facts
from tests.support.card_facts import evaluation as any_evaluation

CARDS = Path(__file__).resolve().parents[1] / "data" / "cards"
FRONT = "---\nlicense: mit\nbase_model: owner/base\n---\n\n# A model\n\n"


def rules(text: str, **options: Any) -> list[tuple[str, int]]:
    """(rule, line) of everything that is found in a README with sound front matter."""
    return [(f.rule, f.line - FRONT.count("\n")) for f in check_card(FRONT + text, **options)]


def only(text: str, **options: Any) -> CardFinding:
    """The one finding."""
    (found,) = check_card(FRONT + text, **options)
    return found


def table(*rows: str) -> str:
    header, *rest = rows
    return "\n".join([header, re.sub(r"[^|]+", "---", header), *rest]) + "\n"


# ---------------------------------------------------------------- the cards that were typed by hand


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("refiner-step50.md", []),
        ("agent.md", [(30, "comparison-built-on"), (42, "percentage-impossible")]),
    ],
)
def test_in_cards_typed_by_hand_it_finds_what_is_wrong_and_nothing_that_is_right(
    name: str, expected: list[tuple[int, str]]
) -> None:
    found = check_card((CARDS / name).read_text())
    assert [(f.line, f.rule) for f in found] == expected
    assert all(f.is_error for f in found)


DOMAINS = table(
    "| Domain | Pass@1 | Pass@4 | Tasks |",
    "| **Overall** | **36.0%** | **59.0%** | 100 |",
    "| Airline | 15.0% | 45.0% | 20 |",
    "| Retail | 55.0% | 85.0% | 40 |",
    "| Telecom | 27.5% | 40.0% | 40 |",
)
STAGES = table(
    "| Stage | Overall Pass@4 |",
    "| Baseline | 14.0% |",
    "| SFT | 27.0% |",
    "| GRPO (this model) | **59.0%** |",
)
#: A card like the second one, with numbers that can be: lines 1 to 17 of what follows the front.
SOUND = (
    "It reaches **59% Pass@4** on a benchmark, a **4x improvement** over the base.\n"
    f"\n## Performance\n\n{DOMAINS}\n{STAGES}\n`num_samples=4`. Telecom is hard (40% Pass@4).\n"
)


def test_numbers_that_can_be_are_left_alone() -> None:
    assert check_card(FRONT + SOUND) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("| 14.0% |", "| 14.3% |", [("comparison-built-on", 1), ("percentage-impossible", 14)]),
        ("4x improvement", "5x improvement", [("comparison", 1)]),
        ("| 40.0% | 40 |", "| 42.5% | 40 |", [("total", 7)]),
        ("| **59.0%** | 100 |", "| **59.0%** | 110 |", [("total", 7), ("total", 7)]),
        ("| 45.0% | 20 |", "| 145.0% | 20 |", [("total", 7), ("percentage-impossible", 8)]),
    ],
)
def test_each_number_is_checked_against_the_others(
    old: str, new: str, expected: list[tuple[str, int]]
) -> None:
    assert old in SOUND
    found = rules(SOUND.replace(old, new, 1))
    assert set(expected) <= set(found), found
    assert {line for _, line in found} <= {line for _, line in expected} | {1, 7, 14, 15}


# ---------------------------------------------------------------- percentages of n


@pytest.mark.parametrize(
    ("share", "n", "samples", "possible"),
    [
        ("14.3%", 100, "", False),
        ("14.2%", 7, "", True),  # cut off instead of rounded
        ("33.30%", 3, "", False),
        ("12.5%", 100, "averaged over 2 seeds", True),
        ("12.34%", 100, "avg@16", False),
        ("0.143", 100, "", False),
        ("~14.3%", 100, "", True),
        ("99.99%", 1000000, "", True),
    ],
)
def test_a_percentage_of_n_is_a_whole_number_of_cases(
    share: str, n: int, samples: str, possible: bool
) -> None:
    text = table("| Set | Accuracy | Questions |", f"| A | {share} | {n} |") + f"\n{samples}\n"
    assert rules(text) == ([] if possible else [("percentage-impossible", 3)])


@pytest.mark.parametrize(
    ("metric", "share", "said", "severity"),
    [
        ("pass@1", "27.3%", "num_samples=4", "error"),
        ("pass@4", "27.5%", "num_samples=4", "error"),  # any of four: whole tasks
        ("pass@4", "27.7%", "num_samples=8", None),  # 70 ways to choose four of eight
        ("pass@1", "27.3%", "", None),  # nobody says how often it was tried
        ("F1", "27.3%", "", None),  # no count of cases
        ("success rate", "27.3%", "", "error"),
    ],
)
def test_how_often_each_case_was_tried_decides_what_can_be(
    metric: str, share: str, said: str, severity: str | None
) -> None:
    text = table(f"| Set | {metric} | Tasks |", f"| A | {share} | 10 |") + f"\n`{said}`\n"
    assert [f.severity for f in check_card(FRONT + text)] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Accuracy 14.3% (n = 100).\n", 1),
        ("### Accuracy, n = 100\n\n" + table("| Set | Accuracy |", "| A | 14.3% |"), 5),
        (table("| Set | Accuracy (n=100) |", "| A | 14.3% |"), 3),
        (table("| Metric | Value |", "| Accuracy (n = 100) | 14.3% |"), 3),
    ],
)
def test_n_is_found_in_text_headings_and_tables(text: str, line: int) -> None:
    assert rules(text) == [("percentage-impossible", line)]
    assert rules(text.replace("14.3", "14.0")) == []


# ---------------------------------------------------------------- parts and wholes


@pytest.mark.parametrize(
    "text",
    [
        "27 of 20 rows were kept.",
        "12/48 (26%) were dropped.",
        "3 of 8 tasks (39.5%) passed.",
        table("| Set | Passed |", "| a | 48/50 = 95.0% |", "| b | 13/67 (19.40%) |"),
    ],
)
def test_parts_that_do_not_make_their_whole_are_found(text: str) -> None:
    assert [rule for rule, _ in rules(text + "\n")] == ["parts"]


@pytest.mark.parametrize(
    "text",
    [
        "20 of 20 rows were kept, 0 of 3 were dropped.",
        "12/48 (25%) were dropped; 2/3 (67%) of them late; 1/3 (33.3%), 2/3 (66.6%).",
        "28 of 88 prompts were dropped, none was cut: 27 `too_long`, 1 `duplicate`.",
        "Trained on 1 of 8 GPUs at step 100 of 2,000; 5 of 10k rows; 2024/2025 (50% more).",
        "One of 3; part 2 of 1.5 hours; 3 of 2-hour sessions.",
        "A 150% larger context and a 2x speed improvement over the base.",
    ],
)
def test_parts_that_can_be_are_left_alone(text: str) -> None:
    assert rules(text + "\n") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (table("| Set | Rows |", "| a | 10 |", "| b | 20 |", "| Total | 31 |"), [("total", 5)]),
        (table("| Model | Avg | A |", "| x | 3.0 | 4.0 |", "| y | 9.9 | 1.0 |"), []),
        (table("| Model | Accuracy |", "| a | 90% |", "| b | 95% |", "| All | 93% |"), []),
    ],
)
def test_totals_recompute_from_their_own_table(text: str, expected: list[tuple[str, int]]) -> None:
    assert rules(text) == expected


# ---------------------------------------------------------------- comparisons


def two_models(base: str, own: str, base_n: int = 100, own_n: int = 100) -> str:
    return table(
        "| Model | Accuracy | Questions |",
        f"| Base | {base} | {base_n} |",
        f"| This model | {own} | {own_n} |",
    )


@pytest.mark.parametrize(
    ("claim", "found"),
    [
        ("A 2x improvement in accuracy over the base.", []),
        ("A 3x improvement in accuracy over the base.", ["comparison"]),
        ("A 3x improvement in speed over the base.", []),
    ],
)
def test_a_claimed_improvement_is_computed_again(claim: str, found: list[str]) -> None:
    text = f"{claim}\n\n{two_models('20.0%', '40.0%')}"
    assert [rule for rule, _ in rules(text)] == found


def test_a_comparison_of_different_n_is_an_error() -> None:
    claim = "A 2x improvement in accuracy over the base.\n\n"
    found = only(claim + two_models("20.0%", "40.0%", base_n=50))
    assert (found.rule, found.severity) == ("comparison", "error")
    assert "n = 100" in found.message
    assert "n = 50" in found.message


def test_a_comparison_across_protocols_is_an_error() -> None:
    def one(model: str, value: str, protocol: str) -> str:
        return f"### {protocol}\n\n" + table(
            "| Model | Accuracy |", f"| {model} | {value} |", "| Another | 30% |"
        )

    greedy, sampled = "greedy decoding, n = 100", "sampled decoding, n = 100"
    claim = "A 2x improvement in accuracy over the base.\n\n"
    text = claim + one("Base", "20%", greedy) + "\n" + one("This model", "40%", sampled)
    assert [rule for rule, _ in rules(text)] == ["comparison"]


# ---------------------------------------------------------------- front matter, leaks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# x\n", [(1, "front-matter")]),
        ("---\nlicense: [mit\n---\n", [(2, "front-matter")]),
        ("---\nlicense: mit\n---\n", [(1, "base-model-missing")]),
        ("---\nbase_model: a/b\n---\n", [(1, "licence-missing")]),
        ("\ufeff---\r\nbase_model: a/b\r\nlicense: mit\r\n---\r\n", []),
    ],
)
def test_the_front_matter_is_what_the_hub_reads(text: str, expected: list[tuple[int, str]]) -> None:
    assert [(f.line, f.rule) for f in check_card(text)] == expected


def test_an_unknown_base_is_a_warning() -> None:
    text = "---\nlicense: mit\n---\n- **Base model:** not recorded: another trainer chose it\n"
    (found,) = check_card(text)
    assert (found.rule, found.severity) == ("base-model-missing", "warning")
    assert lint_card(text) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("hf_abcdefghijklmnopqrstuvwxyz", "secret"),
        ("```\nexport KEY=sk-abcdefghij0123456789\n```", "secret"),
    ],
)
def test_secrets_are_found(text: str, rule: str) -> None:
    assert [r for r, _ in rules(text + "\n")] == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "Training without loss scaling ends in NaN; Nan and Inf are words.",
        table("| Failure | When |", "| `not_finite` | NaN or infinity in the loss |"),
        "`float('nan')`, `-inf`",
        "export HF_TOKEN=hf_xxxxxxxxxxxxxxxxxxxxxxxx",
        "Models lie in `~/.cache/huggingface`, temporary files in /tmp/x.",
        "```bash\n# don't worry\necho \"a\nb\" # it's fine\n```",
        "```bash\npython train.py \\\n  --last 1 \\\n```",
        "````\n```\n````\n- item\n\n  ```\n  code\n  ```",
    ],
)
def test_ordinary_text_has_no_findings(text: str) -> None:
    assert [f for f in check_card(FRONT + text + "\n") if f.is_error] == []


# ---------------------------------------------------------------- against evidence


def evaluation(stage: str, metric: str, value: float, **changes: Any) -> dict[str, Any]:
    """A mean with an interval that no count contradicts."""
    counts = {"numerator": None, "denominator": None, "interval": ""}
    return any_evaluation(stage, metric, value, **{**counts, **changes})


def facts(**changes: Any) -> CardFacts:
    measured = [evaluation("base", "reward", 0.2), evaluation("grpo-step50", "reward", 0.5)]
    return full_facts(**{"evaluations": measured, **changes})


def published(given: CardFacts) -> tuple[str, str]:
    """A card and its evidence."""
    return build_card(given), evidence_text(given, [])


def test_a_card_that_its_evidence_gives_is_clean() -> None:
    card, evidence = published(facts())
    assert check_card(card, evidence) == []
    assert lint_card(card) == []


def test_a_card_of_ours_without_evidence_is_a_warning_and_names_no_folder() -> None:
    card, _ = published(facts())
    (found,) = check_card(card)
    assert (found.rule, found.severity) == ("evidence-missing", "warning")
    assert "only be checked against each other" in found.message
    for more in ("From /home/me/run7.\n", "| a | b |\n|---|---|\n| ~/x | 1 |\n"):
        (path,) = [f for f in check_card(f"{card}\n{more}") if f.is_error]
        assert (path.rule, path.line > card.count("\n")) == ("machine-path", True)


def digits(text: str) -> list[re.Match[str]]:
    return list(re.finditer(r"\d+", text))


def other(run: str, by: int = 1) -> str:
    """Another number with as many digits."""
    return run[:-1] + str((int(run[-1]) + by) % 10)


@pytest.mark.parametrize("given", [full_facts(), sft_facts()], ids=lambda f: f.name)
def test_every_number_of_a_card_is_held_by_its_evidence(given: CardFacts) -> None:
    """The check names the line of any changed digit, and the fact of any number that has one."""
    card, evidence = published(given)
    read, told = load_evidence(evidence), ""
    lines = card.split("\n")
    assert len(digits(card)) > 100
    for place in range(max(len(digits(line)) for line in lines)):
        wrong, changed = list(lines), []
        for number, line in enumerate(lines):
            runs = digits(line)
            if place < len(runs):
                run = runs[place]
                wrong[number] = line[: run.start()] + other(run.group()) + line[run.end() :]
                changed.append(number + 1)
        found = list(differences("\n".join(wrong), card, read))
        assert sorted({f.line for f in found}) == changed
        told += " ".join(f.message for f in found)
    shown = (n for n in card_numbers(given) if n.section != "front matter")
    untold = [n for n in shown if f"fact {n.fact}" not in told]
    assert untold == []


shares = st.floats(0, 1).map(lambda x: round(x, 6))


@st.composite
def measured(draw: st.DrawFn) -> CardFacts:
    """Facts of any run that was evaluated, with a base beside it or without."""
    evaluations = []
    n = draw(st.integers(1, 64))
    for metric in draw(st.lists(st.sampled_from(["reward", "citation_f1"]), unique=True)):
        for model in ("base", "sft", "grpo-step50")[draw(st.integers(0, 2)) :]:
            low, value, high = sorted(draw(st.tuples(shares, shares, shares)))
            numbers = {"low": low, "high": high, "n": n}
            evaluations.append(evaluation(model, metric, value, **numbers))
    kept, dropped = draw(st.integers(1, 10**5)), draw(st.integers(1, 999))
    counts = {"read": kept + dropped, "kept": kept, "dropped": {"duplicate": dropped}}
    return facts(evaluations=evaluations, reports={"data": {"rl": counts, "sft": {}, "split": {}}})


@pytest.mark.parametrize(
    "change",
    [
        lambda card: card + "One more line.\n",
        lambda card: card.replace("\n", "\r\n"),
        lambda card: card.replace("## Known notes", "## Notes"),
        lambda card: "",
    ],
)
def test_words_are_held_by_the_evidence_too(change: Any) -> None:
    card, evidence = published(facts())
    assert any(f.rule == "evidence" for f in check_card(change(card), evidence))


def counted(changes: dict[str, Any]) -> dict[str, Any]:
    low, high = wilson(32, 64)
    numbers = {"numerator": 32, "denominator": 64, "n": 64}
    bounds = {"low": low, "high": high, "interval": "wilson"}
    return evaluation("grpo-step50", "format_valid", 0.5) | numbers | bounds | changes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"numerator": 31}, "is not 31 / 64"),
        ({"low": 0.45}, "Wilson's of 32 of 64"),
        ({"low": 0.6, "high": 0.7}, "does not lie in its interval"),
        ({"n": 65}, "65 prompts have 64 samples"),
    ],
)
def test_evidence_is_checked_for_consistency(changes: dict[str, Any], told: str | None) -> None:
    """A number that was changed in the card and in its evidence alike still has its counts."""
    card, evidence = published(facts(evaluations=[counted(changes)]))
    found = [f for f in check_card(card, evidence) if f.rule == "evidence-inconsistent"]
    assert len(found) >= (told is not None)
    assert told is None or told in " ".join(f.message for f in found)
    assert bool(found) == (told is not None)


@pytest.mark.parametrize("step", [49, None])
def test_evidence_of_another_step_or_format_is_an_error(step: int | None) -> None:
    card, evidence = published(facts())
    content = json.loads(evidence)
    content |= {"step": step} if step else {"format": 99}
    found = [f for f in check_card(card, json.dumps(content)) if f.is_error]
    assert [f.rule for f in found] == ["evidence-inconsistent" if step else "evidence"]


# ---------------------------------------------------------------- cards of strangers


_PIECES = (
    *("<!-- ", "`", "` `` ", "[", "[](", "[a](", "<a", "# a ", "|-", "_", "a_", "~~~", "\t", " "),
    *("1", "1.", "[nan, ", ": nan ", "https://github.com/", "hf_", "sk-", "eyJ", "/home/a", "$("),
    *("3x better ", "from 1 to 1 ", "3 points over ", "50% accuracy ", "50.0% (n = 3) ", "${"),
)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("piece", _PIECES)
def test_any_card_is_checked_in_linear_time(piece: str) -> None:
    """Any pattern that looks at each character from each of them takes many minutes for these."""
    size, short = 50_000, piece.strip() or piece
    long = piece * (size // len(piece))
    lines = (short + "\n") * (size // (len(short) + 1))
    table = f"| a | accuracy |\n|---|---|\n| {long} | 1 |\n"
    check_card(f"{FRONT}{long}\n\n{lines}\n\n# {long}\n\n{table}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "text",
    [
        "| a | pass@900000 |\n|---|---|\n" + "| x (n = 7) | 33.1% |\n" * 2000,
        "| a | accuracy |\n|---|---|\n" + "| base (n = 7) | 33.1% |\n| ours | 9% |\n" * 5000,
        "".join(f"mean of {n} runs. " for n in range(2, 20_000)) + "50.1% of 7 tasks. " * 999,
    ],
    ids=["binomials", "pairs", "repeats"],
)
def test_numbers_of_a_card_are_bounded(text: str) -> None:
    check_card(FRONT + text)


@pytest.mark.timeout(60)
@pytest.mark.slow
def test_a_front_matter_is_read_without_aliases_and_not_beyond_its_size() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    bomb = "---\n" + "\n".join(lines) + "\n---\n# t\n"
    (found,) = [f for f in check_card(bomb) if f.rule == "front-matter"]
    assert (found.line, "alias" in found.message) == (3, True)
    for block in ("a: " + "[" * 3_000, "a: x\n" * 30_000):
        assert "front-matter" in {f.rule for f in check_card(f"---\n{block}\n---\n# t\n")}


def test_oversized_cards_and_evidence_are_not_read() -> None:
    assert [f.rule for f in check_card("a" * 1_000_001)] == ["too-large"]
    card = build_card(full_facts())
    assert "too-large" in {f.rule for f in check_card(card, " " * 10_000_001)}
    assert "evidence" in {f.rule for f in check_card(card, "[" * 100_000)}


@pytest.mark.timeout(60)
def test_a_template_of_a_stranger_is_not_run() -> None:
    endless = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
    )
    evidence = evidence_text(full_facts(template=endless), [])
    (found,) = [f for f in check_card(build_card(full_facts()), evidence) if f.rule == "evidence"]
    assert "not run" in found.message
    assert not found.is_error
    mine = "{{ front_matter }}\n# {{ name }}\n"
    facts = full_facts(template=mine)
    told = check_card(build_card(facts), evidence_text(facts, []), template=mine)
    assert not [f for f in told if f.rule == "evidence"], "the user's own is run, and compared"


# ---------------------------------------------------------------- evidence


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


def step_facts(**changes: Any) -> CardFacts:
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


ODD = step_facts(
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


@pytest.mark.parametrize("given", [full_facts(), sft_facts(), step_facts(), ODD])
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
        content = json.loads(evidence_text(step_facts(), []))
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
    given = step_facts(
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
    given = step_facts(versions={"data": 2, "grpo": 2}, protocols={EVALUATION["protocol"]: known})
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

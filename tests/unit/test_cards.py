"""Cards of models and of agents: claims, tables of numbers, notes, usage and templates."""

import contextlib
import io
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from refiner_core.cards.build import Sentences, build_card, card_variables, shipped_template
from refiner_core.cards.evidence import evidence_text
from refiner_core.cards.facts import CONTROLS, UNKNOWN, CardFacts, unmarked
from refiner_core.cards.lint import check_card, lint_card
from refiner_core.contract.config import CommandConfig, RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.marks import walk
from refiner_core.evaluation.episodes import evaluate_episodes
from tests.support.card_facts import (
    CONFIG,
    OTHER,
    card_numbers,
    evaluation,
    full_facts,
    published_facts,
    reports,
)
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

TINY = RecipeConfig()
#: An option that came after the run.
LATER = "reward.instance_rubrics_only"


def bare_facts(config: RecipeConfig = CONFIG, **changes: Any) -> CardFacts:
    """A step in the middle of a run of which only the recipe is recorded."""
    where: dict[str, Any] = {"stage": "grpo", "step": 50, "final": False}
    command = "refiner run recipe.yaml seed=42"
    return CardFacts(**{"repo_id": "a/b", "config": config, "command": command, **where, **changes})


def front_matter(card: str) -> dict[str, Any]:
    matter: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return matter


def section(card: str, title: str) -> str:
    return card.split(f"## {title}\n")[1].split("\n## ")[0]


# ---------------------------------------------------------------- shipped recipes


def test_the_card_of_a_shipped_recipe_has_its_flags_and_sources() -> None:
    before = tuple(path for path, _ in walk(RecipeConfig) if path != LATER)
    card = build_card(bare_facts(load_recipe("refiner-gpt54"), recorded_fields=before))
    for fact in (
        "base_model: lihaoxin2020/qwen3-4b-refiner-gpt54-ep2",
        "**Training step:** 50 of 200 planned",
        "datasets/lihaoxin2020/rl_hard_gpt5_sft_gpt54rubric",
        "**Judge:** `Qwen/Qwen3.5-35B-A3B`",
        "--refiner_reward_paper_citation_weight 0.2",
        "introduced `--refiner_reward_instance_rubrics_only`",
        "produced before it existed**; the value in effect was `false`",
    ):
        assert fact in card
    assert lint_card(card) == []


def notes(facts: CardFacts) -> str:
    return " ".join(section(build_card(facts), "Known notes").split())


# ---------------------------------------------------------------- claims that follow the recipe


@pytest.mark.parametrize(
    ("reward", "total", "without_rubrics"),
    [
        ({}, "10.0 · [(1 − 0.2) · judge + 0.2 · citation]", "the citation term"),
        ({"apply_paper_citation_reward": False}, "10.0 · [(1 − 0.0) · judge", "is 0"),
        ({"rubric_source": "none"}, "10.0 · citation.", None),
        ({"rubric_source": "none", "apply_paper_citation_reward": False}, "10.0 · 0.", None),
        ({"combination": "additive"}, "10.0 · [judge + 0.2 · citation].", "the citation term"),
        ({"rubric_source": "instance+static"}, "10.0 · [", None),
    ],
)
def test_the_formula_of_the_reward_follows_the_recipe(
    reward: dict[str, Any], total: str, without_rubrics: str | None
) -> None:
    split = {"rl_without_rubrics": 3, "questions": 9, "held_out_questions": 1}
    config = replace(CONFIG, reward=RewardConfig(**reward))
    facts = bare_facts(config, reports={"data": {"split": split}})
    assert f"Total = {total}" in section(build_card(facts), "Training set-up")
    if without_rubrics:
        assert without_rubrics in notes(facts).partition("3 prompts have no rubrics")[2]


def test_a_card_of_sft_with_the_lexical_judge_claims_neither_reward_nor_language_model() -> None:
    assert "no language model" in section(build_card(bare_facts(TINY)), "Training set-up")
    card = build_card(bare_facts(TINY, stage="sft", step=120, final=True))
    assert "sft.learning_rate=1e-5" in card
    assert "judge" not in section(card, "Training set-up").lower()
    assert "--kl_estimator" not in card


# ---------------------------------------------------------------- numbers


def test_one_table_holds_numbers_of_one_protocol() -> None:
    shown = {"base": 0.2, "random_copier": 0.39, "grpo": 0.5}
    entries = [evaluation(stage, "citation_f1", value) for stage, value in shown.items()]
    other = evaluation("sft", "citation_f1", 0.9, protocol=OTHER)
    results = section(build_card(bare_facts(evaluations=[*entries, other])), "Results")
    row = next(line for line in results.splitlines() if line.startswith("| `citation_f1`"))
    assert row == (
        "| `citation_f1` | 0.200 [0.150, 0.250] | 0.390 [0.340, 0.440] | 0.500 [0.450, 0.550] |"
    )
    assert results.count("### ") == 2


def test_the_hubs_own_client_reads_the_results_with_their_n_and_interval() -> None:
    data = ModelCard(build_card(full_facts())).data
    found = {r.metric_type: r for r in data.eval_results or ()}
    assert set(found) == {"citation_f1", "reward", "judge_failed"}, "only this model's own numbers"
    assert found["citation_f1"].metric_value == 0.533
    assert all(x in found["citation_f1"].metric_name for x in ("n = 64", "0.483", "0.583"))
    assert data.base_model == "Qwen/Qwen3-4B"
    assert data.to_dict()["base_model_relation"] == "finetune"
    assert data.datasets == ["somebody/demonstrations", "somebody/prompts"]


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_number_that_was_not_computed_is_neither_nan_nor_zero(value: Any) -> None:
    missing = evaluation("grpo", "reward", value, n=3)
    card = build_card(bare_facts(evaluations=[missing]))
    assert "model-index" not in front_matter(card)
    assert "| — |" in card
    assert lint_card(card) == []


def test_numbers_need_their_evidence_and_have_one_source() -> None:
    for missing in ("protocol", "n", "decoding"):
        with pytest.raises(DataError, match=missing):
            bare_facts(evaluations=[evaluation("grpo", "reward", 1.0, **{missing: None})])
    claims = [evaluation("grpo", "reward", value) for value in (1.0, 2.0)]
    with pytest.raises(DataError, match="Two evaluations"):
        bare_facts(evaluations=claims)


# ---------------------------------------------------------------- steps of one run


def use_of(evaluations: list[dict[str, Any]] | None = None, metric: str = "") -> str:
    """The intended use of a step, beside steps that were measured like this."""
    facts = full_facts() if evaluations is None else full_facts(evaluations=evaluations)
    if metric:
        config = replace_fields(facts.config, {"publish.best_metric": metric})
        facts = replace(facts, config=config)
    return section(build_card(facts), "Intended use")


def test_the_preferred_step_has_the_best_number_of_one_protocol() -> None:
    use = use_of()
    assert "step 75 has the highest `reward`" in use
    assert "5.060 [5.010, 5.110]" in use
    assert "4.870 [4.820, 4.920]" in use
    apart = [
        evaluation("grpo-step50", "reward", 4.87),
        evaluation("grpo-step75", "reward", 9.99, protocol=OTHER),
    ]
    assert "highest" not in use_of(apart), "another protocol is no comparison"
    shares = {25: 0.4, 50: 0.1, 75: 0.2}
    entries = [evaluation(f"grpo-step{s}", "uncited", v) for s, v in shares.items()]
    assert "none has a lower `uncited`" in use_of(entries, "uncited"), "as publish.which=best"


# ---------------------------------------------------------------- course and cost


@pytest.mark.parametrize("points", [[], [[1, 2.0]], [[1, float("nan")]], [[1, 3.0], [2, 3.0]]])
def test_short_flat_and_broken_curves_are_accepted(points: list[Any]) -> None:
    known = reports()
    known["grpo"]["curves"] = {"scores": points}
    card = build_card(full_facts(reports=known))
    assert ("## Training curve" in card) == bool(points)
    assert lint_card(card) == []


# ---------------------------------------------------------------- notes


def test_the_card_of_another_trainers_model_claims_nothing_that_is_not_recorded() -> None:
    command = CommandConfig(run="torchrun /home/me/train.py --out {output}", version="v2")
    known = {"command": {"steps": 50, "final": {"loss": 0.25}}}
    config = replace(TINY, command=command)
    card = build_card(bare_facts(config, stage="command", base_model=UNKNOWN, reports=known))
    assert {"base_model", "datasets"}.isdisjoint(front_matter(card))
    set_up = section(card, "Training set-up")
    assert "`torchrun train.py --out {output}` (version v2)" in set_up
    assert "loss 0.25" in set_up
    for never in ("/home", "none of them is in the training data", "builtin:tiny"):
        assert never not in card


def test_an_adopted_checkpoint_is_noted() -> None:
    config = replace(TINY, command=CommandConfig(adopted="ab" * 32))
    report = {"steps": 50, "adopted": True, "source": "/scratch/me/run/checkpoint-50"}
    known = {"stage": "command", "base_model": "Qwen/Qwen3-4B", "reports": {"command": report}}
    card = build_card(bare_facts(config, **known))
    assert front_matter(card)["base_model"] == "Qwen/Qwen3-4B"
    assert "adopted" in card
    assert "`checkpoint-50`" in card
    assert "/scratch" not in card
    assert lint_card(card) == []


# ---------------------------------------------------------------- reproduction and use


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from refiner_core.generation.saving import model_tensors, save_model
    from refiner_core.models import tiny_model_dir

    folder = tmp_path_factory.mktemp("exported") / "model"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir())
    save_model(model, tokenizer, folder, model_tensors(model).items())
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"config": replace_fields(CONFIG, {"grpo.stop_strings": ["</answer>"]})},
    ],
    ids=["step of a shared repository", "stop strings"],
)
def test_the_usage_section_runs_as_a_reader_would_run_it(
    changes: dict[str, Any], exported: Path
) -> None:
    """Only the repository's name is replaced, by the folder that would be there."""
    short = replace_fields(changes.get("config", CONFIG), {"grpo.response_length": 6})
    given = full_facts(**{**changes, "config": short})
    usage = section(build_card(given), "Usage")
    code = usage.split("```python\n")[1].split("\n```")[0]
    assert ('revision="step-50"' in code) == (given.revision == "step-50")
    printed = io.StringIO()
    space: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        exec(code.replace(given.repo_id, str(exported)), space)  # the point of this test
    assert space["output"].shape[1] > space["inputs"]["input_ids"].shape[1]
    assert printed.getvalue() == space["answer"] + "\n"


@pytest.mark.parametrize("revision", ["main", "step-50"])
def test_the_usage_section_of_a_folder_loads_the_folder_of_that_step(
    revision: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder has no revisions: transformers would load the main one without a warning."""
    config = replace_fields(CONFIG, {"publish.target": "folder", "grpo.response_length": 6})
    given = full_facts(config=config, revision=revision)
    usage = section(build_card(given), "Usage")
    code = usage.split("```python\n")[1].split("\n```")[0]
    assert "revision=" not in code
    here = given.repo_id if revision == "main" else f"{given.repo_id}@{revision}"
    shutil.copytree(exported, tmp_path / here)
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    exec(code, space)  # the point of this test
    assert space["name"] == here


# ---------------------------------------------------------------- templates of users


def test_a_user_can_change_the_template_and_has_all_that_the_shipped_one_has() -> None:
    mine = shipped_template().replace("## Known notes", "## What else happened")
    given = full_facts(template=mine + "\nbeta is {{ facts.config['grpo.beta'] }}.\n")
    card = build_card(given)
    assert "## What else happened" in card
    assert card.endswith("beta is 0.001.\n")
    assert build_card(full_facts(template=shipped_template())) == build_card(full_facts())


@pytest.mark.parametrize(
    ("template", "line", "said"),
    [
        ("# {{ name }}\n\n{{ nmae }}\n", 3, "nmae"),
        ("# {{ name }}\n{% for x in notes %}\n", 2, "endfor"),
        ("a\nb\n{{ step / 0 }}\n", 3, "division by zero"),
        ("{{ ''.__class__.__mro__ }}\n", 1, "unsafe"),
        ("\n{{ notes.append(1) }}\n", 2, "unsafe|not safely callable"),
        ("{{ format.nothing }}", 1, "nothing"),
    ],
)
def test_a_template_that_fails_names_the_line_and_what_there_is(
    template: str, line: int, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        build_card(full_facts(template=template))
    assert f"at line {line}" in str(caught.value)
    assert "notes, preferred, progression" in str(caught.value)


def test_the_table_in_the_templates_head_names_every_variable() -> None:

    head = shipped_template().split("-#}")[0]
    rows = [line.split("|")[1].strip() for line in head.splitlines() if line.startswith("| ")]
    assert set(rows) - {"variable"} == {*card_variables(published_facts(full_facts())), "facts"}


# ---------------------------------------------------------------- hostile or missing values


def test_a_card_with_nothing_recorded_is_short_and_claims_nothing() -> None:
    bare = CardFacts("me/m", RecipeConfig(), "grpo", 3, True, "refiner run tiny")
    card = build_card(bare)
    assert lint_card(card) == []
    for title in ("Training curve", "Hardware and cost"):
        assert f"## {title}" not in card
    assert "No evaluation of this checkpoint is recorded." in card
    assert "Nothing was recorded of the code" in card
    assert build_card(replace(bare)) == card


def test_names_from_rows_and_trainers_forge_no_table_link_or_markup() -> None:
    forged = "".join(
        f"x{sign}{sign}| metric | own |{sign}|---|---|{sign}| citation_f1 | **0.99** |{sign}"
        for sign in ("\r", "\n", "\x1b[2J", "\u2028", "\u202e", "\x85")
    )
    hostile = forged + "<img src=x onerror=y> [free](https://evil.example/a) `a`"
    told = reports()
    told["data"]["rl"]["modes"] = {hostile: 3, "answer_only": 2}
    evaluations = [evaluation("grpo", "citation_f1", 0.5), evaluation("grpo", hostile, 0.5)]
    for facts in (
        full_facts(reports=told),
        full_facts(evaluations=evaluations),
        full_facts(static_rubric_titles=(hostile,), static_rubric_weights=(1.0,)),
        full_facts(
            stage="command",
            reports={"command": {"steps": 3, "final": {hostile: 1.0}, "source": "s"}},
        ),
    ):
        card = build_card(facts)
        assert not CONTROLS.search(card)
        assert "<img" not in card
        assert "](https://evil" not in card
        assert not any(line.startswith("| citation_f1 | **0.99**") for line in card.split("\n"))
        found = check_card(card, evidence_text(facts, []))
        assert {f.rule for f in found} <= {"evidence-inconsistent"}, "made-up intervals"
        assert build_card(published_facts(facts)) == card


def test_invisible_characters_are_refused() -> None:
    card = build_card(full_facts())
    for sign in ("\r", "\x1b", "\u202e", "\u2028", "\x00"):
        forged = card.replace("## Usage", f"## Usage{sign}| grpo | 0.99 |")
        assert "control-character" in {f.rule for f in check_card(forged)}
    assert "control-character" not in {f.rule for f in check_card(card.replace("\n", "\r\n"))}


def test_a_card_says_what_the_base_may_know_and_that_the_training_judge_evaluated() -> None:
    own = {"kind": "openai", "model": CONFIG.judge.model, "revision": CONFIG.judge.revision}
    seen = "it may have seen them"
    alone = "No judge but the one that trained it"
    facts = full_facts()
    assert seen not in build_card(facts), "its SFT held the questions out"
    assert alone not in build_card(facts)
    without = {name: report for name, report in facts.reports.items() if name != "sft"}
    by_itself = {name: {**known, "judge": own} for name, known in facts.protocols.items()}
    card = build_card(full_facts(reports=without, protocols=by_itself))
    assert seen in card
    assert alone in card
    assert "(it also trained this model)" in card
    other = dict([*by_itself.items(), *list(facts.protocols.items())[:1]])
    assert alone not in build_card(full_facts(protocols=other))


# ---------------------------------------------------------------- agents


B0, B1, O0, O1 = (f"{d}/{d}-test-00{i}" for d in ("bookings", "orders") for i in (0, 1))
BASE = {B0: ("expert", "flawed", "nothing", "nothing"), O1: ("expert",) * 4}
OWN = {
    B0: ("expert", "expert", "nothing", "expert"),
    B1: ("words", "nothing", "expert", "flawed"),
    O1: ("expert",) * 4,
}
AGENT = agent_config(evaluate__temperature=0.8, evaluate__top_k=20)


def agent_measured(root: Path, name: str, played: Any, fails: frozenset[int]) -> dict[str, Any]:
    player_of = task_rows(AGENT, _tokenizer(), 2)
    player = Player(AGENT, player_of, by_attempt(played))
    return evaluate_episodes(
        AGENT,
        data_dir=write_tasks(root / "data", player_of),
        data_digest="d" * 64,
        model_ref="builtin:tiny",
        model_name=name,
        output_dir=root / name,
        io=FolderStageIO(root / f"{name}-io"),
        generator=player,
        tokenizer=player.tokenizer,
        environment=Desk(AGENT, fails),
    )


def _tokenizer() -> Any:
    from refiner_core.models import tiny_tokenizer

    return tiny_tokenizer()


def facts_of(*results: dict[str, Any], **changes: Any) -> CardFacts:
    entries = [e for r in results for e in r["evaluations"]]
    entries += [e for r in results[:1] for e in r["reference"]]
    given: dict[str, Any] = {
        "repo_id": "somebody/desk-agent",
        "config": AGENT,
        "stage": "grpo",
        "step": 100,
        "final": True,
        "command": "refiner run tiny",
        "evaluations": entries,
        "protocols": {k: v for r in results for k, v in r["protocols"].items()},
    }
    return CardFacts(**{**given, **changes})


@pytest.fixture(scope="module")
def agent_facts(tmp_path_factory: pytest.TempPathFactory) -> CardFacts:
    root = tmp_path_factory.mktemp("cards")
    fails = frozenset(world_seed(AGENT, "sampled", *place) for place in ((B0, 2), (O1, 0)))
    base = agent_measured(root, "base", BASE, frozenset())
    return facts_of(base, agent_measured(root, "grpo", OWN, fails))


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


def test_a_card_of_an_agent_is_fit_to_be_published(agent_facts: CardFacts) -> None:
    evidence = evidence_text(agent_facts, ())
    card = build_card(agent_facts)
    assert lint_card(card, evidence) == []
    assert lint_card(card) == [], "nor does anything contradict itself"
    assert "fewer than 4 valid attempts" in card
    numbers = {n.fact for n in card_numbers(agent_facts) if n.section == "Results"}
    assert any(fact.endswith(".numerator") for fact in numbers)
    assert all(record is None for record in {n.record for n in card_numbers(agent_facts)})


def changed(card: str, row: str, old: str, new: str) -> str:
    lines = card.split("\n")
    place = next(i for i, line in enumerate(lines) if line.startswith(f"| `{row}` |"))
    assert old in lines[place]
    lines[place] = lines[place].replace(old, new, 1)
    return "\n".join(lines)


def test_a_number_that_no_attempts_give_is_refused(agent_facts: CardFacts) -> None:
    card = build_card(agent_facts)
    sampled = card[card.index("sampled decoding") :]
    head = card[: card.index("sampled decoding")]
    shown = re.search(r"\| `pass@1` \| (\d\.\d{3})", sampled)
    wrong = head + changed(sampled, "pass@1", shown[1], "0.330")
    problems = " ".join(lint_card(wrong, evidence_text(agent_facts, ())))
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

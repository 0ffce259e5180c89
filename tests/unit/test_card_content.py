"""What cards tell of a run: its course, its cost, its steps, how to use and to repeat it."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from refiner_core.cards.build import build_card, shipped_template
from refiner_core.cards.evidence import evidence_text
from refiner_core.cards.facts import CONTROLS, AttemptNote, CardFacts
from refiner_core.cards.lint import check_card, lint_card
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import replace_fields
from tests.support.card_facts import (
    CONFIG,
    OTHER,
    evaluation,
    full_facts,
    published_facts,
    reports,
    sft_facts,
)


def section(card: str, title: str) -> str:
    return card.split(f"## {title}\n")[1].split("\n## ")[0]


def test_a_card_of_a_run_of_which_everything_is_recorded_has_nothing_wrong() -> None:
    for given in (full_facts(), sft_facts(), full_facts(step=100, final=True, measured_as="")):
        assert lint_card(build_card(given)) == []


# ---------------------------------------------------------------- what the Hub reads


def test_the_hubs_own_client_reads_the_results_with_their_n_and_interval() -> None:
    data = ModelCard(build_card(full_facts())).data
    found = {r.metric_type: r for r in data.eval_results or ()}
    assert set(found) == {"citation_f1", "reward", "judge_failed"}, "only this model's own numbers"
    assert found["citation_f1"].metric_value == 0.533
    assert found["citation_f1"].metric_name == (
        "citation_f1 (greedy, n = 64 prompts, 95 % interval 0.483 to 0.583)"
    )
    assert data.base_model == "Qwen/Qwen3-4B"
    assert data.to_dict()["base_model_relation"] == "finetune"
    assert data.datasets == ["somebody/demonstrations", "somebody/prompts"]


def test_a_training_that_went_on_with_other_processes_says_so() -> None:
    facts = full_facts()
    two = {"ranks": 2, "nodes": 1, "engine": "DeepSpeed ZeRO-3", "attempt": 1, "up_to_step": 20}
    report = {**facts.reports["grpo"], "ranks": 1, "engine": "torch", "resumed_on": [two]}
    card = build_card(replace(facts, reports={**facts.reports, "grpo": report}))
    assert (
        "GRPO was resumed on other processes: up to step 20 on 2 processes (DeepSpeed ZeRO-3), "
        "then on 1 process (torch)"
    ) in card
    assert lint_card(card) == []
    same = {**report, "resumed_on": []}
    card = build_card(replace(facts, reports={**facts.reports, "grpo": same}))
    assert "other processes" not in card


# ---------------------------------------------------------------- steps of one run


def test_steps_of_the_run_stand_below_each_other_where_the_protocol_is_the_same() -> None:
    results = section(build_card(full_facts()), "Results")
    _, progress, rewards = results.rsplit("### Training progression", 2)
    assert "| step 25 | 0.487 [0.437, 0.537] |" in progress
    assert "| **step 50 (this model)** | 0.533 [0.483, 0.583], n = 64 |" in progress
    assert "reward" not in progress, "the reward was measured under another protocol"
    assert rewards.index("step 25") < rewards.index("step 50") < rewards.index("step 75")
    main = results.split("### Training progression")[0]
    assert (
        "| metric | base | random copier (floor) | SFT | **GRPO, step 50 (this model)** |" in main
    )


def test_the_step_to_prefer_is_the_one_with_the_highest_number_of_one_protocol() -> None:
    use = section(build_card(full_facts()), "Intended use")
    assert "Of the 3 steps that were measured, step 75 has the highest `reward`" in use
    assert "5.060 [5.010, 5.110], n = 64; this one has 4.870 [4.820, 4.920], n = 64" in use
    assert "prefer a later step" not in use, "it was measured which one to prefer"
    own = full_facts(evaluations=[evaluation("grpo-step50", "reward", 4.87, protocol=OTHER)])
    assert "prefer a later step of the same run" in section(build_card(own), "Intended use")


def test_a_step_is_not_held_against_a_number_of_another_protocol() -> None:
    apart = [
        evaluation("grpo-step50", "reward", 4.87),
        evaluation("grpo-step75", "reward", 9.99, protocol=OTHER),
    ]
    card = build_card(full_facts(evaluations=apart))
    assert "highest" not in section(card, "Intended use")
    assert "Training progression" not in card


def test_the_best_of_several_says_so_and_a_tie_is_no_defeat() -> None:
    tied = [evaluation(f"grpo-step{s}", "reward", 4.87, protocol=OTHER) for s in (25, 50)]
    use = section(build_card(full_facts(evaluations=tied)), "Intended use")
    assert "none has a higher `reward`" in use
    assert "flatters" in use


def test_of_a_number_that_should_be_small_the_smallest_is_preferred() -> None:
    """As `publish.which=best` chooses; the card of the best must not name another step."""
    shares = {25: 0.4, 50: 0.1, 75: 0.2}
    entries = [evaluation(f"grpo-step{s}", "uncited", v) for s, v in shares.items()]
    facts = full_facts(evaluations=entries)
    config = replace_fields(facts.config, {"publish.best_metric": "uncited"})
    use = section(build_card(replace(facts, config=config)), "Intended use")
    assert "none has a lower `uncited`" in use
    assert "A lowest number among several flatters" in use


def test_the_last_checkpoint_stands_among_the_steps_of_its_run() -> None:
    entries = [
        evaluation("grpo-step50", "citation_f1", 0.5),
        evaluation("grpo", "citation_f1", 0.6),
    ]
    final = full_facts(step=100, final=True, measured_as="", evaluations=entries)
    results = section(build_card(final), "Results")
    assert "| step 50 | 0.500" in results
    assert "| **step 100 (this model)** | 0.600" in results
    assert "| metric | **GRPO (this model)** |" in results
    before = full_facts(evaluations=entries)
    assert "| metric | GRPO, last step | **GRPO, step 50 (this model)** |" in build_card(before)


def test_a_checkpoint_that_nobody_measured_says_so_beside_the_others() -> None:
    card = build_card(full_facts(evaluations=[evaluation("base", "reward", 1.0)]))
    assert "This checkpoint itself has not been evaluated." in section(card, "Known notes")


# ---------------------------------------------------------------- course and cost


def test_the_course_of_training_is_at_most_ten_lines_with_both_ends() -> None:
    curve = section(build_card(full_facts()), "Training curve")
    rows = [line for line in curve.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 10
    assert rows[0] == "| 4 | 2.143 | 0.0007692 | 396.7 | 0.5323 |"
    assert rows[-1].startswith("| 48 | 3.714 |")
    assert "Reward from step 4 to 48: `▁▁▂▃▃▄▅▆▆▇██` (lowest 2.143, highest 3.714)." in curve


def test_a_curve_with_gaps_is_not_set_beside_steps_it_does_not_belong_to() -> None:
    known = reports()
    known["grpo"]["curves"]["objective/kl3_avg"] = [[1, 0.5], [2, 0.75]]
    curve = section(build_card(full_facts(reports=known)), "Training curve")
    assert "| step | reward | tokens per rollout | share that stopped |" in curve
    assert "KL was not computed in all steps; the first value is 0.5, the last 0.75." in curve


@pytest.mark.parametrize("points", [[], [[1, 2.0]], [[1, float("nan")]], [[1, 3.0], [2, 3.0]]])
def test_a_short_flat_or_broken_curve_is_no_trouble(points: list[Any]) -> None:
    known = reports()
    known["grpo"]["curves"] = {"scores": points}
    card = build_card(full_facts(reports=known))
    assert ("## Training curve" in card) == bool(points)
    assert lint_card(card) == []


def test_an_sft_card_has_the_loss_that_was_held_back() -> None:
    curve = section(build_card(sft_facts()), "Training curve")
    assert "| 4 | 3.07 |" in curve
    assert "Validation loss: 2.81 at the end, lowest 2.76 after step 3." in curve


def test_cost_counts_all_attempts_and_says_what_was_lost() -> None:
    card = build_card(full_facts())
    cost = section(card, "Hardware and cost")
    assert "grpo 2 h 02 min." in cost
    assert "**Time of all attempts:** data 4.1 s, sft 10 min 05 s, grpo 2 h 31 min." in cost
    assert "17.25 GPU-hours, all attempts together. That is about 53.48 USD at 3.10 USD" in cost
    assert "1.50 of 17.25 GPU-hours went into work" in section(card, "Known notes")


def test_cost_says_what_the_judge_was_asked() -> None:
    cost = section(build_card(full_facts()), "Hardware and cost")
    assert "**Judging in training:** 61200 judgements, 54873 calls, 4100 known before" in cost
    assert "43 without a score, 31415926 tokens read, 438984 written." in cost
    told = reports()
    del told["grpo"]["judge"]  # the lexical judge keeps no count
    assert "Judging in training" not in build_card(full_facts(reports=told))


def test_without_a_gpu_core_hours_are_counted_and_nothing_is_priced() -> None:
    cost = {"gpu_hours": 0.0, "core_hours": 0.035, "lost_core_hours": 0.0, "price": 3.0}
    card = build_card(full_facts(cost=cost))
    assert "**Compute:** 0.035 core-hours" in card
    assert "USD" not in card
    assert "had to be done again" not in card


# ---------------------------------------------------------------- notes


def test_a_hub_that_did_not_answer_is_told_like_any_other_interruption() -> None:
    attempts = [AttemptNote("grpo", 1, "hub_outage"), AttemptNote("grpo", 2, "hub_refused", 3)]
    notes = section(build_card(full_facts(attempts=attempts)), "Known notes")
    assert (
        "because the Hub did not answer; attempt 2 went on from the checkpoint of step 3" in notes
    )
    assert "because the Hub refused it; the stage was not taken up again" in notes


def test_an_option_of_publishing_that_came_later_is_no_news_of_a_model() -> None:
    notes = section(build_card(full_facts(recorded_fields=())), "Known notes")
    assert "--refiner_reward_instance_rubrics_only" in notes
    assert "publish." not in notes


def test_a_repository_that_was_read_at_a_branch_is_named() -> None:
    moving = replace_fields(CONFIG, {"model.revision": "main", "data.rl_revision": "main"})
    notes = section(build_card(full_facts(config=moving)), "Known notes")
    assert "The revision of the base model and the prompts is recorded as `main`" in notes
    assert "`main`" not in section(build_card(full_facts()), "Known notes")


def test_a_training_that_ended_before_its_last_step_says_so() -> None:
    report = {"steps": 20, "steps_planned": 60}
    cut = full_facts(stage="command", step=20, measured_as="", reports={"command": report})
    notes = " ".join(section(build_card(cut), "Known notes").split())
    assert "this checkpoint is step 20 of the 60 that the trainer had spoken of" in notes


def test_an_adopted_checkpoint_of_ours_says_that_its_past_is_not_recorded() -> None:
    known = {"grpo": {"steps": 50, "adopted": True}}
    card = build_card(full_facts(reports={**known, "command": {}}))
    assert "adopted" not in section(card, "Known notes"), "no such thing is reported of grpo"
    external = full_facts(
        stage="command", measured_as="", reports={"command": {"steps": 50, "adopted": True}}
    )
    assert "was adopted from the folder of a run" in section(build_card(external), "Known notes")


# ---------------------------------------------------------------- to repeat it


def test_reproduction_says_what_the_command_needs_and_what_it_plans() -> None:
    told = section(build_card(full_facts()), "Reproduction")
    assert "```bash\nrefiner run recipe.yaml seed=42\n```" in told
    assert "It takes refiner 0.1.0 at commit `0123abc`." in told
    assert "`recipe.yaml` lies beside this card (SHA-256 `572b25e5d1bac28e" in told
    assert (
        f"It reads `rl.jsonl` from the folder that it is given in (SHA-256 `{'ab' * 32}`)" in told
    )
    assert f"the fingerprint of the stage `grpo`, `{'c9' * 32}`" in told
    assert "step 50 is a checkpoint that it saves on the way (every 50 steps)" in told


def test_rubrics_stand_with_their_weights_and_a_training_log_with_its_address() -> None:
    card = build_card(full_facts())
    assert "`Citation Discipline`, weight 1.0, `Off-Query Padding`, weight -0.5" in card
    assert "[b7d80rfe](https://wandb.ai/somebody/refiner/runs/b7d80rfe)" in card


# ---------------------------------------------------------------- to use it


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from refiner_core.models import tiny_model_dir
    from refiner_core.training.model.loading import export

    folder = tmp_path_factory.mktemp("exported") / "model"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir())
    export(model, AutoTokenizer.from_pretrained(tiny_model_dir()), folder)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"revision": "main"},
        {"config": replace_fields(CONFIG, {"grpo.stop_strings": ["</answer>"]})},
        {"config": replace_fields(CONFIG, {"data.refiner_mode": "with_reasoning"})},
    ],
    ids=["step of a shared repository", "own repository", "stop strings", "other mode"],
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
    """A folder has no revisions: transformers would load what main is, and say nothing."""
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


def test_the_output_format_follows_the_modes_of_the_rows() -> None:
    assert "block and nothing else. Every" in build_card(full_facts())
    known = reports()
    known["data"]["rl"]["modes"] = {"answer_only": 5, "with_reasoning": 2}
    told = section(build_card(full_facts(reports=known)), "Output format")
    assert "modes of its training rows: answer_only, with_reasoning" in told
    assert "The first snippet answers the question.\n<answer>" in told


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
    from refiner_core.cards.build import card_variables

    head = shipped_template().split("-#}")[0]
    rows = [line.split("|")[1].strip() for line in head.splitlines() if line.startswith("| ")]
    assert set(rows) - {"variable"} == {*card_variables(published_facts(full_facts())), "facts"}


# ---------------------------------------------------------------- nothing to tell


def test_a_card_with_nothing_recorded_is_short_and_claims_nothing() -> None:
    bare = CardFacts("me/m", RecipeConfig(), "grpo", 3, True, "refiner run tiny")
    card = build_card(bare)
    assert lint_card(card) == []
    for title in ("Training curve", "Hardware and cost"):
        assert f"## {title}" not in card
    assert "No evaluation of this checkpoint is recorded." in card
    assert "Nothing was recorded of the code" in card
    assert build_card(replace(bare)) == card


@pytest.mark.parametrize("sign", ["\r", "\n", "\x1b[2J", "\u2028", "\u202e", "\x85"])
def test_names_that_rows_and_trainers_bring_forge_no_table_link_or_markup(sign: str) -> None:
    forged = f"x{sign}{sign}| metric | own |{sign}|---|---|{sign}| citation_f1 | **0.99** |{sign}"
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


def test_a_card_with_a_character_that_nobody_sees_is_refused() -> None:
    card = build_card(full_facts())
    for sign in ("\r", "\x1b", "\u202e", "\u2028", "\x00"):
        forged = card.replace("## Usage", f"## Usage{sign}| grpo | 0.99 |")
        assert "control-character" in {f.rule for f in check_card(forged)}
    assert "control-character" not in {f.rule for f in check_card(card.replace("\n", "\r\n"))}

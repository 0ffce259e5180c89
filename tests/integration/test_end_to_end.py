"""The whole pipeline, end to end, through the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from refiner_core.cards.lint import lint_card
from tests.support.command import LONGER, Finished, Stage, called, refiner


def published(finished: Finished) -> Path:
    """Where the run says that its model lies."""
    return Path(next(s["target"] for s in finished.json["stages"] if s["stage"] == "publish"))


KINDS = ["data", "sft", "grpo", "evaluate", "evaluate", "publish", "card"]


@pytest.fixture(scope="module")
def workspace(small_run: tuple[Path, Finished]) -> Path:
    return small_run[0]


@pytest.fixture(scope="module")
def finished(small_run: tuple[Path, Finished]) -> Finished:
    return small_run[1]


@pytest.fixture(scope="module")
def overrides(small: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the run that all tests here look at."""
    return (*small, *LONGER)


def test_a_run_completes_every_stage(finished: Finished) -> None:
    stages = finished.json["stages"]
    assert [s["stage"] for s in stages] == KINDS
    assert {s["state"] for s in stages} == {"done"}
    assert len({s["fingerprint"] for s in stages}) == len(stages)
    assert all(s["seconds"] > 0 for s in stages)


def test_evaluations_have_intervals_and_counts(finished: Finished) -> None:
    numbers = finished.json["evaluations"]
    keys = {"stage", "protocol", "decoding", "metric", "value", "low", "high", "n"}
    assert all(keys <= set(n) for n in numbers)
    assert {n["stage"] for n in numbers} == {"base", "grpo", "random_copier"}
    for model in ("base", "grpo", "random_copier"):
        for decoding in ("greedy", "sampled"):
            here = [n for n in numbers if (n["stage"], n["decoding"]) == (model, decoding)]
            assert {"format_valid", "citation_f1", "rubric_score", "reward", "oracle"} <= {
                n["metric"] for n in here
            }
            of_all = [n for n in here if n["metric"] != "oracle_given_valid"]
            assert {n["n"] for n in of_all if n["value"] is not None} <= {4}, "prompts evaluated"


def test_the_next_run_skips_all(
    finished: Finished, workspace: Path, overrides: tuple[str, ...]
) -> None:
    def files() -> dict[Path, int]:
        found = workspace.glob("stages/*/**/*")
        return {p: p.stat().st_mtime_ns for p in found if p.is_file()}

    before = files()
    again = refiner("run", "tiny", f"workspace={workspace}", *overrides, "--no-server", "--json")
    assert again.code == 0
    assert {s["state"] for s in again.json["stages"]} == {"skipped"}
    assert again.json["evaluations"] == finished.json["evaluations"]
    assert files() == before


def test_plan_skips_and_explain_finds_the_field(
    finished: Finished, workspace: Path, overrides: tuple[str, ...]
) -> None:
    where = (f"workspace={workspace}", *overrides)
    plan = called("plan", "tiny", *where, "--json").json
    assert {s["action"] for s in plan["stages"]} == {"skip"}
    changed = called("plan", "tiny", *where, "grpo.beta=0.5", "--json").json
    actions = {s["name"]: s["action"] for s in changed["stages"]}
    again = {name for name, action in actions.items() if action == "run"}
    assert again == {"grpo", "publish", "evaluate-grpo", "card"}
    why = called("explain", "grpo", "tiny", *where, "grpo.beta=0.5")
    assert "grpo.beta: 0.001 → 0.5" in why.stdout


def test_a_dry_run_prints_the_plan_and_touches_nothing(tmp_path: Path) -> None:
    done = called("run", "tiny", f"workspace={tmp_path}/none", "--dry-run", "--json")
    assert done.code == 0
    assert {s["action"] for s in done.json["stages"]} == {"run"}
    assert list(tmp_path.iterdir()) == []


def test_arms_never_publish_over_each_other(finished: Finished, overrides: tuple[str, ...]) -> None:
    from flows.api import make_recipe_plan

    one, two = (make_recipe_plan("tiny", [*overrides, f"grpo.beta={b}"]) for b in (0.001, 0.5))
    assert one.by_name["grpo"].fingerprint[:8] in published(finished).name
    assert two.by_name["grpo"].fingerprint[:8] not in published(finished).name


def test_the_published_model_loads_and_answers(finished: Finished, workspace: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = published(finished)
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        p.name for p in folder.iterdir()
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "<query>Hello?</query>"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > 4


def test_the_card_has_the_numbers_and_the_command(finished: Finished, workspace: Path) -> None:
    card = (published(finished) / "README.md").read_text()
    assert lint_card(card) == []
    oracle = next(
        n
        for n in finished.json["evaluations"]
        if (n["stage"], n["decoding"], n["metric"]) == ("grpo", "greedy", "oracle")
    )
    assert f"{oracle['value']:.3f}" in card
    assert "refiner run tiny " in card
    assert str(workspace) not in card, "a card is for others; our folders are not"
    assert "kl3" in card
    assert "0.2" in card


def test_the_cards_command_gives_one_plan(
    finished: Finished, workspace: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of the local files, which it names without their folders."""
    monkeypatch.chdir(trained.parent)
    card = (published(finished) / "README.md").read_text()
    line = next(x for x in card.splitlines() if x.startswith("refiner run tiny "))
    words = (*shlex.split(line)[2:], f"workspace={workspace}", "--json")
    again = called("plan", *words).json
    assert [s["fingerprint"] for s in again["stages"]] == [
        s["fingerprint"] for s in finished.json["stages"]
    ]


def test_rollouts_are_kept_with_reward_components(finished: Finished, workspace: Path) -> None:
    attempt = Stage(workspace, "grpo").attempts[-1]
    files = sorted((attempt / "rollouts").glob("step-*.parquet"))
    assert len(files) == 12
    rows = pq.read_table(files[0]).to_pylist()
    assert len(rows) == 8
    wanted = {"reward/rubric", "reward/citation", "reward/format_bonus", "advantage"}
    assert wanted <= set(rows[0])
    assert "truth" not in json.dumps(rows[0]), "the truth never reaches what a reward could see"


def test_grpo_learns_from_groups_that_differ(finished: Finished, workspace: Path) -> None:
    sft, grpo = Stage(workspace, "sft").hashes(), Stage(workspace, "grpo").hashes()
    assert sft["model/model.safetensors"] != grpo["model/model.safetensors"]
    counts = Stage(workspace, "grpo").result()["report"]["counts"]
    assert counts["groups/kept"] > 0
    assert counts["optimizer_steps"] > 0

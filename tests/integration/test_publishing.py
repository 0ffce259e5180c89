"""What a run leaves on the Hub: each step with its own card, and never an older card again."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from flows.publishing import facts_of_stage
from flows.running.calls import make_recipe_plan
from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import load_evidence
from refiner_core.cards.lint import lint_card
from tests.support.git_hub import LoopbackHub
from tests.support.recorded_run import RecordedRun

REPO = "me/refiner"
HUB = ("publish.target=hub", f"publish.repo_id={REPO}", "publish.which=every-save")


def text(hub: LoopbackHub, revision: str, name: str = "README.md") -> str:
    return hub.contents(REPO, revision)[name].decode()


def run_with_steps(root: Path, *overrides: str) -> RecordedRun:
    """Steps 2 and 4 are published while training goes on, then the end."""
    run = RecordedRun(root, *HUB, *overrides)
    run.data()
    run.train("sft")
    run.begin("grpo")
    for step in (2, 4):
        run.export(step)
        run.carry_out(f"publish-step{step}")
    run.train("grpo")
    run.carry_out("publish")
    return run


def test_every_step_has_its_tag_and_its_card(hub: LoopbackHub, tmp_path: Path) -> None:
    run = run_with_steps(tmp_path / "runs")
    assert "No evaluation of this checkpoint" in text(hub, "step-2")
    for model in ("base", "sft", "grpo"):
        run.evaluate(f"evaluate-{model}", quality=0.5)
    for step in (2, 4):
        run.evaluate(f"evaluate-grpo-step{step}", quality=0.2 * step)
        report = run.carry_out(f"card-step{step}")
        assert report["changed"] == ["README.md", "refiner.json"]
    run.carry_out("card")
    for name, model in (("card-step2", "grpo-step2"), ("card", "grpo")):
        found = {e["stage"] for e in facts_of_stage(run.workspace, run.stage(name).id).evaluations}
        assert found == {"base", "sft", model, "random_copier"}, "numbers of its own"
    assert {f"tags/step-{s}" for s in (2, 4, 6)} | {"heads/main"} == set(hub.refs(REPO))
    for step, name in ((2, "card-step2"), (4, "card-step4"), (6, "card")):
        files = hub.contents(REPO, f"step-{step}")
        card, evidence = files["README.md"].decode(), files["refiner.json"].decode()
        assert lint_card(card, evidence) == []
        assert card == build_card(facts_of_stage(run.workspace, run.stage(name).id))
        assert card == build_card(load_evidence(evidence).facts)
        assert files["model.safetensors"] == f"grpo {step}".encode()
        for file in load_evidence(evidence).files:
            assert hashlib.sha256(files[file.path]).hexdigest() == file.sha256
    assert text(hub, "main") == text(hub, "step-6"), "main ends at the last step"
    run.carry_out("card-progression")
    last = facts_of_stage(run.workspace, run.stage("card-progression").id)
    assert {"grpo-step2", "grpo-step4", "grpo"} <= {e["stage"] for e in last.evaluations}
    assert (last.final, last.revision) == (True, "step-6")


def test_a_repeated_stage_keeps_the_newer_card(hub: LoopbackHub, tmp_path: Path) -> None:
    """The workspace has lost the record of `publish-step2`; it is carried out again at the end."""
    run = run_with_steps(tmp_path / "runs")
    run.evaluate("evaluate-base")
    run.evaluate("evaluate-sft")
    run.evaluate("evaluate-grpo-step2")
    run.carry_out("card-step2")
    before, refs = text(hub, "step-2"), hub.refs(REPO)
    shutil.rmtree(run.workspace.layout.stage(run.stage("publish-step2").id).control)
    asked = len(hub.log)
    assert run.carry_out("publish-step2")["card"] == before
    assert len(hub.log) - asked <= 10, [r.path for r in hub.log[asked:]]
    assert not any(r.writes for r in hub.log[asked:])
    assert text(hub, "step-2") == before
    assert hub.refs(REPO) == refs, "nothing was committed"


def test_a_published_recipe_plans_the_same_run(hub: LoopbackHub, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"include: tiny\nworkspace: {tmp_path}/runs\n"
        f"publish: {{target: hub, repo_id: {REPO}}}\ngrpo: {{num_training_steps: 6}}\n"
    )
    run = RecordedRun(tmp_path / "runs", recipe=str(path))
    for name in ("data", "sft", "grpo"):
        run.data() if name == "data" else run.train(name)
    run.carry_out("publish")
    downloaded = tmp_path / "elsewhere" / "recipe.yaml"
    downloaded.parent.mkdir()
    downloaded.write_text(text(hub, "main", "recipe.yaml"))
    made = json.loads(text(hub, "main", "refiner.json"))["fingerprint"]
    assert make_recipe_plan(str(downloaded)).by_name["grpo"].fingerprint == made
    assert "refiner run recipe.yaml" in text(hub, "main")
    assert REPO not in downloaded.read_text(), "nobody else is told to publish there"

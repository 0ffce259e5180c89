"""Publications of a run on the Hub: a card for each step, and what plain tools read of it."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from flows.publishing.facts import facts_of_stage
from infra.hub.target import HubTarget
from infra.publishing import Publication
from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import load_evidence
from refiner_core.cards.lint import lint_card
from refiner_core.contract.config import PublishConfig
from refiner_core.generation.saving import model_tensors, save_model
from refiner_core.models import tiny_model_dir
from tests.support.command import finished
from tests.support.git_hub import LoopbackHub
from tests.support.publications import publication
from tests.support.recorded_run import RecordedRun

REPO = "me/refiner"
HUB = ("publish.target=hub", f"publish.repo_id={REPO}", "publish.which=every-save")


def text(hub: LoopbackHub, revision: str, name: str = "README.md") -> str:
    return hub.contents(REPO, revision)[name].decode()


def run_with_steps(root: Path, *overrides: str) -> RecordedRun:
    """Steps 2 and 4 are published during training, then the end."""
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


# ---------------------------------------------------------------- tools of others


READER = """
import hashlib, json, sys
from pathlib import Path
import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

repo_id, revision = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(repo_id, revision=revision)
tokenizer = AutoTokenizer.from_pretrained(repo_id, revision=revision)
weight = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    weight.update(name.encode() + tensor.numpy().tobytes())
folder = Path(snapshot_download(repo_id, revision=revision))
print(json.dumps({
    "weights": weight.hexdigest(),
    "tokens": tokenizer("a question")["input_ids"],
    "files": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()},
}))
"""


def exported(folder: Path) -> tuple[Publication, str, list[int]]:
    """The built-in model as a stage exports it, its weights' hash, and how it reads a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir())
    save_model(model, tokenizer, folder / "model", model_tensors(model).items())
    weight = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weight.update(name.encode() + tensor.numpy().tobytes())
    files = {p.name: p.read_bytes() for p in (folder / "model").iterdir()}
    wanted = publication(folder, 50, files=files, repo_id=REPO)
    return wanted, weight.hexdigest(), tokenizer("a question")["input_ids"]


def test_transformers_loads_a_published_step(hub: LoopbackHub, tmp_path: Path) -> None:
    wanted, weights, tokens = exported(tmp_path)
    config = PublishConfig(target="hub", which="every-save")
    published = HubTarget(config, hub.url).publish(wanted)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = finished([sys.executable, "-c", READER, REPO, "step-50"], env=env)
    assert done.code == 0, done.stderr[-3000:]
    read = json.loads(done.stdout.splitlines()[-1])
    assert (read["weights"], read["tokens"]) == (weights, tokens)
    del read["files"][".gitattributes"]
    assert read["files"] == {f.path: f.sha256 for f in published.files}

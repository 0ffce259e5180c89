"""What a run publishes: facts of its card come from records; no model of malformed answers."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from flows.checking.own_data import example_rows
from flows.checking.sources import resolve_sources
from flows.cli.main import main
from flows.publishing.facts import facts_of_stage
from flows.running.console import Console, state_line
from flows.running.status import RunWatcher
from infra.attempt.attempt import AttemptRun
from infra.jobs.failures import classify
from infra.store.provenance import write_proof
from infra.store.workspace import Workspace
from infra.tracking import ADDRESS_FILE
from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import load_evidence
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, HealthStop, StageFailed, WorkspaceError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.proofs import Interruption, ProofComparison, ResumeProof
from refiner_core.contract.records import AttemptOutcome
from refiner_core.contract.types import StageView
from tests.support.recorded_run import RecordedRun

EVERY = ("publish.which=every-save",)


def trained_run(root: Path, *overrides: str) -> RecordedRun:
    run = RecordedRun(root, *overrides)
    run.data()
    run.train("sft")
    return run


def finished_run(root: Path, *overrides: str) -> RecordedRun:
    """The last checkpoint published, evaluated, with a card that has its numbers."""
    run = trained_run(root, *overrides)
    run.train("grpo")
    run.carry_out("publish")
    for model in ("base", "sft", "grpo"):
        run.evaluate(f"evaluate-{model}", quality=0.5)
    run.carry_out("card")
    return run


def card_of(run: RecordedRun, name: str, workspace: Workspace | None = None) -> str:
    return build_card(facts_of_stage(workspace or run.workspace, run.stage(name).id))


# ---------------------------------------------------------------- made again


def test_a_card_tells_the_resume_proof_of_its_own_stage(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "runs")
    before, stage = card_of(run, "card"), run.stage("grpo")
    known: dict[str, Any] = {
        **{"version": 1, "recipe": "tiny", "stage": "grpo", "stage_id": stage.id},
        **{"fingerprint": stage.fingerprint, "short_fingerprint": "ab" * 32, "overrides": ()},
        **{"changed": {}, "steps": 7, "seed": 0, "how": "kill", "wanted": 2, "tolerance": 0.0},
        "interruptions": (Interruption(3, "judge", "kill", 1, 2),),
        "comparisons": (ProofComparison("loss trace", 70),),
    }
    write_proof(run.workspace, ResumeProof(**{**known, "fingerprint": "cd" * 32}))
    assert card_of(run, "card") == before
    write_proof(run.workspace, ResumeProof(**known))
    assert "a run of 7 steps of this stage, interrupted 1 time by kill -9, was bitwise" in (
        card_of(run, "card")
    )
    facts = facts_of_stage(run.workspace, run.stage("card").id)
    assert facts.records["proof"] == f"proofs/{stage.id}/proof.json"


def test_published_evidence_makes_the_card_and_holds_nothing_private(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "runs", "description=Rows of /home/me/rows.jsonl", "seed=5")
    folder = run.published("card")
    text = (folder / "refiner.json").read_text()
    evidence = load_evidence(text)
    assert build_card(evidence.facts) == (folder / "README.md").read_text()
    listed = {f.path: f.sha256 for f in evidence.files}
    published_state = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
    assert published_state == {*listed, "README.md", "refiner.json"}
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert str(tmp_path) not in text
    assert "/home/me" not in text
    assert evidence.fingerprint == run.stage("grpo").fingerprint
    facts = facts_of_stage(run.workspace, run.stage("card").id)
    assert len([k for k in facts.records if k.startswith("evaluations.")]) == len(facts.evaluations)
    for position, entry in enumerate(facts.evaluations):
        path, _, inside = facts.records[f"evaluations.{position}"].partition("#")
        found: Any = json.loads((run.workspace.root / path).read_text())
        for part in inside.split("."):
            found = found[int(part)] if part.isdigit() else found[part]
        assert found["value"] == entry["value"], "each fact names its record"
    for path in facts.records.values():
        assert (run.workspace.root / path.partition("#")[0]).exists(), path


# ---------------------------------------------------------------- during training


def test_a_card_of_a_step_tells_only_what_came_before(tmp_path: Path) -> None:
    """However the training ends, the card of step 2 that was published in between is the same."""
    run = trained_run(tmp_path / "runs", *EVERY)
    first = AttemptOutcome("preempted", "resume", step=1)
    run.fail("grpo", first, seconds=60.0)
    run.begin("grpo")
    run.export(2, attempt=2, elapsed_s=18.0)
    run.carry_out("publish-step2")
    facts = facts_of_stage(run.workspace, run.stage("publish-step2").id)
    assert (facts.step, facts.final, facts.measured_as) == (2, False, "grpo-step2")
    assert facts.revision == "step-2"
    notes = [(a.number, a.failure) for a in facts.attempts if a.stage == "grpo"]
    assert notes == [(1, "preempted"), (2, "none")]
    assert facts.cost["seconds"]["grpo"] == 78.0
    assert facts.provenance["host"], "of the attempt that still runs"
    before = card_of(run, "publish-step2")
    run.workspace.close_attempt(
        run.stage("grpo").id, 2, AttemptOutcome("gpu_error", "resume", step=5), 99.0
    )
    run.train("grpo")
    assert card_of(run, "publish-step2") == before == run.report("publish-step2")["card"]


def test_a_card_of_a_step_tells_that_training_had_died(tmp_path: Path) -> None:
    """Published by hand, of a run that a full quota had ended."""
    run = trained_run(tmp_path / "runs", *EVERY)
    run.fail("grpo", AttemptOutcome("disk_full", "resume", step=5, errno=122), seconds=60.0)
    run.export(2)
    run.carry_out("publish-step2")
    card = card_of(run, "publish-step2")
    assert "Training had stopped when this checkpoint was published, after step 5" in card
    assert "because the disk or its quota was full; it had not been taken up again" in card
    assert "Nothing unusual" not in card
    run.begin("grpo")
    run.train("grpo")
    assert card_of(run, "publish-step2") == card, "it says what was so when it was published"


# ---------------------------------------------------------------- costs, tracking, sources


def test_repeated_hours_are_counted_apart(tmp_path: Path) -> None:
    run = trained_run(
        tmp_path / "runs",
        *("grpo.resources.gpus=2", "grpo.resources.cpus=8"),
        *("publish.price_per_gpu_hour=2.5", "publish.currency=EUR"),
    )
    grpo = run.stage("grpo").id
    first = run.fail("grpo", AttemptOutcome("preempted", "resume", step=4), seconds=3600.0)
    second = run.begin("grpo")
    run.workspace.layout.attempt(grpo, second).started.write_text('{"resumed": {"step": 3}}')
    run.workspace.close_attempt(grpo, second, AttemptOutcome("killed", "resume", step=3), 1800.0)
    run.train("grpo")
    run.carry_out("publish")
    cost = facts_of_stage(run.workspace, run.stage("publish").id).cost
    # One of the first one's four steps, and all of the second one, which got no further.
    assert first == 1
    assert cost["gpu_hours"] == pytest.approx(2 * 1.5, rel=0.01)
    assert cost["lost_gpu_hours"] == pytest.approx(2 * (0.25 + 0.5), rel=0.01)
    assert cost["lost_core_hours"] == pytest.approx(8 * (0.25 + 0.5), rel=0.01)
    assert (cost["price"], cost["currency"]) == (2.5, "EUR")


def test_a_checkpoint_is_exported_though_the_weights_of_the_end_are_gone(tmp_path: Path) -> None:
    """They may have been reclaimed, once the Hub had them; the checkpoint is another thing."""
    run = trained_run(tmp_path / "runs", *EVERY)
    run.train("grpo")
    (weights,) = run.workspace.layout.stage(run.stage("grpo").id).data.rglob("model.safetensors")
    weights.unlink()
    run.export(2)
    export = AttemptRun(run.workspace, run.stage("export-step2").id, 1, own_log=False)
    export.check_inputs()
    run.carry_out("publish-step2")
    last = AttemptRun(run.workspace, run.stage("publish").id, run.claim("publish"), own_log=False)
    with pytest.raises(WorkspaceError, match="is gone"):
        last.check_inputs()


def test_there_is_no_total_where_the_time_of_an_attempt_is_unknown(tmp_path: Path) -> None:
    """Checkpoints of older versions do not say it; a sum without the training would look cheap."""
    run = trained_run(tmp_path / "runs", *EVERY, "publish.price_per_gpu_hour=2.5")
    run.begin("grpo")
    run.export(2, attempt=1, elapsed_s=None)
    run.carry_out("publish-step2")
    cost = facts_of_stage(run.workspace, run.stage("publish-step2").id).cost
    assert set(cost) == {"seconds"}
    assert set(cost["seconds"]) == {"data", "sft"}
    card = run.report("publish-step2")["card"]
    assert "data" in card.partition("**Time of the attempts that made it:**")[2]
    assert "all attempts together" not in card


def test_the_card_links_an_online_tracker(tmp_path: Path) -> None:
    run = trained_run(tmp_path / "runs")
    run.train("grpo")
    folder = run.workspace.layout.attempt(run.stage("grpo").id, 1).tracker
    folder.mkdir(parents=True)
    address = "https://wandb.ai/me/refiner/runs/grpo-1"
    (folder / ADDRESS_FILE).write_text(json.dumps({"url": address}))
    run.carry_out("publish")
    facts = facts_of_stage(run.workspace, run.stage("publish").id)
    assert facts.tracking == {"grpo": address}
    assert address in run.report("publish")["card"]


def test_a_local_file_is_named_without_its_folder_and_with_its_hash(tmp_path: Path) -> None:
    rows = tmp_path / "private" / "rows.jsonl"
    rows.parent.mkdir()
    rows.write_text(json.dumps(example_rows("rl", 1)[0]) + "\n")
    run = finished_run(tmp_path / "runs", f"data.rl_path={rows}")
    digest = hashlib.sha256(rows.read_bytes()).hexdigest()
    rows.unlink()
    facts = facts_of_stage(run.workspace, run.stage("card").id)
    assert facts.sources == {"rows.jsonl": digest}
    assert "data.rl_path=rows.jsonl" in facts.command
    assert "private" not in card_of(run, "card")


# ---------------------------------------------------------------- the best


BEST = ("publish.which=best", "publish.best_metric=reward", "publish.repo_id=me/{recipe}-{step}")


def ready_to_choose(root: Path, qualities: dict[str, float], *overrides: str) -> RecordedRun:
    run = trained_run(root, *BEST, *overrides)
    run.train("grpo")
    for step in (2, 4):
        run.export(step)
    for model in ("base", "sft"):
        run.evaluate(f"evaluate-{model}", quality=0.5)
    for name, quality in qualities.items():
        run.evaluate(f"evaluate-{name}", quality=quality)
    return run


def test_the_best_checkpoint_is_published_and_the_card_says_against_which(tmp_path: Path) -> None:
    qualities = {"grpo-step2": 0.5, "grpo-step4": 1.0, "grpo": 0.5}
    run = ready_to_choose(tmp_path / "runs", qualities)
    report = run.carry_out("publish-best")
    assert (report["step"], report["best"]["step"], report["repo_id"]) == (4, 4, "me/tiny-4")
    assert [c["step"] for c in report["best"]["candidates"]] == [2, 4, 6]
    assert all(c["n"] == 6 and c["low"] is not None for c in report["best"]["candidates"])
    published = run.published("publish-best")
    assert (published / "model.safetensors").read_text() == "grpo 4"
    assert "best of 3 checkpoints" in report["card"]
    for candidate in report["best"]["candidates"]:
        assert f"step {candidate['step']}" in report["card"]
        assert f"{candidate['value']:.3f} [" in report["card"]
    assert facts_of_stage(run.workspace, run.stage("publish-best").id).measured_as == "grpo-step4"
    assert card_of(run, "publish-best") == report["card"]


@pytest.mark.parametrize(("qualities", "best"), [((0.5, 0.5, 0.5), 2), ((0.0, 0.5, 1.0), 6)])
def test_the_earlier_equal_wins(tmp_path: Path, qualities: tuple[float, ...], best: int) -> None:
    names = ("grpo-step2", "grpo-step4", "grpo")
    run = ready_to_choose(tmp_path / "runs", dict(zip(names, qualities, strict=True)))
    report = run.carry_out("publish-best")
    assert report["step"] == best


def test_numbers_that_cannot_be_compared_choose_nothing(tmp_path: Path) -> None:
    qualities = {"grpo-step2": 1.0, "grpo": 1.0}
    run = ready_to_choose(tmp_path / "runs", qualities, "publish.best_metric=oracle")
    run.evaluate("evaluate-grpo-step4", quality=1.0)
    with pytest.raises(StageFailed, match=r"measured are: .*reward"):
        run.carry_out("publish-best")
    run = ready_to_choose(tmp_path / "other", qualities)
    run.evaluate("evaluate-grpo-step4", prompts=5)
    with pytest.raises(StageFailed, match="measured in several ways"):
        run.carry_out("publish-best")


# ---------------------------------------------------------------- what does not leave


def test_a_template_that_leaves_the_licence_out_publishes_nothing(tmp_path: Path) -> None:
    template = tmp_path / "card.jinja"
    template.write_text("---\nbase_model: x\n---\n\n# {{ name }}\n\nNothing more.\n")
    run = trained_run(tmp_path / "runs", f"publish.card_template={template}")
    run.train("grpo")
    with pytest.raises(StageFailed, match=r"(?s)licen[cs]e.*publish\.card_template"):
        run.carry_out("publish")
    assert not (tmp_path / "runs" / "published").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"# {{ name }}\n{% if %}\n", "fails at line 2"), (b"\xff\xfe", "not text in UTF-8")],
)
def test_a_broken_template_is_refused_early(tmp_path: Path, content: bytes, said: str) -> None:
    template = tmp_path / "card.jinja"
    template.write_bytes(content)
    config = replace_fields(RecipeConfig(), {"publish.card_template": str(template)})
    with pytest.raises(ConfigurationError, match=said):
        resolve_sources(config)


def test_only_files_that_were_asked_for_go_along_and_a_model_is_whole(tmp_path: Path) -> None:
    patterns = "publish.files=['*.json','*.safetensors']"
    run = trained_run(tmp_path / "a", patterns)
    run.train("grpo")
    run.carry_out("publish")
    names = {p.name for p in run.published("publish").iterdir() if not p.name.startswith(".")}
    assert "trainer_state.json" in names
    half = trained_run(tmp_path / "b", "publish.files=['*.safetensors']")
    half.train("grpo")
    with pytest.raises(StageFailed, match=r"tokenizer_config.json would be left out"):
        half.carry_out("publish")


# ---------------------------------------------------------------- malformed answers


#: Of a training whose rollouts had no answer block.
NOTHING: dict[str, Any] = {"episodes": 48, "counts": {"samples/malformed": 48}}
SAID = "all of its 48 rollouts were malformed"


def trained(root: Path, *overrides: str, **report: Any) -> RecordedRun:
    run = RecordedRun(root / "runs", *overrides)
    run.data()
    run.train("sft")
    run.train("grpo", **report)
    return run


def test_it_is_not_published_and_the_option_that_does_so_is_named(tmp_path: Path) -> None:
    run = trained(tmp_path, **NOTHING)
    with pytest.raises(HealthStop, match=rf"{SAID}.*publish\.malformed=true") as refused:
        run.carry_out("publish")
    outcome = classify(refused.value)
    assert (outcome.failure, outcome.decision) == ("unhealthy", "stop"), "it would be so again"
    told = RecordedRun(tmp_path / "runs", "publish.malformed=true")
    assert told.stage("publish").id == run.stage("publish").id, "the same publication"
    told.carry_out("publish")
    assert told.published("publish").is_dir()


def test_an_evaluation_counts_too_and_one_answer_is_enough(tmp_path: Path) -> None:
    """Demonstrations alone say nothing of the form of answers."""
    run = trained(tmp_path / "sft")
    run.evaluate("evaluate-grpo", quality=0.0)
    with pytest.raises(HealthStop, match=r"format_valid: 0 of 6 greedy"):
        run.carry_out("publish")
    report = {"episodes": 48, "counts": {"samples/malformed": 47, "samples/unscored": 0}}
    run = trained(tmp_path / "grpo", **report)
    run.evaluate("evaluate-base", quality=0.0)
    run.carry_out("publish")


def test_terminal_and_report_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, **NOTHING)
    rows = {row.name: row for row in RunWatcher(run.workspace, run.run, ask=False).observe().stages}
    assert (rows["grpo"].state, rows["sft"].reason) == ("done", "")
    assert rows["grpo"].reason.startswith(f"warning: {SAID}")
    for command in ("status", "report"):
        assert main([command, run.run.run, f"workspace={tmp_path}/runs"]) == 0
        assert f"warning: {SAID}" in capsys.readouterr().out
    view = StageView("grpo", "grpo", "", "done", seconds=5.0, message=f"warning: {SAID}")
    assert state_line(view) == f"grpo: done (5.0 s), warning: {SAID}"
    heard = io.StringIO()
    console = Console(stream=heard, quiet=True)
    console.finish({"grpo": view})
    assert f"grpo: done: warning: {SAID}" in heard.getvalue(), "also where only warnings are wanted"

"""`refiner diff`: stages, fields, rows, steps and numbers that differ between two runs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.cli.main import main
from flows.diffing.run_diff import (
    Difference,
    diff_sides,
    difference_lines,
    find_side,
    next_commands,
)
from infra.attempt.attempt import AttemptRun
from infra.store.sweep_records import note_trial, write_sweep
from refiner_core.contract.records import SWEEP_VERSION, SweepRecord, TrialRecord
from refiner_core.contract.types import PromptRow
from refiner_core.data.prepared import write_prompts
from tests.support.recorded_run import (
    PROMPTS,
    RecordedRun,
    prompt_rows,
    training_report,
    write_model,
)


def _data(run: RecordedRun, prompts: Sequence[PromptRow]) -> None:
    def work(attempt: AttemptRun) -> dict[str, Any]:
        write_prompts(attempt.output_dir / "rl_test.parquet", prompts[:PROMPTS])
        write_prompts(attempt.output_dir / "rl_train.parquet", prompts[PROMPTS:])
        return {"rl": {}, "sft": {}, "split": {}}

    run.do("data", work)


def _grpo(run: RecordedRun, *, parts_at: int | None = None, text: str = "other") -> None:
    """Six steps whose times are this machine's own; from ``parts_at`` on, other rollouts."""

    def work(attempt: AttemptRun) -> dict[str, Any]:
        for step in range(1, 7):
            other = parts_at is not None and step >= parts_at
            rows = [
                {"step": step, "sample_id": f"row-{n}", "sample_index": 0, "response_text": "same",
                 "reward": 1.0}
                for n in range(3)
            ]  # fmt: skip
            if other:
                rows[1]["response_text"] = text
            attempt.io.save_rollouts(step, rows)
            metrics = {"scores": 0.5 + 0.1 * other, "time/step_s": attempt.seconds}
            attempt.io.log_metrics(step, {**metrics, "tokens_per_second": 1 / attempt.seconds})
        write_model(attempt.output_dir / "model", f"grpo {parts_at}")
        return training_report("grpo", 6)

    run.do("grpo", work)


def _finished(root: Path, *overrides: str, parts_at: int | None = None) -> RecordedRun:
    run = RecordedRun(root, *overrides)
    stages = {s.name for s in run.plan.stages}
    for name in ("data", "sft"):
        if run.workspace.read_result(run.stage(name).id) is None:
            run.data() if name == "data" else run.train("sft")
    _grpo(run, parts_at=parts_at)
    if "evaluate-grpo" in stages:
        run.evaluate("evaluate-grpo", 1.0 if parts_at is None else 0.5)
    return run


TRAINED = ("stages=[data,sft,grpo]",)
MEASURED = ("stages=[data,sft,grpo,evaluate]", "evaluate.models=[grpo]")


def _diff(a: RecordedRun, b: RecordedRun, part: str = "") -> Difference:
    first = find_side(a.workspace, a.run.run + part)
    return diff_sides(first, find_side(b.workspace, b.run.run + part))


def test_two_executions_of_one_recipe_are_equal_though_their_times_are_not(tmp_path: Path) -> None:
    one, other = (_finished(tmp_path / name, *TRAINED) for name in "ab")
    found = _diff(one, other)
    assert found["equal"] is True
    assert {s["relation"] for s in found["stages"]} == {"alike"}
    assert [(d["stage"], d["step"], d["same_steps"]) for d in found["training"]] == [
        ("grpo", None, 6)
    ]
    words = ["diff", one.run.run, other.run.run, f"workspace={tmp_path / 'a'}"]
    assert main([*words, "--other", str(tmp_path / "b"), "--exit-code"]) == 0


def test_the_first_step_that_differs_is_found_with_its_rollout(tmp_path, capsys) -> None:
    """The first differing step and its sample are named."""
    one = _finished(tmp_path / "a", *TRAINED)
    other = _finished(tmp_path / "b", *TRAINED, parts_at=4)
    found = _diff(one, other)
    assert found["equal"] is False
    (grpo,) = found["training"]
    assert (grpo["step"], grpo["same_steps"]) == (4, 3)
    rollout = {"sample_id": "row-1", "sample_index": 0, "fields": ("response_text",)}
    assert grpo["rollout"] == {**rollout, "a": "same", "b": "other"}
    assert grpo["metrics"] == {"scores": (0.5, 0.6)}
    text = "\n".join(difference_lines(found))
    assert "They differ: first in step 4 of grpo." in text
    assert "grpo: first differing step 4 (3 steps before it are the same)" in text
    assert f"refiner why scores step4 {one.run.run}" in next_commands(found)[0]
    # A script is told by the exit code if it asks for that; else it is 0.
    words = ["diff", one.run.run, other.run.run, f"workspace={tmp_path / 'a'}"]
    words += ["--other", str(tmp_path / "b"), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["training"][0]["step"] == 4
    assert main([*words, "--exit-code"]) == 1


def test_shared_stages_and_differing_fields_are_named(tmp_path: Path) -> None:
    one = _finished(tmp_path, *MEASURED)
    other = _finished(tmp_path, *MEASURED, "grpo.beta=0.01", "log_level=warning", parts_at=1)
    found = _diff(one, other)
    relations = {s["stage"]: s["relation"] for s in found["stages"]}
    assert relations == {
        "data": "same", "sft": "same", "grpo": "different", "evaluate-grpo": "different"
    }  # fmt: skip
    marks = {f["field"]: (f["mark"], f["stages"]) for f in found["fields"]}
    assert marks["grpo.beta"] == ("identity", ("grpo",))
    assert marks["log_level"] == ("execution", ())
    text = "\n".join(difference_lines(found))
    assert f"data: same stage ({one.stage('data').id})" in text
    assert "grpo.beta 0.001 → 0.01" in text
    # Under one protocol numbers are compared, prompt by prompt.
    rubric = next(n for n in found["numbers"] if n["metric"] == "format_valid")
    assert rubric["difference"] < 0, "second minus first"
    assert text.index("grpo.beta: 0.001 → 0.01") < text.index("Stages") < text.index("log_level")
    assert next_commands(found)[1].startswith(f"refiner report {one.run.run} {other.run.run}")


def test_rows_are_compared_by_content(tmp_path: Path) -> None:
    prompts = prompt_rows(2 * PROMPTS)
    changed = [replace(prompts[0], question="another?"), *prompts[2:PROMPTS], prompts[1]]
    one, other = RecordedRun(tmp_path / "a", *TRAINED), RecordedRun(tmp_path / "b", *TRAINED)
    _data(one, prompts)
    _data(other, [*changed, *prompts[PROMPTS:-1]])
    (test, train) = sorted(_diff(one, other)["rows"], key=lambda rows: str(rows["file"]))
    assert (test["a_rows"], test["b_rows"], test["changed"]) == (PROMPTS, PROMPTS, 1)
    assert test["examples"][2] == ["row-0"]
    assert (train["only_a"], train["only_b"]) == (1, 0)
    assert train["examples"][0] == [f"row-{2 * PROMPTS - 1}"]


def test_numbers_of_different_protocols_are_refused_by_name(tmp_path: Path) -> None:
    """A number under another judge or other prompts is another number."""
    one = _finished(tmp_path, *MEASURED)
    other = _finished(tmp_path, *MEASURED, "reward.rubric_source=none")
    found = _diff(one, other)
    number = next(n for n in found["numbers"] if n["metric"] == "format_valid")
    assert "rubrics.source" in number["refused"]
    assert number["difference"] is None
    assert "not comparable, the protocols differ in" in "\n".join(difference_lines(found))


def test_code_and_environment_are_listed_and_make_nothing_unequal(tmp_path: Path) -> None:
    one = _finished(tmp_path / "a", *TRAINED)
    other = _finished(tmp_path / "b", *TRAINED)
    for run, code, line in ((one, "a" * 16, "x = 1\n"), (other, "b" * 16, "x = 2\ny = 3\n")):
        file = run.workspace.layout.code / code / "flows" / "thing.py"
        file.parent.mkdir(parents=True)
        file.write_text(line)
        path = run.workspace.layout.run(run.run.run).record
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "code": code}))
    result = other.workspace.layout.stage(other.stage("sft").id).result
    written = json.loads(result.read_text())
    written["provenance"]["versions"]["torch"] = "9.9"
    result.write_text(json.dumps(written))
    found = _diff(one, other)
    assert found["equal"] is True
    assert found["code"]["files"] == ["flows/thing.py"]
    torch = next(c for c in found["environment"] if c["what"] == "torch")
    assert (torch["b"], torch["stages"]) == ("9.9", ("sft",))
    assert next_commands(found)[-1].startswith("diff -ru ")


def test_trials_are_named_by_sweep_arm_and_seed(tmp_path, capsys) -> None:
    run = RecordedRun(tmp_path, *TRAINED)
    stages = {s.name: s.id for s in run.plan.stages}
    trials = [TrialRecord("beta-0.1", seed, (), stages) for seed in (1, 2)]
    write_sweep(run.workspace, 
        SweepRecord(
            SWEEP_VERSION, 1, "kl", "tiny", "", "", (), "beta-0.1", (1, 2), tuple(trials), {}, {},
            {}, "0" * 16, "2026-01-01",
        )
    )  # fmt: skip
    note_trial(run.workspace, "kl", "beta-0.1/seed1", run.run.run)
    assert find_side(run.workspace, "kl:beta-0.1/seed1").run == run.run
    assert find_side(run.workspace, "kl:beta-0.1/seed1:sft").stages == {"sft": stages["sft"]}
    where = f"workspace={tmp_path}"
    for word, said in (
        ("kl:beta-0.1/seed2", "has not begun"),
        ("kl:beta-0.2/seed1", "Did you mean"),
        ("kl", "a trial is SWEEP:ARM/seedN"),
        ("nobody", "has no run 'nobody'"),
        (f"{run.run.run}:gpro", "Did you mean"),
    ):
        assert main(["diff", word, run.run.run, where]) == 2
        assert said in capsys.readouterr().err

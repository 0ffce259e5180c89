"""`refiner why`: from a printed number to its samples and judgements."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from flows.cli.main import main
from flows.cli.plan import why_command
from flows.why.explanation import parse_query
from refiner_core.evaluation.metrics import load_samples
from tests.support.recorded_run import RecordedRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A run with a published, evaluated model."""
    run = RecordedRun(tmp_path_factory.mktemp("why") / "runs")
    run.data()
    for name in ("sft", "grpo"):
        run.train(name)
        path = run.workspace.layout.attempt(run.stage(name).id, 1).metrics
        path.write_text('{"step": 3, "metrics": {"scores": 1.5, "loss/train_avg": 0.25}}\n')
    run.carry_out("publish")
    run.evaluate("evaluate-base", quality=0.0)
    run.evaluate("evaluate-sft", quality=0.5)
    run.evaluate("evaluate-grpo", quality=0.7)
    run.carry_out("card")
    return run


def why(run: RecordedRun, *words: str) -> Result:
    done = CliRunner().invoke(why_command, [*words, f"workspace={run.workspace.root}"])
    assert done.exception is None, done.exception
    return done


def figures(run: RecordedRun, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(why(run, *words, "--json").stdout)["figures"]
    return found


def entry(run: RecordedRun, model: str, metric: str) -> dict[str, Any]:
    report = run.report(f"evaluate-{model}")
    return next(e for e in report["evaluations"] if e["metric"] == metric)


def test_a_number_as_it_is_printed_leads_to_samples_and_judgements(run: RecordedRun) -> None:
    number = entry(run, "grpo", "reward")
    text = why(run, f"{number['value']:.3f}", "reward", "grpo").stdout
    assert text.splitlines()[0] == (
        f"{number['value']:.3f} [{number['low']:.3f}, {number['high']:.3f}]  reward of grpo, "
        f"greedy, n = {number['n']}"
    )
    for said in ("again from the samples: the same", number["protocol_name"], "States that"):
        assert said in text
    assert "| <answer>" in text, "the answer itself"


def test_shown_samples_are_those_of_the_samples_file(run: RecordedRun) -> None:
    (found,) = figures(run, "reward", "grpo")
    rows = load_samples(Path(found["files"]["samples"]))
    shown = {(s["sample_id"], s["number"]): s["value"] for s in found["samples"]}
    assert shown == {(r["sample_id"], r["sample_index"]): r["reward"] for r in rows}
    values = [s["value"] for s in found["samples"]]
    assert values == sorted(values)
    sample = found["sample"]
    row = next(r for r in rows if r["sample_id"] == sample["which"]["sample_id"])
    assert sample["answer"] == row["response_text"]
    assert sample["judgements"] == json.loads(row["judgements"])
    assert sample["question"] in sample["prompt"]


def test_a_number_that_cannot_be_recomputed_is_reported(run: RecordedRun, tmp_path: Path) -> None:
    """As of an edited result."""
    copy = tmp_path / "runs"
    shutil.copytree(run.workspace.root, copy)
    path = copy / "stages" / run.stage("evaluate-grpo").id / "result.json"
    record = json.loads(path.read_text())
    position = next(
        i for i, e in enumerate(record["report"]["evaluations"]) if e["metric"] == "reward"
    )
    record["report"]["evaluations"][position]["value"] = 9.75
    path.write_text(json.dumps(record))
    done = CliRunner().invoke(why_command, ["9.75", f"workspace={copy}"])
    assert "differs from the record" in done.stdout


def test_several_numbers_are_listed_with_how_to_narrow(run: RecordedRun) -> None:
    done = why(run, "format_valid")
    assert "format_valid is 4 recorded numbers" in done.stdout
    assert f"refiner why format_valid base greedy {run.stage('evaluate-base').id}" in done.stderr
    assert len(figures(run, "format_valid")) == 4
    assert len(figures(run, "format_valid", "base", "greedy")) == 1


@given(st.floats(-1e6, 1e6), st.integers(0, 6))
def test_a_number_is_found_by_any_count_of_digits(value: float, digits: int) -> None:
    assert parse_query([f"{value:.{digits}f}"]).means(value)
    assert parse_query([f"{100 * value:.{digits}f}%"]).means(value)
    assert parse_query([f"{value:.{digits}e}"]).means(value)
    assert not parse_query([f"{value:.{digits}f}"]).means(value + 2.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("0.123456",), "nearest are"),
        (("rewardd",), "Did you mean 'reward'?"),
        (("0.1", "0.2"), "ask for one number at a time"),
        (("reward", "step99"), "has no number that is 'reward step99'"),
        (("",), "was given nothing"),
    ],
)
def test_an_unknown_number_is_answered_with_near_ones(run, capsys, words, said) -> None:
    assert main(["why", *words, f"workspace={run.workspace.root}"]) == 2
    assert said in capsys.readouterr().err

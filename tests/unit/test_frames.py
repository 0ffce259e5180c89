"""Records as dataframes: missing values stay missing, and only wanted columns are read.

Runs are recorded without training (tests.support.recorded_run); sweeps are drawn.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from flows import api
from flows.frames.columns import TABLES
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.records import AttemptOutcome
from tests.support.recorded_run import RecordedRun
from tests.support.recorded_sweep import RecordedSweep


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A run whose GRPO was preempted once and whose card is not done yet."""
    run = RecordedRun(tmp_path_factory.mktemp("frames") / "runs")
    run.data()
    run.train("sft")
    run.fail("grpo", AttemptOutcome("preempted", "resume", "the node was taken", step=2))
    run.train("grpo")
    attempt = run.workspace.layout.attempt(run.stage("grpo").id, 2)
    lines = [
        {"step": 1, "metrics": {"scores": 0.5, "grad_norm": None}},
        {"step": 1, "metrics": {"val/held_out": 0.25}},
        {"step": 2, "metrics": {"scores": 0.75, "grad_norm": 2.0}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    attempt.metrics.write_text(text + '{"step": 3, "met')  # a writer that is in the middle of it
    run.evaluate("evaluate-grpo", quality=0.5)
    return run


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> RecordedSweep:
    """Two arms; of one of them a seed is not done."""
    sweep = RecordedSweep(
        tmp_path_factory.mktemp("frames") / "runs",
        ("base", "more"),
        seeds=(1, 2),
        prompts=8,
        steps=3,
        without=[("more", 2)],
    )
    sweep.write()
    return sweep


def _frames(run: RecordedRun, sweep: RecordedSweep) -> Iterator[tuple[str, pd.DataFrame]]:
    root, other = run.workspace.root, sweep.workspace.root
    yield "stages", api.stages_frame(workspace=root)
    yield "metrics", api.metrics_frame(workspace=root)
    yield "rollouts", api.rollouts_frame(workspace=root)
    yield "samples", api.samples_frame(workspace=root)
    yield "evaluations", api.evaluations_frame(workspace=root)
    yield "incidents", api.incidents_frame(workspace=root)
    yield "trials", api.trials_frame("drawn", other)
    yield "comparisons", api.comparisons_frame("drawn", other)


def test_every_column_has_the_type_that_is_documented(
    made: RecordedRun, drawn: RecordedSweep
) -> None:
    for name, frame in _frames(made, drawn):
        assert len(frame), name
        said = api.describe_columns(name).set_index("column")["dtype"]
        for column in frame:
            there = str(frame[column].dtype)
            assert there == said.get(column, "float64") or column.startswith("level/"), column
        there = [c for c in said.index if c in frame]
        assert list(frame.columns[: len(there)]) == there


def test_a_step_is_one_row_and_what_is_not_finite_is_missing(made: RecordedRun) -> None:
    frame = api.metrics_frame(workspace=made.workspace.root)
    assert frame["step"].tolist() == [1, 2]
    assert frame["scores"].tolist() == [0.5, 0.75]
    assert frame["grad_norm"].isna().tolist() == [True, False]
    assert frame["val/held_out"].isna().tolist() == [False, True]
    assert list(api.metrics_frame(workspace=made.workspace.root, columns=["scores"])) == [
        "step",
        "scores",
    ]


def test_deleted_rollouts_raise_an_error(made: RecordedRun, tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs")
    run.data()
    assert len(api.rollouts_frame(workspace=run.workspace.root)) == 0, "nothing was sampled yet"
    assert list(api.rollouts_frame(workspace=run.workspace.root)) == list(TABLES["rollouts"])
    run.train("sft")
    run.train("grpo")
    for file in run.workspace.layout.attempt(run.stage("grpo").id, 1).rollouts.iterdir():
        file.unlink()
    with pytest.raises(DataError, match="no rollouts"):
        api.rollouts_frame(workspace=run.workspace.root)
    assert len(api.stages_frame(workspace=run.workspace.root))


def test_samples_are_those_that_numbers_were_made_of(made: RecordedRun) -> None:
    root = made.workspace.root
    samples = api.samples_frame(workspace=root, model="grpo", decoding="greedy")
    numbers = api.evaluations_frame(workspace=root)
    said = numbers[(numbers["model"] == "grpo") & (numbers["metric"] == "format_valid")]
    assert said["value"].item() == pytest.approx(samples["format_valid"].mean())
    assert said["n"].item() == samples["sample_id"].nunique()
    assert numbers["model"].iloc[-1] == "random_copier"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"f": "metrics_frame", "stage": "grop"}, "Did you mean 'grpo'"),
        ({"f": "metrics_frame", "columns": ["score"]}, "Did you mean 'scores'"),
        ({"f": "rollouts_frame", "steps": 100}, "no rollouts of step 100"),
        ({"f": "rollouts_frame", "stage": "sft"}, "samples no rollouts"),
        ({"f": "samples_frame", "model": "gpt"}, "evaluated no model 'gpt'"),
        ({"f": "stages_frame", "run": "nonesuch"}, "has no run 'nonesuch'"),
    ],
)
def test_unknown_names_are_refused_with_near_ones(
    made: RecordedRun, call: dict[str, object], said: str
) -> None:
    function = getattr(api, str(call["f"]))
    with pytest.raises(ConfigurationError, match=said):
        function(workspace=made.workspace.root, **{k: v for k, v in call.items() if k != "f"})


def test_trials_have_their_arms_levels_and_states(drawn: RecordedSweep) -> None:
    frame = api.trials_frame("drawn", drawn.workspace.root).set_index(["arm", "seed"])
    assert frame.loc[("more", 1), "level/arm"] == "more"
    assert frame.loc[("more", 2), "state"] == "waiting"
    assert bool(frame.loc[("base", 1), "baseline"])
    assert pd.isna(frame.loc[("base", 1), "judge_calls"]), "nobody counted: that is not 0"

"""The shipped example runs, prints the numbers of the report, and draws a picture.

Its sweep is drawn, with rollouts beside it; matplotlib draws without a screen.
"""

import os
import re
import sys
from pathlib import Path

import pytest

from flows import api
from infra.store.traces import encode_rollouts
from tests.support.command import finished
from tests.support.recorded_sweep import RecordedSweep

ROOT = Path(__file__).parents[2]
pytest.importorskip("matplotlib", reason="needs the extra `analysis`")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> RecordedSweep:
    """Two arms, one of them truly better, and the last step's rollouts of the baseline."""
    made = RecordedSweep(
        tmp_path_factory.mktemp("example") / "runs",
        ("base", "more"),
        prompts=30,
        steps=8,
        effects={"more": 0.05},
    )
    made.write()
    folder = made.workspace.layout.attempt(made.stages("base", 1)["grpo"], 1).rollouts
    folder.mkdir()
    row = {"step": 8, "sample_id": "row-00001", "sample_index": 0, "response_text": "<answer>42"}
    rows = [{**row, "reward": r, "reward/rubric": r / 10, "judgements": "[]"} for r in (1.0, 7.5)]
    for step in (1, 2, 3, 8):
        data = encode_rollouts([{**row, "step": step} for row in rows])
        (folder / f"step-{step:08d}.parquet").write_bytes(data)
    return made


@pytest.fixture(scope="module")
def ran(sweep: RecordedSweep) -> tuple[str, Path]:
    """What it prints, and where its pictures lie."""
    out = sweep.root.parent / "pictures"
    command = [sys.executable, "-m", "flows.examples.compare_two_arms"]
    command += [str(sweep.root), sweep.name, str(out)]
    done = finished(command, ROOT, {**os.environ, "MPLBACKEND": "Agg"})
    assert done.code == 0, done.stderr
    return done.stdout, out


def test_its_numbers_are_those_of_the_report(ran: tuple[str, Path], sweep: RecordedSweep) -> None:
    frame = api.comparisons_frame(sweep.name, sweep.root)
    (said,) = frame[frame["primary"] & (frame["arm"] == "more")].to_dict("records")
    printed = re.search(r"^(\S+) \[(\S+), (\S+)\], p = (\S+)$", ran[0], re.MULTILINE)
    wanted = [said[k] for k in ("difference", "difference_low", "difference_high")]
    assert [float(x) for x in printed.groups()[:3]] == pytest.approx(wanted, abs=6e-5)
    assert float(printed[4]) == pytest.approx(said["p"], rel=6e-3)
    assert f"{said['n']} prompts, {said['seeds']} seeds" in ran[0]
    assert f"{said['metric']} of grpo, sampled: more minus base" in ran[0]


def test_every_python_snippet_of_the_readme_runs(sweep: RecordedSweep) -> None:
    text = (ROOT / "flows" / "README.md").read_text(encoding="utf-8")
    chapter = text.partition("## From Python")[2].partition("\n## ")[0]
    names = {"run": f"{sweep.name}:base/seed1", "workspace": sweep.root}
    blocks = re.findall(r"```python\n(.*?)```", chapter, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, names)

"""A workspace of an older refiner: opened, shown, resumed and extended by this one.

``tests/data/recorded`` describes it. It is never made again: what this code cannot read of it, it
cannot read of our users' workspaces either.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import api
from flows.cli.main import main
from refiner_core.models import builtin_model_dir
from tests.support import goldens
from tests.support.command import Finished, refiner

RECORDED = Path(__file__).resolve().parents[1] / "data" / "recorded"
FACTS = json.loads((RECORDED / "facts.json").read_text())
#: Weights of the recorded code snapshot that are left out of the archive, since the package ships
#: the same bytes.
SHIPPED = {"tiny": "tiny", "tiny_tools": "tiny-tools"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded folder, in another place than it was made in."""
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(RECORDED / "workspace.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (snapshot,) = (folder / "runs" / "code").iterdir()
    for folder_name, name in SHIPPED.items():
        target = snapshot / "refiner_core" / "models" / folder_name / "model.safetensors"
        shutil.copyfile(builtin_model_dir(name) / "model.safetensors", target)
    return folder


@pytest.fixture
def show(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command that only reads, in this process; what it prints."""
    monkeypatch.chdir(place)

    def called(*args: str) -> str:
        assert main([*args]) == 0, capsys.readouterr()
        return capsys.readouterr().out

    return called


def call(place: Path, *args: str) -> Finished:
    done = refiner(*args, cwd=place)
    assert done.code == 0, (args, done.stdout, done.stderr)
    return done


def test_its_runs_are_listed_and_nothing_is_done_again(show: Callable[..., str]) -> None:
    listed = json.loads(show("runs", "--all", "workspace=runs", "--json"))["runs"]
    assert [(row["run"], row["state"] == "done") for row in listed[::-1]] == [
        (row["run"], row["state"] == "finished") for row in FACTS["runs"]
    ]
    planned = json.loads(show("plan", "recipe.yaml", "workspace=runs", "--json"))
    assert {s["name"]: s["fingerprint"] for s in planned["stages"]} == FACTS["fingerprints"]
    assert {s["action"] for s in planned["stages"]} == {"skip"}


def test_rows_from_python_still_have_their_fields_as_attributes(place: Path) -> None:
    report: Any = api.report_of_run(FACTS["runs"][0]["run"], place / "runs")
    with pytest.warns(DeprecationWarning, match=r"row.metric is row\['metric'\] now"):
        assert report.numbers[0].metric == report.numbers[0]["metric"]
    with pytest.raises(AttributeError, match=r"has no 'metrics'; it has .*metric"):
        report.numbers[0].metrics  # noqa: B018
    run = report.run
    assert api.diff_runs(run, run, place / "runs").equal  # type: ignore[attr-defined]
    (found, *_) = api.find_numbers([f"{report.numbers[0]['value']:.3f}"], place / "runs")
    with pytest.warns(DeprecationWarning, match="row.agrees is"):
        assert api.explain_number(found, place / "runs").agrees is not False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("status-all", ("status", "--all")),
        ("status-finished", ("status", FACTS["finished"])),
        ("status-interrupted", ("status", FACTS["interrupted"])),
        ("status-sweep", ("status", "sweep")),
        ("report-run", ("report", FACTS["finished"], "--out", "page")),
        ("report-sweep", ("report", "sweep", "--out", "sweep-page")),
    ],
)
def test_scripts_find_known_keys(show: Callable[..., str], name: str, args: Any) -> None:
    printed = json.loads(show(*args, "workspace=runs", "--json"))
    assert goldens.shape(printed) == goldens.read(name)
    if name == "report-run":
        rows = printed["numbers"]
        found = {(row["model"], row["decoding"], row["metric"]): row["value"] for row in rows}
        for model, decoding, metric, value in FACTS["numbers"]:
            assert found[model, decoding, metric] == value


def test_its_publication_and_its_nights_are_shown(place: Path, show: Callable[..., str]) -> None:
    show("card", "show", FACTS["finished"], "workspace=runs")
    (published,) = [p for p in (place / "runs/published/refiner").iterdir() if "@" not in p.name]
    show("card", "check", str(published))
    assert FACTS["night"] in show("nightly", "history", "night.yaml", "workspace=runs")


def test_an_interrupted_run_is_resumed_from_its_checkpoint(place: Path) -> None:
    call(place, "resume", FACTS["interrupted"], "workspace=runs", "--no-server", "-q")
    status = call(place, "status", FACTS["interrupted"], "workspace=runs", "--json").json
    assert {stage["state"] for stage in status["stages"]} == {"done"}
    attempts = place / "runs/stages" / FACTS["interrupted_grpo"] / "attempts"
    said = re.search(
        r"(?:going on|resuming) from the checkpoint of step (\d+)",
        (max(attempts.iterdir()) / "log.txt").read_text(),
    )
    assert said
    assert int(said[1]) >= FACTS["interrupted_step"]


def test_it_is_extended_without_training_again(place: Path) -> None:
    only = ("stages=[data,sft,grpo,evaluate]", "evaluate.models=[grpo]")
    args = ("recipe.yaml", "evaluate.num_samples=3", *only, "workspace=runs")
    planned = call(place, "plan", *args, "--json").json["stages"]
    trains = {s["name"]: s["action"] for s in planned if s["name"] in ("data", "sft", "grpo")}
    assert trains == {"data": "skip", "sft": "skip", "grpo": "skip"}
    call(place, "run", *args, "--no-server", "-q")
    sweep = call(place, "sweep", "sweep.yaml", "workspace=runs", "--dry-run", "--json").json
    assert (sweep["stages"]["to_run"], sweep["stages"]["done"]) == (0, sweep["stages"]["unique"])
    call(place, "sweep", "sweep.yaml", "workspace=runs", "--yes", "--no-server", "-q")

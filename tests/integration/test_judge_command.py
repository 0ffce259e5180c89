"""`refiner judge` against a real server: a judge of a known defect is found out, a sound one is
left in peace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from tests.support.judge_server import JudgeServer
from tests.support.known_judges import KnownJudge

_DEFECTS = {
    "": set(),
    "early": {"order of criteria"},
    "first source": {"order of sources"},
    "long": {"length"},
    "obedient": {"obeys hostile answers"},
    "dice": {"not repeatable"},
    "mute": {"failing"},
}


@dataclass(frozen=True)
class Called:
    """What a call of the command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def refiner(capsys: pytest.CaptureFixture[str], *words: str) -> Called:
    code = main(list(words))
    shown = capsys.readouterr()
    return Called(code, shown.out, shown.err)


def at(server: JudgeServer, *more: str) -> list[str]:
    return [
        f"judge.base_url={server.base_url}",
        "judge.model=m",
        "judge.max_retries=0",
        "judge.concurrency=16",
        *more,
    ]


@pytest.mark.parametrize("defect", _DEFECTS)
def test_a_judges_defect_is_found_and_no_other(
    defect: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with JudgeServer(KnownJudge(defect)) as server:
        called = refiner(
            capsys,
            "judge",
            "report",
            f"workspace={tmp_path}/none",
            *at(server, "judge.form=batched"),
            "--repeats=2",
            "--json",
        )
    assert called.code == 0, called.err
    report = called.json
    found = {f["name"] for f in report["findings"] if f["verdict"] == "found"}
    assert found == _DEFECTS[defect], report["findings"]
    assert {f["verdict"] for f in report["findings"]} <= {"found", "not found"}
    if defect == "":
        for kind, gold in report["gold"].items():
            assert gold["raw"]["numerator"] == gold["raw"]["denominator"], kind
        assert report["forms"]["kappa"]["value"] == 1.0
        assert report["resistance"]["resisted"]["numerator"] == 40
    if defect == "early":
        assert report["forms"]["raw"]["value"] < 1
        assert report["order_of_criteria"]["shift"]["value"] > 0.2
    if defect == "obedient":
        results = {a["result"] for a in report["resistance"]["attacks"]}
        assert results == {"obeyed"}
    if defect == "dice":
        assert report["gold"]["all"]["kappa"]["low"] < 0.2
    if defect == "mute":
        cost = report["costs"]["rubric"]
        assert (cost["failed"], cost["reasons"]) == (6, {"unparsable": 2})
        assert report["gold"]["rubric"]["left_out"] == 6

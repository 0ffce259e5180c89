"""Nightly evaluations: one line per night and checkpoint, alerts, channels, files and weights."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.nightly.checkpoints import CheckpointNotReady, resolve
from flows.nightly.history import status_json
from flows.nightly.night import check_nightly, load_nightly, run_night, shipped_nightlies
from infra.host.processes import ProcessId
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError
from refiner_core.nightly.definition import Checkpoint, CheckpointSource
from refiner_core.nightly.page import VIEWS, trend_page
from tests.support.git_hub import LoopbackHub
from tests.support.hook import Hook
from tests.support.nightly import NightLab
from tests.support.recorded_run import RecordedRun

HOSTILE = "<script>alert(1)</script>"
DAYS = [f"2026-11-{day:02d}" for day in range(1, 31)]


@pytest.fixture
def lab(tmp_path: Path) -> NightLab:
    return NightLab(tmp_path)


# ---------------------------------------------------------------- once


def test_a_night_is_a_line_for_each_checkpoint_and_a_second_call_changes_nothing(
    lab: NightLab,
) -> None:
    first = lab.both(DAYS[0])
    assert (first.state, [e.state for e in first.entries]) == ("done", ["kept", "kept"])
    before = {p: p.read_bytes() for p in lab.records.folder.rglob("*.json")}
    again = lab.night(DAYS[0], at="23:00")
    assert again.state == "done"
    after = {p: p.read_bytes() for p in lab.records.folder.rglob("*.json")}
    assert [r.key for r in lab.records.rows()] == sorted(r.key for r in lab.records.rows())
    assert len(lab.records.rows()) == 2
    assert {p: after[p] for p in before} == before, "history is never rewritten"


def test_unchanged_weights_keep_their_numbers_and_the_canary_is_another_stage_each_night(
    lab: NightLab,
) -> None:
    for day in DAYS[:3]:
        lab.both(day)
    rows = lab.records.rows()
    model = [r for r in rows if not r.canary]
    canary = [r for r in rows if r.canary]
    assert len({r.stage for r in model}) == 1
    assert len({r.stage for r in canary}) == 3
    assert len({r.protocol for r in rows}) == 1, "the occasion is no part of the protocol"


def test_a_night_under_a_live_process_is_left_alone(lab: NightLab) -> None:
    lab.measure("canary", DAYS[0])
    lab.measure("model", DAYS[0])
    assert lab.records.take_night(DAYS[0], 0)  # this very process: it lives
    busy = lab.night(DAYS[0])
    assert (busy.state, busy.exit_code) == ("busy", 0)
    assert f"process {os.getpid()} on" in busy.message
    assert lab.records.rows() == []
    lab.records.leave_night(DAYS[0], 1)
    assert lab.night(DAYS[0]).state == "done"


def test_a_night_of_a_dead_process_is_continued(lab: NightLab) -> None:
    lab.measure("canary", DAYS[0])
    lab.measure("model", DAYS[0])
    path = lab.records.folder / "nights" / DAYS[0] / "turns" / "0001.json"
    path.parent.mkdir(parents=True)
    gone = ProcessId(ProcessId.of().host, os.getpid(), 1.0)
    path.write_text(json.dumps({"process": str(gone)}))
    assert lab.night(DAYS[0]).state == "done"


# ---------------------------------------------------------------- late


def test_a_night_is_the_occasion_and_not_the_moment(tmp_path: Path) -> None:
    lab = NightLab(tmp_path, timezone="America/New_York")
    lab.measure("canary", DAYS[0])
    lab.measure("model", DAYS[0])
    # Three in the morning of the first in New York is 07:00 UTC (after the clocks change: 08:00).
    assert lab.night(DAYS[1], at="05:00").night == DAYS[0]


# ---------------------------------------------------------------- change


def told(lab: NightLab) -> list[tuple[str, str, str, str]]:
    return [(a["checkpoint"], a["kind"], a["cause"], a["night"]) for a in lab.records.alerts()]


@pytest.mark.slow
def test_a_regression_and_its_recovery_are_reported_once(lab: NightLab) -> None:
    for number, day in enumerate(DAYS[:12]):
        bad = 4 <= number < 8
        lab.train(f"weights {number}")
        lab.both(day, model=0.35 if bad else 0.5)
    assert told(lab) == [
        ("model", "change", "model", DAYS[5]),
        ("model", "recovery", "model", DAYS[9]),
    ]
    first = lab.records.alerts()[0]
    assert first["difference"] == pytest.approx(-0.15, abs=0.02)
    assert (first["weights_changed"], first["direction"]) == (True, "drop")
    assert "The canary has not moved: the model has changed." in first["text"]
    trends = lab.reading()
    hostile = replace(trends, nightly=replace(trends.nightly, name=HOSTILE))
    page = trend_page(hostile, "2026-11-30T04:00:00+00:00")
    assert HOSTILE not in page
    assert "default-src 'none'" in page
    assert [alert for alert in trends.alerts if alert["night"] not in page] == []
    assert [title for _, title in VIEWS if title not in page] == []


@pytest.mark.slow
def test_a_lenient_judge_is_drift_and_no_progress(lab: NightLab) -> None:
    for number, day in enumerate(DAYS[:12]):
        lenient = 0.1 if number >= 8 else 0.0
        lab.train(f"weights {number}")
        served = "judge-2" if lenient else "judge-1"
        lab.both(day, 0.5 + lenient, 0.5 + lenient, served=served)
    assert told(lab) == [("canary", "change", "drift", DAYS[9])]
    alert = lab.records.alerts()[0]
    assert alert["changed"]["judge.served"] == ["judge-1", "judge-2"]
    assert "no change of a model" in alert["text"]
    assert "model" in alert["text"].rpartition("compare with older ones: ")[2]


def test_another_protocol_starts_another_series(lab: NightLab) -> None:
    for day in DAYS[:3]:
        lab.both(day, model=0.5)
    lab.write(overrides="- evaluate.seed=99\n  - grpo.response_length=40")
    for day in DAYS[3:6]:
        lab.both(day, canary=0.2, model=0.2)
    assert told(lab) == [], "numbers of two protocols are never held against each other"
    keys = [s.key for s in lab.reading().series]
    assert len({k.protocol for k in keys}) == 2


# ---------------------------------------------------------------- channels


@pytest.mark.slow
def test_a_failed_channel_is_recorded_and_fails_no_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.notifying.sender._PAUSE_S", 0.0)
    command = f"cat >> {tmp_path}/told; echo >> {tmp_path}/told; printenv REFINER_ALERT_TITLE"
    alarms = f"channels: [{{command: '{command}'}}, {{url: LAB_HOOK}}]"
    lab = NightLab(tmp_path / "lab", alerts=alarms)
    with Hook(status=500) as hook:
        monkeypatch.setenv("LAB_HOOK", hook.address)
        for number, day in enumerate(DAYS[:6]):
            lab.train(f"weights {number}")
            outcome = lab.both(day, model=0.5 if number < 3 else 0.3)
            if number == 4:
                assert (outcome.state, len(outcome.alerts)) == ("done", 1)
                (why,) = outcome.undelivered.values()
                assert "HTTP 500" in why
            if number == 5:
                assert outcome.undelivered == {}
    said = (tmp_path / "told").read_text().strip().splitlines()
    assert [json.loads(line)["checkpoint"] for line in said] == ["model"], "once"
    assert len(hook.bodies) == 3, "tries in one night, none in the next"
    assert hook.bodies[-1]["text"].startswith("lab: oracle (greedy) of model dropped by")
    status = status_json(lab.reading(), lab.records, datetime.now(UTC))
    assert [list(whys) for whys in status["undelivered"].values()] == [["LAB_HOOK"]]
    whole = "".join(p.read_text() for p in lab.workspace.root.rglob("*.json"))
    assert "secret-path" not in whole


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("schedule:", "shedule:", "Did you mean 'schedule'"),
        ('"0 3 * * *"', '"0 3,4 * * *"', "two occasions in one night"),
        ("timezone: UTC", "timezone: Mars/Base", "no time zone"),
        ("name: model,", "name: canary,", "Two checkpoints are called canary"),
        ("metrics: [oracle]", "metrics: [orcale]", "Did you mean 'oracle'"),
        ("canary: {folder", "canary: {newest: {recipe: tiny}, xfolder", "no field `xfolder`"),
        ("recipe: tiny", "recipe: tinny", "Did you mean 'tiny'"),
        ("timezone: UTC", "timezone: UTC\ntimezone: UTC", "has `timezone` .line [0-9]+. twice"),
        ("timezone: UTC", "timezone: " + "{a: " * 500 + "1" + "}" * 500, "nested too deeply"),
        ("- tracking.wandb=disabled", "- model.name_or_path=x", "named by `checkpoints`"),
        ("  metrics: [oracle]", "  channels: [{url: 'http://x/y'}]", "name of the environment"),
    ],
)
def test_invalid_files_are_refused_by_field(lab: NightLab, old: str, new: str, says: str) -> None:
    path = lab.root / "lab.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigurationError, match=says):
        check_nightly(str(path))


def test_a_movable_or_changed_canary_is_refused(lab: NightLab) -> None:
    path = lab.root / "lab.yaml"
    text = path.read_text()
    line = next(li for li in text.splitlines() if li.startswith("canary:"))
    moving = text.replace(line, "canary: {hub: org/name, revision: main}")
    path.write_text(moving)
    with pytest.raises(ConfigurationError, match="which may move"):
        load_nightly(str(path))
    path.write_text(text.replace(line, line.partition(", digest")[0] + "}"))
    with pytest.raises(ConfigurationError, match=r"digest: [0-9a-f]{64}"):
        check_nightly(str(path))
    with pytest.raises(ConfigurationError, match="not pinned"):
        run_night(load_nightly(str(path)))
    path.write_text(text)
    lab.both(DAYS[0])
    (lab.root / "canary" / "model.safetensors").write_text("something else")
    with pytest.raises(ConfigurationError, match="not those that were pinned"):
        lab.night(DAYS[1])


def test_the_shipped_file_can_be_carried_out(tmp_path: Path) -> None:
    assert list(shipped_nightlies()) == ["tiny-nightly"]
    notes = check_nightly("tiny-nightly", [f"workspace={tmp_path}/none"]).warnings
    assert any("latest" in note for note in notes)
    assert not (tmp_path / "none").exists(), "to check changes nothing"


def test_a_night_that_has_passed_is_not_evaluated_any_more(lab: NightLab) -> None:
    assert lab.night(DAYS[4], wanted=DAYS[2]).state == "missed"
    assert lab.records.nights() == []
    lab.both(DAYS[4])
    early = lab.night(DAYS[4], wanted=DAYS[2])
    assert (early.state, lab.records.nights()) == ("missed", [DAYS[4]])
    assert DAYS[4] in early.message


# ---------------------------------------------------------------- which weights


def test_the_newest_of_a_run_is_what_has_come_furthest(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs", "publish.which=every-save")
    newest = Checkpoint("newest", CheckpointSource("newest", "recipe tiny"))
    with pytest.raises(CheckpointNotReady, match="finished"):
        resolve(newest, run.workspace)
    run.data()
    run.train("sft")
    assert resolve(newest, run.workspace).what == f"{run.stage('sft').id} of {run.run.run}"
    run.export(2)
    step = resolve(newest, run.workspace)
    assert run.stage("export-step2").id in step.what, "a checkpoint of a training that goes on"
    run.train("grpo")
    last = resolve(newest, run.workspace)
    assert run.stage("grpo").id in last.what
    assert last.digest != step.digest
    of_run = Checkpoint("newest", CheckpointSource("newest", f"run {run.run.run}"))
    assert resolve(of_run, run.workspace).digest == last.digest
    stage = Checkpoint("sft", CheckpointSource("stage", run.stage("sft").id))
    assert resolve(stage, run.workspace).ref.endswith("/output/model")
    with pytest.raises(ConfigurationError, match="no finished stage"):
        resolve(Checkpoint("x", CheckpointSource("stage", "grpo-000000000000")), run.workspace)


def test_a_branch_of_the_hub_means_the_commit_that_it_is_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LoopbackHub(tmp_path / "hub") as hub:
        for name, value in (("HF_ENDPOINT", hub.url), ("HF_TOKEN", hub.token)):
            monkeypatch.setenv(name, value)
        import huggingface_hub

        api = huggingface_hub.HfApi(endpoint=hub.url, token=hub.token)
        api.create_repo("me/model")
        (tmp_path / "config.json").write_text("{}")
        made = api.upload_file(
            path_or_fileobj=tmp_path / "config.json", path_in_repo="config.json", repo_id="me/model"
        )
        workspace = Workspace.open(tmp_path / "runs")
        found = resolve(Checkpoint("m", CheckpointSource("hub", "me/model", "main")), workspace)
        assert (found.revision, found.digest) == (made.oid, f"hub:me/model@{made.oid}")
        with pytest.raises(ConfigurationError, match="no revision 'nope'"):
            resolve(Checkpoint("m", CheckpointSource("hub", "me/model", "nope")), workspace)

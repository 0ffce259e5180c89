"""Nightly evaluations: lines, alerts, channels, weights, and changes over many nights."""

import json
import os
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from flows.nightly.checkpoints import CheckpointNotReady, resolve
from flows.nightly.history import status_json
from flows.nightly.night import check_nightly, load_nightly, run_night, shipped_nightlies
from infra.host.processes import ProcessId
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError
from refiner_core.nightly.changes import (
    Change,
    NightPoint,
    Values,
    compare,
    night_noise,
    read_series,
    reportable,
)
from refiner_core.nightly.definition import Checkpoint, CheckpointSource, Schedule
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


# ---------------------------------------------------------------- changes over nights


PROMPTS = tuple(f"p{i:03d}" for i in range(60))
NIGHTS = [(date(2026, 1, 1) + timedelta(days=i)).isoformat() for i in range(60)]
#: Spread of one prompt's score from night to night, and the error of a difference that it makes.
SPREAD = 0.1
ERROR = SPREAD * (2 / len(PROMPTS)) ** 0.5
Floats = npt.NDArray[np.float64]


class Told(NamedTuple):
    """Reported changes of one series and its canary."""

    canary: list[Change]
    model: list[Change]


def series(rng: np.random.Generator, shared: Floats, own: Floats) -> list[NightPoint]:
    """A fresh measurement each night: prompts differ, nights add ``shared`` and ``own``."""
    base = rng.uniform(0.2, 0.8, len(PROMPTS))
    noise = rng.normal(0, SPREAD, (len(shared), len(PROMPTS)))
    values = base + noise + (shared + own)[:, None]
    return [NightPoint(n, n, n, Values(PROMPTS, v)) for n, v in zip(NIGHTS, values, strict=False)]


def reported(seed: int, nights: int = 60, *, own: Any = 0.0, shared: Any = 0.0) -> Told:
    rng = np.random.default_rng(seed)
    whole = np.zeros(nights) + shared
    canary = series(rng, whole, np.zeros(nights))
    model = series(rng, whole, np.zeros(nights) + own)
    return Told(
        reportable(read_series(canary, None)[0], "any", canary=True),
        reportable(read_series(model, canary)[0], "any", canary=False),
    )


def from_night(number: int, amount: float, nights: int = 60) -> Floats:
    """Nothing, and ``amount`` from a night on."""
    return np.where(np.arange(nights) >= number, amount, 0.0)


@pytest.mark.slow
def test_a_thousand_quiet_series_hardly_ever_alarm_in_sixty_nights() -> None:
    """500 pairs of a model and a canary, each measured afresh in each of 60 nights. At most one
    series in a hundred may alarm; measured at this size: about one in a thousand."""
    found = [reported(seed) for seed in range(500)]
    alarms = sum(bool(t.canary) + bool(t.model) for t in found)
    assert alarms <= 10, f"{alarms} of 1000 series"


def test_nights_that_move_everything_a_little_do_not_alarm_either() -> None:
    """What all prompts share in a night (load, other batches) is no sampling of prompts: a paired
    interval alone would alarm in most series."""
    alarms = 0
    for seed in range(100):
        load = np.random.default_rng(10_000 + seed).normal(0, ERROR, 60)
        found = reported(seed, shared=load)
        alarms += bool(found.canary) + bool(found.model)
    assert alarms <= 6, f"{alarms} of 200 series"


@pytest.mark.parametrize("amount", [6.0, 10.0])
def test_a_regression_of_six_errors_is_found_within_three_nights(amount: float) -> None:
    found = [reported(s, 33, own=from_night(30, -amount * ERROR, 33)).model for s in range(100)]
    soon = [t for t in found if t and t[-1].night in NIGHTS[30:33]]
    assert len(soon) >= 90
    assert all(t[-1].direction == -1 for t in soon)
    as_model = sum(t[-1].cause == "model" for t in soon)
    assert as_model >= 0.75 * len(soon), "the others are told too, as not clear"


def test_a_lenient_judge_is_never_taken_for_progress() -> None:
    """From night 30 on every score is higher, of the canary and of the models alike."""
    found = [reported(seed, 40, shared=from_night(30, 8 * ERROR, 40)) for seed in range(150)]
    drift = sum(any(c.cause == "drift" for c in t.canary) for t in found)
    progress = sum(any(c.cause == "model" for c in t.model) for t in found)
    assert drift >= 145
    assert progress <= 1, f"{progress} of 150 called progress"


def test_a_change_of_one_night_is_not_reported() -> None:
    once = np.zeros(60)
    once[30] = -12 * ERROR
    assert not any(reported(seed, own=once).model for seed in range(30))


def test_a_recovery_follows_a_reported_change() -> None:
    own = from_night(20, -12 * ERROR) - from_night(40, -12 * ERROR)
    for seed in range(10):
        changes = reported(seed, own=own).model
        assert [(c.kind, c.direction) for c in changes] == [("change", -1), ("recovery", 1)]


def test_only_the_relevant_direction_is_reported() -> None:
    rng = np.random.default_rng(0)
    canary = series(rng, np.zeros(40), np.zeros(40))
    better = read_series(series(rng, np.zeros(40), from_night(30, 12 * ERROR, 40)), canary)[0]
    assert [c.direction for c in better] == [1]
    assert reportable(better, "drop", canary=False) == []
    assert reportable(better, "rise", canary=False) == list(better)


def test_without_a_canary_no_change_of_the_model_is_claimed() -> None:
    rng = np.random.default_rng(0)
    model = series(rng, np.zeros(40), from_night(30, -12 * ERROR, 40))
    canary = [p for p in series(rng, np.zeros(40), np.zeros(40)) if p.night < NIGHTS[30]]
    (change,) = read_series(model, canary)[0]
    assert (change.cause, change.canary) == ("unclear", None)


def test_the_canary_speaks_of_the_nights_in_which_numbers_were_made() -> None:
    """A number that is kept while the judge drifts was made before: it has no part in it."""
    rng = np.random.default_rng(1)
    canary = series(rng, from_night(10, 0.5, 20), np.zeros(20))
    first = series(rng, np.zeros(1), np.zeros(1))[0]
    kept = [NightPoint(n, NIGHTS[0], first.digest, first.values) for n in NIGHTS[:20]]
    assert read_series(kept, canary)[0] == ()


def test_few_nights_know_little_of_their_own_spread() -> None:
    quiet, restless = night_noise([0.5] * 4), night_noise([0.5, 0.51, 0.49, 0.5])
    assert quiet.spread == 0
    assert restless.freedom < night_noise([0.5, 0.51] * 20).freedom
    a, b = Values(PROMPTS, np.full(60, 0.5)), Values(PROMPTS, np.full(60, 0.53))
    assert compare(b, a, quiet).beyond(3.0)
    assert not compare(b, a, restless).beyond(3.0)


def test_prompts_that_only_one_side_has_are_left_out() -> None:
    a = Values.of(["x", "y", "z"], [0.1, 0.2, 0.3])
    b = Values.of(["z", "y", "w"], [0.5, 0.4, 0.9])
    found = compare(b, a)
    assert (found.n, found.difference) == (2, pytest.approx(0.2))


# ---------------------------------------------------------------- nights


def test_a_night_has_the_date_of_its_own_zone_when_clocks_are_changed_too() -> None:
    berlin = Schedule("30 2 * * *", "Europe/Berlin")
    # On 29 March 2026 there is no half past two in Berlin; the night is at three.
    spring = [datetime(2026, 3, day, 1, 30, tzinfo=UTC) for day in (28, 29, 30)]
    assert [berlin.night_at(m) for m in spring] == ["2026-03-28", "2026-03-29", "2026-03-30"]
    assert berlin.begins("2026-03-29").isoformat() == "2026-03-29T03:00:00+02:00"
    # On 25 October it comes twice; the night once.
    autumn = [datetime(2026, 10, day, 12, tzinfo=UTC) for day in (24, 25, 26)]
    assert [berlin.night_at(m) for m in autumn] == ["2026-10-24", "2026-10-25", "2026-10-26"]


def test_moments_of_the_kind_that_prefect_has_mean_the_same_night() -> None:
    from pendulum import datetime as moment

    berlin = Schedule("0 3 * * *", "Europe/Berlin")
    assert berlin.night_at(moment(2026, 11, 21, 2, 0, tz="UTC")) == "2026-11-21"
    assert berlin.next_after(moment(2026, 11, 21, 2, 0, tz="UTC")).day == 22


def test_a_night_starts_at_its_scheduled_minute() -> None:
    utc = Schedule("0 3 * * 1-5", "UTC")
    assert utc.night_at(datetime(2026, 11, 20, 3, 0, tzinfo=UTC)) == "2026-11-20"  # a Friday
    assert utc.night_at(datetime(2026, 11, 20, 2, 59, 59, tzinfo=UTC)) == "2026-11-19"
    assert utc.night_at(datetime(2026, 11, 22, 12, tzinfo=UTC)) == "2026-11-20"
    with pytest.raises(ConfigurationError, match="no night of 2026-11-21"):
        utc.begins("2026-11-21")

"""Nights for real: evaluated by workers, called by a Prefect server whose clock is ahead."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.checking.sources import model_digest
from infra.prefect_server.server import ensure_server
from refiner_core.nightly.schedule import Schedule
from tests.support.command import command, environment, refiner
from tests.support.judge_server import JudgeServer, completion
from tests.support.prefect_server import PrefectApi, eventually

FILE = """
schedule: "0 3 * * *"
timezone: Europe/Berlin
recipe: tiny
overrides:
  - workspace=runs
  - data.synthetic_rl_rows=12
  - evaluate.max_prompts=2
  - evaluate.decoding=[greedy]
  - evaluate.bootstrap_samples=50
  - evaluate.fresh_reference=false
  - grpo.response_length=4
  - tracking.wandb=disabled
  - dispatch.poll_s=0.1
  - judge.kind=openai
  - judge.model=judge
  - judge.base_url={url}
checkpoints:
  - {{name: base, folder: "builtin:tiny"}}
canary: {{folder: "builtin:tiny", digest: {digest}}}
alerts:
  metrics: [reward, length_tokens]
  channels: [{{prefect: true}}]
"""
SCHEDULE = Schedule("0 3 * * *", "Europe/Berlin")


class Place:
    """A nightly file beside its workspace, and the judge that it asks."""

    def __init__(self, folder: Path, judge: JudgeServer) -> None:
        self.folder, self.judge = folder, judge
        self.file = folder / "real.yaml"
        digest = model_digest("builtin:tiny", "")
        self.file.write_text(FILE.format(url=judge.base_url, digest=digest))

    def run(self, *words: str) -> dict[str, Any]:
        """`refiner nightly run` from another folder, as cron would."""
        done = refiner("nightly", "run", str(self.file), *words, "--json")
        assert done.code == 0, done.stderr
        return dict(done.json)

    def history(self) -> list[dict[str, Any]]:
        done = refiner("nightly", "history", str(self.file), "--json")
        assert done.code == 0, done.stderr
        return list(done.json["rows"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A judge that says what it is, and the newest night evaluated once."""

    def say(body: dict[str, Any], _: int) -> Any:
        reply = json.loads(completion('{"score": 2}').body)
        reply |= {"model": "judge-7b", "system_fingerprint": "fp1"}
        from tests.support.judge_server import Reply

        return Reply(body=json.dumps(reply))

    with JudgeServer(say) as judge:
        yield Place(tmp_path_factory.mktemp("nightly"), judge)


def test_a_night_is_evaluated_by_ordinary_runs_and_the_canary_is_judged_afresh(
    place: Place,
) -> None:
    tonight = SCHEDULE.night_at(datetime.now(UTC))
    first = place.run()
    assert (first["night"], first["state"], first["late"]) == (tonight, "done", False)
    assert {c["checkpoint"]: c["state"] for c in first["checkpoints"]} == {
        "canary": "measured",
        "base": "measured",
    }
    rows = {r["checkpoint"]: r for r in place.history()}
    assert rows["canary"]["stage"] != rows["base"]["stage"]
    assert rows["canary"]["protocol"] == rows["base"]["protocol"], "one protocol, two stages"
    assert rows["canary"]["numbers"] == rows["base"]["numbers"], "the same weights"
    assert rows["canary"]["facts"]["judge.served"] == "judge-7b fp1"
    record = json.loads((place.folder / f"runs/runs/{rows['base']['run']}/run.json").read_text())
    assert record["provenance"]["nightly"] == {
        "name": "real",
        "night": tonight,
        "checkpoint": "base",
    }
    # The same questions, asked twice: the canary's answers are not taken from the store.
    asked = [json.dumps(b["messages"]) for b in place.judge.bodies]
    assert len(asked) == 2 * len(set(asked)) > 0

    again = place.run()
    assert (again["state"], again["checkpoints"]) == ("done", [])
    assert len(place.judge.bodies) == len(asked)
    assert len(place.history()) == 2


@pytest.mark.prefect
def test_a_prefect_server_says_when_and_records_say_what(place: Place, prefect: PrefectApi) -> None:
    tonight = SCHEDULE.night_at(datetime.now(UTC))
    before = SCHEDULE.nights_up_to(datetime.now(UTC), 2)[0]
    if not place.history():
        place.run()
    made = refiner("nightly", "deploy", str(place.file), "--json")
    assert made.code == 0, made.stderr
    (deployment,) = made.json["deployments"]

    # Its clock is moved: what the server will start a month from now are our nights.
    ahead = datetime.now(UTC) + timedelta(days=30)
    window = {"start_time": ahead.isoformat(), "min_runs": 5, "max_runs": 5}
    _patient(lambda: prefect.post(f"/deployments/{deployment['id']}/schedule", window))
    of_it = {"deployments": {"id": {"any_": [deployment["id"]]}}}
    after = {"flow_runs": {"expected_start_time": {"after_": ahead.isoformat()}}, **of_it}
    planned = [
        datetime.fromisoformat(run["expected_start_time"])
        for run in _patient(lambda: prefect.post("/flow_runs/filter", after))
    ]
    assert len(planned) == 5
    assert all(SCHEDULE.begins(SCHEDULE.night_at(moment)) == moment for moment in planned)

    # Two runs that the server has meant for earlier come late: each is its own night.
    late = {
        night: _patient(
            lambda night=night: prefect.post(
                f"/deployments/{deployment['id']}/create_flow_run",
                {"state": {"type": "SCHEDULED", "state_details": {"scheduled_time": _at(night)}}},
            )
        )
        for night in (before, tonight)
    }
    serving = _serve(place)
    try:
        for run in late.values():
            ended = eventually(lambda run=run: _ended(prefect, run["id"]), 120)
            assert ended["state"]["type"] == "COMPLETED", ended["state"]
    finally:
        serving.send_signal(signal.SIGINT)
        code = serving.wait(60)
    assert code == 0
    assert prefect.get(f"/deployments/{deployment['id']}")["paused"] is True
    words = {night: _ended(prefect, r["id"])["state"]["message"] for night, r in late.items()}
    assert words[tonight] == f"real, night of {tonight}: done"
    assert words[before] == f"real, night of {before}: missed", "before its history begins"
    assert len(place.history()) == 2, "nothing counts double, and nothing is invented"
    status = refiner("nightly", "status", str(place.file), "--json").json
    assert status["nights"] == {tonight: "done"}


@pytest.mark.prefect
def test_a_pool_that_is_not_there_is_refused_with_those_that_are(
    place: Place, prefect: PrefectApi
) -> None:
    """It was a bug in refiner, by the server's answer to the question which there are."""
    _patient(lambda: prefect.post("/work_pools/", {"name": "night-shift", "type": "process"}))
    refused = refiner("nightly", "deploy", str(place.file), "--pool", "missing")
    assert refused.code == 2
    assert "The server has no work pool 'missing'. Expected one of: " in refused.stderr
    assert "night-shift" in refused.stderr
    assert "prefect work-pool create missing --type process" in refused.stderr
    there = refiner("nightly", "deploy", str(place.file), "--pool", "night-shift", "--json")
    assert [d["pool"] for d in there.json["deployments"]] == ["night-shift"]


@pytest.mark.prefect
def test_an_automation_runs_a_deployment_for_an_alert(place: Place, prefect: PrefectApi) -> None:
    from flows.nightly.channels import ALERT, send
    from refiner_core.nightly.values import Alarm

    ensure_server(120)
    deploy = ("nightly", "deploy", str(place.file), "--json")
    own = refiner(*deploy, "--automation", "none/such")
    assert (own.code, "no deployment 'none/such'" in own.stderr) == (2, True)
    flow = _patient(lambda: prefect.post("/flows/", {"name": "teams-flow"}))
    wanted = {"name": "tell", "flow_id": flow["id"]}
    target = _patient(lambda: prefect.post("/deployments/", wanted))
    made = [refiner(*deploy, "--automation", "teams-flow/tell") for _ in range(2)]
    assert [m.code for m in made] == [0, 0], made[-1].stderr
    assert made[0].json == made[1].json, "the same deployment and automation, as the file says now"
    known = _patient(lambda: prefect.post("/automations/filter"))
    assert [a["name"] for a in known].count("refiner-nightly-real") == 1
    alert = {"nightly": "real", "id": "x", "kind": "change", "cause": "model", "title": "t"}
    send(Alarm("prefect"), {**alert, "checkpoint": "base", "metric": "reward", "text": "…"})
    eventually(lambda: ALERT in prefect.events("refiner.nightly.real"))
    of_it = {"flow_runs": {}, "deployments": {"id": {"any_": [target["id"]]}}}
    eventually(lambda: _patient(lambda: prefect.post("/flow_runs/filter", of_it)))


def _patient(ask: Callable[[], Any]) -> Any:
    """What the server says; it is busy (503) while its own services write, as its client knows."""

    def once() -> Any:
        try:
            return (ask(),)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return None

    return eventually(once)[0]


def _at(night: str) -> str:
    return SCHEDULE.begins(night).isoformat()


def _serve(place: Place) -> subprocess.Popen[bytes]:
    env = {**environment(), "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    log = (place.folder / "serve.log").open("wb")
    return subprocess.Popen(
        command("nightly", "serve", str(place.file)), env=env, stdout=log, stderr=log
    )


def _ended(prefect: PrefectApi, flow_run: str) -> dict[str, Any] | None:
    found = _patient(lambda: prefect.get(f"/flow_runs/{flow_run}"))
    over = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
    return found if found["state"]["type"] in over else None

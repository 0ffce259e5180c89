"""The picture in Prefect, on a real server: what it shows, and that work never depends on it."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.picture.feed import Story
from flows.running.pipeline import run_pictured
from infra.prefect_server.server import ensure_server, server_status
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.records import Outcome, RunRecord
from refiner_core.contract.types import Progress
from refiner_core.contract.views import StageView
from tests.support.browser import chromium
from tests.support.fake_campaign import Change, FakeCampaign
from tests.support.plans import claim, run_record, small_plan
from tests.support.prefect_server import PrefectApi, eventually
from tests.support.told_campaign import patch_router, told_run

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


class Heard:
    """A console that remembers, and can press Ctrl-C."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.finished: dict[str, StageView] = {}
        self.press_ctrl_c = threading.Event()

    def show(self, views: Mapping[str, StageView]) -> None:
        if self.press_ctrl_c.is_set():
            self.press_ctrl_c.clear()
            raise KeyboardInterrupt

    def note(self, message: str) -> None:
        self.notes.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def finish(self, views: Mapping[str, StageView]) -> None:
        self.finished = dict(views)

    def close(self) -> None:
        pass


@pytest.fixture
def plan() -> Plan:
    return make_plan(RecipeConfig(recipe="tiny"), {})


def training(report: Mapping[str, Any]) -> list[Change]:
    steps = [
        (0.5 * i, {"progress": Progress(i, 6, "rollouts", {"reward": 0.1 * i})})
        for i in range(1, 6)
    ]
    begin = (0.0, {"state": "running", "attempt": 1, "log": "/runs/grpo/attempt-1.log"})
    return [begin, *steps, (3.5, {"state": "done", "seconds": 3.5, "report": report})]


NUMBER = {"metric": "citation_f1", "decoding": "greedy", "value": 0.81, "low": 0.7, "high": 0.9}
SCRIPT: dict[str, list[Change]] = {
    "data": [(0.0, {"state": "skipped"})],
    "grpo": training({"curves": {"scores": [[1, 0.25], [2, 0.5], [3, 0.75]]}}),
    "evaluate-base": [
        (0.0, {"state": "running"}),
        (0.5, {"state": "failed", "message": "the judge fell over"}),
    ],
    "evaluate-sft": [(0.0, {"state": "done", "report": {"evaluations": [NUMBER]}})],
    "publish": [(0.0, {"state": "done", "report": {"card": "---\na: 1\n---\n# A model\n\nHi.\n"}})],
    "evaluate-grpo": [(0.0, {"state": "interrupted", "message": "Ctrl-C"})],
    "card": [(0.0, {"state": "blocked", "message": "evaluate-base failed"})],
}


@pytest.fixture(scope="session")
def drawn(prefect_session: None) -> tuple[Plan, Heard, dict[str, StageView]]:
    """One run with every kind of end, drawn once for the tests that look at it."""
    plan, heard = make_plan(RecipeConfig(recipe="tiny"), {}), Heard()
    views = run_pictured(
        FakeCampaign(plan, SCRIPT), plan, "run-drawn", use_server=True, console=heard
    )
    return plan, heard, views


@pytest.fixture
def flow_run(drawn: object, prefect: PrefectApi) -> dict[str, Any]:
    found = prefect.flow_run("run-drawn")
    assert found
    return found


def states(prefect: PrefectApi, flow_run: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Type, name and message of each task run's state by stage name."""
    return {
        name.split(" ")[0]: (
            run["state_type"],
            run["state_name"],
            (run["state"] or {}).get("message"),  # a run has no state before its first event is in
        )
        for name, run in prefect.task_runs(flow_run["id"]).items()
    }


def test_a_run_is_named_and_tagged(flow_run: Mapping[str, Any]) -> None:
    assert flow_run["name"] == "tiny run-drawn"
    assert set(flow_run["tags"]) == {"tiny", "run-drawn", "run:run-drawn"}
    assert flow_run["state_type"] == "FAILED"
    assert "evaluate-base" in flow_run["state"]["message"]


def test_the_graph_is_the_plan(
    drawn: tuple[Plan, Any, Any], flow_run: Mapping[str, Any], prefect: PrefectApi
) -> None:
    plan = drawn[0]
    assert set(prefect.task_runs(flow_run["id"])) == {s.title for s in plan.stages}
    wanted = {
        (plan.by_name[before].title, stage.title)
        for stage in plan.stages
        for before in stage.inputs.values()
    }
    assert prefect.edges(flow_run["id"]) == wanted


def test_task_runs_cost_no_concurrency_slot(
    flow_run: Mapping[str, Any], prefect: PrefectApi
) -> None:
    assert all(run["tags"] == [] for run in prefect.task_runs(flow_run["id"]).values())


def test_states_say_how_each_stage_ended(flow_run: Mapping[str, Any], prefect: PrefectApi) -> None:
    found = eventually(
        lambda: (s := states(prefect, flow_run)) and s["card"][0] == "CANCELLED" and s, 15
    )
    assert found["data"] == ("COMPLETED", "Skipped", "skipped: done before")
    assert found["grpo"][0] == "COMPLETED"
    assert found["evaluate-base"] == ("FAILED", "Failed", "the judge fell over")
    assert found["evaluate-grpo"][:2] == ("CANCELLED", "Interrupted")
    assert found["card"] == ("CANCELLED", "Blocked", "not started: evaluate-base failed")


def test_artifacts_show_progress_log_curve_numbers_and_card(
    flow_run: Mapping[str, Any], prefect: PrefectApi
) -> None:
    artifacts = prefect.artifacts(flow_run["id"])
    assert artifacts["tiny-grpo-progress"]["data"] == 100
    assert "/runs/grpo/attempt-1.log" in artifacts["tiny-grpo-log"]["data"]
    assert "▁▅█" in artifacts["tiny-grpo-curves"]["data"]
    assert "| citation_f1 | 0.81 | 0.7 | 0.9 |" in artifacts["tiny-evaluate-sft-numbers"]["data"]
    assert artifacts["tiny-publish-card"]["data"].startswith("# A model")


def test_the_run_says_where_to_look(drawn: tuple[Any, Heard, Any], prefect: PrefectApi) -> None:
    heard, views = drawn[1:]
    assert heard.warnings == []
    assert len(heard.notes) == 1
    assert heard.notes[0].startswith(f"Prefect: {prefect.info.url}/runs/flow-run/")
    assert heard.finished == views


def test_a_second_run_uses_the_same_server_and_ctrl_c_shows_as_interrupted(
    plan: Plan, prefect: PrefectApi
) -> None:
    heard = Heard()
    slow: dict[str, list[Change]] = {"sft": [(0.0, {"state": "running"}), (60.0, {})]}
    campaign = FakeCampaign(plan, slow)

    def stop() -> None:
        eventually(lambda: heard.notes)
        heard.press_ctrl_c.set()

    threading.Thread(target=stop, daemon=True).start()
    run_pictured(campaign, plan, "run-stopped", use_server=True, console=heard)
    assert campaign.stopped == "Ctrl-C"
    assert heard.warnings == []
    assert ensure_server(5).pid == prefect.info.pid
    run = prefect.flow_run("run-stopped")
    assert run
    assert (run["state_type"], run["state_name"]) == ("CANCELLED", "Interrupted")


@contextmanager
def orchestrator(run: str) -> Iterator[psutil.Process]:
    """A run in a process of its own, which is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.pictured_run", run],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def test_an_automation_acts_on_the_event_of_a_run_that_fails(
    prefect: PrefectApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As flows/notifying/README.md says; here it begins a deployment's flow run."""
    flow = prefect.post("/flows/", {"name": "own-flow"})
    target = prefect.post("/deployments/", {"name": "on-failure", "flow_id": flow["id"]})
    trigger = {
        "type": "event",
        "posture": "Reactive",
        "expect": ["refiner.run.failed"],
        "match": {"prefect.resource.id": "refiner.run.*"},
        "threshold": 1,
        "within": 0,
    }
    action = {"type": "run-deployment", "source": "selected", "deployment_id": target["id"]}
    wanted = {"name": "on-failure", "trigger": trigger, "actions": [action]}
    prefect.post("/automations/", wanted)
    patch_router(monkeypatch)
    root = tmp_path / "runs"
    told_run(root, {"prefect": True}, behaviour={"fail": "bug", "fail_at_step": 1})
    run = Workspace.read_only(root).run_ids()[-1]
    event = eventually(lambda: prefect.events(f"refiner.run.{run}").get("refiner.run.failed"))
    assert event["payload"]["next"] == f"refiner logs data {run} workspace={root}"
    assert event["resource"]["refiner.cause"] == "bug"
    of_it = {"deployments": {"id": {"any_": [target["id"]]}}}
    eventually(lambda: prefect.post("/flow_runs/filter", of_it))


def test_killed_alone_an_orchestrator_shows_as_crashed_at_once(prefect: PrefectApi) -> None:
    with orchestrator("run-killed") as process:
        run = eventually(lambda: _in_state(prefect, "run-killed", "RUNNING"))
        process.kill()
        run = eventually(lambda: _in_state(prefect, "run-killed", "CRASHED"), 30)
    found = eventually(lambda: _stage_in_state(prefect, run, "sft", "CRASHED"), 15)
    assert "The same command takes up" in found


def test_killed_with_its_picture_it_is_closed_by_the_next_run(
    plan: Plan, prefect: PrefectApi
) -> None:
    with orchestrator("run-vanished") as process:
        run = eventually(lambda: _in_state(prefect, "run-vanished", "RUNNING"))
        eventually(lambda: _stage_in_state(prefect, run, "sft", "RUNNING") is not None)
        for child in process.children():
            child.send_signal(signal.SIGSTOP)  # it must not see its orchestrator die
        children = process.children()
        process.kill()
        for child in children:
            child.kill()
    assert _in_state(prefect, "run-vanished", "RUNNING")
    run_pictured(FakeCampaign(plan), plan, "run-next", use_server=True, console=Heard())
    run = eventually(lambda: _in_state(prefect, "run-vanished", "CRASHED"), 5)
    assert "was killed" in run["state"]["message"]
    found = eventually(lambda: _stage_in_state(prefect, run, "sft", "CRASHED"), 15)
    assert "was killed" in found
    assert _in_state(prefect, "run-next", "COMPLETED")


def _in_state(prefect: PrefectApi, run: str, state: str) -> dict[str, Any] | None:
    found = prefect.flow_run(run)
    return found if found and found["state_type"] == state else None


def _stage_in_state(
    prefect: PrefectApi, run: Mapping[str, Any], stage: str, state: str
) -> str | None:
    """The state's message once the stage is in it, None before."""
    found = states(prefect, run).get(stage, ("", "", ""))
    return (found[2] or "") if found[0] == state else None


def test_work_goes_on_when_the_server_dies_and_the_picture_is_drawn_again(
    plan: Plan, prefect: PrefectApi
) -> None:
    heard = Heard()
    script: dict[str, list[Change]] = {
        "sft": [(0.0, {"state": "running"}), (12.0, {"state": "done"})]
    }
    campaign = FakeCampaign(plan, script)

    def kill() -> None:
        eventually(lambda: _in_state(prefect, "run-lost", "RUNNING"))
        os.kill(prefect.info.pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    views = run_pictured(campaign, plan, "run-lost", use_server=True, console=heard)
    assert {view.state for view in views.values()} == {"done"}
    assert campaign.ended_at - campaign.started_at < 16  # nobody waited for a server
    lost = [w for w in heard.warnings if "no picture" in w]
    assert len(lost) == 1
    again = PrefectApi(ensure_server(60))
    assert again.info.pid != prefect.info.pid
    eventually(lambda: _in_state(again, "run-lost", "COMPLETED"))


def test_a_server_of_the_users_that_is_down_costs_one_warning(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("REFINER_STATE_DIR", str(tmp_path))
    heard = Heard()
    views = run_pictured(FakeCampaign(plan), plan, "run-alone", use_server=True, console=heard)
    assert {view.state for view in views.values()} == {"done"}
    assert len(heard.warnings) == 1
    assert "refused" in heard.warnings[0]
    assert server_status().state == "yours"  # and none of ours was started


class TellingCampaign(FakeCampaign):
    """A campaign of a real workspace that runs out of room and goes on."""

    def __init__(self, plan: Plan, workspace: Workspace, run: RunRecord) -> None:
        queued = (0.1, {"state": "queued", "attempt": 1, "message": "PENDING (Resources)"})
        super().__init__(plan, {"sft": [queued], "rest": [(0.0, {"state": "done"})]})
        self.workspace, self.run, self.seen = workspace, run, threading.Event()

    def _play(self, name: str) -> None:
        super()._play(name)
        if name == "sft":  # until somebody has seen that it is queued
            self.seen.wait(60)
            self.script["sft"] = self.script["rest"]
            super()._play(name)

    def start(self) -> None:
        super().start()
        stage = claim(self.workspace, self.plan, "sft")
        full = Outcome("disk_full", "resume", "saving the checkpoint of step 3", 5, 3, errno=122)
        self.workspace.start_attempt(stage.id, 1, {"started_at": "2026-11-21T01:00:00+00:00"})
        self.workspace.close_attempt(stage.id, 1, full, 30.0)
        claim(self.workspace, self.plan, "sft", after=1)
        self.note({"event": "claim", "stage": "sft", "attempt": 1})
        self.note({"event": "short", "stage_id": stage.id, "need_bytes": 10**9})
        self.note({"event": "reclaimed", "stage_id": stage.id, "bytes": 56 * 10**9})
        self.note({"event": "claim", "stage": "sft", "attempt": 2})

    def note(self, event: Mapping[str, Any]) -> None:
        path = self.workspace.layout.run(self.run.run).events
        with path.open("a") as file:
            file.write(json.dumps({"at": "2026-11-21T03:12:00+00:00", **event}) + "\n")


def test_a_full_disk_is_an_event_and_stands_in_the_timeline(
    prefect: PrefectApi, tmp_path: Path
) -> None:
    plan, workspace = small_plan(), Workspace.open(tmp_path)
    run = run_record(workspace, plan)
    workspace.write_run(run)
    campaign = TellingCampaign(plan, workspace, run)
    story = Story(str(workspace.layout.run(run.run).events), resumed=True)

    def look() -> None:
        flow_run = eventually(lambda: _in_state(prefect, run.run, "RUNNING"))
        eventually(lambda: states(prefect, flow_run).get("sft", ("", ""))[1] == "Queued")
        campaign.seen.set()

    threading.Thread(target=look, daemon=True).start()
    heard = Heard()
    run_pictured(campaign, plan, run.run, use_server=True, console=heard, story=story)
    assert heard.warnings == []
    flow_run = eventually(lambda: _in_state(prefect, run.run, "COMPLETED"))
    assert {f"run:{run.run}", f"resumes:{run.run}"} <= set(flow_run["tags"])
    assert campaign.seen.is_set()

    table = prefect.artifacts(flow_run["id"])["small-incidents"]["data"]
    assert "EDQUOT (errno 122) while saving step 3; 56.0 GB reclaimed; is being resumed" in table
    wanted = {"refiner.short", "refiner.reclaimed", "refiner.incident"}
    eventually(lambda: wanted <= set(prefect.events(f"refiner.run.{run.run}")), 30)
    incident = prefect.events(f"refiner.run.{run.run}")["refiner.incident"]
    assert incident["payload"]["failure"] == "disk_full"
    assert any(r["prefect.resource.role"] == "flow-run" for r in incident["related"])


def test_a_run_of_another_host_is_closed_by_what_its_workspace_says(
    plan: Plan, prefect: PrefectApi, tmp_path: Path
) -> None:
    workspace, theirs = Workspace.open(tmp_path), "another-host:1:1.00"
    path = workspace.layout.run("run-far").events
    path.parent.mkdir(parents=True)
    story = Story(str(path))
    flow = prefect.post("/flows/", {"name": "refiner"})
    prefect.post(
        "/flow_runs/",
        {
            "flow_id": flow["id"],
            "tags": ["run-far"],
            "parameters": {"recipe": "tiny", "run": "run-far", "owner": theirs},
            "state": {"type": "RUNNING"},
        },
    )

    def draw_another(run: str) -> None:
        campaign = FakeCampaign(plan, {s.name: [(0.0, {"state": "skipped"})] for s in plan.stages})
        run_pictured(campaign, plan, run, use_server=True, console=Heard(), story=story)

    workspace.write_orchestrator("run-far", {"process": theirs, "state": "running"})
    draw_another("run-near-1")
    assert _in_state(prefect, "run-far", "RUNNING"), "nobody knows that it has ended"
    workspace.write_orchestrator("run-far", {"process": theirs, "state": "ended"})
    draw_another("run-near-2")
    run = eventually(lambda: _in_state(prefect, "run-far", "CRASHED"), 5)
    assert "has ended" in run["state"]["message"]


@pytest.mark.browser
def test_a_person_sees_the_stages(
    drawn: tuple[Plan, Any, Any],
    flow_run: Mapping[str, Any],
    prefect: PrefectApi,
    tmp_path: Path,
) -> None:
    key = base64.b64encode(prefect.info.auth.encode()).decode()
    with chromium(tmp_path) as page:
        page.open(
            f"{prefect.info.url}/runs/flow-run/{flow_run['id']}",
            local_storage={"prefect-password": key},
        )
        wanted = {"tiny run-drawn", *(stage.title for stage in drawn[0].stages)}
        eventually(lambda: all(title in page.text() for title in wanted))


def test_without_the_key_the_server_tells_nothing(prefect: PrefectApi) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{prefect.info.api_url}/admin/version", timeout=10)
    command = " ".join(psutil.Process(prefect.info.pid).cmdline())
    log = Path(server_status().log).read_text()
    assert prefect.info.auth.split(":")[1] not in command + log + repr(prefect.info)

"""Runs of a terminal as Prefect shows them, on a real server; the work never depends on it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.prefect_server import ensure_server, server_status, terminal_link
from refiner_core.contract.records import AttemptOutcome
from refiner_core.contract.types import Progress
from tests.support.browser import chromium
from tests.support.command import command, environment, refiner
from tests.support.plans import claim
from tests.support.prefect_server import PrefectApi, eventually
from tests.support.recorded_call import RecordedCall
from tests.support.told_campaign import patch_router, told_run

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
NUMBER = {"metric": "citation_f1", "decoding": "greedy", "value": 0.81, "low": 0.7, "high": 0.9}
STAGES = ("data", "sft", "grpo", "publish", "evaluate")


def play(call: RecordedCall) -> None:
    """A run with every kind of end."""
    call.shows("data", "skipped", attempt=0)
    call.shows("sft", "running")
    call.log("sft", "step 1: loss 2.5")
    for step in range(1, 7):
        call.progress("sft", Progress(step, 6, "step", {"loss": 2.5}))
    call.shows("sft", "done")
    call.shows("grpo", "running")
    call.shows("grpo", "done", report={"card": "---\na: 1\n---\n# A model\n\nHi.\n"})
    call.shows("evaluate-sft", "running")
    call.shows("evaluate-sft", "done", report={"evaluations": [NUMBER]})
    call.shows("evaluate-base", "running")
    call.shows("evaluate-base", "failed", message="the judge fell over")
    call.shows("publish", "running")
    call.shows("publish", "interrupted", message="Ctrl-C")
    for name in ("evaluate-grpo", "card"):
        call.shows(name, "blocked", attempt=0, message="evaluate-base failed")


def in_state(prefect: PrefectApi, call: RecordedCall, state: str) -> dict[str, Any] | None:
    found = prefect.flow_run(f"run:{call.run}")
    return found if found and found["state_type"] == state else None


def states(prefect: PrefectApi, flow_run: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Type and message of each task run's state by stage name."""
    return {
        name.split(" ")[0]: (run["state_type"], (run["state"] or {}).get("message"))
        for name, run in prefect.task_runs(flow_run["id"]).items()
    }


def test_a_run_is_a_flow_run_with_tasks_and_artifacts(prefect: PrefectApi, tmp_path: Path) -> None:
    call = RecordedCall(tmp_path, *STAGES)
    call.room.write_label(call.run, {"note": "try beta 0.05", "tags": ["keep"]})
    with call.worked_on():
        play(call)
        eventually(lambda: call.said)
        call.end(1)
        flow_run = eventually(lambda: in_state(prefect, call, "FAILED"))
    # The flow run, of the deployment, with the run's parameters; its link is printed.
    assert flow_run["name"] == f"small {call.run}: try beta 0.05"
    assert {"refiner", f"run:{call.run}", "keep"} <= set(flow_run["tags"])
    deployment = prefect.get("/deployments/name/pipeline/refiner")
    assert flow_run["deployment_id"] == deployment["id"]
    assert flow_run["parameters"]["run"] == call.run
    assert flow_run["parameters"]["workspace"] == str(call.room.root)
    assert "evaluate-base: the judge fell over" in flow_run["state"]["message"]
    assert f"`refiner resume {call.run}" in flow_run["state"]["message"]
    assert call.warned == []
    assert call.said == [f"Prefect: {prefect.info.url}/runs/flow-run/{flow_run['id']}"]

    # Each stage that began is a task run after those that it is made from.
    titles = {call.plan.by_name[n].title for n in (*STAGES[1:4], "evaluate-sft", "evaluate-base")}
    runs = eventually(lambda: (r := prefect.task_runs(flow_run["id"])) and set(r) == titles and r)
    assert all(run["tags"] == [] for run in runs.values()), "a tag costs a concurrency slot"
    sft, grpo = (call.plan.by_name[n].title for n in ("sft", "grpo"))
    assert (sft, grpo) in prefect.edges(flow_run["id"])
    found = eventually(lambda: (s := states(prefect, flow_run)) and len(s) == 5 and s)
    assert found["grpo"][0] == "COMPLETED"
    assert found["evaluate-base"] == ("FAILED", "the judge fell over")
    assert found["publish"][0] == "CANCELLED"
    assert "Ctrl-C" in str(found["publish"][1])

    # Artifacts: stages, progress, numbers, card; and the log lines.
    artifacts = prefect.artifacts(flow_run["id"])
    assert "| data | skipped |" in artifacts[f"{call.run}-stages"]["data"]
    assert artifacts[f"{call.run}-sft-progress"]["data"] == 100
    numbers = artifacts[f"{call.run}-evaluate-sft-numbers"]["data"]
    assert "| citation_f1 | 0.81 | 0.7 | 0.9 |" in numbers
    assert artifacts[f"{call.run}-grpo-card"]["data"].startswith("# A model")
    assert not any("file://" in str(artifact["data"]) for artifact in artifacts.values())
    eventually(lambda: logged(prefect, flow_run, "loss 2.5"))

    # The event for automations.
    name = f"refiner.run.{call.run}"
    event = eventually(lambda: prefect.events(name).get("refiner.run.failed"))
    assert "evaluate-base: the judge fell over" in event["payload"]["message"]
    assert f"refiner resume {call.run}" in event["payload"]["next"]


def logged(prefect: PrefectApi, flow_run: Mapping[str, Any], words: str) -> bool:
    wanted = {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}}
    return any(words in line["message"] for line in prefect.post("/logs/filter", wanted))


def test_ctrl_c_is_cancelled_and_resume_begins_anew(prefect: PrefectApi, tmp_path: Path) -> None:
    call = RecordedCall(tmp_path)
    with call.worked_on():
        call.shows("data", "running")
        call.shows("data", "interrupted", message="Ctrl-C")
        call.shows("sft", "interrupted", attempt=0, message="Ctrl-C")
        call.end(6)
        first = eventually(lambda: in_state(prefect, call, "CANCELLED"))
    with call.worked_on():
        for name in ("data", "sft"):
            call.shows(name, "running")
            call.shows(name, "done", report={})
        call.end()
        second = eventually(lambda: in_state(prefect, call, "COMPLETED"))
    assert first["id"] != second["id"]
    assert first["deployment_id"] == second["deployment_id"]
    assert ensure_server(5).pid == prefect.info.pid


def test_a_killed_orchestrator_shows_as_crashed(prefect: PrefectApi, tmp_path: Path) -> None:
    call = RecordedCall(tmp_path)
    with call.worked_on() as process:
        call.shows("data", "running")
        eventually(lambda: in_state(prefect, call, "RUNNING"))
        process.kill()
        run = eventually(lambda: in_state(prefect, call, "CRASHED"))
    assert "was killed" in run["state"]["message"]
    assert f"`refiner resume {call.run}" in run["state"]["message"]
    eventually(lambda: states(prefect, run)["data"][0] == "CRASHED")


def follower_of(call: RecordedCall) -> psutil.Process:
    """The process that shows a call."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "flows.attach" in command and call.run in command:
            return process
    raise AssertionError("no process shows the call")


def test_the_next_run_closes_a_flow_run_without_follower(
    prefect: PrefectApi, tmp_path: Path
) -> None:
    vanished, after = RecordedCall(tmp_path / "1"), RecordedCall(tmp_path / "2", "data")
    with vanished.worked_on() as process:
        vanished.shows("data", "running")
        run = eventually(lambda: in_state(prefect, vanished, "RUNNING"))
        eventually(lambda: states(prefect, run).get("data", ("",))[0] == "RUNNING")
        follower_of(vanished).kill()
        process.kill()
    assert in_state(prefect, vanished, "RUNNING")
    with after.worked_on():
        after.shows("data", "running")
        after.shows("data", "done", report={})
        after.end()
        run = eventually(lambda: in_state(prefect, vanished, "CRASHED"))
        assert "refiner status" in run["state"]["message"]
        eventually(lambda: states(prefect, run)["data"][0] == "CRASHED")
        eventually(lambda: in_state(prefect, after, "COMPLETED"))


def test_a_resume_continues_a_flow_run_without_follower(
    prefect: PrefectApi, tmp_path: Path
) -> None:
    call = RecordedCall(tmp_path, "data")
    with call.worked_on() as process:
        call.shows("data", "running")
        before = eventually(lambda: in_state(prefect, call, "RUNNING"))
        follower_of(call).kill()
        process.kill()
    with call.worked_on():
        call.shows("data", "running")
        call.shows("data", "done", report={})
        call.end()
        assert eventually(lambda: in_state(prefect, call, "COMPLETED"))["id"] == before["id"]


def test_a_full_disk_is_an_event_and_an_incident(prefect: PrefectApi, tmp_path: Path) -> None:
    call = RecordedCall(tmp_path, "data", "sft")
    full = AttemptOutcome("disk_full", "resume", "saving the checkpoint of step 3", 5, 3, errno=122)
    with call.worked_on():
        call.shows("data", "skipped", attempt=0)
        stage = claim(call.room, call.plan, "sft")
        call.room.start_attempt(stage.id, 1, {"started_at": "2026-11-21T01:00:00+00:00"})
        call.room.close_attempt(stage.id, 1, full, 30.0)
        claim(call.room, call.plan, "sft", after=1)
        call.note({"event": "claim", "stage": "sft", "attempt": 1})
        call.note({"event": "short", "stage_id": stage.id, "need_bytes": 10**9})
        call.note({"event": "reclaimed", "stage_id": stage.id, "bytes": 56 * 10**9})
        call.note({"event": "claim", "stage": "sft", "attempt": 2})
        call.shows("sft", "paused", 2, message="no room")
        flow_run = eventually(lambda: in_state(prefect, call, "RUNNING"))
        eventually(lambda: states(prefect, flow_run).get("sft", ("", ""))[1] == "no room")
        call.shows("sft", "done", 2, report={})
        call.end()
        eventually(lambda: in_state(prefect, call, "COMPLETED"))
    table = prefect.artifacts(flow_run["id"])[f"{call.run}-incidents"]["data"]
    assert "EDQUOT (errno 122) while saving step 3; 52.2 GiB reclaimed" in table
    name = f"refiner.run.{call.run}"
    wanted = {"refiner.short", "refiner.reclaimed", "refiner.incident"}
    eventually(lambda: wanted <= set(prefect.events(name)))
    incident = prefect.events(name)["refiner.incident"]
    assert incident["payload"]["failure"] == "disk_full"
    assert any(r["prefect.resource.role"] == "flow-run" for r in incident["related"])


def test_unreadable_records_end_no_flow_run(prefect: PrefectApi, tmp_path: Path) -> None:
    call = RecordedCall(tmp_path, "data")
    with call.worked_on():
        call.shows("data", "running")
        flow_run = eventually(lambda: in_state(prefect, call, "RUNNING"))
        events = call.room.layout.run(call.run).events
        events.rename(events.with_name("away"))
        events.mkdir()
        eventually(lambda: logged(prefect, flow_run, "cannot be read"))
        events.rmdir()
        events.with_name("away").rename(events)
        call.shows("data", "done", report={})
        call.end()
        eventually(lambda: in_state(prefect, call, "COMPLETED"))


def test_a_cancel_in_the_ui_ends_a_run_of_a_terminal(prefect: PrefectApi, tmp_path: Path) -> None:
    call = RecordedCall(tmp_path)
    with call.worked_on():
        call.shows("data", "running")
        flow_run = eventually(lambda: in_state(prefect, call, "RUNNING"))
        cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        prefect.post(f"/flow_runs/{flow_run['id']}/set_state", cancelling)
        eventually(lambda: call.room.cancel_asked(call.run))
        for name in ("data", "sft"):
            call.shows(name, "interrupted", int(name == "data"), message="cancelled by somebody")
        call.end(6)
        eventually(lambda: in_state(prefect, call, "CANCELLED"))


def test_a_dead_server_stops_no_work_and_catches_up(prefect: PrefectApi, tmp_path: Path) -> None:
    call = RecordedCall(tmp_path)
    with call.worked_on():
        call.shows("data", "running")
        before = eventually(lambda: in_state(prefect, call, "RUNNING"))
        os.kill(prefect.info.pid, signal.SIGKILL)
        call.shows("data", "done", report={})
        eventually(lambda: call.warned)
        again = PrefectApi(ensure_server(400))
        assert again.info.pid != prefect.info.pid
        call.shows("sft", "running")
        call.shows("sft", "done", report={})
        call.end()
        after = eventually(lambda: in_state(again, call, "COMPLETED"))
    assert after["id"] == before["id"]
    assert len(call.warned) == 1
    assert "is gone" in call.warned[0]


@contextmanager
def elsewhere(monkeypatch: pytest.MonkeyPatch, folder: Path, url: str) -> Iterator[None]:
    """A server of the user's own, and no server of ours."""
    monkeypatch.setenv("PREFECT_API_URL", url)
    monkeypatch.setenv("REFINER_STATE_DIR", str(folder))
    yield
    assert server_status().state == "yours", "none of ours was started"


def test_a_dead_server_of_the_user_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_router(monkeypatch)
    with elsewhere(monkeypatch, tmp_path / "state", "http://127.0.0.1:9/api"):
        assert told_run(tmp_path / "runs", {}, use_server=True).exit_code == 0
        call = RecordedCall(tmp_path / "2")
        with call.worked_on():
            eventually(lambda: call.warned)
            call.end()
        assert len(call.warned) == 1
        assert "127.0.0.1:9" in call.warned[0]


def test_the_server_answers_nobody_without_the_key(prefect: PrefectApi) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{prefect.info.api_url}/admin/version", timeout=10)
    command = " ".join(psutil.Process(prefect.info.pid).cmdline())
    log = Path(server_status().log).read_text()
    assert prefect.info.auth.split(":")[1] not in command + log + repr(prefect.info)


# ---------------------------------------------------------------- the link of `refiner server`


def on_a_terminal(*words: str) -> str:
    """What a command prints on a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(*words), env=environment(), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 65536):
            said += piece
    except OSError:  # how a pseudo-terminal says that its other end is closed
        process.wait(400)
    finally:
        os.close(ours)
    return said.decode()


def test_the_link_opens_the_page_and_shows_no_key(prefect: PrefectApi, tmp_path: Path) -> None:
    found = re.search(r"http://\S+open\.html#\S+", on_a_terminal("server"))
    assert found
    with chromium(tmp_path / "stranger") as page:
        page.show(f"{prefect.info.url}/dashboard")
        eventually(lambda: page.run("location.pathname") == "/login")
    with chromium(tmp_path / "profile") as page:
        page.show(found[0])
        eventually(lambda: "Work Pools" in page.text())
        assert page.run("location.pathname") == "/dashboard"
        assert "Authentication failed" not in page.text()
        assert prefect.info.auth not in page.run("location.href")
        assert "open.html" not in page.run("document.referrer")
        entries = page.call("Page.getNavigationHistory")["entries"]
        assert not any(prefect.info.auth.split(":")[1] in entry["url"] for entry in entries)


def test_the_link_leads_to_no_other_site(prefect: PrefectApi, tmp_path: Path) -> None:
    on_a_terminal("server")  # the page is there
    with chromium(tmp_path / "profile") as page:
        for target in ("//example.org/", "https://example.org/", "javascript:alert(1)"):
            page.show(f"{prefect.info.url}/open.html#me:key,{target}")
            assert page.run("location.origin") == prefect.info.url
            assert page.run("localStorage.getItem('prefect-password')") is None
            page.show("about:blank")


def test_the_key_is_shown_on_a_terminal_alone(prefect: PrefectApi, tmp_path: Path) -> None:
    info = ensure_server(400)
    key = info.auth.split(":")[1]
    for words in (("server",), ("server", "--json")):
        done = refiner(*words)
        assert key not in done.stdout + done.stderr
    with (tmp_path / "file").open("w") as file:
        assert terminal_link(info, "/runs", file) == f"{info.url}/runs"


def test_a_stopped_server_stays_stopped_until_somebody_needs_it(
    prefect: PrefectApi, tmp_path: Path
) -> None:
    call = RecordedCall(tmp_path, "data")
    with call.worked_on():
        call.shows("data", "running")
        before = eventually(lambda: in_state(prefect, call, "RUNNING"))
        assert refiner("server", "stop").stdout == "stopped\n"
        eventually(lambda: call.warned)
        assert "was stopped. Work continues" in call.warned[0]
        time.sleep(5)  # a restart would begin at once
        assert server_status().state == "stopped"
        call.shows("data", "done", report={})
        again = PrefectApi(ensure_server(400))
        assert again.info.url == prefect.info.url
        eventually(lambda: call.said[1:])
        call.end()
        assert eventually(lambda: in_state(again, call, "COMPLETED"))["id"] == before["id"]

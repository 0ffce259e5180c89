"""Notifications are sent once, survive a killed orchestrator, and block nothing."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.notifying import sender
from flows.notifying.sender import unsent
from infra.store.workspace import Workspace
from tests.support.command import called, environment, refiner
from tests.support.hook import Hook
from tests.support.told_campaign import patch_router, told_run


class Place:
    """A workspace, and a file that a command writes messages to."""

    def __init__(self, folder: Path) -> None:
        self.root, self.file = folder / "runs", folder / "told.jsonl"
        self.command = f"cat >> {self.file}"

    @property
    def told(self) -> list[dict[str, Any]]:
        """What the command was given."""
        text = self.file.read_text() if self.file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    @property
    def kinds(self) -> list[str]:
        return [message["kind"] for message in self.told]

    @property
    def run(self) -> str:
        return Workspace.read_only(self.root).run_ids()[-1]

    @property
    def unsent(self) -> list[dict[str, Any]]:
        """Undelivered messages in the event log of the run."""
        return unsent(Workspace.read_only(self.root), self.run)

    def start(self, notify: dict[str, Any], *resume: str) -> subprocess.Popen[bytes]:
        """An orchestrator as a process of its own."""
        words = [sys.executable, "-m", "tests.support.told_campaign", str(self.root)]
        with (self.root.parent / "stderr.txt").open("ab") as stderr:
            return subprocess.Popen(
                [*words, json.dumps(notify), *resume], env=environment(), stderr=stderr
            )

    def behave(self, **told: Any) -> None:
        self.root.mkdir(exist_ok=True)
        (self.root / "behaviour.json").write_text(json.dumps({"data": told}))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    patch_router(monkeypatch)
    return Place(tmp_path)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    with Hook() as hook:
        monkeypatch.setenv("TEAM_HOOK", hook.address)
        yield hook


def wait_for(look: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def senders() -> list[psutil.Process]:
    """Processes that send messages."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "flows.notifying.sender" in process.cmdline():
                found.append(process)
    return found


def test_every_channel_reports_the_end_once_and_leaks_no_address(
    place: Place, hook: Hook, capfd: pytest.CaptureFixture[str]
) -> None:
    fields = f'{place.command}; echo "$REFINER_KIND $REFINER_RUN" > {place.file}.fields'
    fields += f"; ps axww -o args > {place.file}.ps"
    notify = {"command": fields, "urls": ["TEAM_HOOK"]}
    hook._first = [500, 503]
    assert told_run(place.root, notify).exit_code == 0
    assert told_run(place.root, notify, resume=place.run).exit_code == 0, "all is done: no news"
    (message,) = place.told
    assert message["title"] == f"{place.run} has finished"
    assert message["next"] == f"refiner report {place.run} workspace={place.root}"
    assert Path(f"{place.file}.fields").read_text() == f"finished {place.run}\n"
    assert [b["kind"] for b in hook.bodies] == ["finished"] * 3, "two refusals, then taken"
    assert hook.bodies[-1]["text"].startswith(f"{place.run} has finished\n")
    assert place.unsent == []
    files = b"".join(p.read_bytes() for p in place.root.rglob("*") if p.is_file())
    assert b"secret-path" not in files
    assert "secret-path" not in "".join(capfd.readouterr())
    processes = Path(f"{place.file}.ps").read_text()
    assert "flows.notifying.sender" in processes
    assert "secret-path" not in processes


def test_a_server_that_hangs_holds_up_no_end_and_no_other_channel(
    place: Place, hook: Hook, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hook.hangs = True
    monkeypatch.setattr(sender, "CATCH_UP_S", 0.5)
    told_run(place.root, {"command": place.command, "urls": ["TEAM_HOOK"]})
    assert "two minutes" in capfd.readouterr().err
    wait_for(lambda: place.kinds == ["finished"])
    assert place.unsent == [], "the hook still has it"
    hook.status, hook.hangs = 500, False
    hook.end.set()
    (left,) = wait_for(lambda: place.unsent)
    assert (left["channel"], left["kind"]) == ("TEAM_HOOK", "finished")


def test_a_failed_channel_is_reported_and_fails_no_run(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told_run(place.root, {"command": "exit 7"}).exit_code == 0
    assert "ended with code 7" in capfd.readouterr().err
    done = called("status", f"workspace={place.root}")
    assert "ended with code 7" in done.stdout
    (event,) = called("status", f"workspace={place.root}", "--json").json["not_told"]
    assert (event["channel"], event["kind"]) == ("command", "finished")


def test_an_outage_is_reported_once_not_per_retry(place: Place) -> None:
    behaviour = {"steps": 4, "fail": "judge_outage", "fail_at_step": 2, "fails": 3}
    done = told_run(place.root, {"command": place.command}, behaviour=behaviour)
    assert done.exit_code == 0
    assert done.views["data"].attempt == 4
    assert place.kinds == ["paused", "finished"]
    assert (place.told[0]["cause"], place.told[0]["stage"]) == ("judge_outage", "data")


def test_ctrl_c_is_reported_on_request(place: Place) -> None:
    place.behave(steps=1000)
    process = place.start({"command": place.command, "on": ["stopped"]})
    wait_for(lambda: list(place.root.glob("stages/*/attempts/*/heartbeat.json")))
    process.send_signal(signal.SIGINT)
    assert process.wait(400) == 6
    assert place.kinds == ["stopped"]
    assert place.told[0]["next"] == f"refiner resume {place.run} workspace={place.root}"


def test_a_killed_orchestrator_and_the_end_of_its_run_are_reported(place: Place) -> None:
    place.behave(steps=100)
    notify = {"command": place.command}
    process = place.start(notify)
    wait_for(lambda: list(place.root.glob("stages/*/attempts/*/heartbeat.json")))
    (child,) = [p for p in psutil.Process(process.pid).children() if p in senders()]
    process.kill()
    process.wait()
    wait_for(lambda: place.kinds == ["failed"])
    assert place.told[0]["cause"] == "orchestrator_gone"
    assert place.told[0]["next"] == f"refiner resume {place.run} workspace={place.root}"
    wait_for(lambda: child not in senders())
    assert place.start(notify, place.run).wait(400) == 0
    assert place.kinds == ["failed", "finished"]


def test_a_killed_sender_is_reported_and_fails_no_run(place: Place) -> None:
    place.behave(steps=100)
    process = place.start({"command": place.command})
    (child,) = wait_for(
        lambda: [p for p in psutil.Process(process.pid).children() if p in senders()]
    )
    child.kill()
    assert process.wait(400) == 0
    assert place.told == []
    said = (place.root.parent / "stderr.txt").read_text()
    assert said.count("this run") == 1


def test_notify_test_reports_the_result_of_each_channel(tmp_path: Path, hook: Hook) -> None:
    told = tmp_path / "told"
    channels = (f"notify.command=cat > {told}", "notify.urls=[TEAM_HOOK]")
    done = refiner("notify", "test", "tiny", *channels, "--json")
    assert done.code == 0, done.stderr
    assert [c["delivered"] for c in done.json["channels"]] == [True, True]
    assert json.loads(told.read_text())["kind"] == hook.bodies[0]["kind"] == "test"
    hook.status = 404
    done = refiner("notify", "test", "tiny", channels[0], "notify.webhook=TEAM_HOOK")
    assert done.code == 1
    assert "did not take the message (HTTP 404)" in done.stdout
    assert "notify.webhook will be refused by the next version" in done.stderr
    assert "secret-path" not in done.stdout + done.stderr
    refused = called("plan", "tiny", f"notify.urls=[{hook.address}]")
    assert (refused.code, "secret-path" in refused.stderr) == (2, False)
    assert "name of the environment variable" in refused.stderr

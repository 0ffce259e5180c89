"""Notifications: messages, pauses, channels, and the section of a recipe."""

import json
import socket
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from flows.notifying import notifiers as words
from flows.notifying import sender
from flows.notifying.notifiers import Pauses, SweepNotifier, Topic
from flows.notifying.sender import ChannelError
from flows.running.calls import warn_of_silence
from flows.sweeping.admission import TrialVerdict
from infra.store.layout import sweep_call
from infra.store.orchestrators import OrchestratorProcess
from infra.store.workspace import Workspace
from refiner_core.contract.config import NotifyConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.sections.steering import NotifyChannel
from refiner_core.contract.types import StageView
from tests.support.command import wait_until
from tests.support.hook import Hook

TOPIC = Topic("20261121-120000-tiny-ab12", "tiny", "/scratch/me/my runs", "node7")


def view(name: str, state: Any, **more: Any) -> StageView:
    return StageView(name, name.partition("-")[0], "f", state, **more)


# ---------------------------------------------------------------- what they say


def test_a_message_is_short_and_has_no_credentials() -> None:
    text = "x" * 9000 + " https://me:hunter2@host/"
    signed = words.stopped(TOPIC, "https://me:hunter2@host/a?X-Amz-Signature=abcdef")
    long = TOPIC.message("failed", "a\nb" * 900, text, "show notify", stage="s, " * 900)
    assert len(long["text"]) <= 2000, "as much as all chat servers take"
    assert len(long["title"]) <= 200
    assert "\n" not in long["title"]
    assert "\nNext: refiner show notify" in long["text"]
    assert len(json.dumps(long)) < 5000
    assert "hunter2" not in signed["text"]
    assert "abcdef" not in signed["text"]


# ---------------------------------------------------------------- pauses


def told(pauses: Pauses, *statuses: tuple[str, str], every_s: float = 10.0) -> list[float]:
    times = [number_ * every_s for number_ in range(len(statuses))]
    return [t for t, s in zip(times, statuses, strict=True) if pauses.observe({"grpo": s}, t)]


OUT, TRIES = ("judge_outage", "pauses after judge outage, 30 s more"), ("", "")


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((OUT, OUT, TRIES), []),  # over within a moment
        ((OUT, TRIES, OUT, TRIES, OUT, TRIES, OUT, OUT), [40.0]),
        ((OUT,) * 6 + (TRIES,) * 62 + (OUT,) * 4, [30.0, 710.0]),  # another one
        ((OUT,) + (TRIES,) * 9, []),
    ],
)
def test_a_lasting_pause_is_reported_once(statuses, expected) -> None:
    assert told(Pauses(30.0), *statuses) == expected


# ---------------------------------------------------------------- sweeps


class Sweep:
    """A supervisor with states set by hand."""

    def __init__(self, states: dict[str, str]) -> None:
        self.held, self.states = "", states

    def standing(self) -> dict[str, TrialVerdict]:
        return {n: TrialVerdict(s, f"grpo: {n} broke", f"run-{n}") for n, s in self.states.items()}

    def views(self) -> dict[str, StageView]:
        running = [name for name, state in self.states.items() if state == "running"]
        return {f"{name}/grpo": view("grpo", "running") for name in running}


class Heard:
    """A sender that keeps messages."""

    quiet = False

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def begin(self, gone: words.Message) -> None: ...

    def end(self) -> None: ...

    def tell(self, message: words.Message) -> None:
        self.told.append((message["kind"], message["title"]))


def watched(
    root: Path, state: str, before: OrchestratorProcess, *, resumed: bool = False
) -> tuple[Sweep, SweepNotifier, list[tuple[str, str]]]:
    """A sweep of four trials, its watcher, and what it sends."""
    heard, supervisor = Heard(), Sweep(dict.fromkeys("abcd", state))
    record = SimpleNamespace(recipe="tiny", started_at="")
    notify, workspace = NotifyConfig(command="true"), Workspace.open(root)
    about = (supervisor, sweep_call("betas"), record, notify, workspace, before)
    watching = SweepNotifier(*about, resumed=resumed, print_line=print, sender=heard)
    watching.show(supervisor.views())
    return supervisor, watching, heard.told


def test_a_sweep_reports_its_first_failed_trial_and_the_others_at_the_end(tmp_path: Path) -> None:
    sweep, watching, told = watched(tmp_path, "running", OrchestratorProcess("none"))
    for trial in "abc":
        sweep.states[trial] = "failed"
        watching.show(sweep.views())
    ((kind, title),) = told
    assert (kind, "a has failed" in title) == ("failed", True)
    sweep.states["d"] = "done"
    watching.over({})
    ((kind, title),) = told[1:]
    assert (kind, "3 trials" in title) == ("failed", True)


def test_a_held_sweep_is_reported_once(tmp_path: Path) -> None:
    sweep, watching, told = watched(tmp_path, "running", OrchestratorProcess("none"))
    sweep.held = "it would take 900 GPU-hours of 800"
    watching.show(sweep.views())
    watching.show(sweep.views())
    sweep.states.update(a="done", b="done", c="held", d="held")
    watching.over({})
    assert told == [("paused", "sweep betas is held")]


@pytest.mark.parametrize(
    ("before", "told_"),
    [(OrchestratorProcess("ended", exit_code=0), []), (OrchestratorProcess("gone"), ["finished"])],
)
def test_a_finished_sweep_is_reported_unless_it_was_before(tmp_path, before, told_) -> None:
    _, watching, told = watched(tmp_path, "done", before, resumed=True)
    watching.over({})
    assert [kind for kind, _ in told] == told_


# ---------------------------------------------------------------- the section


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("notify.urls=[https://hooks.example/T0/SECRET]", "name of the environment variable"),
        ("notify.urls=[MY-HOOK]", "name of the environment variable"),
        ("notify.urls=[/slack://T0/SECRET]", "name of the environment variable"),
        ("notify.webhook=https://hooks.example/T0/SECRET", "name of the environment variable"),
        ("notify.command='   '", "is empty"),
        ("notify.command='curl -d @- https://x.example/SECRET'", "has an address in it"),
        ("notify.after_min=-1", "zero or more"),
    ],
)
def test_a_section_that_cannot_work_is_refused_without_repeating_it(override, says) -> None:
    from refiner_core.contract.checks.recipe import check_config

    with pytest.raises(ConfigurationError, match=says) as refused:
        check_config(load_recipe("tiny", [override]))
    assert "SECRET" not in str(refused.value)


def test_a_missing_address_is_reported_before_the_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TEAM_HOOK", "json://host/")
    notify = NotifyConfig(urls=("TEAM_HOOK", str(tmp_path / "none")))
    warn_of_silence(replace(RecipeConfig(), notify=notify))
    said = capsys.readouterr().err
    assert "TEAM_HOOK" not in said
    assert f"notify.urls=[{tmp_path}/none]" in said


# ---------------------------------------------------------------- how they go out


def test_a_command_that_hangs_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sender, "_COMMAND_S", 1.0)
    alarm = NotifyChannel("command", f"sleep 300 & echo $! > {tmp_path}/pid; wait")
    message = words.stopped(TOPIC, "why")
    with pytest.raises(ChannelError, match="did not end"):
        sender.send(alarm, message, show=False)
    child = int((tmp_path / "pid").read_text())
    # A killed child is gone when init has taken it in.
    wait_until(lambda: not _is_running(child), "its child to end")


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no address"),
        ("no-such-service://secret-path", "is not known to Apprise"),
        ("# a comment\nhttps:///secret-path\n", "is not known to Apprise"),
        ("http://127.0.0.1:{port}/secret-path", r"\(no answer\)"),
        ("json://127.0.0.1:{port}/secret-path", "did not take the message"),
    ],
)
def test_a_failed_address_is_not_repeated(text, says, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(sender, "_TRIES", 1)
    file = tmp_path / "hook"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # taken, and nobody listens
        text = text.format(port=free.getsockname()[1])
        file.write_text(text)
        with pytest.raises(ChannelError, match=says) as refused:
            sender.send(NotifyChannel("url", str(file)), words.stopped(TOPIC, "why"))
    assert "secret-path" not in str(refused.value) + caplog.text


def test_a_failing_plugin_is_reported_without_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> str:
        raise KeyError("https://secret-path")

    monkeypatch.setattr(sender, "_refusal", broken)
    monkeypatch.setenv("TEAM_HOOK", "slack://secret-path")
    with pytest.raises(ChannelError, match=r"TEAM_HOOK failed \(KeyError\)") as refused:
        sender.send(NotifyChannel("url", "TEAM_HOOK"), words.stopped(TOPIC, "why"))
    assert "secret-path" not in "".join(traceback.format_exception(refused.value))


def test_an_address_gets_the_format_of_its_service_and_a_redirect_is_a_failure(monkeypatch) -> None:
    monkeypatch.setattr(sender, "_PAUSE_S", 0.0)
    message = words.stopped(TOPIC, "why")
    with Hook() as hook, Hook(statuses=(500, 503)) as other:
        plain = f"{hook.address}?key=a%20b&key2=c"
        both = f"{plain}\n{other.address.replace('http', 'json', 1)}"
        monkeypatch.setenv("TEAM_HOOK", both)
        sender.send(NotifyChannel("url", "TEAM_HOOK"), message)
        (body,) = hook.bodies
        text = f"{message['title']}\n{message['text']}"
        assert body == {**{k: v for k, v in message.items() if k != "version"}, "text": text}
        assert hook.paths == ["/secret-path?key=a%20b&key2=c"]
        assert [b["message"] for b in other.bodies] == [message["text"]] * 3, "as Apprise has it"
        hook.status = 302
        with pytest.raises(ChannelError, match="Address 1 in TEAM_HOOK did not take"):
            sender.send(NotifyChannel("url", "TEAM_HOOK"), message)

"""What messages say, when a pause is worth one, and which sections are refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.notifying import channels, words
from flows.notifying.channels import ChannelFailed
from flows.notifying.courier import Courier, Route
from flows.notifying.message import message_of, parcel_of
from flows.notifying.pauses import Change, Pauses, Sight
from flows.notifying.telling import Teller
from flows.notifying.watching import told_pauses
from flows.notifying.watching_sweeps import SweepWatching
from flows.notifying.words import Topic
from flows.sweeping.words import TrialWord
from infra.campaign.reconcile import paused_after
from infra.store.layout import sweep_call
from infra.store.notices import Notices
from infra.store.workspace import Workspace
from refiner_core.contract.alarms import Alarm
from refiner_core.contract.config import NotifyConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import make_plan
from refiner_core.contract.records import from_json, to_json
from refiner_core.contract.views import StageView
from tests.support.command import wait_until

TOPIC = Topic("20261121-120000-tiny-ab12", "tiny", "/scratch/me/my runs", "node7")


def view(name: str, state: Any, **more: Any) -> StageView:
    return StageView(name, name.partition("-")[0], "f", state, **more)


def number(stage: str, metric: str, value: float, decoding: str = "sampled") -> dict[str, Any]:
    interval = {"low": value - 0.1, "high": value + 0.1}
    return {
        "stage": stage, "metric": metric, "value": value, "decoding": decoding, "under": "",
    } | interval  # fmt: skip


# ---------------------------------------------------------------- what they say


def test_a_finished_run_says_numbers_before_and_after_and_where_the_models_lie() -> None:
    views = {
        "sft": view("sft", "skipped"),
        "grpo": view("grpo", "done", seconds=7200.0),
        "publish": view("publish", "done", report={"target": "/runs/published/refiner"}),
    }
    numbers = [
        *(number("base", m, 0.1) for m in ("reward", "oracle")),
        number("grpo", "reward", 8.633),
        number("grpo", "oracle", 0.811),
        number("grpo", "oracle", 0.9, decoding="greedy"),
        number("random_copier", "oracle", 0.42),
    ]
    message = words.finished(TOPIC, "k", views, numbers)
    assert message.title == "20261121-120000-tiny-ab12 has finished"
    assert "  oracle: 0.100 (base) -> 0.811 [0.711, 0.911] (grpo)" in message.text.splitlines()
    assert "random_copier" not in message.text
    assert "2 stages done" in message.text
    assert "1 were there already" in message.text
    assert "published: /runs/published/refiner" in message.text
    assert message.next == f"refiner report {TOPIC.name} 'workspace=/scratch/me/my runs'"


def test_a_failure_begins_with_what_failed_by_itself_and_says_how_to_mend_it() -> None:
    views = {
        "data": view("data", "done"),
        "sft": view("sft", "failed", message="needs data"),
        "grpo": view(
            "grpo",
            "failed",
            message="lr is 9. To mend it: set grpo.learning_rate",
            log="/l/log.txt",
        ),
        "evaluate": view("evaluate", "blocked", message="needs grpo"),
    }
    causes = {"sft": "bug", "grpo": "not_finite"}
    message = words.failed(TOPIC, "k", views, causes)
    assert message.title.endswith("has failed: grpo, loss, norm or reward was not finite")
    assert message.text.splitlines()[0].endswith("To mend it: set grpo.learning_rate")
    assert "1 of 4 stages are done." in message.text
    assert (message.cause, message.next.split()[:3]) == ("not_finite", ["refiner", "logs", "grpo"])


def test_who_gave_up_waiting_is_told_to_resume_and_not_to_look_for_a_bug() -> None:
    views = {"grpo": view("grpo", "interrupted", message="no room for 1440 min", exit_code=5)}
    message = words.failed(TOPIC, "k", views, {"grpo": "disk_full"})
    assert "stands still: grpo, no room on the disk" in message.title
    assert message.next.startswith("refiner resume ")


def test_a_message_is_short_has_no_credentials_and_comes_back_from_its_record() -> None:
    text = "x" * 9000 + " https://me:hunter2@host/"
    signed = words.stopped(TOPIC, "k", "https://me:hunter2@host/a?X-Amz-Signature=abcdef")
    long = TOPIC.message("k", "failed", "a\nb" * 900, text, "refiner status", stage="s, " * 900)
    assert len(long.text) <= 2400
    assert len(long.title) <= 200
    assert "\n" not in long.title
    assert len(json.dumps(dict(parcel_of(long).body))) < 8000
    assert "hunter2" not in signed.text
    assert "abcdef" not in signed.text
    assert message_of(json.loads(json.dumps(long.json()))) == long


def test_what_goes_out_names_the_run_or_the_sweep_for_scripts_and_automations() -> None:
    parcel = parcel_of(words.stopped(TOPIC, "k", "stopped by Ctrl-C"))
    assert parcel.event == "refiner.run.stopped"
    assert parcel.labels["prefect.resource.id"] == f"refiner.run.{TOPIC.name}"
    assert parcel.variables["REFINER_RUN"] == parcel.body["run"] == TOPIC.name
    sweep = replace(TOPIC, call=sweep_call("betas"))
    parcel = parcel_of(words.sweep_ended(sweep, "k", {}, "6 trials: 6 done"))
    assert parcel.event == "refiner.sweep.finished"
    assert parcel.labels["prefect.resource.id"] == "refiner.sweep.betas"
    assert (parcel.variables["REFINER_RUN"], parcel.variables["REFINER_SWEEP"]) == ("", "betas")


# ---------------------------------------------------------------- pauses


def told(pauses: Pauses, *sights: Sight, every_s: float = 10.0) -> list[tuple[str, float]]:
    found = []
    for number_, sight in enumerate(sights):
        now = number_ * every_s
        found += [(c.kind, now) for c in pauses.look({"grpo": sight}, now)]
    return found


OUT = Sight("judge_outage", "pauses after judge outage, 30 s more", done=7)
TRIES, FURTHER = Sight(done=5), Sight(done=8)


@pytest.mark.parametrize(
    ("sights", "expected"),
    [
        ((OUT, OUT, FURTHER), []),  # over within a moment
        ((OUT, TRIES, OUT, TRIES, OUT, TRIES, OUT, OUT), [("paused", 40.0)]),
        ((OUT,) * 6 + (TRIES, FURTHER, FURTHER), [("paused", 30.0), ("resumed", 70.0)]),
        ((OUT,) * 5 + (Sight(over=True, ended=True),), [("paused", 30.0), ("resumed", 50.0)]),
        ((OUT,) * 5 + (Sight(ended=True),), [("paused", 30.0)]),  # its end is another message
        ((OUT,) + (TRIES,) * 9, []),  # it works on, only not far yet
    ],
)
def test_a_pause_is_told_once_when_it_lasts_and_its_end_when_work_gets_further(
    sights: tuple[Sight, ...], expected: list[tuple[str, float]]
) -> None:
    assert told(Pauses(30.0), *sights) == expected


def test_a_pause_that_an_earlier_process_has_told_of_is_not_told_again(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path)
    notices = Notices(workspace.layout, tmp_path / "notices")
    change = Change("paused", "judge_outage", ("grpo",), "…", 60.0, 1)
    notices.record("p", words.changed(TOPIC, "p", change).json())
    assert told_pauses(notices) == {"judge_outage": ("grpo",)}
    pauses = Pauses(30.0, told_pauses(notices))
    assert told(pauses, *(OUT,) * 6, TRIES, FURTHER) == [("resumed", 70.0)]
    notices.record("r", words.changed(TOPIC, "r", change._replace(kind="resumed")).json())
    assert told_pauses(notices) == {}


def test_several_stages_that_wait_for_the_same_are_one_pause() -> None:
    pauses, short = Pauses(0.0), Sight("disk_full", "12 GB more are needed")
    (change,) = pauses.look({"grpo": short, "evaluate": short}, 1.0)
    assert change.stages == ("grpo", "evaluate")
    assert pauses.look({"grpo": FURTHER, "evaluate": short}, 2.0) == []
    (change,) = pauses.look({"grpo": FURTHER, "evaluate": FURTHER}, 3.0)
    assert change.kind == "resumed"


def test_why_a_stage_waits_is_read_from_what_the_reconciler_says() -> None:
    assert paused_after("pauses after environment outage, 30 s more") == "environment_outage"
    assert paused_after("waits for a free slot (dispatch.max_parallel)") == ""


# ---------------------------------------------------------------- sweeps


class Sweep:
    """What is asked of a supervisor, by hand."""

    def __init__(self, states: dict[str, str]) -> None:
        self.held, self.states = "", states

    def standing(self) -> dict[str, TrialWord]:
        return {n: TrialWord(s, f"grpo: {n} broke", f"run-{n}") for n, s in self.states.items()}  # type: ignore[arg-type]

    def working(self) -> dict[str, dict[str, StageView]]:
        return {n: {"grpo": view("grpo", s)} for n, s in self.states.items() if s == "running"}


Told = Callable[[], list[tuple[str, str]]]


@pytest.fixture
def sweep(tmp_path: Path) -> tuple[Sweep, SweepWatching, Told, list[float]]:
    """A sweep of four trials, who watches it, what was recorded to be told, and the clock."""
    workspace, clock = Workspace.open(tmp_path), [0.0]
    notices = Notices(workspace.layout, tmp_path / "notices")
    notify = NotifyConfig(command="true")
    topic = replace(TOPIC, call=sweep_call("betas"))
    teller = Teller(Route(topic, notify, 1, "", ""), notices, lambda: 1e9, pytest.fail)
    supervisor = Sweep(dict.fromkeys("abcd", "running"))
    watching = SweepWatching(
        supervisor, workspace, resumed=False, topic=topic, notify=notify, turn=1,
        teller=teller, notices=notices, clock=lambda: clock[0],
    )  # fmt: skip
    watching.show({})
    return supervisor, watching, lambda: [(m["kind"], m["title"]) for m in notices.all()], clock


def test_of_a_sweep_the_first_failed_trial_is_told_and_the_others_with_the_end(
    sweep: tuple[Sweep, SweepWatching, Told, list[float]],
) -> None:
    supervisor, watching, told_, clock = sweep
    for trial in "abc":
        supervisor.states[trial] = "failed"
        for _ in range(3):
            clock[0] += 3.0
            watching.show({})
    assert told_() == [("failed", "sweep betas goes on, but a has failed")]
    supervisor.states["d"] = "done"
    watching.over({})
    assert told_()[1:] == [("failed", "sweep betas has ended without 3 trials")]


def test_a_sweep_that_is_held_says_so_once_and_one_that_is_done_too(
    sweep: tuple[Sweep, SweepWatching, Told, list[float]],
) -> None:
    supervisor, watching, told_, _ = sweep
    supervisor.held = "it would take 900 GPU-hours of 800"
    watching.show({})
    watching.show({})
    supervisor.states.update(a="done", b="done", c="held", d="held")
    watching.over({})
    assert told_() == [("paused", "sweep betas is held")]
    supervisor.held = ""
    supervisor.states.update(c="done", d="done")
    watching.over({})
    watching.over({})
    assert told_()[1:] == [("finished", "sweep betas has finished")]


# ---------------------------------------------------------------- the section


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("notify.webhook=https://hooks.example/T0/SECRET", "name of the environment variable"),
        ("notify.webhook=MY-HOOK", "name of the environment variable"),
        ("notify.command='   '", "is empty"),
        ("notify.command='curl -d @- https://x.example/SECRET'", "has an address in it"),
        ("notify.after_min=-1", "zero or more"),
    ],
)
def test_a_section_that_cannot_work_is_refused_without_repeating_it(
    override: str, says: str
) -> None:
    from refiner_core.contract.checks.recipe import check_config

    with pytest.raises(ConfigurationError, match=says) as refused:
        check_config(load_recipe("tiny", [override]))
    assert "SECRET" not in str(refused.value)


def test_who_is_told_changes_no_stage_and_records_without_the_section_are_quiet() -> None:
    loud = NotifyConfig(on=(), command="x", webhook="Y", prefect=True, after_min=3, pause_min=9)
    plain, told_of = RecipeConfig(), replace(RecipeConfig(), notify=loud)
    ids = [[s.id for s in make_plan(c, {}).stages] for c in (plain, told_of)]
    assert ids[0] == ids[1]
    old = to_json(plain)
    del old["notify"]
    assert from_json(RecipeConfig, old).notify == NotifyConfig()


# ---------------------------------------------------------------- how they go out


def test_a_command_that_hangs_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_COMMAND_S", 1.0)
    alarm = Alarm("command", f"sleep 300 & echo $! > {tmp_path}/pid; wait")
    message = TOPIC.message("k", "failed", "has failed", "why", "refiner status")
    with pytest.raises(ChannelFailed, match="did not end"):
        channels.send(alarm, parcel_of(message), show=False)
    child = int((tmp_path / "pid").read_text())
    # A killed child is gone when init has taken it in.
    wait_until(lambda: not _is_running(child), "its child to end", 10)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_another_courier_has_just_delivered_goes_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Workspace.open(tmp_path / "runs").layout
    notices = Notices(layout, tmp_path / "runs" / "notices")
    notify = NotifyConfig(command=f"echo told >> {tmp_path}/told")
    message = TOPIC.message("k", "finished", "has finished", "all", "refiner report")

    class Late(Notices):
        """The other courier is through between the look and the claim."""

        def begin_sending(self, key: str, channel: str) -> bool:
            notices.note_delivery(key, channel)
            return super().begin_sending(key, channel)

    route = Route(TOPIC, notify, 1, "node7:1:0", "")
    courier = Courier(route, Late(layout, notices.folder))
    courier.begin()
    courier.take(message)
    assert courier.finish(10.0)
    assert not (tmp_path / "told").exists()


def test_a_webhook_that_nobody_answers_says_why_and_not_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "_TRIES", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # taken, and nobody listens
        monkeypatch.setenv("TEAM_HOOK", f"http://127.0.0.1:{free.getsockname()[1]}/secret-path")
        parcel = channels.Parcel({"title": "t", "text": "t"}, {}, "e", {})
        with pytest.raises(ChannelFailed, match=r"\(connection refused\)") as refused:
            channels.send(Alarm("webhook", "TEAM_HOOK"), parcel)
    assert "secret-path" not in str(refused.value)

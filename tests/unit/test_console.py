"""Progress and summaries on standard error."""

from __future__ import annotations

import errno
import io
from dataclasses import replace

import pytest

from flows.running.console import Console
from flows.sweeping.admission import TrialVerdict
from refiner_core.contract.types import Progress, StageView

SFT = StageView("sft", "sft", "f" * 12, "waiting")
RUNNING = replace(SFT, state="running", attempt=1)
FAILED = replace(SFT, state="failed", seconds=65.0, message="loss is NaN", log="/w/sft.log")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def at(step: int, **values: float) -> StageView:
    return replace(RUNNING, progress=Progress(step, 80, "step", values))


def shown(*views: StageView, every_s: float = 1.0, quiet: bool = False) -> list[str]:
    """Lines after the views of one stage were shown one after the other."""
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock, quiet=quiet)
    for view in views:
        console.show({view.name: view})
        clock.now += every_s
    console.close()
    return stream.getvalue().splitlines()


def test_every_change_of_state_is_one_line() -> None:
    done = replace(RUNNING, state="done", seconds=7.2)
    assert shown(SFT, RUNNING, RUNNING, done, done) == ["sft: running", "sft: done (7.2 s)"]


def test_progress_is_a_line_every_ten_seconds_at_most() -> None:
    lines = shown(*[at(step, reward=step / 100) for step in range(1, 26)])
    assert lines == [
        "sft: running, step 1/80, reward 0.01",
        "sft: running, step 11/80, reward 0.11",
        "sft: running, step 21/80, reward 0.21",
    ]


def test_quiet_leaves_failures() -> None:
    assert shown(RUNNING, at(3), FAILED, every_s=20.0, quiet=True) == [
        "sft: failed (1 min 05 s), loss is NaN",
        "  log: /w/sft.log",
    ]


def test_the_summary_names_logs_and_the_next_commands() -> None:
    stream = io.StringIO()
    console = Console(
        command=["refiner", "run", "tiny", "workspace=/w space"],
        workspace="/w space",
        stream=stream,
        clock=Clock(),
    )
    blocked = StageView("grpo", "grpo", "f", "blocked", message="sft failed")
    views = {"sft": FAILED, "grpo": blocked}
    console.finish(views)
    assert stream.getvalue().splitlines()[3:] == [
        "1 failed, 1 blocked in 0.0 s",
        "  sft: failed: loss is NaN",
        "    log: /w/sft.log",
        "  grpo: blocked: sft failed",
    ]
    assert console.next_commands(views) == [
        "refiner logs sft 'workspace=/w space'",
        "refiner run tiny 'workspace=/w space'",
        "refiner status 'workspace=/w space'",
    ]


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream=stream, clock=Clock())
    console.show({"sft": at(40, loss=1.25)})
    console.note("Prefect: http://127.0.0.1:1")
    console.finish({"sft": replace(at(80), state="done")})
    text = stream.getvalue()
    assert "step 40/80" in text
    assert "loss 1.25" in text
    assert "Prefect: http://127.0.0.1:1" in text
    assert "1 done in" in text


def test_a_sweep_shows_changes_of_trials_and_the_stages_at_work() -> None:
    stream, clock, trials = io.StringIO(), Clock(), dict[str, TrialVerdict]()
    console = Console(stream=stream, clock=clock, trials=lambda: trials)
    views = {"a/sft": replace(at(3), name="a/sft"), "a/data": replace(SFT, name="a/data")}
    for a, b in (("waiting", "waiting"), ("running", "held"), ("failed", "held")):
        trials["a"] = TrialVerdict(a, "loss is NaN" if a == "failed" else "", run="run-a")
        trials["b"] = TrialVerdict(b, "a limit" if b == "held" else "", run="run-b")
        console.show(views)
        clock.now += 60.0
    console.finish({})
    assert stream.getvalue().splitlines() == [
        "a: running (run run-a)",
        "2 trials: 1 running, 1 held",
        "  a/sft: running step 3/80",
        "a: failed: loss is NaN",
        "2 trials: 1 held, 1 failed",
        "  a/sft: running step 3/80",
        "2 trials: 1 held, 1 failed in 3 min",
    ]


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_closed_terminal_stops_no_work(
    monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = kind()
    console = Console(stream=stream)
    console.show({"sft": SFT})

    def refuse(_text: str) -> int:
        raise OSError(errno.EIO, "the terminal is gone")

    stream.write = refuse
    console.show({"sft": RUNNING})
    console.note("stopping")
    console.finish({"sft": FAILED})
    console.close()

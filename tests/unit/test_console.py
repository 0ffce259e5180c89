"""Progress and summaries on standard error."""

from __future__ import annotations

import errno
import io
from dataclasses import replace

import pytest

from flows.running.console import Console
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

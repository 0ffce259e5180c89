"""Progress, signals and text of others on a terminal."""

import errno
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flows.artifacts import artifacts_of, markdown_table
from flows.cli.run import stop_on_signals
from flows.running.console import Console
from flows.running.foreground import run_shown
from flows.running.logs import log_pieces
from infra.host.terminal import printable
from infra.store.workspace import Workspace
from refiner_core.contract.records import AttemptOutcome, RunRecord, to_json
from refiner_core.contract.types import Progress, StageView
from refiner_core.report.printing import table_lines
from tests.support.command import on_terminal, refiner
from tests.support.plans import claim, run_record, small_plan

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


# ---------------------------------------------------------------- text of others


#: Clears the screen, sets the title, writes the clipboard, hides a line, turns text around.
HOSTILE = "a\x1b[2J\x1b[Hb\x1b]0;owned\x07c\x1b]52;c;aGk=\x1b\\d\x1bPq\x1b\\e\x9b2Jf\x08\x7f"
HOSTILE += "\u202eg\rh\x1b(0"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOSTILE, "abcdefg\nh"),
        ("plain\ttext\nµ 漢 🙂\n", "plain\ttext\nµ 漢 🙂\n"),
        ("10%\r20%\r\n", "10%\n20%\n"),
        ("cut \x1b[3", "cut "),
        ("cut \x1b", "cut "),
        ("\x1b[31mred\x1b[0m", "red"),
    ],
)
def test_nothing_but_text_is_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.fixture
def run(workspace: Workspace) -> RunRecord:
    """Its attempt at SFT has printed and said what is hostile."""
    plan = small_plan()
    run = replace(run_record(workspace, plan), config=to_json(plan.config))
    workspace.write_run(run)
    planned = claim(workspace, plan, "sft")
    workspace.start_attempt(planned.id, 1, {"started_at": "2026-11-21T01:00", "node": "n3"})
    log = workspace.layout.attempt(planned.id, 1).log
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(HOSTILE, newline="")
    workspace.close_attempt(planned.id, 1, AttemptOutcome("bug", "stop", HOSTILE, 5, 7), 10.0)
    return run


@pytest.mark.slow
def test_a_terminal_gets_no_sequences(workspace: Workspace, run: RunRecord) -> None:
    where = f"workspace={workspace.root}"
    for words in (("logs", "sft"), ("status",), ("status", "--json")):
        said = on_terminal(*words, where)
        assert b"abcdefg" in said or b"\\u001b" in said, words
        for sign in (b"\x1b", b"\x07", "\x9b".encode(), b"\x08", b"\x7f", "\u202e".encode()):
            assert sign not in said.replace(b"\r\n", b""), (words, sign)
    piped = refiner("logs", "sft", where)
    assert "\x1b[2J" in piped.stdout
    assert "\x1b]52;c;aGk=" in piped.stdout


def test_a_running_table_shows_hostile_messages_as_text() -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Tty()
    console = Console(stream=stream)
    view = StageView("sft", "sft-1", "f", "failed", message=f"it said {HOSTILE}")
    console.show({"sft": view})
    console.finish({"sft": view})
    assert len([*table_lines([["sft", "killed: x\ngrpo  done"]], ["stage", "state"])]) == 2
    assert "abcdef" in stream.getvalue()
    for sign in ("\x1b]0;", "\x1b]52", "\x1b[2Jb", "\x07", "\x9b", "\u202e"):
        assert sign not in stream.getvalue()


def test_a_log_larger_than_the_memory_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("first line\n")
    os.truncate(log, 1 << 40)  # 1 TiB without a block
    first = next(log_pieces(log))
    assert first.startswith("first line\n")
    assert sys.getsizeof(first) < 1 << 23
    log.write_bytes("aé漢".encode() * 700_000)
    assert "".join(log_pieces(log)) == "aé漢" * 700_000, "no letter is cut in two"
    assert list(log_pieces(tmp_path / "none")) == []


# ---------------------------------------------------------------- signals


class Stubborn:
    """An orchestrator that works for some seconds, and is slow to note a request to stop."""

    def __init__(self, seconds: float) -> None:
        self.ends_at, self.stopped_for = time.monotonic() + seconds, ""

    def start(self) -> None:
        pass

    def views(self) -> dict[str, StageView]:
        state = "running" if time.monotonic() < self.ends_at else "done"
        return {"data": StageView("data", "data", "f", state)}

    def request_stop(self, reason: str) -> None:
        time.sleep(0.1)
        self.stopped_for = reason

    def wait(self, seconds: float) -> bool:
        left = self.ends_at - time.monotonic()
        time.sleep(max(0.0, min(seconds, left)))
        return left <= seconds

    def join(self) -> dict[str, StageView]:
        return self.views()


@pytest.fixture
def handlers() -> Iterator[None]:
    """SIGTERM and SIGHUP as in the command; all as they were afterwards."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    stop_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.slow
def test_ctrl_c_asks_to_stop_and_a_second_one_leaves() -> None:
    class Impatient(Console):
        presses = 0

        def show(self, views: object) -> None:
            self.presses += 1
            signal.raise_signal(signal.SIGINT)

    campaign = Stubborn(60.0)
    console = Impatient(stream=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        run_shown(campaign, console=console)
    assert campaign.stopped_for == "Ctrl-C"
    assert console.presses > 2  # within a second they are one wish


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("apart_s", [0.0, 0.05])
@pytest.mark.parametrize(
    ("first", "said"), [(signal.SIGHUP, "SIGHUP"), (signal.SIGTERM, "SIGTERM")]
)
def test_simultaneous_signals_count_once(apart_s: float, first: signal.Signals, said: str) -> None:
    """A terminal that closes, systemd and scancel send several; the jobs must not be left."""
    campaign = Stubborn(1.2)
    code = (
        "import os, time; print(flush=True); input(); "
        f"os.kill({os.getpid()}, {first}); time.sleep({apart_s}); "
        f"os.kill({os.getpid()}, {signal.SIGTERM})"
    )
    stream = io.StringIO()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdin is not None
        sender.stdout.readline()  # it is there, and sends at once when it is told to
        threading.Timer(0.3, lambda: sender.communicate("\n")).start()
        views = run_shown(campaign, console=Console(stream=stream))
    # Which of two that are pending at once is taken first is the kernel's choice of threads.
    assert campaign.stopped_for in (said, "SIGTERM")
    assert stream.getvalue().count("Stopping (") == 1
    assert {view.state for view in views.values()} == {"done"}
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_artifacts_hold_no_image_and_no_html() -> None:
    """A row, an answer or a judge may have written a part of it; the UI would fetch and obey."""
    evil = "<img src=//h/x> ![](//h/y) <!-- x --></script>"
    view = StageView(
        "sft",
        "sft",
        "f",
        "done",
        report={
            "evaluations": [{"metric": evil, "value": 1.0}],
            "card": f"# Title\n\n{evil}\n\nwith a < b, a [link](x) and `<answer>`",
        },
    )
    artifacts = artifacts_of("r", view)
    assert len(artifacts) == 2
    shown = [a["markdown"] for a in artifacts] + [markdown_table([{evil: evil}])]
    for text in shown:
        assert not re.search(r"<[a-zA-Z/!?]|!\[", text)
    assert "with a < b, a [link](x) and `‹answer>`" in artifacts[-1]["markdown"]

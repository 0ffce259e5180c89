"""Text of trainers, answers and judges sends no sequences to a terminal. A log is read in pieces,
and a missing one has a reason."""

import io
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flows.running.console import Console
from flows.running.logs import log_pieces
from infra.host.terminal import printable
from infra.store.workspace import Workspace
from refiner_core.contract.records import AttemptOutcome, RunRecord, to_json
from refiner_core.contract.types import StageView
from refiner_core.report.printing import table_lines
from tests.support.command import on_terminal, refiner
from tests.support.plans import claim, run_record, small_plan

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

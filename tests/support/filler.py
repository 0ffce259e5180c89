"""Another user of the same quota: fills it at random moments, and in the middle of saves.

    python -m tests.support.filler FOLDER --watch WORKSPACE --seed 7 --rounds 20

In: a folder on the quota, and a workspace there whose checkpoints are watched for. Out: one JSON
line per round on stdout: when it was begun (seconds from the start, and what was drawn), how many
bytes went in before EDQUOT, for how long they stayed. Every fourth round waits until a checkpoint
is half-written and fills the quota then; the rest come at random offsets. A save may be quicker
than that: with ``--until-seen TEXT`` all rounds come in the middle of saves, and they are over once
an attempt's log has the text. With ``--refill`` all rounds come in the middle of saves, too, and
for as long as one lasts whatever anybody frees is taken at once; ``--inodes`` takes files instead
of bytes. ``--saves`` tells what a half-written save looks like: files of a folder that has none yet
of the name ``--whole``. SIGTERM removes it all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

_CHUNK = os.urandom(1 << 20)
_LONGEST_S = 60.0  # that a save is waited for


def main() -> None:
    """Fill and empty until all rounds are over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--watch", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--longest-wait-s", type=float, default=6.0)
    parser.add_argument("--hold-s", type=float, nargs=2, default=(0.5, 5.0))
    parser.add_argument("--until-seen", metavar="TEXT")
    parser.add_argument("--refill", action="store_true")
    parser.add_argument("--inodes", action="store_true")
    parser.add_argument("--saves", metavar="GLOB", default="stages/*/checkpoints/.tmp-step-*/*")
    parser.add_argument("--whole", metavar="NAME", default="COMPLETE.json")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    dice, began = random.Random(told.seed), time.monotonic()
    taker = (Files if told.inodes else Bytes)(told.folder)
    try:
        for number in range(1, told.rounds + 1):
            wait_s, hold_s = dice.uniform(0, told.longest_wait_s), dice.uniform(*told.hold_s)
            if told.until_seen and _seen(told.watch, told.until_seen):
                break
            mid_save = number % 4 == 1 or told.until_seen or told.refill
            if mid_save:
                _wait_for_save(told.watch, told.saves, told.whole)
            else:
                time.sleep(wait_s)
            at = time.monotonic() - began
            line = {"round": number, "kind": "mid-save" if mid_save else "at random"}
            line |= {"at_s": round(at, 3), "taken": taker.take(), "hold_s": round(hold_s, 2)}
            if told.refill:
                line["taken_again"] = _keep_taking(taker, hold_s)
            print(json.dumps(line), flush=True)
            if not told.refill:
                time.sleep(hold_s)
            taker.give_back()
    finally:
        taker.give_back()


def _seen(workspace: Path, text: str) -> bool:
    logs = workspace.glob("stages/grpo-*/attempts/*/log.txt")
    return any(text in log.read_text(errors="replace") for log in logs)


def _wait_for_save(workspace: Path, saves: str, whole: str) -> None:
    """Until a checkpoint is half-written, or for a minute."""
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):  # it went away while it was looked at
            if any(not (p.parent / whole).exists() for p in workspace.glob(saves)):
                return
        time.sleep(0.002)


def _keep_taking(taker: Bytes | Files, hold_s: float) -> int:
    """Take whatever is freed, for ``hold_s``; how much that was."""
    taken, deadline = 0, time.monotonic() + hold_s
    while time.monotonic() < deadline:
        taken += taker.take()
        time.sleep(0.005)
    return taken


class Bytes:
    """All the bytes that are left, in one file."""

    def __init__(self, folder: Path) -> None:
        self._file, self._written = folder / "somebody-elses-data.bin", 0

    def take(self) -> int:
        """Take all that is left, at once; bytes taken."""
        before = self._written
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError:  # not even the file
            return 0
        size = 64 << 20
        while size >= len(_CHUNK):  # reserving is quicker than any writer that is at work just now
            try:
                os.posix_fallocate(descriptor, self._written, size)
                self._written += size
            except OSError:
                size //= 2
        os.lseek(descriptor, self._written, os.SEEK_SET)
        size = len(_CHUNK)
        try:
            while size >= 512:
                try:
                    self._written += os.write(descriptor, _CHUNK[:size])
                except OSError:
                    size //= 2
        finally:
            os.close(descriptor)
        return self._written - before

    def give_back(self) -> None:
        """Leave the room to others again."""
        self._file.unlink(missing_ok=True)
        self._written = 0
        os.sync()  # btrfs gives quota back only once it has written that out


class Files:
    """All the inodes that are left, in empty files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder / "somebody-elses-files", 0

    def take(self) -> int:
        """Take all that is left, at once; files made."""
        before = self._made
        try:
            self._folder.mkdir(exist_ok=True)
            while True:
                (self._folder / str(self._made)).touch()
                self._made += 1
        except OSError:
            return self._made - before

    def give_back(self) -> None:
        """Leave the room to others again."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()

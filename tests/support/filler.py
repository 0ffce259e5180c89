"""Another user of the same quota: fills it at random moments, and in the middle of saves.

    python -m tests.support.filler FOLDER --watch WORKSPACE --seed 7 --rounds 20

In: a folder on the quota, and a workspace there whose checkpoints are watched for. Out: one JSON
line per round on stdout: when it was begun (seconds from the start, and what was drawn), how many
bytes went in before EDQUOT, for how long they stayed. Every fourth round waits until a checkpoint
is half-written and fills the quota then; the rest come at random offsets. A save may be quicker
than that: with ``--until-seen TEXT`` all rounds come in the middle of saves, and they are over once
an attempt's log has the text. SIGTERM removes it all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import FrameType

_CHUNK = os.urandom(1 << 20)


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
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    dice, began = random.Random(told.seed), time.monotonic()
    file = told.folder / "somebody-elses-data.bin"
    try:
        for number in range(1, told.rounds + 1):
            wait_s, hold_s = dice.uniform(0, told.longest_wait_s), dice.uniform(*told.hold_s)
            if told.until_seen and _seen(told.watch, told.until_seen):
                break
            kind = "mid-save" if number % 4 == 1 or told.until_seen else "at random"
            if kind == "mid-save":
                _wait_for_save(told.watch, 60.0)
            else:
                time.sleep(wait_s)
            at = time.monotonic() - began
            written = _fill(file)
            line = {"round": number, "kind": kind, "at_s": round(at, 3), "bytes": written}
            print(json.dumps({**line, "hold_s": round(hold_s, 2)}), flush=True)
            time.sleep(hold_s)
            _empty(file)
    finally:
        _empty(file)


def _seen(workspace: Path, text: str) -> bool:
    logs = workspace.glob("stages/grpo-*/attempts/*/log.txt")
    return any(text in log.read_text(errors="replace") for log in logs)


def _wait_for_save(workspace: Path, limit_s: float) -> None:
    """Until a checkpoint is half-written, or for ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for folder in workspace.glob("stages/*/checkpoints/.tmp-step-*"):
            if any(folder.iterdir()):
                return
        time.sleep(0.002)


def _fill(file: Path) -> int:
    """Take all that is left, at once; bytes taken."""
    written = 0
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
    size = 64 << 20
    while size >= len(_CHUNK):  # reserving is quicker than any writer that is at work just now
        try:
            os.posix_fallocate(descriptor, written, size)
            written += size
        except OSError:
            size //= 2
    os.lseek(descriptor, written, os.SEEK_SET)
    size = len(_CHUNK)
    try:
        while size >= 512:
            try:
                written += os.write(descriptor, _CHUNK[:size])
            except OSError:
                size //= 2
    finally:
        os.close(descriptor)
    return written


def _empty(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.sync()  # btrfs gives quota back only once it has written that out


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()

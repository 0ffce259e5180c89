"""Slurm's commands as a small program with a folder for memory, put first on PATH in unit tests.

``calls.jsonl`` there has a line for each call: command, arguments, names of the environment.
``jobs.json`` maps ids to what squeue, scontrol and sacct print of them. ``NAME.fails`` makes a
command print its text on stderr and exit 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("program.py")
COMMANDS = ("sbatch", "srun", "squeue", "sacct", "scontrol", "scancel")


class FakeSlurm:
    """The folder, and the commands in ``bin`` below it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        for command in COMMANDS:
            script = self.bin / command
            script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {_PROGRAM} {command} "$@"\n')
            script.chmod(0o755)
        self.set_jobs({})

    def environment(self) -> dict[str, str]:
        """What points at it."""
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        return {"FAKE_SLURM": str(self.folder), "PATH": path}

    def set_jobs(self, jobs: Mapping[str, Mapping[str, Any]]) -> None:
        """What the scheduler knows from now on; ``live`` (default) lists a job in squeue."""
        (self.folder / "jobs.json").write_text(json.dumps(jobs))

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        """What it knows now."""
        found: dict[str, dict[str, Any]] = json.loads((self.folder / "jobs.json").read_text())
        return found

    def fail(self, command: str, text: str) -> None:
        """The command fails with this text; with none it works again."""
        path = self.folder / f"{command}.fails"
        if text:
            path.write_text(text)
        else:
            path.unlink(missing_ok=True)

    def calls(self, *commands: str) -> list[dict[str, Any]]:
        """All calls so far, or those of these commands."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [c for c in found if not commands or c["command"] in commands]

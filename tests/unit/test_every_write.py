"""Each write of an attempt fails: the workspace loads, and the next attempt ends undisturbed.

One life of an attempt (opening, claim, start, metrics, rollouts, reservations, checkpoints with
retention, result, outcome) is about two hundred operations on the disk. Each of them is refused
(EDQUOT once, ENOSPC from then on) or is the last one of the process: here in one of these ways, in
`make prove` in all three.
"""

from __future__ import annotations

import contextlib
import errno
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.store.atomic import TEMPORARY
from infra.store.traces import read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.errors import NoSpaceError
from refiner_core.contract.records import AttemptOutcome
from tests.support.command import ROOT
from tests.support.faulty_disk import Fault, FaultyDisk, Killed
from tests.support.one_life import (
    STAGE,
    TOLD,
    Story,
    go_on,
    one_life,
    quick,  # noqa: F401
    store,
    story,
)
from tests.support.thorough import share

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Story, list[str]]:
    """What a life on a sound disk leaves, and its operations."""
    disk = FaultyDisk(tmp_path_factory.mktemp("sound") / "ws")
    with disk.mounted():
        assert one_life(Path(disk.root)) == 0
    return story(Path(disk.root)), disk.operations


def disturbed_life(root: Path, at: int, fault: Fault) -> tuple[int | None, str]:
    """The exit code of a life in which operation ``at`` goes wrong (None: it has none), and that
    operation."""
    disk = FaultyDisk(root, at, fault)
    code = None
    with disk.mounted(), contextlib.suppress(Killed, NoSpaceError):
        code = one_life(root)
    return code, disk.operations[at - 1]


def check_what_is_left(root: Path, *, killed: bool, code: int | None) -> None:
    """Every reader finds whole files and a clear state."""
    workspace = Workspace.read_only(root)
    for path in root.rglob("*.json"):
        if TEMPORARY not in str(path.relative_to(root)):
            json.loads(path.read_text())
    for path in root.rglob("step-*.parquet"):
        assert len(read_rollouts(path)) == 1
    if not killed:
        left = [p for p in root.rglob(f"{TEMPORARY}*") if "heartbeat" not in p.name]
        assert left == [], "what did not fit is removed"
    record = workspace.read_record(STAGE.id)
    if record is None or not record.attempts:
        assert code is None
        return
    outcome = record.attempts[-1].outcome
    if killed:
        assert record.state in ("claimed", "done")
    elif record.result is not None or code == 0:
        assert (record.state, code) == ("done", 0)
        assert outcome == AttemptOutcome("none", "finish")
    else:
        assert code in (5, None)
        if outcome is not None:
            assert (outcome.failure, outcome.decision) == ("disk_full", "resume")
            assert outcome.errno in (errno.EDQUOT, errno.ENOSPC)
    check_checkpoints(workspace)


def check_checkpoints(workspace: Workspace) -> None:
    """The newest that was ever complete is there, and what is called complete can be loaded."""
    found = store(workspace).complete()
    for checkpoint in found:
        assert (checkpoint.path / "state.bin").read_bytes() == b"x" * int(str(TOLD["bytes"]))
    began = [int(p.name.removeprefix("step-")) for p in store(workspace)._folders()]
    assert max(began, default=0) == max((c.step for c in found), default=0)


FAULTS: tuple[Fault, ...] = ("refused once", "full from then on", "killed")


@pytest.mark.parametrize("fault", FAULTS)
def test_every_single_write_may_go_wrong(
    tmp_path: Path, undisturbed: tuple[Story, list[str]], fault: Fault
) -> None:
    expected, operations = undisturbed
    assert len(operations) > 150
    for at in share(len(operations), 3, FAULTS.index(fault)):
        root = tmp_path / str(at)
        works = operations[at - 1].startswith(("unlink", "rmdir")) and fault != "killed"
        if works:
            continue  # deleting works on a full disk, too
        code, operation = disturbed_life(root, at, fault)
        try:
            check_what_is_left(root, killed=fault == "killed", code=code)
            go_on(root)
            assert story(root) == expected
        except Exception as error:
            error.add_note(f"after operation {at} ({operation}): {fault}; see {root}")
            raise


def test_a_kill_at_any_write(tmp_path: Path, undisturbed: tuple[Story, list[str]]) -> None:
    expected, operations = undisturbed
    sampled = random.Random(20261121).sample(range(1, len(operations) + 1), 4)
    started = {
        at: subprocess.Popen(
            [sys.executable, "-m", "tests.support.one_life", tmp_path / str(at), str(at)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for at in sampled
    }
    for at, process in started.items():
        assert process.wait(240) == -signal.SIGKILL, operations[at - 1]
        check_what_is_left(tmp_path / str(at), killed=True, code=None)
        go_on(tmp_path / str(at))
        assert story(tmp_path / str(at)) == expected, operations[at - 1]

"""Checkpoints: complete or invisible, retention, fences, a full disk, reserved space."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.attempt.stage_io import Heartbeat
from infra.jobs.signals import AttemptClosed
from infra.store import atomic
from infra.store import atomic as room
from infra.store.checkpoints import MARKER, CheckpointStore, step_name
from infra.store.workspace import Workspace
from refiner_core.contract.errors import Interrupted, NoSpaceError
from tests.support.plans import claim, small_plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def save(store: CheckpointStore, step: int, text: str = "state") -> None:
    with store.new(step) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "state.bin").write_text(text)


def save_and_fail(store: CheckpointStore, step: int, error: Exception) -> None:
    with store.new(step) as folder:
        (folder / "half.bin").write_text("half")
        raise error


def steps(store: CheckpointStore) -> list[int]:
    return [c.step for c in store.complete()]


def test_the_newest_is_found_by_number_and_knows_its_attempt(folder: Path) -> None:
    for attempt, step in ((1, 9), (2, 10), (3, 123_456_789)):
        save(CheckpointStore(folder, attempt, keep=9), step)
    latest = CheckpointStore(folder, 4).latest()
    assert (latest.step, latest.attempt) == (123_456_789, 3)
    assert (latest.path / "sub" / "state.bin").read_text() == "state"


def test_a_checkpoint_is_invisible_until_it_is_complete(folder: Path) -> None:
    store = CheckpointStore(folder, 1)
    with store.new(1) as path:
        (path / "state.bin").write_text("half")
        assert store.latest() is None
    assert steps(store) == [1]
    with pytest.raises(Interrupted):
        save_and_fail(store, 2, Interrupted("stopped"))
    assert [p.name for p in folder.iterdir()] == [step_name(1)], "an error leaves nothing"


def test_what_a_killed_attempt_left_half_written_is_swept_away(folder: Path) -> None:
    folder.mkdir()
    left = folder / f"{atomic.TEMPORARY}{step_name(3)}-a1"
    left.mkdir()
    (left / "state.bin").write_text("half")
    store = CheckpointStore(folder, 2)
    assert store.latest() is None
    save(store, 4)
    assert not left.exists()


def test_a_deletion_that_was_cut_short_gives_its_room_back_later(folder: Path) -> None:
    store = CheckpointStore(folder, 1)
    save(store, 1)
    save(store, 2)
    (folder / step_name(1) / MARKER).unlink()  # a kill came right after this
    save(store, 3)
    assert sorted(p.name for p in folder.iterdir()) == [step_name(2), step_name(3)]
    (folder / step_name(3) / MARKER).unlink()
    with pytest.raises(ValueError, match="no"):
        save_and_fail(store, 3, ValueError("no"))
    assert [p.name for p in folder.iterdir()] == [step_name(2)], "before it is written again"


# ---------------------------------------------------------------- retention


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_the_newest_ones_are_kept_and_never_fewer_than_one(folder: Path, keep: int) -> None:
    store = CheckpointStore(folder, 1, keep=keep)
    for step in range(1, 6):
        save(store, step)
    assert steps(store) == [1, 2, 3, 4, 5][-max(1, keep) :]


@pytest.mark.parametrize(
    ("keep", "before", "step", "during", "after"),
    [
        (2, [1, 2], 3, [2], [2, 3]),  # with three of them it would be keep + 1
        (1, [1], 2, [1], [2]),  # the only one stays until its successor is complete
        (2, [5], 5, [5], [5]),  # saved again
        (1, [9], 5, [9], [5, 9]),  # a later step stays
    ],
)
def test_old_checkpoints_are_deleted_before_a_save_but_never_the_last_one(
    folder: Path, keep: int, before: list[int], step: int, during: list[int], after: list[int]
) -> None:
    store = CheckpointStore(folder, 1, keep=keep)
    for old in before:
        save(store, old)
    with store.new(step) as path:
        assert steps(store) == during
        (path / "state.bin").write_text("x")
    assert steps(store) == after


# ---------------------------------------------------------------- fence and order


def test_a_stale_attempt_makes_nothing_visible_and_deletes_nothing(folder: Path) -> None:
    newer: list[int] = []

    def fence() -> None:
        if newer:
            raise AttemptClosed("a newer attempt exists")

    def save_while_another_begins() -> None:
        with CheckpointStore(folder, 1, fence=fence).new(7) as path:
            (path / "state.bin").write_text("x")
            newer.append(2)

    with pytest.raises(AttemptClosed):
        save_while_another_begins()
    assert list(folder.iterdir()) == []
    for step in (1, 2, 3):
        save(CheckpointStore(folder, 2, keep=9), step)
    with pytest.raises(AttemptClosed):
        save(CheckpointStore(folder, 1, keep=2, fence=fence), 2)
    assert steps(CheckpointStore(folder, 2)) == [1, 2, 3]


def test_what_was_logged_is_durable_before_the_marker_exists(folder: Path) -> None:
    seen = []

    def flush() -> None:
        seen.append(list(folder.rglob(MARKER)))

    save(CheckpointStore(folder, 1, before_commit=flush), 1)
    assert seen == [[]]


# ---------------------------------------------------------------- a full disk


def full(*_: object, **__: object) -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), errno.EDQUOT),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"), errno.EDQUOT),
        (type("SafetensorError", (Exception,), {})("I/O error: (os error 122)"), errno.EDQUOT),
        (OSError("4096 requested and 0 written"), errno.EDQUOT),
    ],
)
def test_every_error_of_a_full_disk_is_recognised(
    folder: Path, error: Exception, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(folder, 1)
    save(store, 1)
    monkeypatch.setattr(room, "refusal", lambda *_: errno.EDQUOT)
    with pytest.raises(NoSpaceError, match="checkpoint of step 2") as caught:
        save_and_fail(store, 2, error)
    assert caught.value.errno == number
    assert [p.name for p in folder.iterdir()] == [step_name(1)]


def test_a_write_error_with_room_on_the_disk_stays_what_it_is(folder: Path) -> None:
    error = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    with (
        pytest.raises(RuntimeError, match="PytorchStreamWriter"),
        CheckpointStore(folder, 1).new(1),
    ):
        raise error


def test_a_checkpoint_is_synced_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a power cut would leave one that looks complete and is empty."""
    synced, sync = set[int](), os.fsync

    def noted(descriptor: int) -> None:
        if not (folder / step_name(1)).exists():
            synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    save(CheckpointStore(folder, 1), 1)
    saved = folder / step_name(1)
    assert {p.stat().st_ino for p in (saved, *saved.rglob("*"))} <= synced


# ---------------------------------------------------------------- room, and what a save costs


def test_space_is_reserved_after_retention_and_before_a_write(folder: Path) -> None:
    seen: list[list[str]] = []

    @contextlib.contextmanager
    def reserve() -> Iterator[None]:
        seen.append(sorted(p.name for p in folder.iterdir()))
        yield
        seen.append(sorted(p.name for p in folder.iterdir()))

    @contextlib.contextmanager
    def refuse() -> Iterator[None]:
        raise NoSpaceError("there will be none")
        yield

    store = CheckpointStore(folder, 1, keep=2, reserve=reserve)
    for step in (1, 2, 3):
        save(store, step)
    assert seen[4:] == [[step_name(2)], [step_name(2), step_name(3)]]
    with pytest.raises(NoSpaceError, match="there will be none"):
        save(CheckpointStore(folder, 1, reserve=refuse), 4)
    assert step_name(3) in [p.name for p in folder.iterdir()]
    assert step_name(4) not in [p.name for p in folder.iterdir()]


def test_the_longest_save_is_known(tmp_path: Path) -> None:
    workspace, plan = Workspace.open(tmp_path / "ws"), small_plan()
    stage = claim(workspace, plan, "data")
    assert workspace.longest_save_s(stage.id) == 0.0
    paths = workspace.layout.attempt(stage.id, 1)
    heartbeat = Heartbeat(paths.heartbeat, time.monotonic())
    store = CheckpointStore(workspace.layout.stage(stage.id).checkpoints, 1, watch=heartbeat.saving)
    with store.new(1) as path:
        (path / "state").write_text("x")
        time.sleep(0.05)
    assert workspace.longest_save_s(stage.id) >= 0.05, "known from the marker"
    heartbeat.stop()
    shutil.rmtree(store.folder)
    assert workspace.longest_save_s(stage.id) >= 0.05, "known from the heartbeat"


def test_an_older_attempt_leaves_alone_what_a_newer_one_is_writing(folder: Path) -> None:
    """It may save for a while before it notices that it has been replaced."""
    with CheckpointStore(folder, 2).new(5) as newer:
        (newer / "state.bin").write_text("half")
        save(CheckpointStore(folder, 1), 4)
        assert (newer / "state.bin").read_text() == "half"
    assert steps(CheckpointStore(folder, 3)) == [4, 5]


def test_a_checkpoint_that_is_held_at_the_last_moment_stays(folder: Path) -> None:
    """Between the choice of what goes and its deletion, a publication may begin to wait."""
    asked: list[frozenset[int]] = []

    def held() -> frozenset[int]:
        asked.append(frozenset({1}) if asked else frozenset())
        return asked[-1]

    save(CheckpointStore(folder, 1, keep=9), 1)
    save(CheckpointStore(folder, 1, keep=9), 2)
    save(CheckpointStore(folder, 1, keep=2, held=held), 3)
    assert len(asked) > 1
    assert steps(CheckpointStore(folder, 1)) == [1, 2, 3]

"""The workspace's store of judgements: what it keeps, which damage it survives, its size."""

import errno
import logging
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.judgements import store
from infra.judgements.store import (
    HEADER_BYTES,
    RECORD_BYTES,
    JudgementIndex,
    WorkspaceStore,
    decode,
    encode_record,
    list_segments,
    summarise,
)
from refiner_core.contract.types import StoredJudgement
from tests.support.faulty_disk import FaultyDisk

MIB = 1 << 20
YES, NO = StoredJudgement(1.0, 700, 9), StoredJudgement(0.0, 650, 9)


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question reads the files, not one a second."""
    monkeypatch.setattr(store, "_LOOK_EVERY_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "judgements"


def opened(folder: Path, limit_bytes: int = MIB, writer: str = "grpo-1") -> WorkspaceStore:
    return WorkspaceStore(folder, writer=writer, limit_bytes=limit_bytes)


def key(number: int) -> bytes:
    return struct.pack("<QQ", number * 0x9E3779B97F4A7C15 % 2**64, number)


def filled(folder: Path, numbers: range, judgement: StoredJudgement = YES) -> None:
    """A job that has put some and has ended."""
    with opened(folder) as one:
        for number in numbers:
            one.put(key(number), judgement)


def known(folder: Path, numbers: range, limit_bytes: int = MIB) -> int:
    """How many of these a job that begins now would not ask for."""
    with opened(folder, limit_bytes) as one:
        return sum(found is not None for found in one.get([key(n) for n in numbers]))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ---------------------------------------------------------------- keeping


def test_jobs_see_each_others_judgements_while_they_run_and_after(folder: Path) -> None:
    third = StoredJudgement(1 / 3, 4_000_000_000, 0)
    with opened(folder) as one, opened(folder, writer="../../etc/passwd:ü") as other:
        for number in range(3):
            one.put(key(number), third)
            one.flush()
            assert other.get([key(number)]) == [third]
            other.put(key(100 + number), NO)
            other.flush()
            assert one.get([key(100 + number), key(number), key(99)]) == [NO, third, None]
    assert len(list_segments(folder)) == 2, "a file for each writer, in the folder"
    assert known(folder, range(104)) == 6


def test_a_failed_judgement_cannot_be_kept_and_a_reader_writes_nothing(folder: Path) -> None:
    with opened(folder) as one:
        for score in (float("nan"), float("inf"), -0.5, 5.0):
            with pytest.raises(ValueError, match="from 0 to 1"):
                one.put(key(1), StoredJudgement(score))
        with pytest.raises(ValueError, match="16 bytes"):
            one.put(b"short", YES)
        assert one.get([key(1), b"short"]) == [None, None]
    assert not folder.exists()


# ---------------------------------------------------------------- looking up


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=80), st.data())
@settings(max_examples=60, deadline=None)
def test_a_table_is_a_dictionary(puts: list[tuple[int, int]], data: st.DataObject) -> None:
    """Keys that share their first half, many small batches, the same key again."""
    keys = [struct.pack("<QQ", a, b) for a, b in puts]
    values = {k: StoredJudgement(b / 3, a, b) for k, (a, b) in zip(keys, puts, strict=True)}
    table = JudgementIndex()
    while keys:
        part, keys = keys[: (n := data.draw(st.integers(1, 9)))], keys[n:]
        if data.draw(st.booleans()):
            table.add(decode(b"".join(encode_record(k, values[k]) for k in part))[0])
        else:
            for k in part:
                table.put(k, values[k])
    wanted = [struct.pack("<QQ", a, b) for a in range(42) for b in range(4)]
    assert table.get(wanted) == [values.get(k) for k in wanted]


# ---------------------------------------------------------------- damage


def one_file(folder: Path, count: int) -> Path:
    filled(folder, range(count))
    ((path, _),) = list_segments(folder)
    return path


@given(cut=st.integers(0, HEADER_BYTES + 5 * RECORD_BYTES), live=st.booleans())
@settings(max_examples=60, deadline=None)
def test_cut_files_are_read(tmp_path_factory: pytest.TempPathFactory, cut: int, live: bool) -> None:
    folder = tmp_path_factory.mktemp("cut") / "judgements"
    path = one_file(folder, 5)
    path.write_bytes(path.read_bytes()[:cut])
    if live:
        path.rename(path.with_suffix(".live"))
    whole = max(0, cut - HEADER_BYTES) // RECORD_BYTES
    with opened(folder) as one:
        found = one.get([key(n) for n in range(5)])
        assert found == [YES] * whole + [None] * (5 - whole)
        one.put(key(9), NO)  # and the next job is none the worse
    assert known(folder, range(10)) == whole + 1


@given(bit=st.integers(0, 5 * RECORD_BYTES * 8 - 1))
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_costs_one(tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    folder = tmp_path_factory.mktemp("flip") / "judgements"
    path = one_file(folder, 5)
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    with opened(folder) as one:
        found = one.get([key(n) for n in range(5)])
    damaged = bit // 8 // RECORD_BYTES
    assert found == [None if n == damaged else YES for n in range(5)]


def test_a_newer_file_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = one_file(folder, 2)
    newer = bytearray(path.read_bytes())
    struct.pack_into("<H", newer, 8, 2)
    struct.pack_into("<I", newer, 12, zlib.crc32(bytes(newer[:12])))
    path.write_bytes(newer)
    foreign = folder / "notes.sealed"
    foreign.write_bytes(b"not ours" * 100)
    assert known(folder, range(2)) == 0
    assert "not a file of judgements of version 1" in " ".join(warnings(caplog))
    filled(folder, range(2))
    assert known(folder, range(2)) == 2
    assert path.read_bytes() == bytes(newer)
    assert foreign.exists()


def test_files_that_are_closed_to_this_user_are_skipped(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = one_file(folder, 2)
    filled(folder, range(5, 8))
    real = Path.open

    def closed(self: Path, *args: Any, **more: Any) -> Any:
        if self.name == path.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *args, **more)

    monkeypatch.setattr(Path, "open", closed)  # root may read everything
    with opened(folder) as one:
        for _ in range(3):
            assert one.get([key(0), key(6)]) == [None, YES]
    assert len(warnings(caplog)) == 1
    assert str(path) in warnings(caplog)[0]


# ---------------------------------------------------------------- a disk that takes nothing


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("fault", ["refused once", "full from then on"])
def test_a_full_disk(folder: Path, at: int, fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    filled(folder, range(3))
    disk = FaultyDisk(folder.parent, at, fault)
    with disk.mounted():
        one = opened(folder)
        for number in range(10, 20):
            one.put(key(number), NO)
            if number % 3 == 0:
                one.flush()
        assert one.get([key(n) for n in range(10, 20)]) == [NO] * 10, "memory knows them"
        one.close()
    if fault == "full from then on" and len(disk.operations) >= at:
        assert len(warnings(caplog)) <= 2
        assert any("memory only" in w or "kept small" in w for w in warnings(caplog))
    assert known(folder, range(3)) == 3
    for path, _ in list_segments(folder):  # no torn record is followed by others
        data = path.read_bytes()[HEADER_BYTES:]
        assert len(decode(data)[0]) == len(data) // RECORD_BYTES


def test_what_the_disk_did_not_take_is_written_when_there_is_room_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with opened(folder) as one:
        monkeypatch.setattr(os, "write", full)
        one.put(key(1), YES)
        one.flush()
        one.flush()
        assert known(folder, range(2)) == 0
        monkeypatch.setattr(os, "write", real)
        one.put(key(0), NO)
        one.flush()
        assert known(folder, range(2)) == 2
    assert len(warnings(caplog)) == 1
    assert "repeated after a crash" in warnings(caplog)[0]
    assert "are stored in" in caplog.text


# ---------------------------------------------------------------- staying small


@pytest.mark.slow
def test_the_oldest_judgements_go_when_the_store_is_full(folder: Path) -> None:
    limit = 600_000  # segments of 75 kB
    with opened(folder, limit) as one:
        for number in range(30_000):  # 1.08 MB
            one.put(key(number), YES)
            if number % 500 == 0:
                one.flush()
    assert summarise(folder)["bytes"] <= limit
    assert known(folder, range(29_000, 30_000), limit) == 1000, "the newest stay"
    assert known(folder, range(1000), limit) == 0


def test_short_jobs_leave_few_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_SEGMENTS", 20)
    for job in range(60):
        with opened(folder) as one:
            one.put(key(job), YES)
    assert summarise(folder)["files"] <= 20
    assert known(folder, range(60)) == 20
    assert known(folder, range(59, 60)) == 1, "the newest stays"


def test_readers_and_writers_survive_that_their_files_are_deleted(folder: Path) -> None:
    with opened(folder) as one, opened(folder) as other:
        one.put(key(1), YES)
        one.flush()
        assert other.get([key(1)]) == [YES]
        for path, _ in list_segments(folder):
            path.unlink()
        one.put(key(2), NO)
        one.flush()
        assert other.get([key(1), key(2)]) == [YES, NO]
    assert known(folder, range(3)) == 1

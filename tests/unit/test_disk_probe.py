"""Quota tools' output becomes room: the tightest of what applies, and nothing that lies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infra.disk.probe import (
    Limit,
    Prober,
    Room,
    ToolFailed,
    parse_btrfs_qgroups,
    parse_mmlsquota,
    parse_quota,
    parse_size,
    parse_with_pattern,
    parse_xfs_quota,
)
from infra.disk.usage import Size
from infra.host.files import Mount, mount_of
from refiner_core.contract.config import DiskConfig
from refiner_core.contract.errors import ConfigurationError

DATA = Path(__file__).resolve().parents[1] / "data" / "disk"
KIB, GIB = 1024, 2**30


def output(name: str) -> str:
    return (DATA / name).read_text()


# ---------------------------------------------------------------- golden output


def test_quota_shows_bytes_inodes_and_grace() -> None:
    (quota,) = parse_quota(output("quota-ext4-over.txt"))
    assert quota.where == "/dev/ubda"
    assert quota.whose == "user #12345"
    assert quota.bytes == Limit(16381 * KIB, 8192 * KIB, 16384 * KIB)
    assert quota.inodes == Limit(40, 20, 40)
    assert quota.bytes.free == 3 * KIB


def test_a_grace_column_may_be_empty() -> None:
    (quota,) = parse_quota(output("quota-ext4-project.txt"))
    assert quota.bytes.free == 0, "it is over its hard limit"
    assert quota.inodes == Limit(62)
    assert quota.inodes.free is None


def test_no_quota_is_no_row() -> None:
    assert parse_quota(output("quota-none.txt")) == []


def test_a_wrapped_line_of_nfs_with_its_grace_over_counts_the_soft_limit_as_hard() -> None:
    (quota,) = parse_quota(output("quota-nfs-wrapped.txt"))
    assert quota.where == "filer.cluster.example:/export/home/ann"
    assert quota.bytes.over
    assert quota.bytes.effective == 94371840 * KIB
    assert quota.bytes.free == 0
    assert quota.inodes is not None
    assert quota.inodes.effective == 600000


def test_lustre_shows_a_user_above_the_soft_limit() -> None:
    (quota,) = parse_quota(output("lfs-user.txt"))
    assert quota.bytes == Limit(8388608 * KIB, 6291456 * KIB, 8912896 * KIB)
    assert quota.inodes == Limit(182044, 0, 200000)


def test_lustre_wraps_long_names_and_can_be_quiet() -> None:
    (quota,) = parse_quota(output("lfs-project-quiet-wrapped.txt"))
    assert quota.where == "/lustre/scratch/projects/refinement"
    assert quota.bytes.free == 8 * GIB


def test_xfs_shows_blocks_and_inodes_on_one_line() -> None:
    (quota,) = parse_xfs_quota(output("xfs-project.txt"))
    assert quota.bytes == Limit(30722 * KIB, 4096 * KIB, 32768 * KIB)
    assert quota.inodes == Limit(62, 0, 100)
    assert quota.where == "/data"


def test_xfs_whose_grace_is_over_wraps_too() -> None:
    (quota,) = parse_xfs_quota(output("xfs-grace-over.txt"))
    assert quota.whose == "User ann"
    assert quota.bytes.over
    assert quota.bytes.free == 0


def test_btrfs_shows_referenced_and_exclusive_limits() -> None:
    found = [q for q in parse_btrfs_qgroups(output("btrfs-6.txt")) if q.bytes.free is not None]
    assert [(q.whose, q.bytes.free) for q in found] == [
        ("qgroup 0/256", 67108864 - 52445184),
        ("qgroup 1/100", 60000000 - 52445184),
    ]


def test_an_older_btrfs_names_its_columns_otherwise_and_may_doubt_itself() -> None:
    found = [q for q in parse_btrfs_qgroups(output("btrfs-4.txt")) if q.bytes.free is not None]
    assert [q.bytes.hard for q in found] == [67108864]


def test_gpfs_counts_what_is_in_doubt_as_used() -> None:
    user, fileset = parse_mmlsquota(output("mmlsquota.txt"))
    assert user.bytes.used == (943718400 + 1048576) * KIB
    assert user.bytes.effective == 1153433600 * KIB
    assert not user.bytes.over
    assert fileset.bytes.over
    assert fileset.bytes.free == 0


SITE_PATTERN = (
    r"Space:\s+(?P<used>\S+) of (?P<limit>\S+).*\n.*Files:\s+(?P<inodes_used>\S+)"
    r" of (?P<inodes_limit>\S+)"
)


def test_a_site_s_own_tool_is_read_by_a_pattern() -> None:
    (quota,) = parse_with_pattern(output("site-tool.txt"), SITE_PATTERN)
    assert quota.bytes == Limit(int(56.3 * GIB), hard=60 * GIB)
    assert quota.inodes == Limit(1204551, hard=2000000)
    (quota,) = parse_with_pattern("left: 3 TB", r"left: (?P<free>.*)")
    assert quota.bytes.free == 3 * 10**12


@pytest.mark.parametrize("pattern", ["nothing (?P<used>x)", r"Space:\s+(?P<used>\S+)"])
def test_a_pattern_that_finds_too_little_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        parse_with_pattern(output("site-tool.txt"), pattern)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1,024", 1024),
        ("1.5K", 1536),
        ("2 GiB", 2 * GIB),
        ("2 GB", 2 * 10**9),
        ("3t", 3 * 2**40),
    ],
)
def test_sizes_with_units(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_what_is_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_size("lots")


# ---------------------------------------------------------------- choosing and combining


class Tools:
    """Answers commands from a table, by their first word and first option."""

    def __init__(self, **answers: str) -> None:
        self.answers, self.asked = answers, list[str]()

    def __call__(self, command: Sequence[str]) -> str:
        self.asked.append(" ".join(command))
        if command[0] not in self.answers:
            raise ToolFailed(f"{command[0]} is not installed")
        return self.answers[command[0]]


def look(tools: Tools, kind: str, tmp_path: Path, source: str = "", **config: object) -> Room:
    settings = DiskConfig(**config)  # type: ignore[arg-type]
    mount = Mount(Path("/scratch"), kind, source)
    return Prober(tmp_path, settings, run=tools, mount=mount, measure=lambda: Size(700, 7)).look()


def test_lustre_is_asked_on_lustre_and_the_tightest_wins(tmp_path: Path) -> None:
    tools = Tools(lfs=output("lfs-user.txt"))
    room = look(tools, "lustre", tmp_path, "10.0.0.1@tcp:/fs")
    assert room.free_bytes == (8912896 - 8388608) * KIB
    assert room.free_inodes == 200000 - 182044
    assert room.knows_quota
    assert all(a.startswith("lfs quota -q") for a in tools.asked)
    assert {a.split()[3] for a in tools.asked} >= {"-u", "-g"}


def test_quota_rows_of_other_file_systems_do_not_count(tmp_path: Path) -> None:
    tools = Tools(quota=output("quota-ext4-over.txt"))
    assert look(tools, "ext4", tmp_path, "/dev/ubda").free_bytes == 3 * KIB
    assert look(tools, "ext4", tmp_path, "/dev/vdb").free_bytes > 3 * KIB


def test_missing_tools_leave_the_file_system_s_own_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = look(Tools(), "ext4", tmp_path)
    assert room.source == "file system (ext4)"
    assert not room.knows_quota
    assert room.free_bytes > 0
    assert not caplog.records, "a tool that nobody asked for is not missed"


def test_a_tool_that_was_asked_for_and_fails_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools = Tools(lfs="lfs quota: cannot open /scratch")
    mount = Mount(Path("/scratch"), "lustre", "")
    prober = Prober(tmp_path, DiskConfig(), run=tools, mount=mount)
    with caplog.at_level(logging.WARNING):
        looks = [prober.look(), prober.look()]
    assert all(room.free_bytes is not None for room in looks), "the next best is asked"
    said = [r.getMessage() for r in caplog.records if "cannot open /scratch" in r.getMessage()]
    assert len(said) == len(set(said)) > 0


def test_one_failing_call_does_not_hide_what_another_shows(tmp_path: Path) -> None:
    def only_user(command: Sequence[str]) -> str:
        if "-u" in command:
            return output("lfs-user.txt")
        raise ToolFailed("refused")

    prober = Prober(tmp_path, DiskConfig(), run=only_user, mount=Mount(Path("/"), "lustre", ""))
    assert prober.look().free_bytes == (8912896 - 8388608) * KIB


def test_negative_numbers_are_a_lie_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"probe": "command:site", "pattern": r"(?P<used>\d+) (?P<limit>-?\d+)"}
    room = look(Tools(site="10 -5"), "nfs4", tmp_path, **config)
    assert room.source == "file system (nfs4)"
    assert "command" in caplog.text


def test_a_command_probe_reads_what_the_site_says(tmp_path: Path) -> None:
    tools = Tools(mytool=output("site-tool.txt"))
    room = look(tools, "nfs4", tmp_path, probe="command:mytool -f {folder}", pattern=SITE_PATTERN)
    assert room.limit_bytes == 60 * GIB
    assert room.free_inodes == 2000000 - 1204551
    assert tools.asked == [f"mytool -f {tmp_path}"]


def test_a_limit_of_one_s_own_counts_what_the_workspace_uses(tmp_path: Path) -> None:
    room = look(Tools(), "tmpfs", tmp_path, limit_gb=1000 / GIB, inode_limit=10)
    assert (room.free_bytes, room.used_bytes) == (300, 700)
    assert room.free_inodes == 3
    assert room.source == "disk.limit_gb"
    assert room.share == pytest.approx(0.7)


def test_an_unknown_probe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"disk\.probe"):
        Prober(tmp_path, DiskConfig(probe="magic"))


def test_a_folder_that_is_not_there_yet_has_the_room_of_the_one_above(tmp_path: Path) -> None:
    assert Prober(tmp_path / "a" / "b", DiskConfig()).look().free_bytes > 0


def test_the_innermost_mount_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch" / "mine").mkdir(parents=True)
    table = [("/", "ext4"), (tmp_path / "scratch", "lustre"), (tmp_path / "scr", "btrfs")]
    found = [SimpleNamespace(mountpoint=str(p), fstype=k, device=f"dev-{k}") for p, k in table]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    assert mount_of(tmp_path / "elsewhere").type == "ext4"
    assert mount_of(tmp_path / "scratch" / "mine" / "x").source == "dev-lustre"
    assert mount_of(tmp_path / "scratch").type == "lustre"

"""Quota tools' output becomes room: the tightest of what applies, and nothing that lies."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infra.disk.probe import (
    FreeSpace,
    Prober,
    Quota,
    QuotaLimit,
    parse_mmlsquota,
    parse_quota,
    parse_size,
    parse_with_pattern,
    parse_xfs_quota,
)
from infra.disk.usage import DiskSize
from infra.host.files import Mount, mount_of
from refiner_core.contract.config import DiskConfig
from refiner_core.contract.errors import ConfigurationError

DATA = Path(__file__).resolve().parents[1] / "data" / "disk"
KIB, GIB = 1024, 2**30


def output(name: str) -> str:
    return (DATA / name).read_text()


# ---------------------------------------------------------------- golden output


@pytest.mark.parametrize(
    ("parse", "name", "left"),
    [
        (parse_quota, "quota-ext4-over.txt", [("user #12345", 3 * KIB, 0)]),
        (parse_quota, "quota-ext4-project.txt", [("project #77", 0, None)]),
        (parse_quota, "quota-none.txt", []),
        # Above the soft limit, whose grace is over: it counts as the hard one.
        (parse_quota, "quota-nfs-wrapped.txt", [("user ann", 0, 189_679)]),
        (parse_quota, "lfs-user.txt", [("ann", GIB // 2, 200_000 - 182_044)]),
        (parse_quota, "lfs-project-quiet-wrapped.txt", [("", 8 * GIB, None)]),
        (parse_xfs_quota, "xfs-project.txt", [("", (32768 - 30722) * KIB, 100 - 62)]),
        (parse_xfs_quota, "xfs-grace-over.txt", [("User ann", 0, None)]),
        # What is "in doubt" counts as used.
        (
            parse_mmlsquota,
            "mmlsquota.txt",
            [
                ("USR ann", (1153433600 - 943718400 - 1048576) * KIB, None),
                ("FILESET refinement", 0, 80),
            ],
        ),
    ],
)
def test_what_tools_print_tells_what_is_left(
    parse: Callable[[str], list[Quota]], name: str, left: list[tuple[str, int, int | None]]
) -> None:
    found = [q for q in parse(output(name)) if q.bytes.free is not None]
    assert [(q.whose, q.bytes.free, q.inodes and q.inodes.free) for q in found] == left


SITE_PATTERN = (
    r"Space:\s+(?P<used>\S+) of (?P<limit>\S+).*\n.*Files:\s+(?P<inodes_used>\S+)"
    r" of (?P<inodes_limit>\S+)"
)


def test_a_site_s_own_tool_is_read_by_a_pattern() -> None:
    (quota,) = parse_with_pattern(output("site-tool.txt"), SITE_PATTERN)
    assert quota.bytes == QuotaLimit(int(56.3 * GIB), hard=60 * GIB)
    assert quota.inodes == QuotaLimit(1204551, hard=2000000)
    (quota,) = parse_with_pattern("left: 3 TB", r"left: (?P<free>.*)")
    assert quota.bytes.free == 3 * 10**12


def test_an_unknown_size_or_probe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size("lots")
    with pytest.raises(ConfigurationError, match=r"disk\.probe"):
        Prober(tmp_path, DiskConfig(probe="magic"))


# ---------------------------------------------------------------- choosing and combining


class Tools:
    """Answers commands from a table, by their first word and first option."""

    def __init__(self, **answers: str) -> None:
        self.answers, self.asked = answers, list[str]()

    def __call__(self, command: Sequence[str]) -> str:
        self.asked.append(" ".join(command))
        if command[0] not in self.answers:
            raise FileNotFoundError(command[0])
        return self.answers[command[0]]


def look(tools: Tools, kind: str, tmp_path: Path, source: str = "", **config: object) -> FreeSpace:
    settings = DiskConfig(**config)
    mount = Mount(Path("/scratch"), kind, source)
    return Prober(
        tmp_path, settings, run=tools, mount=mount, measure=lambda: DiskSize(700, 7)
    ).observe()


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


def test_a_failing_tool_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    room = look(Tools(), "ext4", tmp_path / "not" / "there")
    assert (room.source, room.knows_quota) == ("file system (ext4)", False)
    assert room.free_bytes > 0, "of the folder above"
    assert not caplog.records, "a tool that was not asked for is not missed"
    tools = Tools(lfs="lfs quota: cannot open /scratch")
    prober = Prober(tmp_path, DiskConfig(), run=tools, mount=Mount(Path("/"), "lustre", ""))
    assert all(prober.observe().free_bytes is not None for _ in range(2))
    said = [r.getMessage() for r in caplog.records if "cannot open /scratch" in r.getMessage()]
    assert len(said) == len(set(said)) > 0

    def only_user(command: Sequence[str]) -> str:
        if "-u" in command:
            return output("lfs-user.txt")
        raise OSError("refused")

    prober = Prober(tmp_path, DiskConfig(), run=only_user, mount=Mount(Path("/"), "lustre", ""))
    assert prober.observe().free_bytes == (8912896 - 8388608) * KIB


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


def test_the_innermost_mount_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch" / "mine").mkdir(parents=True)
    table = [("/", "ext4"), (tmp_path / "scratch", "lustre"), (tmp_path / "scr", "btrfs")]
    found = [SimpleNamespace(mountpoint=str(p), fstype=k, device=f"dev-{k}") for p, k in table]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    assert mount_of(tmp_path / "elsewhere").type == "ext4"
    assert mount_of(tmp_path / "scratch" / "mine" / "x").source == "dev-lustre"
    assert mount_of(tmp_path / "scratch").type == "lustre"

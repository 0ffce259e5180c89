"""Room on file systems that really are full: a btrfs quota, a small tmpfs, one without inodes."""

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.disk.manager import DiskManager
from infra.disk.probe import Prober
from infra.jobs.dispatcher import AttemptRef
from infra.store.checkpoints import CheckpointStore
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig
from refiner_core.contract.errors import NoSpaceError
from tests.support.disk import published, weights_go
from tests.support.plans import claim, small_plan
from tests.support.quota import QuotaFolder, fill, quota_folder, small_tmpfs

pytestmark = pytest.mark.quota
MIB = 1 << 20
QUICK = DiskConfig(watch_s=0.4, hold_s=0.5)


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[QuotaFolder]:
    with quota_folder(tmp_path / "q", 64) as disk:
        yield disk


def save(store: CheckpointStore, step: int, mib: int) -> None:
    with store.new(step) as folder:
        (folder / "state.bin").write_bytes(os.urandom(mib * MIB))


def test_the_room_is_the_quota_s_and_not_the_disk_s(quota: QuotaFolder) -> None:
    room = Prober(quota.folder, DiskConfig()).observe()
    assert room.limit_bytes == 64 * MIB
    assert room.knows_quota
    assert room.source.startswith("btrfs qgroup")
    assert Prober(quota.folder, DiskConfig(probe="statvfs")).observe().free_bytes > 200 * MIB
    (quota.folder / "file").write_bytes(os.urandom(16 * MIB))
    os.sync()
    assert 46 * MIB < Prober(quota.folder, DiskConfig()).observe().free_bytes < 49 * MIB


def test_a_quota_is_seen_without_root() -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from infra.disk.probe import Prober\n"
        "from refiner_core.contract.config import DiskConfig\n"
        "prober = Prober(Path(sys.argv[1]), DiskConfig())\n"  # a section's first use imports
        "os.setuid(65534)\n"
        "print(prober.observe().limit_bytes)\n"
    )
    with tempfile.TemporaryDirectory() as root:  # pytest's own folders are closed to others
        Path(root).chmod(0o755)
        with quota_folder(Path(root) / "q", 64) as disk:
            command = [sys.executable, "-c", script, str(disk.folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(64 * MIB), done.stderr


def test_a_reclaim_frees_space_on_a_quota(quota: QuotaFolder) -> None:
    workspace = Workspace.open(quota.folder / "ws")
    stage = claim(workspace, small_plan("data"), "data")
    ref = AttemptRef(stage.id, 1)
    store = CheckpointStore(workspace.layout.stage(stage.id).checkpoints, 1, keep=9)
    for step in (50, 100):
        save(store, step, 12)
    disk_manager = DiskManager(workspace, QUICK)
    assert disk_manager.shortage(disk_manager.need_of(stage.id), ref) == 0
    filler = quota.folder / "filler"
    fill(filler, leave=4 * MIB)
    assert disk_manager.available(fresh=True).free_bytes < 8 * MIB
    assert disk_manager.shortage(12 * MIB, ref) > 0
    with disk_manager.reserve(ref, 12 * MIB):  # the checkpoint of step 50 goes for it
        save(store, 150, 12)
    assert [c.step for c in store.complete()] == [100, 150]
    with pytest.raises(NoSpaceError, match="No space for"), disk_manager.reserve(ref, 40 * MIB):
        pytest.fail("it does not fit")
    assert [c.step for c in store.complete()] == [150], "what could go has gone, and not the newest"
    filler.unlink()
    done = disk_manager.free_space(40 * MIB, ref)
    assert done is not None, "what others delete is seen, too"


def test_a_quota_that_is_full_to_the_last_byte_can_still_be_cleared(quota: QuotaFolder) -> None:
    workspace = Workspace.open(quota.folder / "ws")
    stage = claim(workspace, small_plan("data"), "data")
    store = CheckpointStore(workspace.layout.stage(stage.id).checkpoints, 1, keep=9)
    for step in (9, 10):
        save(store, step, 8)
    fill(quota.folder / "filler")
    with pytest.raises(OSError, match=f"Errno {errno.EDQUOT}"):
        (quota.folder / "one more").write_bytes(os.urandom(MIB))
    disk_manager = DiskManager(workspace, QUICK)
    done = disk_manager.free_space(4 * MIB, AttemptRef(stage.id, 1))
    assert done.bytes >= 8 * MIB
    assert [c.step for c in store.complete()] == [10]
    (quota.folder / "one more").write_bytes(os.urandom(4 * MIB))


def test_a_quota_that_no_tool_shows_is_found_by_writing(quota: QuotaFolder) -> None:
    workspace = Workspace.open(quota.folder / "ws")
    disk_manager = DiskManager(workspace, DiskConfig(probe="statvfs", reclaim=False))
    assert disk_manager.shortage(MIB) == 0
    fill(quota.folder / "filler")
    assert disk_manager.available(fresh=True).free_bytes > 100 * MIB
    assert disk_manager.free_space(MIB) is None


def test_a_disk_without_inodes_is_short_though_bytes_are_free(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "t", mib=64, inodes=200) as folder:
        workspace = Workspace.open(folder / "ws")
        stage = claim(workspace, small_plan("data"), "data")
        ref = AttemptRef(stage.id, 1)
        store = CheckpointStore(workspace.layout.stage(stage.id).checkpoints, 1, keep=9)
        for step in (1, 2):
            with store.new(step) as target:
                for index in range(30):
                    (target / str(index)).touch()
        disk_manager = DiskManager(workspace, QUICK)
        assert disk_manager.shortage(MIB, ref) == 0
        room = disk_manager.available(fresh=True)
        assert room.free_inodes is not None
        for index in range(room.free_inodes - 8):
            (folder / f"filler-{index}").touch()
        assert disk_manager.available(fresh=True).free_bytes > 60 * MIB
        assert disk_manager.shortage(MIB, ref) > 0
        assert disk_manager.lacking(MIB, ref) == "8 more files and folders (inodes)"
        assert "8 more files and folders (inodes)" in disk_manager.status_line()
        done = disk_manager.free_space(MIB, ref)
        assert done is not None
        assert [c.step for c in store.complete()] == [2]


def test_weights_go_only_when_their_copy_is_on_another_file_system(tmp_path: Path) -> None:
    plan = small_plan("data", "sft", "publish")
    with small_tmpfs(tmp_path / "t", mib=32) as folder:
        workspace = Workspace.open(folder / "ws")
        sft, target = published(workspace, tmp_path, plan)
        assert target.stat().st_dev != workspace.root.stat().st_dev
        assert weights_go(workspace)
        disk_manager = DiskManager(workspace, DiskConfig())
        disk_manager.carry_out(disk_manager.candidates())
        weights = workspace.layout.attempt(sft, 1).output / "model" / "model.safetensors"
        assert not weights.exists()
        assert (target / "model.safetensors").exists()


def test_a_run_that_can_never_fit_is_refused(tmp_path: Path) -> None:
    """It would wait for ever, which `disk.too_small=wait` allows."""
    with small_tmpfs(tmp_path / "t", mib=3) as folder:
        words = ("run", "tiny", f"workspace={folder / 'ws'}", "--no-server")
        command = [sys.executable, "-m", "flows.cli.main", *words]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert refused.returncode == 5, refused.stderr

        assert "can never hold more than 3.0 MiB" in refused.stderr

        assert not (folder / "ws").exists()
        waits = [*command, "disk.too_small=wait"]
        with subprocess.Popen(waits, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            said = next(line for line in process.stderr if "aiting for disk space" in line)
            process.terminate()
        assert "nothing is lost" in said

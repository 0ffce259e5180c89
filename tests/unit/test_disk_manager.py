"""Disk space of a workspace: what is used, reserved and reclaimed, and what stays."""

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.disk import inventory as copies_module
from infra.disk.garbage_collection import Candidate, ReclaimOrder, carry_out, plan_reclaim
from infra.disk.inventory import Inventory, PublishedCopy, StageFacts, Weights, read_inventory
from infra.disk.manager import FLOOR_BYTES, DiskEvent, DiskManager, DiskWatch, Reservations
from infra.disk.usage import (
    DiskItem,
    DiskSize,
    Kind,
    by_run_and_kind,
    find_caches,
    measure,
    size_of,
    take_inventory,
    use_node_caches,
)
from infra.jobs.dispatcher import AttemptRef
from infra.judgements.store import WorkspaceStore
from infra.orchestrator.waiting import SpaceWaits
from infra.store.checkpoints import CheckpointStore, pin, read_reclaimed, reclaimed_text, unpin
from infra.store.workspace import Workspace
from refiner_core.contract.config import CommandConfig, DiskConfig, RecipeConfig
from refiner_core.contract.errors import NoSpaceError
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.records import AttemptOutcome, OutputFile, from_json
from refiner_core.contract.types import StoredJudgement
from tests.support.disk import finish, foreign_checkpoint, published, save, weights_go
from tests.support.plans import SOURCES, claim, run_record, small_config, small_plan
from tests.support.probing import ProbingKeeper

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FULL = AttemptOutcome("disk_full", "resume")


def space_for(workspace: Workspace, more: int, **config: object) -> DiskManager:
    """A keeper of a workspace that may grow by ``more`` bytes."""
    limit = measure(workspace.layout).bytes + more
    settings = DiskConfig(limit_gb=limit / GIB, watch_s=0.2, hold_s=0.3)
    return DiskManager(workspace, replace(settings, **config))


def steps_of(workspace: Workspace, stage_id: str) -> list[int]:
    store = CheckpointStore(workspace.layout.stage(stage_id).checkpoints, 0)
    return [c.step for c in store.complete()]


# ---------------------------------------------------------------- use


def test_hard_links_count_once_and_symbolic_links_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "ws"
    folder.mkdir()
    (folder / "a").write_bytes(os.urandom(64 * KIB))
    alone = size_of(folder)
    (folder / "b").hardlink_to(folder / "a")
    both = size_of(folder)
    assert (both.bytes, both.inodes) == (alone.bytes, alone.inodes)
    assert both.gain < alone.gain, "deleting one name frees nothing"
    (tmp_path / "big").write_bytes(os.urandom(MIB))
    (folder / "link").symlink_to(tmp_path)
    assert size_of(folder).bytes < MIB


def test_usage_by_run_and_kind_adds_up(workspace: Workspace) -> None:
    plan = small_plan("data", "sft")
    claim(workspace, plan, "data")
    stage = claim(workspace, plan, "sft")
    run = run_record(workspace, plan)
    workspace.write_run(run)
    save(workspace, stage.id, 5)
    paths = workspace.layout.attempt(stage.id, 1)
    for name in ("rollouts", "output", "tracking"):
        (paths.data / name).mkdir(exist_ok=True)
        (paths.data / name / "file").write_bytes(os.urandom(8 * KIB))
    items = take_inventory(workspace.layout)
    rows = {(r.run, r.kind): r.size for r in by_run_and_kind(items, {run.run: [stage.id]})}
    assert rows[run.run, "checkpoints"].bytes >= MIB
    assert {"rollouts", "outputs", "trackers", "logs"} <= {k for r, k in rows if r == run.run}
    assert ("", "logs") in rows, "the data stage belongs to no run here"
    counted = sum(s.bytes for s in rows.values())
    assert 0 <= measure(workspace.layout).bytes - counted <= 64 * KIB, "except for some folders"


def test_the_oldest_judgements_are_reclaimed_as_a_last_resort(workspace: Workspace) -> None:
    folder = workspace.layout.judgements
    for name, age_s in (("b", 30), ("a", 10), ("c", 20)):
        with WorkspaceStore(folder, writer=name, limit_bytes=MIB) as store:
            store.put(os.urandom(16), StoredJudgement(1.0))
        (path,) = folder.glob(f"{name}-*")
        changed = time.time() - age_s
        os.utime(path, (changed, changed))
    wanted = plan_reclaim(DiskManager(workspace, DiskConfig()).inventory(), 5 * KIB)
    assert [c.path.name[0] for c in wanted] == ["b", "c"]
    assert len(carry_out(workspace, wanted).items) == 2
    assert [p.name[0] for p in folder.iterdir()] == ["a"]
    rows = by_run_and_kind(take_inventory(workspace.layout), {})
    assert [r.size.inodes for r in rows if r.kind == "judgements"] == [1]


# ---------------------------------------------------------------- reservations


def test_others_reserve_space(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    plan = small_plan("data", "sft")
    ref = AttemptRef(claim(workspace, plan, "sft").id, 1)
    other = AttemptRef(claim(workspace, plan, "data").id, 1)
    ledger = Reservations(workspace)
    ledger.write(ref, 3 * MIB)
    assert ledger.others(ref) == []
    (entry,) = ledger.others(other)
    assert entry.outstanding == 3 * MIB
    part = workspace.layout.stage(ref.stage_id).checkpoints / ".tmp-step-00000007-a1"
    part.mkdir(parents=True)
    (part / "half.bin").write_bytes(os.urandom(2 * MIB))
    (entry,) = ledger.others(other)
    assert entry.outstanding <= MIB
    ledger.remove(ref)
    (ledger.folder / "x.json").write_text("{")
    assert ledger.others(other) == [], "a damaged reservation counts for nothing"
    assert "x.json" in caplog.text


@pytest.mark.parametrize("end", ["closed", "superseded", "done", "gone"])
def test_an_ended_attempt_has_no_reservation(workspace: Workspace, end: str) -> None:
    plan = small_plan("data")
    ref = AttemptRef(claim(workspace, plan, "data").id, 1)
    ledger = Reservations(workspace)
    ledger.write(ref, MIB)
    assert len(ledger.others()) == 1
    assert ledger.sweep() == []
    if end == "closed":
        workspace.close_attempt(*ref, FULL)
    elif end == "superseded":
        claim(workspace, plan, "data", after=1)
    elif end == "done":
        finish(workspace, ref.stage_id)
    else:
        shutil.rmtree(workspace.layout.stage(ref.stage_id).control)
    assert ledger.others() == []
    assert len(ledger.sweep()) == 1
    assert list(ledger.folder.iterdir()) == []


def test_workspaces_on_one_quota_can_share_a_ledger(tmp_path: Path) -> None:
    one, two = Workspace.open(tmp_path / "one"), Workspace.open(tmp_path / "two")
    plan = small_plan("data")
    refs = [AttemptRef(claim(w, plan, "data").id, 1) for w in (one, two)]
    ledgers = [Reservations(w, tmp_path / "shared") for w in (one, two)]
    for ledger, ref in zip(ledgers, refs, strict=True):
        ledger.write(ref, MIB)
    (seen,) = ledgers[0].others(refs[0])
    assert seen.workspace == two.layout.control
    two.close_attempt(*refs[1], FULL)
    assert ledgers[0].others(refs[0]) == []
    shutil.rmtree(two.root)
    two.root.symlink_to(two.root)
    assert len(ledgers[0].others(refs[0])) == 1, "it cannot be looked at, and may be at work"


# ---------------------------------------------------------------- shortage and reserving


def test_shortage_counts_margin_and_what_others_reserved(workspace: Workspace) -> None:
    plan = small_plan("data", "sft")
    ref = AttemptRef(claim(workspace, plan, "sft").id, 1)
    disk_manager = space_for(workspace, 8 * MIB)
    assert disk_manager.shortage(7 * MIB) == 0
    assert 0 < disk_manager.shortage(9 * MIB) <= 2 * MIB
    disk_manager.ledger.write(ref, 4 * MIB)
    assert disk_manager.shortage(7 * MIB) > 2 * MIB
    assert disk_manager.shortage(7 * MIB, ref) == 0
    disk_manager.ledger.remove(ref)
    tight = space_for(workspace, 8 * MIB, margin_gb=3 * MIB / GIB)
    assert tight.shortage(7 * MIB) > 0
    whole = space_for(workspace, 8 * MIB, margin_gb=0.0)
    free = whole.available().free_bytes
    assert (whole.shortage(free), whole.shortage(free + 1)) == (0, 1)


def test_failed_writes_mean_no_space(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_manager = DiskManager(workspace, DiskConfig())
    assert disk_manager.shortage(MIB) == 0

    def over_quota(_descriptor: int) -> None:
        """Some file systems report it only when the bytes go to the disk."""
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", over_quota)
        assert disk_manager.free_space(MIB) is None
        assert disk_manager.shortage(MIB) == MIB
    save(workspace, claim(workspace, small_plan("data"), "data").id, 1, 2)
    monkeypatch.setattr("infra.disk.manager.refusal", lambda *_: errno.EROFS)
    before = disk_manager.candidates()
    assert before
    assert disk_manager.free_space(MIB) is None
    assert disk_manager.candidates() == before, "on a read-only file system nothing is deleted"


def test_repeated_failures_do_not_ask_for_ever_more_space(workspace: Workspace) -> None:
    plan = small_plan("data", disk=DiskConfig(watch_s=0.0))
    data = plan.by_name["data"]
    in_vain = replace(FULL, need_bytes=8 * MIB)
    for number in range(9):
        claim(workspace, plan, "data", after=number)
        workspace.close_attempt(data.id, number + 1, in_vain)
    record = workspace.read_record(data.id)
    assert record is not None
    asked = list[int]()

    class Asked(ProbingKeeper):
        def free_space(self, need_bytes: int, ref: AttemptRef | None = None) -> None:
            asked.append(need_bytes)

    spaces = SpaceWaits(
        workspace, Asked(workspace), plan.config.disk, time.monotonic, lambda _: None
    )
    assert data.id in spaces.short({data.id: record})
    assert asked == [16 * MIB], "twice what was written in vain"


def test_a_reservation_holds_for_its_block_and_waits_for_space(workspace: Workspace) -> None:
    ref = AttemptRef(claim(workspace, small_plan("data"), "data").id, 1)
    disk_manager = space_for(workspace, 8 * MIB)
    with disk_manager.reserve(ref, 4 * MIB):
        assert disk_manager.reserved() == 4 * MIB
        assert "reserved" in disk_manager.status_line()
    assert disk_manager.reserved() == 0
    filler = workspace.root / "filler"
    filler.write_bytes(os.urandom(4 * MIB))
    disk_manager = space_for(workspace, 2 * MIB, hold_s=20.0)
    timer = threading.Timer(0.2, filler.unlink)
    timer.start()
    with disk_manager.reserve(ref, 4 * MIB):
        assert not filler.exists(), "it waited until another process freed space"
    timer.join()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_reservation_that_does_not_fit_is_refused(workspace: Workspace, stopped: bool) -> None:
    ref = AttemptRef(claim(workspace, small_plan("data"), "data").id, 1)
    config = space_for(workspace, 2 * MIB, hold_s=999.0 if stopped else 0.1).config
    disk_manager = DiskManager(workspace, config, stop_requested=lambda: stopped)
    with pytest.raises(NoSpaceError, match=r"4\.0 MiB"), disk_manager.reserve(ref, 4 * MIB):
        pytest.fail("it does not fit")
    assert list(disk_manager.ledger.folder.iterdir()) == []


def test_two_saves_that_do_not_fit_together_never_run_together(workspace: Workspace) -> None:
    plan = small_plan("data", "sft")
    refs = [AttemptRef(claim(workspace, plan, n).id, 1) for n in ("data", "sft")]
    disk_manager = space_for(workspace, 6 * MIB)
    inside, most, ended = [0], [0], []
    lock = threading.Lock()

    def work(ref: AttemptRef) -> None:
        own = DiskManager(workspace, replace(disk_manager.config, hold_s=30.0, watch_s=0.05))
        for _ in range(3):
            with own.reserve(ref, 4 * MIB):
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                threading.Event().wait(0.02)
                with lock:
                    inside[0] -= 1
        ended.append(ref)

    threads = [threading.Thread(target=work, args=(ref,)) for ref in refs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(ended), most[0]) == (2, 1)


# ---------------------------------------------------------------- reclaiming


def test_reclaiming_takes_older_checkpoints_and_leaves_the_newest(workspace: Workspace) -> None:
    stage = claim(workspace, small_plan("data"), "data")
    save(workspace, stage.id, 9, 50, 100, size=2 * MIB)
    assert space_for(workspace, MIB, reclaim=False).free_space(2 * MIB) is None
    assert steps_of(workspace, stage.id) == [9, 50, 100]
    disk_manager = space_for(workspace, MIB)
    assert disk_manager.free_space(2 * MIB) is not None
    assert steps_of(workspace, stage.id) == [50, 100], "one was enough"
    assert disk_manager.free_space(4 * MIB) is not None
    assert steps_of(workspace, stage.id) == [100]
    assert disk_manager.free_space(9 * MIB) is None
    assert steps_of(workspace, stage.id) == [100]


@pytest.mark.parametrize(("deleted", "left"), [(2, 1), (1, 2)])
def test_the_trainer_may_delete_checkpoints_during_a_reclaim(
    workspace: Workspace, caplog: pytest.LogCaptureFixture, deleted: int, left: int
) -> None:
    """The older one became the newest and stays; or it is gone already, which is no error."""
    stage = claim(workspace, small_plan("data"), "data")
    save(workspace, stage.id, 1, 2)
    (candidate,) = DiskManager(workspace, DiskConfig()).candidates()
    assert candidate.step == 1
    shutil.rmtree(workspace.layout.stage(stage.id).checkpoints / f"step-{deleted:08d}")
    done = carry_out(workspace, [candidate])
    assert deleted == 1 or done == (0, ())
    assert steps_of(workspace, stage.id) == [left]
    assert not caplog.records


def test_an_output_that_is_finished_during_a_reclaim_stays(workspace: Workspace) -> None:
    """Its outcome is written after its result: an earlier plan takes it for a dead attempt."""
    plan = small_plan("data")
    stage = claim(workspace, plan, "data")
    workspace.close_attempt(stage.id, 1, FULL)
    claim(workspace, plan, "data", after=1)
    workspace.close_attempt(stage.id, 2, FULL)
    outputs = [workspace.layout.attempt(stage.id, number).output for number in (1, 2)]
    for output in outputs:
        output.mkdir(parents=True)
        (output / "rows.jsonl").write_bytes(os.urandom(KIB))
    candidates = DiskManager(workspace, DiskConfig()).candidates()
    assert [c.path for c in candidates] == outputs
    finish(workspace, stage.id, number=2)
    assert carry_out(workspace, candidates).items == (str(outputs[0]),)
    assert (outputs[1] / "rows.jsonl").exists()


def runs_of_code(workspace: Workspace, plan: Plan, *names: str) -> None:
    """A run of the plan for each of these code snapshots, oldest first."""
    for index, code in enumerate(names):
        (workspace.layout.code / code).mkdir()
        run = replace(run_record(workspace, plan), code=code)
        workspace.write_run(replace(run, run=f"20261121-12000{index}-small-0000"))


def test_only_code_without_unfinished_runs_is_deleted(workspace: Workspace) -> None:
    plan = small_plan("data")
    stage = claim(workspace, plan, "data")
    runs_of_code(workspace, plan, "old", "new")
    (workspace.layout.code / "nobodys").mkdir()
    assert read_inventory(workspace).idle_code == set()
    finish(workspace, stage.id)
    assert read_inventory(workspace).idle_code == {"old"}
    disk_manager = DiskManager(workspace, DiskConfig())
    disk_manager.carry_out(disk_manager.candidates())
    assert sorted(p.name for p in workspace.layout.code.iterdir()) == ["new", "nobodys"]


@pytest.mark.parametrize("moment", ["after the plan", "at the deletion"])
def test_new_code_stays(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Else its jobs would import whatever is installed."""
    plan = small_plan("data")
    finish(workspace, claim(workspace, plan, "data").id)
    runs_of_code(workspace, plan, "old", "new")
    disk_manager = DiskManager(workspace, DiskConfig())
    (candidate,) = disk_manager.candidates()
    assert candidate.path.name == "old"

    def begin() -> None:
        run = replace(run_record(workspace, small_plan("data", "sft")), code="old")
        workspace.write_run(run)

    def rename(path: Path, target: Path) -> Path:
        if path.name == "old":
            begin()
        return whole(path, target)

    whole = Path.rename
    if moment == "at the deletion":
        monkeypatch.setattr(Path, "rename", rename)
    else:
        begin()
    assert disk_manager.carry_out([candidate]).items == ()
    assert sorted(p.name for p in workspace.layout.code.iterdir()) == ["new", "old"]


# ---------------------------------------------------------------- published weights


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether the archive counts as another file system (a second one needs root to mount)."""

    def print_line(yes: bool) -> None:
        monkeypatch.setattr(copies_module.PublishedCopy, "is_elsewhere", lambda *_: yes)

    return print_line


PUBLISHED = small_plan("data", "sft", "publish")


def test_published_weights_are_deleted_with_a_note_of_where_they_are(
    workspace: Workspace, tmp_path: Path, elsewhere: Callable[[bool], None]
) -> None:
    sft, target = published(workspace, tmp_path, PUBLISHED)
    elsewhere(False)
    assert not weights_go(workspace), "on the same file system deleting would gain nothing"
    elsewhere(True)
    disk_manager = DiskManager(workspace, DiskConfig())
    done = disk_manager.carry_out(disk_manager.candidates())
    assert done.bytes >= MIB
    weights = workspace.layout.attempt(sft, 1).output / "model"
    assert not (weights / "model.safetensors").exists()
    assert (weights / "config.json").exists(), "only weights are large"
    note = read_reclaimed(workspace.layout.stage(sft))
    assert note["copy"] == str(target)
    assert [f["path"] for f in note["files"]] == ["model/model.safetensors"]
    assert str(target) in (reclaimed_text(workspace.layout.stage(sft)) or "")
    assert not weights_go(workspace)


@pytest.mark.parametrize("damage", ["gone", "short", "replaced"])
def test_weights_stay_when_the_copy_is_not_what_was_published(
    workspace: Workspace, tmp_path: Path, elsewhere: Callable[[bool], None], damage: str
) -> None:
    elsewhere(True)
    sft, target = published(workspace, tmp_path, PUBLISHED)
    file = target / "model.safetensors"
    if damage == "gone":
        file.unlink()
    elif damage == "short":
        os.truncate(file, KIB)
    else:
        file.write_bytes(os.urandom(MIB))  # found only by reading it, right before the deletion
    disk_manager = DiskManager(workspace, DiskConfig())
    disk_manager.carry_out(disk_manager.candidates())
    assert (workspace.layout.attempt(sft, 1).output / "model" / "model.safetensors").exists()
    assert read_reclaimed(workspace.layout.stage(sft)) is None


# ---------------------------------------------------------------- external trainers


def own_trainer(workspace: Workspace, *steps: int, keep: int = 2) -> tuple[str, Path]:
    """A `command` stage at work that has saved these steps, 9 MiB each."""
    config = replace(small_config("command"), command=CommandConfig(run="train", keep=keep))
    stage = claim(workspace, make_plan(config, SOURCES), "command")
    work = workspace.layout.stage(stage.id).data / "work"
    for step in steps:
        foreign_checkpoint(work, step)
    return stage.id, work


def steps_in(work: Path) -> list[int]:
    return sorted(int(p.name.rpartition("-")[2]) for p in work.iterdir())


def test_older_checkpoints_of_a_external_trainer_are_reclaimed(workspace: Workspace) -> None:
    """A start that waited for space beside them would wait for ever: nothing else deletes them."""
    stage_id, work = own_trainer(workspace, 10, 20, 100, 30, 40)
    workspace.close_attempt(stage_id, 1, FULL)
    disk_manager = space_for(workspace, 4 * MIB)
    pin(workspace.layout, stage_id)
    assert disk_manager.candidates() == []
    unpin(workspace.layout, stage_id)
    found = disk_manager.candidates()
    assert [c.path.name for c in found] == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
    assert all(9 * MIB <= c.bytes <= 10 * MIB for c in found)
    assert disk_manager.free_space(9 * MIB) is not None
    assert steps_in(work) == [20, 30, 40, 100], "no more than is needed"
    disk_manager.carry_out(disk_manager.candidates())
    assert steps_in(work) == [40, 100]


def test_the_newest_checkpoint_of_a_running_trainer_stays(workspace: Workspace) -> None:
    """It may look whole while it is still written."""
    _, work = own_trainer(workspace, 10, 20, 30, 40)
    assert space_for(workspace, MIB).free_space(8 * MIB) is not None
    assert steps_in(work) == [20, 30, 40]
    assert space_for(workspace, MIB).free_space(8 * MIB) is None


def test_a_half_save_is_deleted_once_its_trainer_has_ended(workspace: Workspace) -> None:
    stage_id, work = own_trainer(workspace, 10, 20)
    foreign_checkpoint(work, 30, saved=False)
    disk_manager = space_for(workspace, MIB)
    assert disk_manager.candidates() == []
    workspace.close_attempt(stage_id, 1, FULL)
    chosen = disk_manager.candidates()
    assert [c.path.name for c in chosen] == ["checkpoint-30"]
    recorded = workspace.part(workspace.layout.attempt(stage_id, 1), "config")
    config = from_json(RecipeConfig, recorded)
    claim(workspace, make_plan(config, SOURCES), "command", after=1)
    assert disk_manager.carry_out(chosen).items == (), "another attempt may be writing it again"


# ---------------------------------------------------------------- the rest


def test_the_space_for_a_save_is_measured_or_computed(workspace: Workspace) -> None:
    stage = claim(workspace, small_plan("data"), "data")
    disk_manager = DiskManager(workspace, DiskConfig())
    assert disk_manager.need_of(stage.id) == FLOOR_BYTES
    save(workspace, stage.id, 1, size=6 * MIB)
    assert 6 * MIB <= disk_manager.need_of(stage.id) <= 7 * MIB
    config = small_config("data", "sft")
    model = replace(config.model, name_or_path="Qwen/Qwen3-4B", dtype="bfloat16")
    sft = claim(workspace, make_plan(replace(config, model=model), SOURCES), "sft")
    assert disk_manager.need_of(sft.id) == 4 * 10**9 * 14


def test_jobs_compile_into_a_private_folder_of_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache holds code: in a folder that others can write to, it would be theirs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    settings = {"VLLM_CACHE_ROOT": "/mine", "TRITON_CACHE_DIR": ""}
    use_node_caches(settings)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert settings == {
        "VLLM_CACHE_ROOT": "/mine",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "CUDA_CACHE_PATH": f"{folder}/cuda",
    }
    (folder / "triton").mkdir()
    assert [i.path for i in find_caches(("TRITON_CACHE_DIR",))] == [folder / "triton"]
    folder.chmod(0o777)
    use_node_caches(open_to_all := {})
    assert open_to_all == {}


def test_the_watch_reports_each_crossing_once_and_reclaims_first(workspace: Workspace) -> None:
    filler = workspace.root / "filler"
    disk_manager = space_for(workspace, 8 * MIB, warn_share=0.9)
    events: list[DiskEvent] = []
    watch = DiskWatch(disk_manager, lambda: 2 * MIB, events.append)
    watch.observe()
    assert events == []
    filler.write_bytes(os.urandom(15 * MIB // 2))
    for _ in range(3):
        watch.observe()
    assert [e.kind for e in events] == ["warn", "short"]
    filler.unlink()
    watch.observe()
    watch.observe()
    assert [e.kind for e in events] == ["warn", "short", "room"]

    stage = claim(workspace, small_plan("data"), "data")
    save(workspace, stage.id, 1, 2, size=3 * MIB)
    seen = threading.Event()

    def note(event: DiskEvent) -> None:
        events.append(event)
        if event.kind == "reclaimed":
            seen.set()

    with DiskWatch(space_for(workspace, MIB), lambda: 2 * MIB, note):
        assert seen.wait(10)
    assert "short" not in [e.kind for e in events[3:]]
    assert steps_of(workspace, stage.id) == [2]


# ---------------------------------------------------------------- the plan of a reclaim


FILE = OutputFile("model/model.safetensors", 10 * MIB, "ab" * 32)
COPY = PublishedCopy("folder", "/archive/model", {FILE.sha256: "model.safetensors"})
WEIGHTS = Weights(Path("/ws/sft-1/output"), (FILE,), 10 * MIB, COPY)
RUNNING = StageFacts(kind="grpo", open=True)
DONE = StageFacts(kind="sft", done=True, kept_attempt=2, dead=frozenset({1}), weights=WEIGHTS)


def item(
    kind: Kind, stage_id: str, name: str, attempt: int = 0, step: int | None = None
) -> DiskItem:
    folder = "checkpoints" if kind in ("checkpoints", "temporary") else "attempts"
    path = Path("/ws") / stage_id / folder / name
    return DiskItem(path, kind, DiskSize(MIB, 2, MIB), stage_id, attempt, step)


def checkpoint(stage_id: str, step: int) -> DiskItem:
    return item("checkpoints", stage_id, f"step-{step:08d}", step=step)


def stock(*items: DiskItem, complete: bool = True, **stages: StageFacts) -> Inventory:
    found = frozenset(i.path for i in items if i.step is not None and complete)
    return Inventory(items, {k.replace("_", "-"): v for k, v in stages.items()}, found)


def names(candidates: list[Candidate]) -> list[str]:
    return [c.path.name for c in candidates]


# ---------------------------------------------------------------- order


def everything() -> Inventory:
    """One of each kind that may go, and what may not."""
    base = stock(
        checkpoint("grpo-1", 100),
        checkpoint("grpo-1", 9),
        checkpoint("grpo-1", 50),
        checkpoint("sft-1", 7),
        item("outputs", "sft-1", "0001", attempt=1),
        item("outputs", "sft-1", "0002", attempt=2),
        item("temporary", "sft-1", ".tmp-step-00000009-a1", attempt=1),
        DiskItem(Path("/ws/code/old"), "code", DiskSize(MIB, 50, MIB)),
        DiskItem(Path("/ws/code/new"), "code", DiskSize(MIB, 50, MIB)),
        grpo_1=RUNNING,
        sft_1=DONE,
    )
    return replace(base, idle_code=frozenset({"old"}))


def test_what_costs_least_goes_first_and_steps_by_number() -> None:
    found = plan_reclaim(everything(), None)
    assert [(c.rank, c.path.name) for c in found] == [
        (ReclaimOrder.LEFTOVER, ".tmp-step-00000009-a1"),
        (ReclaimOrder.SUPERSEDED, "0001"),
        (ReclaimOrder.FINISHED, "step-00000007"),
        (ReclaimOrder.OLDER, "step-00000009"),
        (ReclaimOrder.OLDER, "step-00000050"),
        (ReclaimOrder.CODE, "old"),
        (ReclaimOrder.WEIGHTS, "output"),
    ]


def test_no_more_is_deleted_than_is_needed() -> None:
    assert names(plan_reclaim(everything(), 2 * MIB)) == [".tmp-step-00000009-a1", "0001"]
    assert plan_reclaim(everything(), 0) == []
    found = plan_reclaim(everything(), 1, need_inodes=20)
    assert found[-1].rank is ReclaimOrder.CODE
    assert sum(c.inodes for c in found) >= 20
    assert plan_reclaim(everything(), 16 * MIB)[-1].rank is ReclaimOrder.WEIGHTS
    assert plan_reclaim(everything(), 999 * MIB)[-1].rank is ReclaimOrder.CODE, "no weights in vain"


def test_stored_judgements_go_last_and_oldest_first() -> None:
    """To judge again costs calls; all else that may go costs nothing, or a download."""
    names_ = ("old.sealed", "new.sealed", "busy.live")
    files = [
        DiskItem(Path("/ws/judgements") / n, "judgements", DiskSize(MIB, 1, MIB)) for n in names_
    ]
    base = everything()
    full = replace(base, items=(*files, *base.items))
    assert names(plan_reclaim(full, 17 * MIB))[-2:] == ["output", "old.sealed"]
    assert names(plan_reclaim(full, 18 * MIB))[-2:] == ["old.sealed", "new.sealed"]
    assert plan_reclaim(full, 999 * MIB)[-1].rank is ReclaimOrder.CODE, "none is given up in vain"
    assert plan_reclaim(full, None) == plan_reclaim(base, None), "not without a need"
    assert names(plan_reclaim(full, 19 * MIB))[-1] == "busy.live", "another one is begun then"
    asked = plan_reclaim(full, None, judgements=True)
    assert names(asked)[-3:] == [*names_], "on request"


# ---------------------------------------------------------------- protections


@pytest.mark.parametrize(
    "change",
    [
        {"weights": WEIGHTS._replace(copy=None)},
        {"pinned": True},
        {"leased": True},
        {"needed_by": "evaluate-sft of run 3"},
        {"done": False},
        {"weights": WEIGHTS._replace(gain=0)},
    ],
)
def test_weights_stay_when_they_are(change: dict[str, Any]) -> None:
    assert [c.rank for c in plan_reclaim(stock(sft_1=DONE), None)] == [ReclaimOrder.WEIGHTS]
    assert plan_reclaim(stock(sft_1=replace(DONE, **change)), None) == []


def test_a_stage_whose_records_cannot_be_read_is_left_alone() -> None:
    assert plan_reclaim(stock(checkpoint("grpo-1", 1), checkpoint("grpo-1", 2)), None) == []


def test_what_a_running_attempt_or_an_orchestrator_is_writing_stays() -> None:
    output = item("outputs", "grpo-1", "0003", attempt=3)
    half = item("temporary", "grpo-1", ".tmp-step-00000009-a3", attempt=3)
    unnamed = item("temporary", "grpo-1", ".tmp-probe-1-ab")
    assert plan_reclaim(stock(output, half, unnamed, grpo_1=RUNNING), None) == []
    ended = replace(RUNNING, open=False, dead=frozenset({3}))
    assert names(plan_reclaim(stock(output, grpo_1=ended), None)) == ["0003"]
    control = item("temporary", "sft-1", "x")._replace(path=Path("/ws/sft-1/.tmp-spec.json-1-ab"))
    assert plan_reclaim(stock(control, sft_1=replace(DONE, weights=None)), None) == []


def test_another_trainer_s_folder_goes_only_with_its_result() -> None:
    work = item("checkpoints", "command-1", "work")
    running, done = StageFacts("command", open=True), StageFacts("command", done=True)
    assert plan_reclaim(stock(work, command_1=running), None) == []
    assert names(plan_reclaim(stock(work, command_1=done), None)) == ["work"]


# ---------------------------------------------------------------- any stage at all


FLAGS = ("done", "pinned", "open", "leased", "complete", "needed")


@pytest.mark.parametrize("need", [None, 0, 2, 20])
def test_whatever_a_stage_is_the_protected_stays(need: int | None) -> None:
    """Never its newest complete checkpoint before it is done, and nothing that somebody reads."""
    items = (
        *(checkpoint("sft-1", step) for step in (9, 50, 100)),
        *(item(kind, "sft-1", kind, 1) for kind in ("outputs", "temporary", "rollouts", "logs")),
    )
    for values in itertools.product((True, False), repeat=len(FLAGS)):
        flags = dict(zip(FLAGS, values, strict=True))
        reader, complete = "grpo" if flags.pop("needed") else "", flags.pop("complete")
        about = StageFacts("sft", dead=frozenset({1}), weights=WEIGHTS, needed_by=reader, **flags)
        wanted = None if need is None else need * MIB
        chosen = plan_reclaim(stock(*items, complete=complete, sft_1=about), wanted)
        gone, ranks = set(names(chosen)), {c.rank for c in chosen}
        assert not gone & {"rollouts", "logs"}
        if complete and not about.done:
            assert "step-00000100" not in gone
        if about.pinned:
            assert chosen == []
        if ReclaimOrder.WEIGHTS in ranks:
            assert about.done
            assert not about.leased
            assert not about.needed_by
        if about.leased:
            assert ReclaimOrder.SUPERSEDED not in ranks

"""Publishing into folders: layout, links, failures. What a Hub does alike is in test_hub."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from infra.publishing import FolderTarget, PublishedFiles, report_of
from infra.store.stage_records import target_damage
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, NoSpaceError
from refiner_core.contract.types import Progress
from tests.support.publications import OTHER_RUN, REPO, card, publication

ALL = ("README.md", "config.json", "model.safetensors", "refiner.json")
STEPS = PublishConfig(which="every-save")
FINAL = PublishConfig()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "published"


def inode(path: Path) -> int:
    return path.stat().st_ino


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_published_folder_has_the_layout_of_the_hub(root: Path, tmp_path: Path) -> None:
    told: list[Progress] = []
    last = publication(tmp_path, 100, final=True)
    target = FolderTarget(root, FINAL)
    published = target.publish(last, told.append)
    assert published == PublishedFiles("folder", str(root / REPO), "main", published.files, ALL)
    assert names(root / REPO) == set(ALL)
    assert names(root / "me") == {"model"}, "no temporary folder is left"
    assert (told[-1].done, told[-1].total) == (4, 4)
    weights = inode(root / REPO / "model.safetensors")
    assert target.publish(publication(tmp_path, 100, final=True, says="F1")).changed
    assert inode(root / REPO / "model.safetensors") == weights, "they are not written again"


def test_main_and_its_step_share_their_bytes(root: Path, tmp_path: Path) -> None:
    published = FolderTarget(root, STEPS).publish(publication(tmp_path, 100))
    step = root / f"{REPO}@step-100"
    assert published.target == str(step)
    assert inode(root / REPO / "model.safetensors") == inode(step / "model.safetensors")


def test_failures_keep_files(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = FolderTarget(root, FINAL)
    target.publish(publication(tmp_path, 100, final=True))
    other = publication(tmp_path, 100, final=True, files={"model.safetensors": b"new"})
    with pytest.raises(Interrupted):
        target.publish(other, should_stop=lambda: True)

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("infra.publishing.atomic.sync_tree", full)
        with pytest.raises(NoSpaceError):
            target.publish(other)
    assert (root / REPO / "model.safetensors").read_bytes() == b"weights of step 100"
    assert names(root / "me") == {"model"}
    assert target.publish(other).changed == ("model.safetensors", "refiner.json")
    assert names(root / REPO) == {"README.md", "model.safetensors", "refiner.json"}


@pytest.mark.parametrize("end", [OSError(errno.EDQUOT, "Disk quota exceeded"), KeyboardInterrupt()])
def test_what_was_published_is_back_where_the_new_one_cannot_take_its_place(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    target = FolderTarget(root, FINAL)
    target.publish(publication(tmp_path, 100, final=True, says="old"))

    def rename(path: Path, to: Path) -> Path:
        if to == root / REPO and target.read_text(REPO, "main", "README.md") is None:
            monkeypatch.undo()
            raise end
        return whole(path, to)

    whole = Path.rename
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((NoSpaceError, KeyboardInterrupt)):
        target.publish(publication(tmp_path, 100, final=True, says="new"))
    assert target.read_text(REPO, "main", "README.md") == card("old")
    assert names(root / "me") == {"model"}


def test_a_kill_loses_nothing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the files that others have put there."""
    publish = FolderTarget(root, FINAL).publish
    publish(publication(tmp_path, 100, final=True, says="old"))
    (root / REPO / "notes.txt").write_text("mine")
    killed = os.fork()
    if killed == 0:
        whole = Path.rename

        def rename(path: Path, to: Path) -> Path:
            done = whole(path, to)
            if path == root / REPO:
                os._exit(9)
            return done

        try:
            monkeypatch.setattr(Path, "rename", rename)
            publish(publication(tmp_path, 100, final=True, says="new"))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == 9
    assert not (root / REPO).exists()
    publish(publication(tmp_path, 100, final=True, says="new"))
    assert (root / REPO / "README.md").read_text() == card("new")
    assert (root / REPO / "notes.txt").read_text() == "mine"


def test_another_run_is_replaced_only_on_request(root: Path, tmp_path: Path) -> None:
    FolderTarget(root, FINAL).publish(publication(tmp_path, 100, final=True))
    other = publication(tmp_path, 40, final=True, run=OTHER_RUN)
    with pytest.raises(ConfigurationError, match=r"another run .*publish\.replace=true"):
        FolderTarget(root, FINAL).publish(other)
    FolderTarget(root, replace(FINAL, replace=True)).publish(other)
    assert b"step 40" in (root / REPO / "model.safetensors").read_bytes()


def test_a_folder_that_cannot_be_written_is_refused(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    (root / "me").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be written.*`publish.path=`"):
        FolderTarget(root, FINAL).publish(publication(tmp_path, 1, final=True))
    nowhere = FolderTarget(Path("/proc/refiner"), FINAL)
    with pytest.raises(ConfigurationError, match=r"cannot be written.*`publish.path=`"):
        nowhere.publish(publication(tmp_path, 1, final=True))


# ---------------------------------------------------------------- what is known of it later


def test_what_was_published_is_known_to_be_gone_or_replaced(root: Path, tmp_path: Path) -> None:
    target, last = FolderTarget(root, FINAL), publication(tmp_path, 100, final=True)
    published = {**report_of(target.publish(last), last), "card": card()}
    numbers = publication(tmp_path, 100, final=True, says="F1 0.9", only_card=True)
    updated = {**report_of(target.publish(numbers), numbers), "card": card("F1 0.9")}
    assert target_damage(published) is None, "a new card replaces nothing that was published"
    assert target_damage(updated) is None
    target.publish(last)
    assert target_damage(published) is None
    assert target_damage(updated) is None, "the same weights; cards come after one another"
    (root / REPO / "README.md").unlink()
    assert target_damage(updated) == f"{root / REPO / 'README.md'} is gone"
    files = {"model.safetensors": b"others", "config.json": b"{}"}
    target.publish(publication(tmp_path, 100, final=True, files=files))
    assert "model.safetensors has been replaced" in str(target_damage(published))
    shutil.rmtree(root)
    assert target_damage(published) == f"{root / REPO} is gone"
    assert target_damage(updated) == f"{root / REPO} is gone"

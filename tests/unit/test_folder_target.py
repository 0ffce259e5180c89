"""Publishing into folders: what lies where, what is not written again, what is refused."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from infra.publishing import FolderTarget, Published, report_of
from infra.store.stage_records import target_damage
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import (
    ConfigurationError,
    Interrupted,
    NoSpaceError,
    StageFailed,
)
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
    published = FolderTarget(root, FINAL).publish(last, told.append)
    assert published == Published("folder", str(root / REPO), "main", published.files, ALL)
    assert [f.path for f in published.files] == list(ALL)
    assert names(root / REPO) == set(ALL)
    assert names(root / "me") == {"model"}, "nothing else is left behind"
    assert (told[-1].done, told[-1].total) == (4, 4)
    text = FolderTarget(root, FINAL).read_text(REPO, "main", "README.md")
    assert text == card()
    assert FolderTarget(root, FINAL).read_text(REPO, "step-1", "README.md") is None


def test_publishing_again_touches_nothing_and_a_new_card_no_weights(
    root: Path, tmp_path: Path
) -> None:
    target = FolderTarget(root, FINAL)
    target.publish(publication(tmp_path, 100, final=True))
    weights = inode(root / REPO / "model.safetensors")
    assert target.publish(publication(tmp_path, 100, final=True)).changed == ()
    numbers = publication(tmp_path, 100, final=True, says="F1 0.9", only_card=True)
    published = target.publish(numbers)
    assert published.changed == ("README.md", "refiner.json")
    assert [f.path for f in published.files] == list(ALL), "the weights are still ours"
    again = publication(tmp_path, 100, final=True, says="F1 0.8")
    assert target.publish(again).changed == ("README.md", "refiner.json")
    assert inode(root / REPO / "model.safetensors") == weights
    assert (root / REPO / "README.md").read_text() == card("F1 0.8")


def test_each_step_has_a_folder_and_main_is_the_last_of_them(root: Path, tmp_path: Path) -> None:
    target = FolderTarget(root, STEPS)
    for step in (50, 100, 75):  # an upload that is late
        published = target.publish(publication(tmp_path, step, final=step == 100))
        assert (published.revision, published.target) == (
            f"step-{step}",
            str(root / f"{REPO}@step-{step}"),
        )
    assert names(root / "me") == {"model", "model@step-50", "model@step-75", "model@step-100"}
    main, last = root / REPO / "model.safetensors", root / "me/model@step-100/model.safetensors"
    assert main.read_bytes() == b"weights of step 100", "main never goes back"
    assert inode(main) == inode(last), "main and its step share their bytes"


def test_main_is_the_best_also_where_an_earlier_step_turns_out_to_be_it(
    root: Path, tmp_path: Path
) -> None:
    target = FolderTarget(root, PublishConfig(which="best"))
    for step in (100, 50):
        target.publish(publication(tmp_path, step))
    assert (root / REPO / "model.safetensors").read_bytes() == b"weights of step 50"


def test_files_that_are_no_longer_wanted_go_and_those_of_others_stay(
    root: Path, tmp_path: Path
) -> None:
    target = FolderTarget(root, FINAL)
    shards = {"model-1.safetensors": b"1", "model-2.safetensors": b"2", "config.json": b"{}"}
    target.publish(publication(tmp_path / "a", 100, files=shards, final=True))
    (root / REPO / "notes").mkdir()
    (root / REPO / "notes" / "mine.txt").write_text("by hand")
    target.publish(publication(tmp_path / "b", 100, final=True))
    assert names(root / REPO) == {*ALL, "notes"}
    assert (root / REPO / "notes" / "mine.txt").read_text() == "by hand"


def test_a_folder_of_somebody_else_is_refused(root: Path, tmp_path: Path) -> None:
    (root / REPO).mkdir(parents=True)
    (root / REPO / "thesis.tex").write_text("years of work")
    for only_card in (False, True):
        with pytest.raises(ConfigurationError, match="was not published by refiner"):
            FolderTarget(root, FINAL).publish(
                publication(tmp_path, 1, final=True, only_card=only_card)
            )
    (root / REPO / "refiner.json").write_text('{"kind": "another tool"}')
    with pytest.raises(ConfigurationError, match="was not published by refiner"):
        FolderTarget(root, FINAL).publish(publication(tmp_path, 1, final=True))
    assert names(root / REPO) == {"thesis.tex", "refiner.json"}


def test_steps_of_two_runs_do_not_share_a_repository(root: Path, tmp_path: Path) -> None:
    target = FolderTarget(root, STEPS)
    target.publish(publication(tmp_path, 50))
    with pytest.raises(ConfigurationError, match=r"another run .*\{fingerprint\}"):
        target.publish(publication(tmp_path, 50, run=OTHER_RUN))
    assert target.publish(publication(tmp_path, 50)).changed == ()


def test_a_card_is_not_put_beside_weights_that_it_is_not_about(root: Path, tmp_path: Path) -> None:
    target = FolderTarget(root, FINAL)
    late = publication(tmp_path / "a", 100, final=True, only_card=True)
    with pytest.raises(ConfigurationError, match="its card is not updated"):
        target.publish(late)
    assert not (root / REPO).exists()
    other = {"model.safetensors": b"other weights", "config.json": b"{}"}
    target.publish(publication(tmp_path / "b", 100, final=True, files=other, run=OTHER_RUN))
    with pytest.raises(ConfigurationError, match="its card is not updated"):
        target.publish(late)


def test_a_source_that_has_changed_since_its_stage_is_not_published(
    root: Path, tmp_path: Path
) -> None:
    wanted = publication(tmp_path, 100, final=True)
    source = wanted.files[0].source
    assert source is not None
    source.write_bytes(source.read_bytes()[::-1])
    with pytest.raises(StageFailed, match=r"model\.safetensors has other content"):
        FolderTarget(root, FINAL).publish(wanted)
    assert not (root / REPO).exists()
    assert names(root / "me") == set(), "no half of it lies around"


def test_a_stop_leaves_what_was_published(root: Path, tmp_path: Path) -> None:
    target = FolderTarget(root, FINAL)
    target.publish(publication(tmp_path / "a", 100, final=True))
    other = {"model.safetensors": b"other weights", "config.json": b"[]"}
    wanted = publication(tmp_path / "b", 100, final=True, files=other)
    with pytest.raises(Interrupted):
        target.publish(wanted, should_stop=lambda: True)
    assert (root / REPO / "model.safetensors").read_bytes() == b"weights of step 100"
    assert names(root / "me") == {"model"}


def test_a_full_disk_leaves_what_was_published(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = FolderTarget(root, FINAL)
    target.publish(publication(tmp_path, 100, final=True))
    other = publication(tmp_path, 100, final=True, files={"model.safetensors": b"new"})

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("infra.publishing.atomic.sync_tree", full)
    with pytest.raises(NoSpaceError):
        target.publish(other)
    assert (root / REPO / "model.safetensors").read_bytes() == b"weights of step 100"
    assert names(root / "me") == {"model"}
    monkeypatch.undo()
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


def test_a_publisher_that_was_killed_between_two_names_loses_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not the files that others have put there."""
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


def test_another_runs_weights_are_replaced_only_where_that_is_asked_for(
    root: Path, tmp_path: Path
) -> None:
    FolderTarget(root, FINAL).publish(publication(tmp_path, 100, final=True))
    other = publication(tmp_path, 40, final=True, run=OTHER_RUN)
    with pytest.raises(ConfigurationError, match=r"another run .*publish\.replace=true"):
        FolderTarget(root, FINAL).publish(other)
    FolderTarget(root, replace(FINAL, replace=True)).publish(other)
    assert b"step 40" in (root / REPO / "model.safetensors").read_bytes()


def test_a_place_where_nothing_can_be_made_is_named_with_its_field(
    root: Path, tmp_path: Path
) -> None:
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

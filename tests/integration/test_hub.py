"""Publishing to a Hub and into folders: what both do alike, then what only the Hub does.

The Hub is on loopback over real git; the real client talks to it over HTTP.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.hub import client
from infra.hub.target import HubTarget
from infra.publishing import FolderTarget
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import ConfigurationError, HubRefused, Interrupted, StageFailed
from refiner_core.contract.types import Progress
from tests.support.git_hub import LoopbackHub
from tests.support.publications import OTHER_RUN, REPO, card, publication

ALL = ["README.md", "config.json", "model.safetensors", "refiner.json"]


@pytest.fixture
def hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """Small weights count as large files."""
    monkeypatch.setattr(client, "READ_BYTES", 8)
    return hub


def target(hub: LoopbackHub, **settings: Any) -> HubTarget:
    """The target of a recipe that publishes every save; settings are those of `publish`."""
    settings = {"which": "every-save", "patience_s": 10.0, **settings}
    return HubTarget(PublishConfig(target="hub", **settings), hub.url)


def weights(hub: LoopbackHub, revision: str) -> bytes:
    return hub.contents(REPO, revision)["model.safetensors"]


# ---------------------------------------------------------------- Hub and folder alike


class OnHub:
    """Published revisions of a Hub, as a test looks at them."""

    def __init__(self, hub: LoopbackHub) -> None:
        self.hub = hub

    def target(self, **settings: Any) -> HubTarget:
        return target(self.hub, **settings)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        files = self.hub.contents(REPO, revision)
        return {path: data for path, data in files.items() if path != ".gitattributes"}

    def revisions(self) -> set[str]:
        return {name.partition("/")[2] for name in self.hub.refs(REPO)}

    def add(self, files: dict[str, bytes]) -> None:
        if REPO not in self.hub.repos:
            self.hub.create(REPO)
        self.hub.add(REPO, files)


class InFolders:
    """The same of folders: ``model`` is main, ``model@step-50`` the revision of a step."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def target(self, **settings: Any) -> FolderTarget:
        return FolderTarget(self.root, PublishConfig(**{"which": "every-save", **settings}))

    def files(self, revision: str = "main") -> dict[str, bytes]:
        folder = self.root / (REPO if revision == "main" else f"{REPO}@{revision}")
        found = (p for p in folder.rglob("*") if p.is_file())
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}

    def revisions(self) -> set[str]:
        found = (self.root / REPO).parent.glob("*")
        return {p.name.partition("@")[2] or "main" for p in found}

    def add(self, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            path = self.root / REPO / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


Place = OnHub | InFolders


@pytest.fixture(params=["hub", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "hub":
        return OnHub(request.getfixturevalue("hub"))
    return InFolders(tmp_path / "published")


def test_every_step_has_a_revision_and_main_is_the_last_step(place: Place, tmp_path: Path) -> None:
    for step in (50, 100, 75):  # the last one comes late
        published = place.target().publish(publication(tmp_path, step, final=step == 100))
        assert published.revision == f"step-{step}"
        assert [f.path for f in published.files] == ALL
    assert place.revisions() == {"main", "step-50", "step-75", "step-100"}
    for revision, step in (("main", 100), ("step-50", 50), ("step-75", 75), ("step-100", 100)):
        assert place.files(revision)["model.safetensors"] == b"weights of step %d" % step
    assert place.target().publish(publication(tmp_path, 75)).changed == (), "nothing has changed"


def test_a_new_card_of_a_step_changes_no_weights(place: Place, tmp_path: Path) -> None:
    for step in (50, 100):
        place.target().publish(publication(tmp_path, step))
    for step in (100, 50):
        numbers = publication(tmp_path, step, says=f"F1 of {step}", only_card=True)
        published = place.target().publish(numbers)
        assert published.changed == ("README.md", "refiner.json")
        assert [f.path for f in published.files] == ALL, "the weights are still published"
        files = place.files(f"step-{step}")
        assert files["model.safetensors"] == b"weights of step %d" % step
        assert files["README.md"].decode() == card(f"F1 of {step}")
    assert place.target().read_text(REPO, "main", "README.md") == card("F1 of 100")
    assert place.target().read_text(REPO, "step-1", "README.md") is None


def test_main_is_the_best_step_even_if_it_is_an_earlier_one(place: Place, tmp_path: Path) -> None:
    best = place.target(which="best")
    best.publish(publication(tmp_path, 100, final=True))
    best.publish(publication(tmp_path, 50))
    assert place.files()["model.safetensors"] == b"weights of step 50"


def test_our_old_files_are_deleted_and_files_of_others_stay(place: Place, tmp_path: Path) -> None:
    shards = {"model-1.safetensors": b"1", "model-2.safetensors": b"2", "old.json": b"{}"}
    place.target().publish(publication(tmp_path / "a", 50, files=shards))
    place.add({"notes/mine.txt": b"by hand"})
    place.target().publish(publication(tmp_path / "b", 100))
    assert set(place.files()) == {*ALL, "notes/mine.txt"}
    assert set(place.files("step-50")) == {"README.md", "refiner.json", *shards}


def test_a_repository_of_others_or_of_another_run_is_refused(place: Place, tmp_path: Path) -> None:
    for name, data in (("thesis.tex", b"years of work"), ("refiner.json", b'{"kind": "other"}')):
        place.add({name: data})
        with pytest.raises(ConfigurationError, match=r"publish\.repo_id|publish\.path"):
            place.target(which="final").publish(publication(tmp_path, 50, final=True))
    assert set(place.files()) == {"thesis.tex", "refiner.json"}


def test_steps_of_two_runs_do_not_share_a_repository(place: Place, tmp_path: Path) -> None:
    place.target().publish(publication(tmp_path, 50))
    with pytest.raises(ConfigurationError, match=r"another run .*\{fingerprint\}"):
        place.target().publish(publication(tmp_path, 50, run=OTHER_RUN))
    assert place.files()["model.safetensors"] == b"weights of step 50"


def test_a_card_is_not_published_beside_other_weights(place: Place, tmp_path: Path) -> None:
    late = publication(tmp_path / "a", 50, only_card=True)
    other = {"model.safetensors": b"other weights", "config.json": b"{}"}
    place.target().publish(publication(tmp_path / "b", 50, files=other))
    with pytest.raises(ConfigurationError, match="its card is not updated"):
        place.target().publish(late)
    assert place.files("step-50")["README.md"].decode() == card()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_changed_source_is_not_published(place: Place, tmp_path: Path, name: str) -> None:
    """A Hub knows no SHA-256 of small files and would not notice."""
    wanted = publication(tmp_path, 50)
    source = next(f.source for f in wanted.files if f.name == name)
    for data in (source.read_bytes()[::-1], b"x"):
        source.write_bytes(data)
        with pytest.raises(StageFailed, match=name):
            place.target().publish(wanted)
    assert place.revisions() <= {"main"}
    assert place.files() == {}


# ---------------------------------------------------------------- the Hub alone


def test_a_published_step_is_read_by_git(hub: LoopbackHub, tmp_path: Path) -> None:
    told: list[Progress] = []
    published = target(hub).publish(publication(tmp_path, 50), told.append)
    assert hub.refs(REPO) == {"heads/main": published.commit, "tags/step-50": published.commit}
    assert hub.repos[REPO].private
    address = f"{hub.url}/{REPO}/tree/step-50"
    assert (published.where, published.target, published.revision) == ("hub", address, "step-50")
    assert "sending model.safetensors" in [p.phase for p in told]
    clone = tmp_path / "clone"
    subprocess.run(
        ["git", "clone", "-q", "-b", "step-50", str(hub.git(REPO).folder), str(clone)],
        check=True,
        capture_output=True,
        env={"GIT_LFS_SKIP_SMUDGE": "1", "PATH": "/usr/local/bin:/usr/bin:/bin"},
    )
    assert (clone / "README.md").read_text() == card()
    assert "oid sha256:" in (clone / "model.safetensors").read_text()
    before = len(hub.log)
    again = target(hub).publish(publication(tmp_path, 50))
    assert (again.changed, again.commit) == ((), published.commit)
    assert len(hub.log) - before <= 10
    assert not any(r.writes for r in hub.log[before:])


def test_each_step_can_have_a_branch(hub: LoopbackHub, tmp_path: Path) -> None:
    branches = target(hub, per_step="branch")
    hub.create(REPO)
    with pytest.raises(ConfigurationError, match="its card is not updated"):
        branches.publish(publication(tmp_path, 50, only_card=True))
    assert set(hub.refs(REPO)) == {"heads/main"}, "no branch is left behind"
    for step in (50, 100, 75):
        branches.publish(publication(tmp_path, step))
        branches.publish(publication(tmp_path, step, says=f"{step}!", only_card=True))
    assert set(hub.refs(REPO)) == {"heads/main", *(f"heads/step-{s}" for s in (50, 75, 100))}
    for revision, step in (("main", 100), ("step-50", 50), ("step-75", 75), ("step-100", 100)):
        assert weights(hub, revision) == b"weights of step %d" % step
        assert branches.read_text(REPO, revision, "README.md") == card(f"{step}!")


def test_large_files(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hashed(*_: object) -> bytes:
        raise AssertionError("the client hashes a file whose hash is known")

    monkeypatch.setattr("huggingface_hub.lfs.sha_fileobj", hashed)
    hub.multipart = 64
    files = {f"model-{n}.safetensors": bytes([n]) * (60 + 40 * n) for n in range(5)}
    target(hub).publish(publication(tmp_path, 50, files=files))
    held = hub.contents(REPO)
    assert {name: held[name] for name in files} == files
    assert len([r for r in hub.log if "/part/" in r.path]) == 2 + 3 + 3 + 4


def test_a_stop_during_an_upload_publishes_nothing(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.multipart = 64
    files = {"model.safetensors": b"w" * 200, "b.safetensors": b"b"}
    wanted = publication(tmp_path, 50, files=files)
    sent: list[Progress] = []

    def stop() -> bool:
        return any("/part/" in r.path for r in hub.log)

    with pytest.raises(Interrupted):
        target(hub).publish(wanted, sent.append, stop)
    assert set(hub.refs(REPO)) == {"heads/main"}
    assert set(hub.contents(REPO)) == {".gitattributes"}
    target(hub).publish(wanted)
    assert weights(hub, "step-50") == b"w" * 200


def test_private_weights(hub: LoopbackHub, tmp_path, caplog) -> None:
    hub.create(REPO, private=False)
    with pytest.raises(HubRefused, match=r"public .*publish\.private=true"):
        target(hub).publish(publication(tmp_path, 50))
    assert not any(r.writes for r in hub.log)
    target(hub, private=False).publish(publication(tmp_path, 50))
    assert "stays private" not in caplog.text
    hub.repos[REPO].private = True
    target(hub, private=False).publish(publication(tmp_path, 50))
    assert "stays private" in caplog.text

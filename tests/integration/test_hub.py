"""Publishing to the Hub: the real client, over HTTP, to a Hub on loopback over real git."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from infra.hub import client
from infra.hub.target import HubTarget
from infra.publishing import Published
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import ConfigurationError, HubRefused, Interrupted, StageFailed
from refiner_core.contract.types import Progress
from tests.support.git_hub import Fault, LoopbackHub
from tests.support.publications import OTHER_RUN, REPO, card, publication

ALL = ["README.md", "config.json", "model.safetensors", "refiner.json"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path / "hub") as found:
        monkeypatch.setenv("HF_TOKEN", found.token)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(client, "READ_BYTES", 8)  # so that weights are large files here, too
        yield found


def target(hub: LoopbackHub, **settings: Any) -> HubTarget:
    """As a recipe that publishes every save has it; settings are those of `publish`."""
    settings = {"which": "every-save", "patience_s": 10.0, **settings}
    return HubTarget(PublishConfig(target="hub", **settings), hub.url)


def weights(hub: LoopbackHub, revision: str) -> bytes:
    return hub.contents(REPO, revision)["model.safetensors"]


def test_a_checkpoint_is_published_with_a_tag_and_git_itself_reads_it(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    told: list[Progress] = []
    published = target(hub).publish(publication(tmp_path, 50), told.append)
    assert [f.path for f in published.files] == list(published.changed) == ALL
    assert hub.refs(REPO) == {"heads/main": published.commit, "tags/step-50": published.commit}
    assert hub.api.repos[REPO].private
    assert published == Published(
        where="hub",
        target=f"{hub.url}/{REPO}/tree/step-50",
        revision="step-50",
        files=published.files,
        changed=published.changed,
        commit=published.commit,
    )
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


def test_an_unchanged_checkpoint_takes_few_requests_and_no_bytes(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    first = target(hub).publish(publication(tmp_path, 50))
    before, refs = len(hub.log), hub.refs(REPO)
    again = target(hub).publish(publication(tmp_path, 50))
    assert (again.changed, again.commit) == ((), first.commit)
    assert len(hub.log) - before <= 10
    assert not any(r.writes for r in hub.log[before:])
    assert hub.refs(REPO) == refs


def test_what_is_no_longer_wanted_goes_and_what_others_added_stays(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    shards = {"model-1.safetensors": b"1", "model-2.safetensors": b"2", "old.json": b"{}"}
    target(hub).publish(publication(tmp_path / "a", 50, files=shards))
    hub.add(REPO, {"notes/mine.txt": b"by hand"})
    target(hub).publish(publication(tmp_path / "b", 100))
    assert set(hub.contents(REPO)) == {*ALL, ".gitattributes", "notes/mine.txt"}
    assert set(hub.contents(REPO, "step-50")) == {
        *(".gitattributes", "README.md", "refiner.json", *shards)
    }


def test_a_step_that_comes_late_gets_its_tag_and_main_stays(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    for step in (50, 100, 75):
        published = target(hub).publish(publication(tmp_path, step, final=step == 100))
        assert hub.refs(REPO)[f"tags/step-{step}"] == published.commit
    refs = hub.refs(REPO)
    assert refs["heads/main"] == refs["tags/step-100"]
    assert set(refs) == {"heads/main", *(f"tags/step-{s}" for s in (50, 75, 100))}
    for step in (50, 75, 100):
        assert weights(hub, f"step-{step}") == b"weights of step %d" % step


def test_a_card_update_moves_the_tag_and_main_only_where_main_is_that_step(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    for step in (50, 100):
        target(hub).publish(publication(tmp_path, step))
    before = len(hub.log)
    for step in (100, 50):
        numbers = publication(tmp_path, step, says=f"F1 of {step}", only_card=True)
        published = target(hub).publish(numbers)
        assert published.changed == ("README.md", "refiner.json")
        assert [f.path for f in published.files] == ALL
        assert hub.refs(REPO)[f"tags/step-{step}"] == published.commit
        assert weights(hub, f"step-{step}") == b"weights of step %d" % step
        assert target(hub).read_text(REPO, f"step-{step}", "README.md") == card(f"F1 of {step}")
    assert target(hub).read_text(REPO, "main", "README.md") == card("F1 of 100")
    assert hub.large_bytes(before) == 0
    assert set(hub.refs(REPO)) == {"heads/main", "tags/step-50", "tags/step-100"}


def test_main_is_the_best_also_where_an_earlier_step_turns_out_to_be_it(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    best = target(hub, which="best")
    best.publish(publication(tmp_path, 100, final=True))
    published = best.publish(publication(tmp_path, 50))
    refs = hub.refs(REPO)
    assert refs["heads/main"] == refs["tags/step-50"] == published.commit != refs["tags/step-100"]


def test_each_step_can_have_a_branch_and_the_last_is_main_too(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    branches = target(hub, per_step="branch")
    for step in (50, 100, 75):
        branches.publish(publication(tmp_path, step))
        branches.publish(publication(tmp_path, step, says=f"{step}!", only_card=True))
    assert set(hub.refs(REPO)) == {"heads/main", *(f"heads/step-{s}" for s in (50, 75, 100))}
    for revision, step in (("main", 100), ("step-50", 50), ("step-75", 75), ("step-100", 100)):
        assert weights(hub, revision) == b"weights of step %d" % step
        assert branches.read_text(REPO, revision, "README.md") == card(f"{step}!")


def test_a_large_file_goes_in_parts_and_several_at_the_same_time(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    hub.api.multipart = 64
    files = {f"model-{n}.safetensors": bytes([n]) * (60 + 40 * n) for n in range(5)}
    target(hub).publish(publication(tmp_path, 50, files=files))
    held = hub.contents(REPO)
    assert {name: held[name] for name in files} == files
    assert len([r for r in hub.log if "/part/" in r.path]) == 2 + 3 + 3 + 4


def test_a_stop_is_noticed_in_the_middle_and_what_was_sent_is_not_sent_again(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    hub.api.multipart = 64
    wanted = publication(
        tmp_path, 50, files={"model.safetensors": b"w" * 200, "b.safetensors": b"b"}
    )
    sent: list[Progress] = []

    def stop() -> bool:
        return any("/part/" in r.path for r in hub.log)

    with pytest.raises(Interrupted, match="not sent again"):
        target(hub).publish(wanted, sent.append, stop)
    assert set(hub.refs(REPO)) == {"heads/main"}, "nothing counts before all of it is there"
    assert set(hub.contents(REPO)) == {".gitattributes"}
    target(hub).publish(wanted)
    assert weights(hub, "step-50") == b"w" * 200


def test_nothing_is_hashed_again(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashed(*_: object) -> bytes:
        raise AssertionError("the client hashes a file whose hash is known")

    monkeypatch.setattr("huggingface_hub.lfs.sha_fileobj", hashed)
    target(hub).publish(publication(tmp_path, 50))


# ---------------------------------------------------------------- names and visibility


def test_a_name_that_is_taken_is_refused(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.create(REPO)
    hub.add(REPO, {"thesis.tex": b"years of work"})
    with pytest.raises(ConfigurationError, match=r"is taken: it holds thesis\.tex.*repo_id"):
        target(hub).publish(publication(tmp_path, 50))
    hub.add(REPO, {"refiner.json": b'{"kind": "another tool"}'})
    with pytest.raises(ConfigurationError, match=r"is taken: it holds a refiner\.json that is not"):
        target(hub).publish(publication(tmp_path, 50))
    assert not any(r.writes for r in hub.log)


def test_steps_of_two_runs_do_not_share_a_repository(hub: LoopbackHub, tmp_path: Path) -> None:
    target(hub).publish(publication(tmp_path, 50))
    with pytest.raises(ConfigurationError, match=r"another run .*\{fingerprint\}"):
        target(hub).publish(publication(tmp_path, 100, run=OTHER_RUN))
    assert weights(hub, "main") == b"weights of step 50"


def test_a_card_is_not_put_beside_weights_that_it_is_not_about(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    late = publication(tmp_path / "a", 50, only_card=True)
    hub.create(REPO)
    for per_step in ("tag", "branch"):
        with pytest.raises(ConfigurationError, match="its card is not updated"):
            target(hub, per_step=per_step).publish(late)
    assert set(hub.refs(REPO)) == {"heads/main"}, "no branch is left behind"
    other = {"model.safetensors": b"other weights", "config.json": b"{}"}
    target(hub).publish(publication(tmp_path / "b", 50, files=other))
    with pytest.raises(ConfigurationError, match="its card is not updated"):
        target(hub).publish(late)


def test_the_same_card_beside_other_weights_is_not_taken_for_an_update(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    """Somebody has moved the tag to another step: that nothing differs in the card says nothing."""
    published = target(hub).publish(publication(tmp_path, 100))
    hub.git(REPO).set_ref("tags/step-50", str(published.commit))
    card_alone = publication(tmp_path, 50, only_card=True)
    card_alone = replace(card_alone, files=card_alone.files[:1])
    assert card_alone.files[0].name == "README.md"
    with pytest.raises(ConfigurationError, match="its card is not updated"):
        target(hub).publish(card_alone)


def test_weights_that_are_to_be_private_do_not_go_where_everybody_sees_them(
    hub: LoopbackHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.create(REPO, private=False)
    with pytest.raises(HubRefused, match=r"is public on the Hub, and publish\.private=true"):
        target(hub).publish(publication(tmp_path, 50))
    assert not any(r.writes for r in hub.log)
    target(hub, private=False).publish(publication(tmp_path, 50))
    assert "stays private" not in caplog.text
    hub.api.repos[REPO].private = True
    target(hub, private=False).publish(publication(tmp_path, 50))
    assert "stays private" in caplog.text


def test_two_in_one_process_take_turns(hub: LoopbackHub, tmp_path: Path) -> None:
    """The client has one session; the second one waits for the first one's end."""
    other: list[Published] = []

    def publish_too(_: Any) -> None:
        import threading

        second = publication(tmp_path, 100)
        thread = threading.Thread(target=lambda: other.append(target(hub).publish(second)))
        thread.start()
        threads.append(thread)

    threads: list[Any] = []
    hub.faults = [Fault("call", where=lambda r: "/commit/" in r.path, does=publish_too)]
    target(hub).publish(publication(tmp_path, 50))
    threads[0].join(30)
    assert other[0].commit == hub.refs(REPO)["heads/main"] == hub.refs(REPO)["tags/step-100"]


def test_a_transfer_that_checks_no_hashes_is_checked_by_what_it_has_read(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of the Xet transfer, whose storage believes the hashes that it is told; large files
    take the LFS way here, one after the other, hashed as they are read."""
    monkeypatch.setattr("infra.hub.client.is_xet_available", lambda: True)
    told: list[Progress] = []
    files = {f"model-{n}.safetensors": b"%d" % n * 100 for n in range(3)}
    wanted = publication(tmp_path, 50, files=files)
    published = target(hub).publish(wanted, told.append)
    assert [f.sha256 for f in published.files if "model" in f.path] == [
        f.sha256 for f in wanted.files if "model" in f.name
    ]
    assert max(p.done for p in told) == 3
    replaced = publication(tmp_path, 100, files=files | {"model-2.safetensors": b"new" * 33})
    source = replaced.files[2].source
    assert source is not None
    source.write_bytes(b"old" * 33)
    with pytest.raises(StageFailed, match=r"model-2\.safetensors has other content"):
        target(hub).publish(replaced)
    assert "tags/step-100" not in hub.refs(REPO)

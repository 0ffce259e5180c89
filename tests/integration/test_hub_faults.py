"""Publishing to a Hub that fails: interruptions at each request, refusals, races, corruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from infra.hub import client
from infra.hub import errors as patience
from infra.hub.target import HubTarget, check_hub
from infra.publishing import Publication
from refiner_core.contract.config import PublishConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, HubOutage, HubRefused, RefinerError
from tests.support.git_hub import EXPIRED, READ_ONLY, STRANGER, Fault, LoopbackHub, Request
from tests.support.publications import REPO, publication

ROOT = Path(__file__).resolve().parents[2]
PUBLISHER = """
import sys
from pathlib import Path
from infra.hub.target import HubTarget
from refiner_core.contract.config import PublishConfig
from tests.support.publications import publication
config = PublishConfig(target="hub", which="every-save", patience_s=20.0)
HubTarget(config).publish(publication(Path(sys.argv[1]), int(sys.argv[2])))
"""


@pytest.fixture
def hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """Small weights count as large files; the first retry comes at once."""
    monkeypatch.setattr(patience, "FIRST_S", 0.01)
    monkeypatch.setattr(client, "READ_BYTES", 8)
    return hub


def target(hub: LoopbackHub, **settings: Any) -> HubTarget:
    settings = {"which": "every-save", "patience_s": 10.0, **settings}
    return HubTarget(PublishConfig(target="hub", **settings), hub.url)


def writes_to(*parts: str) -> Callable[[Request], bool]:
    """Requests that may change something at such an address."""
    return lambda r: r.writes and any(part in r.path for part in parts)


def publisher(hub: LoopbackHub, folder: Path, step: int) -> subprocess.Popen[str]:
    """A process of its own that publishes a step."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token}
    return subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, str(folder), str(step)],
        env={**env, "HF_HOME": str(folder / "hf")},
        stderr=subprocess.PIPE,
        text=True,
    )


# ---------------------------------------------------------------- interrupted anywhere

Story = Callable[[Path, str], list[Publication]]


def publications(*steps: int, **last: Any) -> Story:
    """Publications of these steps; with settings, the last step once more with those."""

    def made(at: Path, repo: str) -> list[Publication]:
        found = [publication(at, step, repo_id=repo) for step in steps]
        again = [publication(at / "new", steps[-1], repo_id=repo, **last)] if last else []
        return found + again

    return made


NUMBERS = {"says": "numbers", "only_card": True}
STORIES: dict[str, tuple[str, Story]] = {
    "the first step": ("tag", publications(50)),
    "a late step with a new tag": (
        "tag",
        publications(100, 50, files={"other.safetensors": b"other"}),
    ),
    "a branch of its own": ("branch", publications(50, 100)),
    "a card of a late step": ("tag", publications(100, 50, **NUMBERS)),
    "a card": ("tag", publications(50, **NUMBERS)),
}


def state(hub: LoopbackHub, repo_id: str) -> tuple[Any, ...]:
    """Names, all that they lead to, and the large files that lie there."""
    large = sorted(p.name for p in (hub.git(repo_id).folder / "lfs").iterdir())
    histories = {n: hub.git(repo_id).history(c) for n, c in hub.refs(repo_id).items()}
    return hub.refs(repo_id), histories, large


@pytest.mark.parametrize("story", STORIES)
def test_an_interruption_changes_no_result(hub: LoopbackHub, tmp_path: Path, story: str) -> None:
    per_step, told = STORIES[story]
    sure, hasty = target(hub, per_step=per_step), target(hub, per_step=per_step, patience_s=0.0)

    for each in told(tmp_path, "me/before")[:-1]:
        sure.publish(each)

    def begin(repo_id: str) -> Publication:
        if "me/before" in hub.repos:
            hub.copy("me/before", repo_id)
        return told(tmp_path, repo_id)[-1]

    last = begin("me/undisturbed")
    start = len(hub.log)
    undisturbed = sure.publish(last)
    count, wanted = len(hub.log) - start, state(hub, "me/undisturbed")
    assert count >= 8
    for kind in ("drop-before", "drop-after"):
        for index in range(count):
            last = begin(f"me/{kind}-{index}")
            start = len(hub.log)
            hub.faults = [Fault(kind, at=start + index)]
            with pytest.raises(HubOutage):
                hasty.publish(last)
            assert len(hub.log) == start + index + 1, "the client tries nothing behind our back"
            published = sure.publish(last)
            assert state(hub, last.repo_id) == wanted, f"{kind} at {hub.log[start + index]}"
            assert (published.commit, published.files) == (undisturbed.commit, undisturbed.files)


@pytest.mark.parametrize("kind", ["drop-before", "drop-after"])
def test_lost_connections_are_retried(hub: LoopbackHub, tmp_path: Path, kind: Any) -> None:
    """Every second request is lost; what went through unnoticed is not done twice."""
    hub.faults = [Fault(kind, where=lambda r: r.index % 2 == 0, times=1000)]
    published = target(hub).publish(publication(tmp_path, 50))
    assert hub.refs(REPO) == {"heads/main": published.commit, "tags/step-50": published.commit}
    assert len(hub.git(REPO).history("" + str(published.commit))) == 2, "one commit of ours"


def test_a_publisher_killed_while_it_sends_loses_nothing(hub: LoopbackHub, tmp_path: Path) -> None:
    dying = publisher(hub, tmp_path, 50)
    died = threading.Event()

    def kill(_: Request) -> None:
        os.kill(dying.pid, signal.SIGKILL)
        dying.wait(30)
        died.set()

    hub.faults = [Fault("call", where=lambda r: r.method == "PUT", does=kill)]
    assert died.wait(400), dying.communicate()
    assert set(hub.contents(REPO)) == {".gitattributes"}, "nothing counts before all of it is there"
    published = target(hub).publish(publication(tmp_path, 50))
    assert hub.refs(REPO) == {"heads/main": published.commit, "tags/step-50": published.commit}
    assert hub.contents(REPO)["model.safetensors"] == b"weights of step 50"


# ---------------------------------------------------------------- two at once


@pytest.mark.parametrize(("first", "second"), [(50, 100), (100, 50), (50, 50)])
def test_two_publishers_may_race(hub: LoopbackHub, tmp_path: Path, first: int, second: int) -> None:
    """The second one does all of its work right before the first one's commit arrives."""
    target(hub).publish(publication(tmp_path, 25))

    def in_between(_: Request) -> None:
        done = publisher(hub, tmp_path, second)
        _, said = done.communicate(timeout=400)
        assert done.returncode == 0, said

    hub.faults = [Fault("call", where=writes_to("/commit/"), does=in_between)]
    published = target(hub).publish(publication(tmp_path, first))
    refs = hub.refs(REPO)
    assert refs[f"tags/step-{first}"] == published.commit
    assert refs["heads/main"] == refs[f"tags/step-{max(first, second)}"]
    assert set(refs) == {"heads/main", *(f"tags/step-{s}" for s in {25, first, second})}
    for step in (first, second):
        files = hub.contents(REPO, f"step-{step}")
        assert files["model.safetensors"] == b"weights of step %d" % step
    assert [r.status for r in hub.log if "/commit/" in r.path].count(412) == 1


def test_lost_races_end(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target(hub).publish(publication(tmp_path, 50))
    number = iter(range(1000))
    fault = Fault(
        "call",
        where=writes_to("/commit/"),
        times=1000,
        does=lambda _: hub.add(REPO, {"notes.txt": b"%d" % next(number)}),
    )
    hub.faults = [fault]
    before, waits = len(hub.log), list[int]()
    monkeypatch.setattr(patience.TimeBudget, "wait", lambda _, nth, *__: not waits.append(nth))
    with pytest.raises(HubOutage, match="others keep on changing it"):
        target(hub, patience_s=0.2).publish(publication(tmp_path, 100))
    assert [r.status for r in hub.log[before:] if "/commit/" in r.path] == [412] * 8
    assert waits == [1, 2, 3, 4, 5, 6, 7, 8], "ever longer, so that others come to their end"


# ---------------------------------------------------------------- limits, outages, transfers


def test_short_outages_and_rate_limits_are_waited_for(hub: LoopbackHub, tmp_path: Path) -> None:
    slow_down = {"status": 429, "headers": {"Retry-After": "0"}}
    parts = ("/preupload/", "/put/", "/commit/", "/tag/")
    hub.faults = [Fault("answer", where=writes_to(part), **slow_down) for part in parts]
    hub.faults += [Fault("answer", where=writes_to("/put/"), times=4, status=502)]
    target(hub).publish(publication(tmp_path, 50))
    assert [r.status for r in hub.log].count(429) == 4
    assert "tags/step-50" in hub.refs(REPO)
    hub.faults = [Fault("answer", times=1000, status=503, says="down for maintenance")]
    with pytest.raises(HubOutage, match="503: down for maintenance"):
        target(hub, patience_s=0.3).publish(publication(tmp_path, 100))
    for headers in ({"Retry-After": "2700"}, {"Ratelimit": '"api";r=0;t=2700'}):
        hub.faults = [Fault("answer", where=writes_to("/put/"), status=429, headers=headers)]
        with pytest.raises(HubOutage, match="2700 s"):
            target(hub).publish(publication(tmp_path, 100))


def test_a_hub_that_does_not_answer_is_given_up_on(hub: LoopbackHub, tmp_path: Path) -> None:
    held = threading.Event()
    hub.faults = [Fault("call", times=1000, does=lambda _: held.wait(20))]
    try:
        with pytest.raises(HubOutage, match="ReadTimeout"):
            target(hub, patience_s=0.2, request_timeout_s=0.1).publish(publication(tmp_path, 50))
    finally:
        held.set()


def test_a_transfer_that_corrupts_is_repeated(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.faults = [Fault("corrupt", where=lambda r: r.method == "PUT")]
    target(hub).publish(publication(tmp_path, 50))
    assert hub.contents(REPO, "step-50")["model.safetensors"] == b"weights of step 50"
    hub.faults = [Fault("corrupt", where=lambda r: r.method == "PUT", times=1000)]
    before = len(hub.log)
    with pytest.raises(HubOutage, match="refused the files, 3 times: sha256"):
        target(hub).publish(publication(tmp_path, 100))
    assert len([r for r in hub.log[before:] if r.method == "PUT"]) == 3
    with pytest.raises(HubOutage, match="while sending files"):
        target(hub, patience_s=0.0).publish(publication(tmp_path, 100))
    assert len([r for r in hub.log[before:] if r.method == "PUT"]) == 4, "it waits between, or ends"
    assert "tags/step-100" not in hub.refs(REPO)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (EXPIRED, r"401: User Access Token is expired.*`hf auth login`"),
        ("hf_NobodyKnowsThisOne", r"401: Invalid username or password.*HF_TOKEN"),
        ("", r"`hf auth login`"),
        (STRANGER, r"403: You don't have the rights.*may write to me"),
        (READ_ONLY, r"403: You don't have the rights.*may write to me"),
    ],
)
def test_wrong_tokens_are_refused(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, says: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(HubRefused, match=says):
        target(hub).publish(publication(tmp_path, 50))
    config = RecipeConfig(publish=PublishConfig(target="hub", repo_id=REPO))
    with pytest.raises(HubRefused, match="token"):
        check_hub(config)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert check_hub(config) == []
    target(hub).publish(publication(tmp_path, 50))


def test_a_refused_upload_is_resumed(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.quota = 10
    with pytest.raises(HubRefused, match="has no space for me/model"):
        target(hub).publish(publication(tmp_path, 50))
    hub.quota = None
    hub.faults = [Fault("answer", where=writes_to("/commit/"), status=401, says="token expired")]
    with pytest.raises(HubRefused, match="401: token expired"):
        target(hub).publish(publication(tmp_path, 50))
    before = len(hub.log)
    target(hub).publish(publication(tmp_path, 50))
    assert hub.large_bytes(before) == 0, "weights are not sent again"


def test_no_error_holds_a_token(hub: LoopbackHub, tmp_path: Path) -> None:
    """Canary: a Hub (or a proxy before it) that repeats what it was sent."""
    echo = f"bad request with Bearer {hub.token} to https://x.example/?X-Amz-Signature=5ecre7"
    for status in (400, 401, 409, 500):
        for part in ("create", "/preupload/", "batch", "/put/", "/commit/", "/tag/"):
            hub.faults = [
                Fault("answer", where=writes_to(part), status=status, says=echo, times=1000)
            ]
            repo_id = f"me/m{status}{part.strip('/')}"
            with pytest.raises(RefinerError) as caught:
                target(hub, patience_s=0.0).publish(publication(tmp_path, 50, repo_id=repo_id))
            told = "".join(traceback.format_exception(caught.value))
            assert hub.token not in told, told
            assert "5ecre7" not in told, told


# ---------------------------------------------------------------- before a run


def test_check_before_run(hub: LoopbackHub) -> None:
    def check(repo_id: str, private: bool = True) -> list[str]:
        publish = PublishConfig(target="hub", repo_id=repo_id, private=private)
        return check_hub(RecipeConfig(publish=publish))

    assert check("me/new") == check("lab/new-{fingerprint}-{step}") == []
    assert len(hub.log) == 3, "two requests, one where the name is not known yet"
    with pytest.raises(HubRefused, match=r"may write to lab, me alone"):
        check("else/model")
    for bad in ("model", "me/a/b", "me/mo del", "me/" + "x" * 97):
        with pytest.raises(ConfigurationError, match="not a valid repository name"):
            check(bad)
    hub.create("me/taken")
    hub.add("me/taken", {"thesis.tex": b"years of work"})
    with pytest.raises(ConfigurationError, match="is taken"):
        check("me/taken")
    hub.create("me/public", private=False)
    with pytest.raises(HubRefused, match="is public"):
        check("me/public")
    hub.create("me/private")
    assert "stays private" in check("me/private", private=False)[0]


def test_an_unreachable_hub_is_a_warning(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.hub.target._PATIENCE_S", 0.1)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    publish = PublishConfig(target="hub", repo_id="me/model")
    warnings = check_hub(RecipeConfig(publish=publish))
    assert "is not known" in warnings[0]
    monkeypatch.setenv("HF_ENDPOINT", "127.0.0.1:9")
    with pytest.raises(ConfigurationError, match="HF_ENDPOINT"):
        check_hub(RecipeConfig(publish=publish))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubRefused, match="HF_HUB_OFFLINE"):
        check_hub(RecipeConfig(publish=publish))

"""Errors of the Hub: waits, classes, masked credentials; files that are sent to it."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import errors as theirs

from infra.host.secrets import masked
from infra.hub import client
from infra.hub.client import operations
from infra.hub.errors import (
    RevisionConflict,
    TimeBudget,
    in_our_words,
    refused,
    rejection,
    translated,
)
from infra.publishing import FileToPublish
from refiner_core.contract.errors import ConfigurationError, HubOutage, HubRefused, Interrupted
from refiner_core.contract.types import Progress


class Time:
    """A clock that moves by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def patience(
        self, limit_s: float, should_stop: Callable[[], bool] = lambda: False
    ) -> TimeBudget:
        return TimeBudget(
            limit_s, should_stop, clock=lambda: self.now, sleep=self.sleep, draw=lambda: 0.5
        )


def test_waits_grow_up_to_a_limit_and_end_with_patience() -> None:
    time = Time()
    patience = time.patience(300)
    waits = []
    for failures in range(1, 100):
        before = time.now
        if not patience.wait(failures, None, before):
            break
        waits.append(round(time.now - before, 6))
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 8]
    assert patience.borne_s == time.now == 271.75


def test_the_wait_that_the_hub_asks_for_is_kept_unless_it_exceeds_patience() -> None:
    time = Time()
    patience = time.patience(100)
    assert patience.wait(1, 60.0, time.now)
    assert time.now == pytest.approx(60)
    assert not patience.wait(1, 60.0, time.now), "60 of 100 s are gone"
    assert time.now == pytest.approx(60), "what is too long is not begun"


def test_hanging_requests_use_patience_and_threads_that_wait_together_use_it_once() -> None:
    time = Time()
    hanging, patience = time.patience(100), time.patience(100)
    time.now = 90.0
    assert not hanging.wait(1, 20.0, since=0.0)
    for asked, borne in ((60.0, 60), (70.0, 70), (65.0, 70), (100.0, 100)):
        time.now = 0.0  # another thread that began to wait at the same moment
        assert patience.wait(1, asked, 0.0)
        assert patience.borne_s == pytest.approx(borne)


def test_a_stop_ends_a_wait() -> None:
    time = Time()
    patience = time.patience(1000, lambda: time.now > 5)
    with pytest.raises(Interrupted, match="not sent again"):
        patience.wait(1, 600.0, 0.0)
    assert 5 < time.now < 5.5
    late = time.patience(1000, lambda: True)
    with pytest.raises(Interrupted):
        late.wait(1, 0.0, time.now)  # also where there is nothing to wait for


@pytest.mark.parametrize(
    ("status", "said", "kind", "says"),
    [
        (401, "Invalid credentials", HubRefused, "`hf auth login`"),
        (403, "you need write access", HubRefused, "a token that may write to lab"),
        (403, "Private repository storage limit reached", HubRefused, "has no space for lab/model"),
        (402, "", HubRefused, "has no space"),
        (413, "too large", HubRefused, "has no space"),
        (507, "", HubRefused, "has no space"),
        (404, "Repository not found", HubRefused, "private ones look missing"),
        (409, "already exists", HubRefused, "409: already exists"),
        (422, "bad", HubRefused, "422: bad"),
        (499, "client closed", HubRefused, "499: client closed"),
        (400, "bad", HubRefused, "400: bad"),
        (408, "slow", HubOutage, "408: slow"),
        (425, "early", HubOutage, "425: early"),
        (429, "too many", HubOutage, "429: too many"),
        (500, "broken", HubOutage, "(500: broken)"),
        (501, "not implemented", HubOutage, "501: not"),
    ],
)
def test_each_answer_has_a_class(status: int, said: str, kind: type[Exception], says: str) -> None:
    error = refused(status, said, "sending files", "lab/model")
    assert type(error) is kind
    assert says in str(error)
    assert error.resumable, "the same command continues after the fix"


def answer(status: int, method: str = "GET", path: str = "/api/models/lab/model") -> Exception:
    """What the client raises of such an answer."""
    request = httpx2.Request(method, f"https://hub.example{path}")
    response = httpx2.Response(status, request=request)
    return theirs.HfHubHTTPError("the client's", response=response, server_message="the Hub's")


class XetError(Exception):
    """An error of the Xet transfer, which exports no class for it."""

    __module__ = "hf_xet.upload"


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (answer(403), HubRefused, "refused sending files (403: the Hub's)"),
        (answer(503), HubOutage, "(503: the Hub's)"),
        (theirs.LocalTokenNotFoundError("?"), HubRefused, "There is no token for the Hub"),
        (theirs.OfflineModeIsEnabled("?"), HubRefused, "HF_HUB_OFFLINE is set"),
        (theirs.HFValidationError("two dots"), ConfigurationError, "not a valid repository name"),
        (httpx2.UnsupportedProtocol("ftp"), ConfigurationError, "HF_ENDPOINT"),
        (httpx2.LocalProtocolError("header"), ConfigurationError, "HF_ENDPOINT"),
        (httpx2.InvalidURL("no host"), ConfigurationError, "HF_ENDPOINT"),
        (httpx2.ReadTimeout("too slow"), HubOutage, "(ReadTimeout: too slow)"),
        (httpx2.ConnectError(""), HubOutage, "(ConnectError)"),
        (XetError("cut"), HubOutage, "the Xet transfer failed: cut"),
        (
            ValueError("LFS batch API returned errors: storage limit"),
            HubRefused,
            "no space for lab/model (413",
        ),
        (ValueError("LFS batch API returned errors: bad size"), HubRefused, "(400: LFS batch"),
        (ValueError("Invalid metadata in README.md: ?"), HubRefused, "Invalid metadata"),
    ],
)
def test_client_errors_are_translated(error: Exception, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind) as caught, in_our_words("sending files", "lab/model"):
        raise error
    assert type(caught.value) is kind
    assert says in str(caught.value)


def following(error: Exception) -> Exception:
    """Another error that was caused by it."""
    found = RuntimeError("upload failed")
    found.__cause__ = error
    return found


@pytest.mark.parametrize("cause", [answer(503), httpx2.ReadTimeout("slow"), XetError("cut")])
def test_the_cause_of_an_error_decides(cause: Exception) -> None:
    assert isinstance(translated(following(cause), "sending files", "lab/model"), HubOutage)


def test_other_errors_pass_through() -> None:
    first, second = KeyError("a bug"), ValueError("another")
    first.__context__, second.__context__ = second, first  # a chain that bites its own tail
    for error in (first, OSError(28, "No space left on device"), KeyError("LFS batch API ret")):
        assert translated(error, "sending files", "lab/model") is None
        assert rejection(error) is None
        with pytest.raises(type(error)), in_our_words("sending files", "lab/model"):
            raise error
    with pytest.raises(RevisionConflict), in_our_words("sending files", "lab/model"):
        raise RevisionConflict("main has moved on") from answer(503)
    ours = HubOutage("what", expected="this", fix="that")
    assert translated(ours, "sending files", "lab/model") is ours


@pytest.mark.parametrize(
    ("method", "path", "statuses"),
    [
        ("PUT", "/put/1f2e", {400, 403, 404, 409, 422}),
        ("POST", "/lab/model.git/info/lfs/objects/verify", {400, 404, 409, 422}),
        ("POST", "/lab/model.git/info/lfs/objects/batch", set()),
        ("POST", "/api/models/lab/model/commit/main", set()),
    ],
)
def test_only_storage_refusals_are_retried(method: str, path: str, statuses: set[int]) -> None:
    for status in (*range(400, 424), 429, 500, 503):
        said = rejection(following(answer(status, method, path)))
        assert said == ("the Hub's" if status in statuses else None)


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer S3CRETS3CRET",
        "token hf_S3CRETS3CRET is expired",
        "https://me:S3CRETS3CRET@hub.example/api",
        "PUT https://s3.example/x?X-Amz-Signature=S3CRETS3CRET&X-Amz-Date=1",
        "GET https://cdn.example/x?Expires=1&Signature=S3CRETS3CRET",
        "no known form: own-S3CRETS3CRET",
    ],
)
def test_no_credential_gets_into_a_message(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "own-S3CRETS3CRET")
    assert "S3CRET" not in masked(text)
    assert "S3CRET" not in str(refused(400, text, "sending files", "me/model"))


# ---------------------------------------------------------------- files that are sent


def stored(folder: Path, data: bytes, name: str = "model.safetensors") -> FileToPublish:
    (folder / name).write_bytes(data)
    return FileToPublish(name, len(data), hashlib.sha256(data).hexdigest(), folder / name)


def never() -> bool:
    return False


def test_only_sent_bytes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "READ_BYTES", 8)
    monkeypatch.setattr(client, "_TELL_BYTES", 10)
    told: list[Progress] = []
    files = [stored(tmp_path, b"w" * 25), FileToPublish.of_text("README.md", "card")]
    large, small = operations(files, [], told.append, never, trusted=True)
    with large.as_file() as plain:
        assert plain.read() == b"w" * 25
    assert not told, "it was hashed, say, and not sent"
    with large.as_file(with_tqdm=True) as file:
        assert (file.read(10), file.read(5), file.read()) == (b"w" * 10, b"w" * 5, b"w" * 10)
    with small.as_file(with_tqdm=True) as file:
        assert file.read() == b"card"
    assert [(p.done, p.values["sent_bytes"]) for p in told] == [(0, 10), (0, 25), (1, 25), (2, 25)]


def test_a_hash_that_only_we_check_is_computed_as_the_file_is_read(tmp_path: Path) -> None:
    """The Hub checks large files itself, unless the transfer is Xet; small ones are checked here,
    up to 10 MiB."""
    limit = 10 << 20
    files = [stored(tmp_path, bytes(limit), "small"), stored(tmp_path, bytes(limit + 1), "large")]

    def known(**how: Any) -> list[tuple[bool, bool]]:
        made = operations(files, ["old"], lambda _: None, never, **how)
        assert [o.path_in_repo for o in made] == ["small", "large", "old"]
        return [(o.is_large, o.upload_info.is_hashed) for o in made[:2]]

    assert known(trusted=True) == [(False, True), (True, True)]
    assert known(trusted=False) == [(False, True), (True, False)]

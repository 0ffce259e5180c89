"""The Hub's trouble in our words: what is waited for and how long, what is told, what is masked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from infra.host.secrets import masked
from infra.hub.errors import refused
from infra.hub.patience import FIRST_S, LONGEST_S, Patience
from refiner_core.contract.errors import HubOutage, HubRefused, Interrupted


class Time:
    """A clock that moves by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def patience(self, limit_s: float, should_stop: Callable[[], bool] = lambda: False) -> Patience:
        return Patience(
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
    assert waits[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert max(waits) == LONGEST_S
    assert 300 - LONGEST_S < time.now <= 300


def test_what_the_hub_asks_for_is_waited_for_unless_it_is_longer_than_patience() -> None:
    time = Time()
    patience = time.patience(100)
    assert patience.wait(1, 60.0, time.now)
    assert time.now == pytest.approx(60)
    assert not patience.wait(1, 60.0, time.now), "60 of 100 s are gone"
    assert time.now == pytest.approx(60), "what is too long is not begun"


def test_a_request_that_hangs_until_its_deadline_uses_patience_up_too() -> None:
    time = Time()
    patience = time.patience(100)
    time.now = 90.0
    assert not patience.wait(1, 20.0, since=0.0)


def test_threads_that_wait_at_the_same_time_use_patience_up_once() -> None:
    time = Time()
    patience = time.patience(100)
    assert patience.wait(1, 60.0, 0.0)
    time.now = 0.0  # another thread, which has begun to wait at the same moment
    assert patience.wait(1, 70.0, 0.0)
    assert patience.borne_s == pytest.approx(70)


def test_a_stop_ends_a_wait() -> None:
    time = Time()
    patience = time.patience(1000, lambda: time.now > 5)
    with pytest.raises(Interrupted, match="not sent again"):
        patience.wait(1, 600.0, 0.0)
    assert time.now < 6


@pytest.mark.parametrize(
    ("status", "said", "kind", "says"),
    [
        (401, "Invalid credentials", HubRefused, "`hf auth login`"),
        (403, "you need write access", HubRefused, "a token that may write to lab"),
        (403, "Private repository storage limit reached", HubRefused, "has no room for lab/model"),
        (402, "", HubRefused, "has no room"),
        (413, "too large", HubRefused, "has no room"),
        (507, "Insufficient Storage", HubRefused, "has no room"),
        (404, "Repository not found", HubRefused, "private ones look as if they were not there"),
        (409, "already exists", HubRefused, "409: already exists"),
        (422, "bad", HubRefused, "422: bad"),
        (501, "not implemented", HubOutage, "goes on with what is not there yet"),
    ],
)
def test_each_answer_says_what_mends_it(
    status: int, said: str, kind: type[Exception], says: str
) -> None:
    error = refused(status, said, "sending files", "lab/model")
    assert type(error) is kind
    assert says in str(error)
    assert error.resumable, "the same command goes on once it is mended"


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

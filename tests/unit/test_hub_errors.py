"""Errors of the Hub: their classes, and no credential in a message."""

from __future__ import annotations

import httpx2
import pytest
from huggingface_hub import errors as theirs

from infra.host.secrets import masked
from infra.hub.errors import (
    RevisionConflict,
    in_our_words,
    refused,
    rejection,
    translated,
)
from refiner_core.contract.errors import ConfigurationError, HubOutage, HubRefused


@pytest.mark.parametrize(
    ("status", "said", "kind", "says"),
    [
        (401, "Invalid credentials", HubRefused, "`hf auth login`"),
        (403, "you need write access", HubRefused, "a token that may write to lab"),
        (403, "Private repository storage limit reached", HubRefused, "has no space for lab/model"),
        (507, "", HubRefused, "has no space"),
        (404, "Repository not found", HubRefused, "private ones look missing"),
        (422, "bad", HubRefused, "422: bad"),
        (408, "slow", HubOutage, "408: slow"),
        (429, "too many", HubOutage, "429: too many"),
        (500, "broken", HubOutage, "(500: broken)"),
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
        (httpx2.ReadTimeout("too slow"), HubOutage, "(ReadTimeout: too slow)"),
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

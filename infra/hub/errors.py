"""Errors of the Hub, translated into refiner's, and the patience with outages.

In: an exception of huggingface_hub, httpx or the Xet transfer. Out: :class:`HubRefused` if a
person has to act, :class:`HubOutage` if time may fix it, each with what happened, what was expected
and the Hub's own message. No message contains a credential: tokens, signed addresses and passwords
in addresses are masked, wherever they come from.

:class:`TimeBudget` limits all waits of a publication together; simultaneous waits of several
threads count once, so that an attempt ends within a known time.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from infra.host.secrets import masked
from infra.publishing import stopped
from infra.store.atomic import chain_of
from refiner_core.contract.errors import ConfigurationError, HubOutage, HubRefused, RefinerError

_WORDS = 300
_STORAGE = re.compile(
    r"(?i)storage\W.*(?:limit|quota|full|exceed)|(?:limit|quota|exceed\w*)\W.*storage"
    r"|payment required|insufficient storage"
)
_FULL = (402, 413, 507)

FIRST_S, LONGEST_S = 0.25, 30.0
#: Longest delay until a stop is noticed during a wait, seconds.
_SLICE_S = 0.2


class RevisionConflict(Exception):
    """The branch or tag was changed by another process: read and decide again."""


class UploadError(Exception):
    """The Hub's storage did not accept a file."""


@contextlib.contextmanager
def in_our_words(doing: str, repo_id: str) -> Iterator[None]:
    """Translate the client's exceptions in the block into refiner errors.

    The cause is dropped on purpose: its text may contain credentials. Exceptions that do not
    concern the Hub (a bug, a full disk) pass through.
    """
    try:
        yield
    except (RefinerError, RevisionConflict, UploadError):
        raise
    except Exception as error:
        found = translated(error, doing, repo_id)
        if found is None:
            raise
        raise found from None


def translated(error: BaseException, doing: str, repo_id: str) -> RefinerError | None:
    """The refiner error for one of the client's; None if it does not concern the Hub.

    Parameters
    ----------
    error
        The exception; the chain of its causes is searched, too.
    doing
        The operation, as after "while": ``creating the repository``.
    repo_id
        ``OWNER/NAME``.
    """
    import httpx2
    from huggingface_hub import errors as theirs

    chain = list(chain_of(error))
    ours = next((link for link in chain if isinstance(link, RefinerError)), None)
    if found := ours or _of_text(error, repo_id):
        return found
    for link in chain:
        if isinstance(link, theirs.HfHubHTTPError):
            said = str(link.server_message or link).strip()
            return refused(link.response.status_code, said, doing, repo_id)
        if isinstance(link, theirs.LocalTokenNotFoundError):
            return _no_token("There is no token for the Hub.")
        if isinstance(link, theirs.OfflineModeIsEnabled):
            return HubRefused(
                f"HF_HUB_OFFLINE is set, so the Hub cannot be asked for {repo_id}.",
                expected="permission to use the network for publishing",
                fix="unset it where the publish stage runs, or set publish.target=folder",
            )
        if isinstance(link, theirs.HFValidationError):
            return ConfigurationError(
                f"{repo_id} is not a valid repository name on the Hub: {_shown(str(link))}",
                expected="OWNER/NAME of letters, digits, `-`, `_` and `.`, 96 characters at most",
                fix="correct publish.repo_id",
            )
        if isinstance(
            link, httpx2.UnsupportedProtocol | httpx2.LocalProtocolError | httpx2.InvalidURL
        ):
            return ConfigurationError(
                f"A request for {doing} is not possible: {_shown(str(link))}.",
                expected="HF_ENDPOINT to be an http(s) address, and HF_TOKEN to be one word",
                fix="correct these variables where the publish stage runs",
            )
        if isinstance(link, httpx2.HTTPError):
            return outage(f"{type(link).__name__}: {link}".removesuffix(": "), doing, repo_id)
        if type(link).__module__.startswith("hf_xet"):
            return outage(f"the Xet transfer failed: {link}", doing, repo_id)
    return None


def refused(status: int, said: str, doing: str, repo_id: str) -> RefinerError:
    """The refiner error for a refusal by the Hub."""
    words = _shown(said)
    owner = repo_id.partition("/")[0]
    what = f"The Hub refused {doing} ({status}: {words})."
    if status in _FULL or _STORAGE.search(said):
        return HubRefused(
            f"The storage of {owner} on the Hub has no space for {repo_id} ({status}: {words}).",
            expected="space for all files of the checkpoint",
            fix="delete repositories or old revisions there, or get more storage; then run the "
            "same command again",
        )
    if status == 401:
        return _no_token(f"The Hub does not accept the token while {doing} ({status}: {words}).")
    if status == 403:
        return HubRefused(
            what,
            expected=f"a token that may write to {owner}",
            fix=f"use one with write access to {owner} (`hf auth login`, or HF_TOKEN), or name an "
            "owner of yours in publish.repo_id",
        )
    if status == 404:
        return HubRefused(
            f"The Hub shows no {repo_id} while {doing} ({status}: {words}).",
            expected="a repository that this token can see; private ones look missing "
            "to all others",
            fix="use a token of its owner (`hf auth login`, or HF_TOKEN), or another "
            "publish.repo_id",
        )
    if status >= 500 or status in (408, 425, 429):
        return outage(f"{status}: {words}", doing, repo_id)
    return HubRefused(
        what,
        expected="the Hub to accept the request",
        fix="correct what it names; the same command tries again",
    )


def outage(why: str, doing: str, repo_id: str) -> HubOutage:
    """The Hub did not answer properly until patience was over."""
    return HubOutage(
        f"The Hub could not be used for {repo_id} while {doing} ({_shown(why)}).",
        expected="an answer within publish.patience_s",
        fix="nothing is lost: the same command continues with the missing parts",
    )


def _of_text(error: BaseException, repo_id: str) -> RefinerError | None:
    """Errors of the client without a class of their own, recognised by text."""
    text = str(error)
    known = ("LFS batch API returned errors", "Invalid metadata in README.md")
    if isinstance(error, ValueError) and text.startswith(known):
        return refused(413 if _STORAGE.search(text) else 400, text, "sending files", repo_id)
    return None


def _no_token(what: str) -> HubRefused:
    return HubRefused(
        what,
        expected="a valid token with write access",
        fix="make one (Settings, Access Tokens) and log in with `hf auth login`, or set HF_TOKEN "
        "where the publish stage runs; then run the same command again",
    )


def _shown(text: str) -> str:
    line = " ".join(masked(text).split()).rstrip(".")
    return line if len(line) <= _WORDS else line[:_WORDS] + "…"


def rejection(error: BaseException) -> str | None:
    """The Hub's message if its storage refuses a file, or has lost it; None for other errors.

    A file arrived damaged, or an address was signed too long ago: at the next request, the Hub
    gives new addresses for missing files.
    """
    from huggingface_hub import errors as theirs

    for link in chain_of(error):
        if isinstance(link, theirs.HfHubHTTPError):
            request, status = link.response.request, link.response.status_code
            path = str(request.url.path)
            if request.method == "PUT":
                known = status in (400, 403, 404, 409, 422)
            else:
                known = "/lfs/objects/" in path and status in (400, 404, 409, 422)
            if known and not path.endswith("/batch"):
                return _shown(str(link.server_message or link))
    return None


@dataclass(eq=False)
class TimeBudget:
    """The rest of ``limit_s`` seconds.

    Attributes
    ----------
    borne_s
        Seconds of failure so far: waits, and requests that failed in the end.
    """

    limit_s: float
    should_stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        self.borne_s, self._until = 0.0, self.clock()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise :class:`Interrupted` if a stop was requested."""
        if self.should_stop():
            raise stopped()

    def wait(self, failures: int, asked_s: float | None, since: float) -> bool:
        """Wait after failure number ``failures`` in a row of a request begun at ``since``.

        ``asked_s`` is the Hub's request; without it waits grow from :data:`FIRST_S` by a factor of
        2 up to :data:`LONGEST_S`, each times a random factor from 0.5 to 1.5. False: the wait would
        exceed the rest, and was skipped.
        """
        backoff = min(FIRST_S * 2 ** min(failures - 1, 16), LONGEST_S) * (0.5 + self.draw())
        end = self.clock() + (backoff if asked_s is None else asked_s)
        with self._lock:
            added = max(0.0, end - max(since, self._until))
            if self.borne_s + added > self.limit_s:
                return False
            self.borne_s += added
            self._until = max(self._until, end)
        while (left := end - self.clock()) > 0:
            self.check()
            self.sleep(min(left, _SLICE_S))
        self.check()
        return True

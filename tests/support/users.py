"""Another user of this machine, who runs a function of a test: attacks, and shared workspaces.

The function runs in a forked child under a uid of its own, without this user's groups, so that it
needs no interpreter that the other user may read; what it imports is imported before. Only root can
change its uid: other users of the tests skip, or fail where ``REFINER_REQUIRE`` names ``users``.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.support.require import require

#: Nobody's numbers on common systems; no entry in the password file is needed.
STRANGER, COLLEAGUE = 54_321, 54_322
_LIMIT_S = 60.0


def needs_users() -> None:
    """Skip (or fail) where this process may not act as another user."""
    require("users", os.geteuid() == 0, "only root can act as another user")


class AsUserError(AssertionError):
    """The function ended with an error under the other uid; the message is its traceback."""


def run_as(
    uid: int,
    function: Callable[..., Any],
    *args: Any,
    groups: tuple[int, ...] = (),
    umask: int = 0o022,
    limit_s: float = _LIMIT_S,
) -> Any:
    """The result of ``function(*args)`` (a value of JSON) as user and group ``uid``.

    Raises
    ------
    AsUserError
        It raised, ended without a result, or took longer than ``limit_s``.
    """
    needs_users()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _act(writing, uid, groups, umask, function, args)
    os.close(writing)
    deadline = time.monotonic() + limit_s
    text = b""
    try:
        os.set_blocking(reading, False)
        while time.monotonic() < deadline:
            try:
                part = os.read(reading, 1 << 16)
            except BlockingIOError:
                time.sleep(0.01)
                continue
            if not part:
                break
            text += part
        else:
            raise AsUserError(f"{function} did not end within {limit_s:g} s")
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not text:
        raise AsUserError(f"{function} ended without a word")
    told = json.loads(text)
    if "error" in told:
        raise AsUserError(told["error"])
    return told["result"]


def _act(
    writing: int,
    uid: int,
    groups: tuple[int, ...],
    umask: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        try:
            os.setgroups([*groups])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(umask)
            told = {"result": function(*args)}
        except BaseException:
            told = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(told, pipe)
    finally:
        os._exit(0)

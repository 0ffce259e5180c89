"""Another user of this machine, who runs a function of a test: attacks, and shared workspaces.

The function runs in a forked child under a uid of its own, without this user's groups, so that it
needs no interpreter that the other user may read; what it imports is imported before. Only root can
change its uid: other users of the tests skip, or fail where ``REFINER_REQUIRE`` names ``users``.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

from tests.support.require import require

#: Nobody's numbers on common systems; no entry in the password file is needed.
STRANGER, COLLEAGUE = 54_321, 54_322


def needs_users() -> None:
    """Skip (or fail) where this process may not act as another user."""
    require("users", os.geteuid() == 0, "only root can act as another user")


def run_as(
    uid: int,
    function: Callable[..., Any],
    *args: Any,
    groups: tuple[int, ...] = (),
    umask: int = 0o022,
    limit_s: float = 60.0,
) -> Any:
    """The result of ``function(*args)`` (a value of JSON) as user and group ``uid``.

    Raises
    ------
    AssertionError
        It raised, ended without a result, or took longer than ``limit_s``.
    """
    needs_users()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        _act(writing, uid, groups, umask, function, args)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise AssertionError(f"{function} ended without a result")
    told = json.loads(text)
    if "error" in told:
        raise AssertionError(told["error"])
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

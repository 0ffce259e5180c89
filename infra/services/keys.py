"""The key of a server that refiner starts: who has it may ask.

In: a service's folder. Out: the key: that in ``REFINER_SERVER_KEY`` of the environment, with which
the users of a group share a server, or a random one, made once, in a file that only its owner can
read, and used by every server of that service from then on. The key of the user's own judge
(``judge.api_key_env``) is for the address that they name, and goes to no server of ours. A key is
in no record, log or command line.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from infra.services.command import KEY_VARIABLES
from infra.store import atomic
from refiner_core.contract.errors import ConfigurationError

#: Where users may set a key of their choice.
VARIABLE = KEY_VARIABLES["command"]
_NAME = "key"
#: How often the making of a key is tried, should somebody else's be half there.
_TRIES = 3


def service_key(folder: Path, given: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The key, and where it comes from: ``environment`` or ``file``.

    Raises
    ------
    ConfigurationError
        The file is another user's, or the variable's value can be no key.
    """
    if own := given.get(VARIABLE, "").strip():
        if not (own.isascii() and own.isprintable() and " " not in own):
            raise ConfigurationError(
                f"The key in {VARIABLE} has characters that no header may carry.",
                expected="printable ASCII without blanks",
                fix=f"export {VARIABLE}=…, or unset it for a key that refiner makes",
            )
        return own, "environment"
    path = folder / _NAME
    for _ in range(_TRIES):
        if key := _read(path):
            return key, "file"
        _make(path)
    raise ConfigurationError(
        f"{path} holds no key.",
        expected="the key that refiner has made",
        fix=f"delete {path}, and the next server gets a new one",
    )


def known_key(folder: Path, source: str) -> str:
    """The key of a server that runs, by where it says that its key comes from; nothing is made.

    Raises
    ------
    ConfigurationError
        It cannot be had here.
    """
    if source == "file":
        return _read(folder / _NAME)
    if source != "environment":
        return ""
    own = os.environ.get(VARIABLE, "").strip()
    if not own:
        raise ConfigurationError(
            f"The judge's server was started with the key in {VARIABLE}, which is not set here.",
            expected="the same key for who asks it",
            fix=f"export {VARIABLE}=…, or end the server with `refiner judge stop`",
        )
    return own


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
    except PermissionError as error:
        raise ConfigurationError(
            f"The key of the judge's server in {path} is another user's.",
            expected="to be who has started the server, or to share a key with them",
            fix=f"export {VARIABLE}=… with a key that is for this alone, the same for all who "
            "share the server, and end the one that runs",
        ) from error


def _make(path: Path) -> None:
    """Write a new key, unless there is one by then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = atomic.temporary_name(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return  # another was faster, and its key is the one
        except OSError as error:
            if error.errno not in atomic.LINKS_UNSUPPORTED:
                raise
            temporary.replace(path)  # one worker at a time starts a service
    finally:
        atomic.remove_quietly(temporary)

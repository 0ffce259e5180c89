"""Addresses and names in a recipe: of servers, of variables and files that hold secrets.

A recipe is recorded: no address in it may hold a password, and a key stands in the environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_place(name: str) -> bool:
    """Whether this names a variable or, from the root or home, a file: addresses are often secrets,
    and stand in no recipe."""
    return bool(VARIABLE.fullmatch(name)) or (name.startswith(("/", "~/")) and "://" not in name)


#: What is wrong, what was expected, and what mends it.
Refusal = tuple[str, str, str]


def of_server(section: str, variable: str, addresses: Iterable[str]) -> Iterator[Refusal]:
    """What is wrong with where a server is asked, and with the name of its key's variable."""
    if not VARIABLE.fullmatch(variable):
        yield (
            f"`{section}.api_key_env` is no name of an environment variable.",
            "a name such as OPENAI_API_KEY, never the key itself: fields are recorded",
            "put the key into the environment: export OPENAI_API_KEY=…",
        )
    if not all(map(is_web_address, addresses)):
        yield (
            f"`{section}.base_url` (or one of several) is no address of a server, or holds a user, "
            "a password or a query.",
            "http:// or https://, a host, and no secret, because addresses are recorded",
            f"set e.g. {section}.base_url=http://127.0.0.1:8000/v1, and put a key into the "
            f"environment variable that {section}.api_key_env names",
        )


def is_web_address(text: str) -> bool:
    """Say whether it names a server over HTTP, and holds no user, password or query."""
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port  # each raises for what it cannot be
    except ValueError:
        return False
    plain = not ("@" in parts.netloc or parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and bool(host) and plain

"""What a job's process logs, without credentials.

In: a level. Out: lines of ``log.txt``. Libraries log whole addresses (a signed one is a credential
for an hour) and, in detail, whole answers; people share logs. So every line, with its traceback, is
masked as it is written: values of this process's own secrets, and whatever looks like one.
"""

from __future__ import annotations

import logging
import os
import re

from infra.host.secrets import MASK, masked

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SECRET_NAME = re.compile(
    r"(?i)(?:\w*_)?(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)"
)
_SHORTEST = 8  # of a value that is taken for a secret; shorter ones are words of ordinary lines
#: Bytes on the wire and each request are of use to nobody who reads what a stage did.
_WIRES = ("httpcore2", "httpx2", "httpcore", "httpx", "urllib3", "filelock")


def set_up_logging(level: str) -> None:
    """Let this process log to standard error, masked. ``level``: ``debug``, ``info`` …"""
    handler = logging.StreamHandler()
    handler.setFormatter(MaskingFormatter(_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in _WIRES:
        logging.getLogger(name).setLevel(logging.WARNING)


class MaskingFormatter(logging.Formatter):
    """Formats as usual, and masks what must not be read."""

    def format(self, record: logging.LogRecord) -> str:
        """The line with its traceback."""
        text = super().format(record)
        for value in _own_secrets():
            text = text.replace(value, MASK)
        return masked(text)


def _own_secrets() -> list[str]:
    """Values of this process's environment that are secrets by their names, longest first."""
    found = {
        value.strip()
        for name, value in os.environ.items()
        if _SECRET_NAME.fullmatch(name) and len(value.strip()) >= _SHORTEST
    }
    return sorted(found, key=len, reverse=True)

"""What a job's process logs, without credentials.

In: a configuration. Out: lines of ``log.txt``. Libraries log whole addresses (a signed one is a
credential for an hour) and, in detail, whole answers; people share logs. So every line, with its
traceback, is masked as it is written: values of this process's own secrets, and whatever looks like
one.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from infra.host.secrets import mask_keys_of, masked
from refiner_core.contract.config import RecipeConfig

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Bytes on the wire and each request are of use to nobody who reads what a stage did.
_WIRES = ("httpcore2", "httpx2", "httpcore", "httpx", "urllib3", "filelock")


def set_up_logging(config: RecipeConfig) -> None:
    """Let this process log to standard error, masked, from ``config.log_level`` on."""
    mask_keys_of(config)
    handler = logging.StreamHandler()
    handler.setFormatter(MaskingFormatter(_FORMAT))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    for name in _WIRES:
        logging.getLogger(name).setLevel(logging.WARNING)


def redirect_output(path: Path) -> None:
    """Let all that this process and its children print go to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class MaskingFormatter(logging.Formatter):
    """Formats as usual, and masks what must not be read."""

    def format(self, record: logging.LogRecord) -> str:
        """The line with its traceback."""
        return masked(super().format(record))

"""A folder to try things in, where a workspace is or would be made; nothing of it is left."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.host.mounts import existing
from infra.store.atomic import TEMPORARY


@contextmanager
def scratch_in(folder: Path) -> Iterator[Path]:
    """A new folder below ``folder``, or below the nearest one above it that exists."""
    made = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}doctor-", dir=existing(folder)))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)

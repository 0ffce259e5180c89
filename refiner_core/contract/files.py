"""Files that appear whole: written beside their place, synced, then renamed.

In: a path. Out: an open file that becomes it. For what a stage leaves in its own output folder;
control files, which several processes may write, are the business of ``infra``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that replaces ``path`` once the block ends without error.

    After an error the old file, if there was one, is still there.
    """
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
